"""FastAPI beside dataloader: a page that orders a report, shows how far it is, and lets people cancel it.

pip install fastapi uvicorn
DATALOADER_URL=http://127.0.0.1:8080 uvicorn reports_web:app --port 8000
curl -si -X POST http://127.0.0.1:8000/reports/ann | grep location   # the page to open
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any
from uuid import UUID

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse, RedirectResponse

from dataloader import JobNotFound, Jobs, StoreUnavailable, open_client

PAGE = """<!doctype html><title>Report</title><progress id=bar></progress> <output id=said></output>
<script>
const look = async () => {
  const report = await (await fetch(location.pathname + "/state")).json()
  if (report.progress) { bar.max = report.progress.of; bar.value = report.progress.month }
  said.textContent = report.result ? report.result.text : report.error || report.status
  if (!report.ended) setTimeout(look, 1000)
}
look()
</script>"""


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with open_client(url=os.environ["DATALOADER_URL"], token=os.environ.get("DATALOADER_TOKEN")) as client:
        app.state.jobs = client.jobs  # one client for all requests
        yield


app = FastAPI(lifespan=lifespan)


def queue(request: Request) -> Jobs:
    jobs: Jobs = request.app.state.jobs
    return jobs


Queue = Annotated[Jobs, Depends(queue)]


@app.post("/reports/{customer}")
async def order(customer: str, jobs: Queue) -> RedirectResponse:
    try:
        added = await jobs.enqueue("report.make", {"customer": customer, "months": 12})
    except StoreUnavailable as error:
        raise HTTPException(503, "The queue does not answer; try again.") from error
    return RedirectResponse(f"/reports/{added.job_id}", status_code=303)


@app.get("/reports/{job_id}")
async def page(job_id: UUID) -> HTMLResponse:
    return HTMLResponse(PAGE)


@app.get("/reports/{job_id}/state")
async def state(job_id: UUID, jobs: Queue) -> dict[str, Any]:
    try:
        job = await jobs.get(job_id)
    except JobNotFound as error:
        raise HTTPException(404, "There is no such report.") from error
    ended = job.status not in {"queued", "running"}
    return {"status": job.status, "ended": ended, "progress": job.progress, "result": job.result, "error": job.error}


@app.delete("/reports/{job_id}", status_code=204)
async def cancel(job_id: UUID, jobs: Queue) -> None:
    await jobs.cancel(job_id)

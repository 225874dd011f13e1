"""Sales of yesterday, loaded every night; who is on duty gets a mail if a night fails for good.

dataloader migrate
dataloader psql -c 'CREATE TABLE sale (day date, shop text, amount numeric, PRIMARY KEY (day, shop))'
export DL_NOTIFY='[{"name":"mail","argv":["python3","nightly_load.py"]}]'
dataloader serve --tasks nightly_load:tasks
"""

import json
import os
import smtplib
import sys
from datetime import UTC, date, datetime, timedelta
from email.message import EmailMessage
from typing import Any
from zoneinfo import ZoneInfo

import httpx2

from dataloader import GiveUp, Job, RetryPolicy, Tasks

API = os.environ.get("SALES_URL", "https://sales.example.org")
ZONE = "Europe/Berlin"

tasks = Tasks()


@tasks.task("sales.load_day", queue="nightly", timeout_s=1_800, retry=RetryPolicy(base_s=60, factor=3))
async def load_day(job: Job) -> GiveUp | None:
    planned = job.planned_at or datetime.now(UTC)  # by hand there is no planned time
    day = planned.astimezone(ZoneInfo(ZONE)).date() - timedelta(days=1)
    async with httpx2.AsyncClient(timeout=60) as client:
        answer = await client.get(f"{API}/sales", params={"day": str(day)})
    answer.raise_for_status()  # raises: the job is tried again
    rows: list[tuple[object, ...]] = [(day, sale["shop"], sale["amount"]) for sale in answer.json()]
    if not rows:
        return GiveUp(f"no sales on {day}")  # another try would not help: somebody has to look
    async with job.transaction() as transaction:
        await transaction.execute("DELETE FROM sale WHERE day = $1", day)
        await transaction.copy("sale", ["day", "shop", "amount"], rows)
        transaction.result = {"day": str(day), "rows": len(rows)}
    return None


tasks.schedule("sales", task=load_day, cron="30 4 * * *", zone=ZONE, missed="all", missed_limit=31)


def mail(notice: dict[str, Any], today: date) -> EmailMessage:
    message = EmailMessage()
    message["Subject"] = f"{notice['kind']}: {notice['name']}, {notice['times']} times since the last mail ({today})"
    message["From"], message["To"] = "jobs@example.org", os.environ.get("ON_DUTY", "data@example.org")
    message.set_content(f"{notice['error']}\n\nJobs: {', '.join(notice['job_ids'])}\n")
    return message


if __name__ == "__main__":  # as the command of DL_NOTIFY: the notice is on the standard input
    with smtplib.SMTP(os.environ.get("SMTP_HOST", "localhost"), int(os.environ.get("SMTP_PORT", "25"))) as server:
        server.send_message(mail(json.load(sys.stdin), date.today()))  # noqa: DTZ011 - a day for people

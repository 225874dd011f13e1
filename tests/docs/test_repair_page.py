"""The repair of docs/processes.md, from start to end: its commands, as pasted, have the described effects."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import httpx2
import pytest
import trio
from conditions import until

pytestmark = pytest.mark.full

PAGE = (Path(__file__).parents[2] / "docs" / "processes.md").read_text()
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]
[REPAIR] = re.findall(r"^## A repair.*?(?=^## )", PAGE, re.MULTILINE | re.DOTALL)
BLOCKS = re.findall(r"^```sh\n(.*?)^```", REPAIR, re.MULTILINE | re.DOTALL)
START, FIND, WHY, VALUES, RESUME, CLOSE = BLOCKS
BIN = Path(sys.executable).parent


async def shell(commands: str, url: str) -> list[str]:
    """Run a block of the page in a shell, on the test's own port; return the printed lines."""
    assert url != "http://127.0.0.1:8080"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DL_", "WORKERS_JSON"))}
    run = partial(
        subprocess.run,
        ["bash", "-e", "-c", commands.replace("http://127.0.0.1:8080", url)],
        env=environment | {"PATH": f"{BIN}:{environment['PATH']}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    done = await trio.to_thread.run_sync(run)
    assert done.returncode == 0, done.stderr
    return done.stdout.replace("}{", "}\n{").splitlines()


@pytest.mark.long
@pytest.mark.requirement("P6")
async def test_a_process_in_error_is_found_repaired_resumed_or_closed_as_on_the_page(serve, tmp_path):
    program = tmp_path / "payments.py"

    async def start():
        service = await serve({"process.payment": 4}, tasks="payments:tasks", environment={"PYTHONPATH": str(tmp_path)})
        return service, service.url

    program.write_text(CODE)
    service, url = await start()
    assert await shell(START, url) == ["thanks"] * 6

    async def payloads(number):
        lines = await shell(f"dataloader process events payment order-{number} --json --url {url}", url)
        return [event["payload"] for event in json.loads("".join(lines))["events"]]

    async def in_error():
        answer = await client.get(f"{url}/api/v1/processes", params={"status": "error"})
        return [process["process_id"][-2:] for process in answer.json()["processes"]]

    async with httpx2.AsyncClient() as client:
        assert len(await until(in_error, lambda names: len(names) == 6)) == 6
        *table, found = await shell(FIND, url)
        shown = re.findall(r"^GROUP.*?(?=\n```)", REPAIR, re.MULTILINE | re.DOTALL)[0].splitlines()
        assert [line.split() for line in table[:2]] == [line.split() for line in shown]
        assert [line.split()[2] for line in table[3:]] == ["error"] * 6
        assert len(json.loads(found)["processes"]) == 6

        lines = await shell(WHY, url)
        fields = [
            line for line in REPAIR.split("```text\n")[2].split("…")[0].splitlines() if "corrupted_by" not in line
        ]
        assert {" ".join(field.split()) for field in fields} <= {" ".join(line.split()) for line in lines}
        process, asked = (json.loads(line) for line in lines[-2:])
        assert (process["detail"], process["state"]) == ("the bank has refused it", {"amount": 5000, "paid": True})
        assert [task["kind"] for task in asked["tasks"]] == ["init", "call", "timeout", "timeout"]
        assert asked["tasks"][-1]["task_id"] == process["corrupted_by"]
        page = (await client.get(f"{url}/ui/process", params={"type": "payment", "id": "order-90"})).text
        assert all(words in page for words in ("the bank has refused it", "Repair…", "Resume…", "Remove…"))
        assert "Process errors" in (await client.get(f"{url}/ui/processes")).text

        by_command, by_http = await shell(VALUES, url)
        assert (by_command, json.loads(by_http)["response"]) == ("corrected", "corrected")
        assert await until(in_error, lambda names: len(names) == 4) == ["95", "94", "93", "92"]
        assert await until(partial(payloads, 90), lambda events: len(events) == 3) == ["reserved", "paid", "captured"]

        service.signal(signal.SIGTERM)
        assert await service.exit_code(within_s=60) == 0
        assert "`limit = 10_000`" in REPAIR
        program.write_text(CODE.replace("limit = 1_000", "limit = 10_000"))
        service, url = await start()
        await shell(RESUME, url)
        assert await until(in_error, lambda names: len(names) == 2) == ["95", "94"]
        assert (await payloads(92))[-1] == "captured"

        await shell(CLOSE, url)
        assert await shell(f"dataloader process errors --url {url}", url) == []
        audit = "\n".join(await shell(f"dataloader audit --url {url}", url))
        assert all(act in audit for act in ("repair", "resume", "remove"))

"""Same work by DBOS, run by a separate Python: nothing of ours is imported.

    DSN=… python dbos_script.py steps HOW WORKFLOWS STEPS
    DSN=… python dbos_script.py calls NUMBER

`steps`: concurrent workflows, each of STEPS steps that return 64 bytes; HOW is a number of threads, or `async`.
`calls`: one workflow answers messages: send, recv, set_event, get_event, one after the other. Prints a line of JSON.
"""

import asyncio
import json
import os
import sys
import time

from dbos import DBOS

WARM_UP = 10
EVENT = "x" * 62


@DBOS.step()
def step() -> str:
    return EVENT


@DBOS.workflow()
def chain(steps: int) -> None:
    for _ in range(steps):
        step()


@DBOS.step()
async def step_async() -> str:
    return EVENT


@DBOS.workflow()
async def chain_async(steps: int) -> None:
    for _ in range(steps):
        await step_async()


@DBOS.workflow()
def answer(number: int) -> None:
    total = 0
    for n in range(number):
        total += DBOS.recv("call", timeout_seconds=60)
        DBOS.set_event(f"answer {n}", total)


async def all_chains(workflows: int, steps: int) -> None:
    handles = [await DBOS.start_workflow_async(chain_async, steps) for _ in range(workflows)]
    for handle in handles:
        await handle.get_result()


def took_by_steps(how: str, *sizes: str) -> dict[str, float]:
    workflows, steps = map(int, sizes)
    began, cpu = time.perf_counter(), time.process_time()
    if how == "async":
        asyncio.run(all_chains(workflows, steps))
    else:
        for handle in [DBOS.start_workflow(chain, steps) for _ in range(workflows)]:
            handle.get_result()
    number = workflows * steps
    return {
        "per_s": number / (time.perf_counter() - began),
        "cpu_us": (time.process_time() - cpu) / number * 1e6,
    }


def took_by_calls(number: int) -> dict[str, list[float]]:
    handle = DBOS.start_workflow(answer, number + WARM_UP)
    took = []
    for n in range(number + WARM_UP):
        began = time.perf_counter()
        DBOS.send(handle.workflow_id, 1, "call")
        answered = DBOS.get_event(handle.workflow_id, f"answer {n}", timeout_seconds=30)
        took.append((time.perf_counter() - began) * 1000)
        assert answered == n + 1, answered
        time.sleep(0.01)
    handle.get_result()
    return {"ms": took[WARM_UP:]}


def main() -> None:
    what, *options = sys.argv[1:]
    config = {
        "name": "bench",
        "system_database_url": os.environ["DSN"],
        "log_level": "ERROR",
        "run_admin_server": False,
    }
    if what == "steps" and options[0].isdecimal():
        config["max_executor_threads"] = int(options[0])
    DBOS(config=config)
    DBOS.launch()
    try:
        print(json.dumps(took_by_steps(*options) if what == "steps" else took_by_calls(int(options[0]))))
    finally:
        DBOS.destroy()


if __name__ == "__main__":
    main()

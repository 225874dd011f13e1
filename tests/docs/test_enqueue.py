"""The programs of docs/enqueue.md, as pasted: each adds a job in its own transaction, and a worker runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import trio
from conditions import patience_s
from databases import raw_connection
from roles import a_role

from dataloader import Settings, Tasks, Worker, open_supervisor
from dataloader.jobs.model import JOB_FIELDS

PAGE = (Path(__file__).parents[2] / "docs" / "enqueue.md").read_text()
PROGRAMS = dict(re.findall(r"^## (\w+)\n\n```python\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE))
[GRANTS] = re.findall(r"```sql\n(-- As the owner.*?)```", PAGE, re.DOTALL)
NEVER_S = 3_600
SETUP = """
import os
import django
from django.conf import settings
from psycopg.conninfo import conninfo_to_dict
at = conninfo_to_dict(os.environ["DATABASE_URL"])
names = {"NAME": "dbname", "USER": "user", "PASSWORD": "password", "HOST": "host", "PORT": "port"}
engine = {"ENGINE": "django.db.backends.postgresql"}
settings.configure(DATABASES={"default": engine | {name: at[key] for name, key in names.items() if key in at}})
django.setup()
"""
# The table refuses the second order after the job has been added.
USE = """
print(place_order(7))
try:
    place_order(-7)
except Exception as error:
    print(type(error).__name__)
"""
REFUSED = {"psycopg": "CheckViolation", "SQLAlchemy": "IntegrityError", "Django": "IntegrityError",
           "asyncpg": "CheckViolationError"}  # fmt: skip


def test_the_page_has_every_argument_of_dl_enqueue():
    [table] = re.findall(r"\| argument \|.*?\n\n", PAGE, re.DOTALL)
    names = {name for cell in re.findall(r"^\|(.*?)\|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", cell)}
    # The database makes the id, and `dl_enqueue_job` takes the version.
    assert names == JOB_FIELDS.keys() - {"job_id", "version"}


def run(program, dsn):
    environment = os.environ | {"DATABASE_URL": dsn}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.slow
@pytest.mark.requirement("Q2")
async def test_each_program_adds_a_job_in_its_transaction_and_wakes_a_worker(database):
    assert PROGRAMS.keys() == REFUSED.keys()
    tasks, billed = Tasks(), []

    @tasks.task("orders.bill", queue="billing")
    async def bill(job):
        billed.append((str(job.job_id), job.args))

    # Polls and sweeps are an hour apart: only a commit's notification wakes the worker.
    quiet = {"poll_s": NEVER_S, "reaper_period_s": NEVER_S, "claim_backoff_s": NEVER_S}
    settings = Settings(db_dsn=database.dsn, workers=(Worker("billing", 2),), **quiet)
    async with open_supervisor(settings, tasks), raw_connection(database.dsn) as raw:
        await raw.execute("CREATE TABLE orders (number int PRIMARY KEY CHECK (number > 0))")
        with a_role(
            database, GRANTS.replace("TO shop", "TO jobs_service") + "GRANT ALL ON orders TO jobs_service"
        ) as shop:
            for name, program in PROGRAMS.items():
                whole = (SETUP if name == "Django" else "") + program + USE
                job_id, refused = await trio.to_thread.run_sync(partial(run, whole, shop.dsn))
                assert refused == REFUSED[name]
                with trio.fail_after(patience_s()):
                    while not billed:  # noqa: ASYNC110 - the handler's list has no event
                        await trio.sleep(0.01)
                assert billed == [(job_id, {"order": 7})], name
                assert await raw.fetchval("SELECT count(*) FROM dl_jobs") == 1
                assert await raw.fetchval("SELECT count(*) FROM orders") == 1
                billed.clear()
                await raw.execute("DELETE FROM orders; DELETE FROM dl_jobs WHERE status = 'succeeded'")
                await raw.execute("DELETE FROM dl_jobs")


def test_the_table_of_arguments_is_that_of_the_function():
    source = (Path(__file__).parents[2] / "store" / "migrations" / "functions" / "enqueue.sql").read_text()
    [arguments] = re.findall(r"FUNCTION \{schema\}\.dl_enqueue\(\n(.*?)\)\nRETURNS", source, re.DOTALL)
    names = [argument.split()[0] for argument in arguments.split(",")]
    table = PAGE.partition("## psycopg")[0]
    documented = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`[^|]*)\|", table, re.MULTILINE)))
    assert documented == names

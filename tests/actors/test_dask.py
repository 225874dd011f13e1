"""Functions next to the workers of a Dask cluster (`dask=`): the same as in child processes, and no job runs twice."""

from __future__ import annotations

import json
import math
import re
import sys
from contextlib import asynccontextmanager
from types import ModuleType
from uuid import UUID

import dask_tasks
import msgspec
import pytest
import trio
from certificates import certificate
from conditions import until, when_ended
from dask_cluster import answer_with, dask_cluster
from distributed import Client
from processes_now import is_alive
from rabbitmq_server import free_port
from services import LEASE_S

from dataloader import ConfigError, Tasks
from dataloader.actors.children import wire
from dataloader.actors.cluster import clusters, connection
from dataloader.actors.cluster.relay import ENDED, Relay, WarmChildren
from dataloader.actors.cluster.talk import TAKE, Order, boot_s
from dataloader.actors.handles import fields_of
from dataloader.actors.job_runs import Run
from dataloader.jobs.model import ClaimedJob
from dataloader.testing import run_task

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def cluster():
    with dask_cluster() as process:
        yield process


@pytest.fixture
def open_service(open_worker, cluster):
    def open_service(slots=4, **settings):
        return open_worker(
            dask_tasks.tasks, {"q": slots}, **({"child_grace_s": 0.5, "dask": cluster.address} | settings)
        )

    return open_service


@pytest.fixture
def run_in():
    async def run_in(supervisor, task, args=None, *, max_attempts=1, within_s=60):
        job = await supervisor.jobs.enqueue(task, args, queue="q", max_attempts=max_attempts)
        return await when_ended(supervisor, job.job_id, within_s=within_s)

    return run_in


@pytest.fixture
def shown():
    """Return a function that reads the progress of a running job."""

    async def shown(supervisor, job_id):
        async def progress():
            return (await supervisor.jobs.get(job_id)).progress

        return await until(progress)

    return shown


async def test_a_function_behaves_the_same_on_dask_and_in_a_child(open_service, run_in):
    async with open_service() as supervisor:
        job = await run_in(supervisor, "all", {"width": 3})
        assert job.status == "succeeded", job.error
        assert job.result["args"] == {"width": 3}
        assert job.progress == {"n": 1}
        lines = [line for line in (await supervisor.jobs.logs(job.job_id)).lines if line.kind == "log"]
        assert {(line.level, line.message) for line in lines} == {
            ("info", "the function runs beside a Dask worker"),
            ("info", "hello"),
            ("info", "printed"),
            ("info", "to stderr"),
        }
        assert (await supervisor.jobs.get(UUID(job.result["added"]))).task == "noop"
        assert (await run_in(supervisor, "aio")).result == "done"
        assert (await run_in(supervisor, "raises", {"how": "error"})).error.startswith("ValueError: no such day\n")
        assert (await run_in(supervisor, "raises", {"how": "exit"})).error.endswith("ended with exit code 3")


async def test_a_dask_worker_reuses_its_child_process(open_service, run_in):
    async with open_service(1) as supervisor:
        pids = {(await run_in(supervisor, "all", {})).result["pid"] for _ in range(4)}
    assert len(pids) <= 2  # one per worker


async def test_a_stop_ends_the_function_beside_the_worker(open_service, shown, run_in):
    async with open_service() as supervisor:
        stops = await supervisor.jobs.enqueue("stops", queue="q")
        endless = await supervisor.jobs.enqueue("endless", queue="q")
        pids = [(await shown(supervisor, job.job_id))["pid"] for job in (stops, endless)]
        assert all(map(is_alive, pids))
        for job in (stops, endless):
            await supervisor.jobs.cancel(job.job_id)
            assert (await when_ended(supervisor, job.job_id)).status == "canceled"
        assert not any(map(is_alive, pids))
        assert "cleaned up" in {line.message for line in (await supervisor.jobs.logs(stops.job_id)).lines}
        assert (await run_in(supervisor, "short")).error.startswith("timeout: the run took longer than 1 s")


async def test_processes_left_by_a_function_on_a_worker_are_dead_when_its_job_ends(open_service, run_in):
    async with open_service() as supervisor:
        job = await run_in(supervisor, "leaves")
        assert not is_alive(job.result)
        warnings = [line.message for line in (await supervisor.jobs.logs(job.job_id)).lines if line.level == "warning"]
        assert warnings == ["processes that the function has left running; they are killed with its child process"]


async def test_a_drain_stops_and_releases_jobs_on_the_cluster(open_service, shown, row_of):
    async with open_service(drain_timeout_s=0) as supervisor:
        job = await supervisor.jobs.enqueue("endless", queue="q")
        pid = (await shown(supervisor, job.job_id))["pid"]
    assert not is_alive(pid)
    row = await row_of(job.job_id)
    assert (row["status"], row["attempt"]) == ("queued", 0)


async def test_a_job_that_finds_no_thread_goes_back_with_its_attempt(open_service, shown, row_of, monkeypatch):
    monkeypatch.setattr(connection, "PLACE_S", 2)
    async with open_service(drain_timeout_s=0) as supervisor:
        for _ in range(2):
            await shown(supervisor, (await supervisor.jobs.enqueue("endless", queue="q")).job_id)
        waits = await supervisor.jobs.enqueue("short", queue="q")  # its timeout, a second, has not begun
        row = await until(lambda: row_of(waits.job_id), lambda row: row["error"])
        assert (row["status"], row["attempt"]) == ("queued", 0)
        assert row["error"].endswith("has no free thread")


async def test_jobs_wait_for_a_cluster_that_is_away_and_run_when_it_is_there(open_worker, row_of):
    address = f"tcp://127.0.0.1:{free_port()}"
    async with open_worker(dask_tasks.tasks, {"q": 1}, dask=address) as supervisor:
        job = await supervisor.jobs.enqueue("noop", queue="q")
        row = await until(lambda: row_of(job.job_id), lambda row: row["error"])
        assert (row["status"], row["attempt"]) == ("queued", 0)
        assert row["error"].endswith("is unavailable")
        with dask_cluster(port=address.rpartition(":")[2]):
            assert (await when_ended(supervisor, job.job_id)).status == "succeeded"


@pytest.fixture
def relay():
    """Return a function that opens a relay with a child that has imported a task and waits for its start."""

    @asynccontextmanager
    async def open_relay(task):
        declared = wire.BodySetup(
            path=sys.path, module="dask_tasks", name=task, around=[], asyncio=False, memory_mb=None
        )
        order = Order("", "", "", "dask_tasks", task, [], False, None, max_jobs=1, idle_s=60, max_lines=10)
        ready = trio.Event()
        async with trio.open_nursery() as nursery:
            relay = Relay(
                order=order, declared=declared, warm=WarmChildren(), nursery=nursery, announce=lambda _: ready.set()
            )
            nursery.start_soon(relay.live, lambda: None)
            with trio.fail_after(60):
                await ready.wait()
                yield relay
            nursery.cancel_scope.cancel()

    return open_relay


def job_line():
    job = ClaimedJob(
        job_id=UUID(int=1),
        token=1,
        queue="q",
        task="stops",
        args="{}",
        lock_key=None,
        lock_hash=None,
        partition_key="",
        attempt=1,
        max_attempts=1,
        lease_s=60,
        more=None,
    )
    return wire.encoded_line(wire.RunJob(fields_of(job), msgspec.Raw(b"{}"), 10, is_stage=False))


async def ended_on(relay):
    """Return how the function has ended, and how the child has."""
    said, number = [], 0
    while ("over",) not in said:
        number, new = await relay.take(number, 1)
        said += new
        number += len(new)
    lines = [one[1] for one in said if one[0] == "line"]
    return [json.loads(line)["stopped"] for line in lines if line.startswith(ENDED)], [
        one for one in said if one[0] == "ended"
    ]


async def test_a_stop_that_reaches_the_worker_with_the_job_takes_effect(relay):
    async with relay("stops") as running:
        far = boot_s() + 600
        running.hear(0, [("arm", far, far), ("line", job_line()), ("term",)])
        assert await ended_on(running) == ([True], [])


async def test_a_renewal_that_reaches_the_worker_before_the_start_counts(relay):
    async with relay("stops") as running:
        soon = boot_s() + 1
        running.hear(0, [("arm", soon, soon), ("until", soon + 600, soon + 600), ("line", job_line())])
        await trio.sleep(1.5)
        running.hear(3, [("term",)])
        assert await ended_on(running) == ([True], [])


async def test_unreadable_answers_of_a_worker_end_the_run_with_its_lease(open_worker, shown):
    with dask_cluster(1, 1) as cluster:
        async with open_worker(dask_tasks.tasks, {"q": 1}, dask=cluster.address) as supervisor:
            job = await supervisor.jobs.enqueue("endless", queue="q", max_attempts=1, lease_ttl_sec=10)
            pid = (await shown(supervisor, job.job_id))["pid"]

            def confuse(dask_worker):
                async def take(relay, after, wait_s):
                    return {"at": 0.0, "process": "", "gone": False, "first": after, "said": [["line", "no bytes"]]}

                dask_worker.handlers[TAKE] = take

            def confuse_all():
                with Client(cluster.address, set_as_default=False) as client:
                    client.run(confuse)

            await trio.to_thread.run_sync(confuse_all)
            assert (await when_ended(supervisor, job.job_id)).status == "failed"
            assert not is_alive(pid)


async def test_a_job_that_is_stopped_before_it_is_sent_leaves_nothing_behind(open_service, shown):
    async with open_service() as supervisor:
        await shown(supervisor, (await supervisor.jobs.enqueue("endless", queue="q")).job_id)
        # This reads private fields: a run that is stopped between its start and its sending leaves no other trace.
        [run] = supervisor._parts.runs
        [of_run] = supervisor._parts.clusters._by_address.values()
        before = set(of_run.listeners)
        with trio.CancelScope() as scope:
            scope.cancel()
            again = msgspec.structs.replace(run.job, token=run.job.token + 1)
            async with supervisor._parts.clusters.lend(
                dask_tasks.tasks["endless"], Run(job=again, claimed_at=0, lease=run.lease)
            ):
                pass
        assert set(of_run.listeners) == before


def at(address, **more):
    tasks = Tasks()
    tasks.task("noop", dask=address, **more)(dask_tasks.noop.handler)
    return tasks


@pytest.mark.parametrize(
    ("address", "error"),
    [
        (True, "task 'noop': dask=True: needs DL_DASK, the address of the scheduler"),
        ("tcp://scheduler:8786", "task 'noop': dask: must be a tls:// address: without TLS only a loopback address"),
        ("tls://scheduler:8786", "task 'noop': dask='tls://scheduler:8786': needs DL_DASK_TLS_CA"),
        (
            "scheduler:8786",
            "task 'noop': dask: must be the address of a Dask scheduler, for example tls://scheduler:87",
        ),
    ],
)
async def test_an_address_that_can_not_be_used_is_refused_at_the_start(open_worker, address, error):
    with pytest.raises(ConfigError) as refused:
        async with open_worker(at(address), {"q": 1}):
            pass
    assert str(refused.value).startswith(error)
    assert "\n" not in str(refused.value)


async def test_without_the_extra_the_service_says_how_to_install_it(open_worker, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(
        ConfigError, match=re.escape("needs the extra `dask`: pip install 'dataloader-supervisor[dask]'")
    ):
        async with open_worker(at("tcp://127.0.0.1:1"), {"q": 1}):
            pass


async def test_without_dask_the_one_file_says_that_an_installed_dataloader_is_needed(open_worker, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(ConfigError) as refused:
        async with open_worker(at("tcp://127.0.0.1:1"), {"q": 1}):
            pass
    assert str(refused.value) == "task 'noop': dask: the standalone binary has no Dask; use an installed dataloader"


async def test_run_task_runs_it_in_a_child_on_this_machine():
    run = await run_task(dask_tasks.tasks, "aio")
    assert (run.status, run.result) == ("succeeded", "done")


async def test_a_worker_of_another_version_fails_the_attempt_with_an_error_that_says_so(
    open_service, run_in, monkeypatch
):
    monkeypatch.setattr(clusters, "program_version", lambda: "0.0.1")
    async with open_service() as supervisor:
        error = (await run_in(supervisor, "noop")).error
        assert "could not start it: RuntimeError: it has dataloader-supervisor" in error
        assert error.endswith("the service has 0.0.1; install the same version")


async def test_a_dask_worker_without_the_package_fails_the_attempt_and_survives(open_worker, run_in):
    with dask_cluster(1, without=["WORKER"]) as process, Client(process.address) as client:
        workers = list(client.scheduler_info()["workers"])
        async with open_worker(dask_tasks.tasks, {"q": 1}, dask=process.address) as supervisor:
            error = (await run_in(supervisor, "noop")).error
        assert "could not start it: ModuleNotFoundError: No module named 'dataloader" in error
        assert list(client.scheduler_info()["workers"]) == workers


async def test_a_scheduler_needs_no_package_of_ours(open_worker, run_in):
    with dask_cluster(1, without=["SCHEDULER"]) as process:
        async with open_worker(dask_tasks.tasks, {"q": 1}, dask=process.address) as supervisor:
            assert (await run_in(supervisor, "aio")).result == "done"


@pytest.mark.parametrize("changed", [{"said": None}, {"at": math.nan}])
async def test_an_answer_that_is_none_costs_the_attempt_and_nothing_else(open_worker, run_in, changed):
    with dask_cluster(1) as process, Client(process.address) as client:
        async with open_worker(
            dask_tasks.tasks, {"q": 1}, dask=process.address, default_lease_s=LEASE_S, heartbeat_s=1
        ) as supervisor:
            assert (await run_in(supervisor, "noop")).status == "succeeded"
            client.run(answer_with, changed=changed)
            assert (await run_in(supervisor, "noop")).status == "failed"


async def test_prints_of_other_clients_on_the_cluster_are_not_the_services_output(open_service, run_in, cluster, capfd):
    with Client(cluster.address) as client:
        async with open_service() as supervisor:
            await run_in(supervisor, "noop")
            client.log_event("print", {"args": ("of another",), "file": 1})
            await run_in(supervisor, "noop")  # its events come after that one
    assert capfd.readouterr().out.count("of another") <= 1  # the other client's own


async def test_a_dask_worker_without_the_module_fails_the_attempt_with_a_clear_error(
    open_worker, cluster, run_in, monkeypatch
):
    module = ModuleType("only_here")
    monkeypatch.setitem(sys.modules, "only_here", module)
    exec("def score(job): pass", vars(module))
    tasks = Tasks()
    tasks.task("score", dask=cluster.address)(module.score)
    async with open_worker(tasks, {"q": 1}) as supervisor:
        error = (await run_in(supervisor, "score")).error
        assert error.startswith("on the Dask worker tcp://127.0.0.1:")
        assert "the child process could not start: ModuleNotFoundError: No module named 'only_here'" in error


async def test_a_cluster_with_tls(open_worker, run_in, tmp_path):
    file = certificate(tmp_path)
    with dask_cluster(1, tls=file) as process:
        assert process.address.startswith("tls://")
        async with open_worker(
            dask_tasks.tasks, {"q": 1}, dask=process.address, dask_tls_ca=file, dask_tls_cert=file
        ) as one:
            assert (await run_in(one, "aio")).result == "done"


async def test_a_worker_whose_relays_have_failed_runs_the_next_job(open_service, run_in):
    def fail():  # each worker calls it
        from dataloader.actors.cluster import on_worker  # noqa: PLC0415 - the worker's

        if (host := on_worker._host) is not None:
            host._token.run_sync_soon(host._nursery.cancel_scope.cancel)
            host._thread.join(30)

    with dask_cluster(1) as own, Client(own.address, set_as_default=False) as client:
        async with open_service(1, dask=own.address) as supervisor:
            for _ in range(2):
                job = await run_in(supervisor, "all", {})
                assert job.status == "succeeded", job.error
                await trio.to_thread.run_sync(client.run, fail)

"""The registry: declarations of tasks, and the contents of their requests."""

from __future__ import annotations

import functools
import re

import attrs
import pytest
import trio

from dataloader import BadRequest, Job, Task, Tasks, new_job
from dataloader.testing import run_task


@attrs.frozen
class Year:
    year: int
    source: str = "ecb"


tasks = Tasks()


@tasks.task("load.year", args=Year, queue="load", priority=7, lock_key="rates:{source}:{year}", max_attempts=1)
async def load_year(job: Job[Year]) -> int:
    """Load one year."""
    return job.args.year


@tasks.task("plain")
async def plain(job: Job) -> object:
    return job.args["year"]


def test_the_decorator_gives_back_the_task_which_can_be_called_as_the_function():
    assert isinstance(load_year, Task)
    assert load_year is tasks["load.year"]
    assert (load_year.queue, load_year.priority, load_year.lock_key) == ("load", 7, "rates:{source}:{year}")
    assert (load_year.is_async, load_year.description) == (True, "Load one year.")
    assert [load_year(None).close(), tasks["plain"].args] == [None, None]


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        ({"queue": ""}, "task 't': queue: must have 1 to 200 characters"),
        ({"priority": -1}, "task 't': priority: must be an integer from 0 to"),
        ({"max_attempts": 0}, "task 't': max_attempts: must be an integer from 1 to 1,000,000, not 0"),
        ({"lease_ttl_sec": 1}, "task 't': lease_ttl_sec: must be an integer from 3 to 86,400, not 1"),
        ({"timeout_s": 0}, "task 't': timeout_s: must be a number of seconds greater than 0, not 0"),
        ({"lock_key": "a{b"}, "task 't': lock_key: must have fields as {year} and no other braces, not 'a{b'"),
        ({"lock_key": "a{}"}, "task 't': lock_key: must have fields as {year} and no other braces, not 'a{}'"),
        ({"lock_key": ()}, "task 't': lock_key: must have at least one field name"),
        ({"args": Year, "lock_key": "r:{yaer}"}, "task 't': lock_key: has the unknown field 'yaer'; fields of args"),
        ({"args": Year, "lock_key": ("yaer",)}, "task 't': lock_key: has the unknown field 'yaer'; fields of args"),
        ({"args": int}, "task 't': args must be an attrs class"),
    ],
    ids=str,
)  # fmt: skip
def test_a_setting_that_is_out_of_range_is_refused_at_the_declaration(given, refusal):
    with pytest.raises(ValueError, match="task") as raised:
        Tasks().task("t", **given)(print)
    assert str(raised.value).startswith(refusal)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("retries", r"unknown option 'retries'; did you mean retry"),
        ("xyz", r"unknown option 'xyz'; after_error, args, .*zone"),
    ],
)
def test_an_option_that_does_not_exist_is_refused(option, says):
    with pytest.raises(TypeError, match=f"task 't': {says}"):
        Tasks().task("t", **{option: 3})


def a_generator(job):
    yield job


async def an_async_generator(job):
    yield job


def without_a_job():
    return None


def with_two(job, other):
    return job, other


@pytest.mark.parametrize(
    ("handler", "says"),
    [
        (a_generator, "a handler must not yield; return a value"),
        (an_async_generator, "a handler must not yield; return a value"),
        (without_a_job, "a handler must take one argument, the job, not ()"),
        (with_two, "a handler must take one argument, the job, not (job, other)"),
    ],
)
def test_a_handler_that_no_worker_could_run_is_refused(handler, says):
    with pytest.raises(ValueError, match=re.escape(f"task 't': {says}")):
        Tasks().task("t")(handler)


def test_a_decorator_may_run_an_async_function_or_a_generator_to_its_end():
    async def doubled(number):
        return 2 * number

    @functools.wraps(doubled)
    def awaits(job):
        return trio.run(doubled, job)

    @functools.wraps(a_generator)
    def collects(job):
        return list(a_generator(job))

    tasks = Tasks()
    assert tasks.task("async")(awaits)(1) == 2
    assert tasks.task("generator")(collects)(1) == [1]


def test_a_decorator_may_add_arguments_to_a_handler():
    @functools.wraps(with_two)
    def wrapper(job):
        return with_two(job, 2)

    assert Tasks().task("t")(wrapper)(1) == (1, 2)


@pytest.mark.parametrize("name", ["process.start", "notify.webhook", "migrate"])
def test_the_names_of_built_in_tasks_are_refused(name):
    with pytest.raises(ValueError, match=r"process\.\*, notify\.\*, migrate are names of built-in tasks"):
        Tasks().task(name)


def test_a_decorator_without_a_name_is_an_error_with_the_right_form():
    with pytest.raises(BadRequest, match=r"task: must be a name, as in @tasks.task\(\"load.year\"\), not <function"):

        @Tasks().task
        async def nameless(job): ...


def test_a_request_has_its_args_as_json_and_leaves_defaults_to_the_database():
    new = new_job(load_year, Year(1999), priority=3)
    assert (new.task, new.args) == ("load.year", {"year": 1999, "source": "ecb"})
    assert (new.queue, new.priority, new.lock_key, new.max_attempts) == (None, 3, None, None)
    assert new_job(load_year, {"year": 1999}).args == {"year": 1999}
    assert new_job("load.year", {"year": "x"}).args == {"year": "x"}, "a name has no type"
    with pytest.raises(BadRequest, match=r"^args\.year: is required"):
        new_job(load_year)
    with pytest.raises(BadRequest, match=r"^args: must be a mapping, because task 'plain' has no args type here"):
        new_job(tasks["plain"], Year(1))


async def test_a_handler_with_a_type_of_args_finds_an_instance():
    assert (await run_task(tasks, "load.year", {"year": 1999})).result == 1999
    assert (await run_task(tasks, load_year, Year(1999))).result == 1999
    assert (await run_task(tasks, "plain", {"year": 1999})).result == 1999
    with pytest.raises(BadRequest, match=r"^args\.year: must be an integer"):
        await run_task(tasks, "load.year", {"year": "x"})


@pytest.mark.requirement("R6")
@pytest.mark.parametrize(
    ("declare", "error"),
    [
        (lambda _, a, _b: [a], "there must be at least 2, not 1"),
        (lambda tasks, a, _b: [a, tasks.task("b")(a)], "or a task of this registry named 's.…' .*, not 'b'"),
        (lambda _, a, _b: [a, Tasks().task("s.b")(a)], "a task of this registry named .*, not 's.b'"),
        (lambda tasks, a, _b: [tasks.task("s.b")(a)] * 2, "'s.b' is already a stage"),
        (lambda tasks, a, b: [tasks.task("s.b", queue="q")(b), a], "'s.a' has no queue, but other stages have one"),
        (lambda tasks, a, b: [a, tasks.task("s.b", lock_key="k")(b)], "lock_key of 's.b': set it at the first stage"),
        (lambda tasks, a, b: [tasks.task("s.a", unique=True)(a), b], "unique of 's.a': .* cannot be unique"),
        (lambda _, a, _b: [a, a], "task 's.a' is registered twice"),
    ],
)
def test_stages_that_can_not_be_are_refused_when_they_are_declared(declare, error):
    tasks = Tasks()

    def a(_job): ...

    def b(_job): ...

    with pytest.raises(ValueError, match=error):
        tasks.stages("s", *declare(tasks, a, b))

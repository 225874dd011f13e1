"""The three handles of a job are one job seen from three sides: they have the same members."""

import inspect

import pytest

from dataloader import AioJob, Job, ThreadJob, ThreadTransaction, Transaction
from dataloader.jobs.handler_calls import HANDLER_CALLS, HandlerCall

HANDLES = (Job, AioJob, ThreadJob)


def public_names(kind: type) -> set[str]:
    return {name for name in (*dir(kind), *inspect.get_annotations(kind)) if not name.startswith("_")}


def test_they_have_the_same_names_with_the_same_parameters() -> None:
    names = public_names(Job)
    assert {"job_id", "args", "log", "progress", "progress_nowait", "transaction", "keep", "resource"} <= names
    for kind in (AioJob, ThreadJob):
        assert public_names(kind) == names
        for name in names:
            if inspect.isfunction(function := getattr(Job, name)):
                assert [*inspect.signature(getattr(kind, name)).parameters] == [*inspect.signature(function).parameters]


def test_a_transaction_has_the_same_names_in_a_thread() -> None:
    assert public_names(ThreadTransaction) == public_names(Transaction)


def test_a_child_process_can_send_every_call() -> None:
    assert set(HANDLER_CALLS.values()) == set(HandlerCall.__subclasses__())


@pytest.mark.parametrize("kind", HANDLES)
def test_every_public_attribute_has_its_own_line(kind: type) -> None:
    sources = [inspect.getsource(base) for base in kind.__mro__ if base.__module__ == "dataloader.jobs.job"]
    for name in public_names(kind):
        attribute = inspect.getattr_static(kind, name)
        if inspect.ismemberdescriptor(attribute):
            # attrs has replaced the attribute of a field: its docstring is below it in the source.
            lines = next(source for source in sources if f"    {name}: " in source).splitlines()
            at = next(number for number, line in enumerate(lines) if line.startswith(f"    {name}: "))
            assert lines[at + 1].strip().startswith('"""'), name
        else:
            assert inspect.getdoc(attribute), name

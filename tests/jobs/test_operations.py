"""Contents of an operation's declaration; both ways of performing operations know all of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import get_type_hints
from uuid import UUID

import attrs
import pytest
from msgspec import Struct

from dataloader import BadRequest, Draining, JobNotFound
from dataloader.jobs.contract import Operator
from dataloader.jobs.errors import InUse
from dataloader.jobs.model import JobRecord
from dataloader.jobs.operations.bulk import bulk
from dataloader.jobs.operations.failures import RetryErrorGroup, failures
from dataloader.jobs.operations.jobs import CancelMany, ChangePriority, GetJob, ListJobs, ListLog, jobs
from dataloader.jobs.operations.limits import ListTasks, SetTasks, limits
from dataloader.jobs.operations.loads import loads
from dataloader.jobs.operations.operation import Operation, Operations
from dataloader.jobs.operations.processes import processes
from dataloader.jobs.operations.queues import queues
from dataloader.jobs.operations.schedules import schedules
from dataloader.jobs.roles import Role
from dataloader.jobs.secrets.record_masks import UnmarkedFieldError
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.implementations import IMPLEMENTATIONS, implements
from dataloader.store.performer import DatabasePerformer
from dataloader.web.app import ROUTES
from dataloader.web.operation_routes import OperationRoutes

ALL = [*jobs, *failures, *queues, *schedules, *limits, *processes, *bulk, *loads]
ONE = UUID(int=1)

of_tests = Operations()


class Door(Struct):
    label: str


@of_tests.declare(
    "POST", "/houses/{name}/rooms/{number}/doors", role=Role.OPERATE, errors=(Draining, InUse), deadline_s=40
)
class OpenDoor(Operation[Door]):
    name: str
    number: int
    key: str
    twice: bool = False


def test_a_declaration_has_what_the_class_says():
    declaration = GetJob.declaration
    assert (declaration.operation_id, declaration.result, declaration.request) == ("show_job", JobRecord, None)
    assert declaration.not_found is JobNotFound
    declaration = OpenDoor.declaration
    assert (declaration.operation_id, declaration.result) == ("open_door", Door)
    assert declaration.path_fields == {"name": str, "number": int}
    assert declaration.request.__struct_fields__ == ("key", "twice")
    with pytest.raises(TypeError, match="key"):
        declaration.request()


def test_fields_go_into_the_path_and_the_others_into_the_query_or_the_body():
    door = OpenDoor("a/b", 3, "k")
    assert OpenDoor.declaration.address(door) == "/houses/a%2Fb/rooms/3/doors"
    assert OpenDoor.declaration.fields(door) == {"key": "k", "twice": False}
    assert not OpenDoor.declaration.in_query
    assert ListLog.declaration.in_query


def test_a_request_is_the_base_that_has_its_fields_or_the_operation_itself():
    named = {kind.__name__: kind.declaration.request.__name__ for kind in (ChangePriority, CancelMany, RetryErrorGroup)}
    assert named == {
        "ChangePriority": "PriorityRequest",
        "CancelMany": "BulkRequest",
        "RetryErrorGroup": "GroupRetryRequest",
    }
    assert ListJobs.declaration.request is ListJobs


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_an_operation_has_an_implementation_of_its_type_and_one_route(kind):
    implementation = IMPLEMENTATIONS[kind]
    hints = get_type_hints(implementation)
    assert (hints["request"], hints["return"]) == (kind, kind.declaration.result)
    [route] = [
        route
        for route in ROUTES
        if route.view.__name__ == kind.declaration.operation_id and route.path.startswith("/api/")
    ]
    assert (route.method, route.role) == (kind.declaration.method, kind.declaration.role)


def test_a_route_has_what_its_declaration_says():
    made = OperationRoutes()
    made.operation(OpenDoor)(None)
    [route] = made
    assert (route.method, route.path) == ("POST", "/api/v1/houses/<path:name>/rooms/<int:number>/doors")
    assert (route.role, route.answers, route.deadline_s) == (Role.OPERATE, {200: Door}, 40)
    assert route.body is OpenDoor.declaration.request
    assert route.query is None
    assert (route.conflicts, route.rows, route.pages) == (True, False, False)
    made.operations([OpenDoor, GetJob, ListJobs])
    assert [(route.view.__name__, route.rows, route.pages) for route in made[1:]] == [
        ("show_job", True, False),
        ("list_jobs", False, True),
    ]


def test_an_operation_that_names_something_in_its_body_may_answer_404():
    made = OperationRoutes()
    made.operations([SetTasks, ListTasks])
    assert [route.names for route in made] == [True, False]


def test_an_answer_with_an_unmarked_field_gets_no_route():
    with pytest.raises(UnmarkedFieldError, match=r"^Door\.label: "):
        OperationRoutes().operations([OpenDoor])


@pytest.fixture
def performer(monkeypatch):
    async def open_door(store, request):
        return store.operator.name, request.number

    monkeypatch.setitem(IMPLEMENTATIONS, OpenDoor, open_door)
    unused = SimpleNamespace(default_lease_s=60, options=DatabaseOptions(dsn=""))
    return DatabasePerformer(database=unused, operator=Operator("ann"), enqueuer=unused, served=unused, waits=unused)


async def test_an_implementation_gets_the_operator_who_signs(performer):
    assert await performer.perform(OpenDoor("a", 1, "k")) == ("ann", 1)
    assert await performer.signed(Operator("bob")).perform(OpenDoor("a", 1, "k")) == ("bob", 1)


async def test_a_field_of_the_path_that_has_another_type_is_refused(performer):
    with pytest.raises(BadRequest, match=r"^number: must be a int, not '1'$"):
        await performer.perform(OpenDoor("a", "1", "k"))


async def test_a_process_that_drains_refuses_the_operations_that_say_so(performer):
    draining = attrs.evolve(performer, draining=lambda: True)
    with pytest.raises(Draining):
        await draining.perform(OpenDoor("a", 1, "k"))
    with pytest.raises(Draining):
        await draining.enqueue([])


def test_an_operation_has_one_implementation():
    with pytest.raises(ValueError, match="GetJob"):
        implements(GetJob)(IMPLEMENTATIONS[GetJob])

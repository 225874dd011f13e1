"""Internal names of Hypercorn and Quart that we use: an upgrade that changes one fails here, not at a client.

Hypercorn's private names are used only in web/server/http1.py; of Quart and quart-trio there are none.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.lifespan import Lifespan
from hypercorn.trio.worker_context import WorkerContext
from quart import Quart, Request
from quart_trio import QuartTrio

from dataloader.web.server.http1 import Http1

WEB = Path(__file__).parents[3] / "web"
PROTOCOL = {
    "handle": ["event"],
    "stream_send": ["event"],
    "_handle_events": [],
    "_check_protocol": ["event"],
    "_create_stream": ["request"],
    "_send_error_response": ["status_code"],
    "_send_h11_event": ["event"],
}
OF_THE_PROTOCOL = ("app", "config", "context", "task_group", "connection_state", "ssl", "client", "server", "send")
OVERRIDDEN = {"_check_protocol", "_create_stream", "_send_error_response", "stream_send"}


def parameters(function):
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_the_protocol_has_the_methods_that_we_override_or_call():
    assert {name: parameters(getattr(H11Protocol, name)) for name in PROTOCOL} == PROTOCOL
    assert tuple(parameters(H11Protocol)) == OF_THE_PROTOCOL
    assert {name for name in vars(Http1) if name in vars(H11Protocol) and not name.startswith("__")} == OVERRIDDEN


def test_the_protocol_calls_what_we_override_and_works_by_what_we_replace():
    source = inspect.getsource(H11Protocol)
    for name in OVERRIDDEN:
        assert f"self.{name}(" in source or f"self.{name}," in source, name
    # Its h11 connection is ours; before the first request it answers data that is not HTTP by `_send_error_response`.
    for used in ("self.connection.next_event()", "self.connection.they_are_waiting_for_100_continue", "self.send("):
        assert used in source, used


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (Lifespan, {"handle_lifespan", "wait_for_startup", "wait_for_shutdown"}),
        (WorkerContext, {"terminated", "event_class", "mark_request"}),
        (ASGIWrapper, {"__call__"}),
        (Quart, {"asgi_http_class", "request_class", "handle_request"}),
        (QuartTrio, {"asgi_http_class"}),
    ],
)
def test_the_server_is_made_of_parts_that_are_there(kind, names):
    source = inspect.getsource(kind)
    assert {name for name in names if not hasattr(kind, name) and f"self.{name}" not in source} == set()


def test_a_request_of_quart_is_made_as_we_make_it():
    assert parameters(Request) == [
        *("method", "scheme", "path", "query_string", "headers", "root_path", "http_version", "scope"),
        *("max_content_length", "body_timeout", "send_push_promise"),
    ]


def test_private_names_of_hypercorn_stand_in_one_file_and_here():
    private = {name for name in vars(H11Protocol) if name.startswith("_") and not name.startswith("__")}
    used = {
        (file.name, node.attr)
        for file in WEB.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in private
    }
    called = {"_create_stream", "_send_h11_event", "_send_error_response"}
    assert used == {("http1.py", name) for name in called}
    assert called | OVERRIDDEN <= PROTOCOL.keys()

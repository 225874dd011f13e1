"""Description of the API, generated from the routes: `/openapi.json` (OpenAPI 3.1) and the page that shows it.

It is built at the first request and cached. The page needs only this server: its one script fetches `/openapi.json` and
writes only text nodes. A nonce allows only that script and that style sheet.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from html import escape
from http import HTTPStatus
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import msgspec
import trio
from msgspec import Struct

from dataloader.jobs.task import Task
from dataloader.web import problems
from dataloader.web.paging import LINK
from dataloader.web.problems import Problem
from dataloader.web.routes import JSON, Answer, Call, Route, Routes
from dataloader.web.task_descriptions import describe_tasks

NO_TASKS: Final[Mapping[str, Task[Any]]] = {}
_PART: Final = re.compile(r"<(\w+:)?(\w+)>")
_PATH_PARTS: Final[Mapping[str, dict[str, Any]]] = {
    "uuid:": {"type": "string", "format": "uuid"},
    "int:": {"type": "integer", "minimum": 0},
}
_HTML: Final = "text/html; charset=utf-8"
_PAGE: Final = Path(__file__).with_name("pages").joinpath("api_docs.html").read_text("utf-8")
_REQUEST_ID: Final = {
    "name": "X-Request-ID",
    "in": "header",
    "required": False,
    "description": "At most 128 printable ASCII characters. Returned in the response and logged.",
    "schema": {"type": "string", "maxLength": 128},
}
_SENT_ALWAYS: Final = {
    "X-Request-ID": {"description": "ID of the request.", "required": True, "schema": {"type": "string"}}
}
_RETRY_AFTER: Final = {
    "Retry-After": {
        "description": "Seconds after which the request may be repeated.",
        "required": True,
        "schema": {"type": "integer"},
    }
}
_SENT_WITH: Final[Mapping[int, dict[str, Any]]] = {
    401: {
        "WWW-Authenticate": {
            "description": "`Bearer`, with the problem of the token.",
            "required": True,
            "schema": {"type": "string"},
        }
    },
    415: {
        "Accept-Encoding": {
            "description": "`identity`: other encodings are not accepted.",
            "schema": {"type": "string"},
        }
    },
    429: _RETRY_AFTER,
    503: _RETRY_AFTER,
}
"""Headers of problems, by their status."""


def description_routes(routes: Sequence[Route], tasks: Mapping[str, Task[Any]] = NO_TASKS) -> Routes:
    """Return the routes that describe `routes`, and each of the `tasks`.

    The description is built at the first request.
    """
    found = Routes()

    # It takes more than 100 ms: it must not delay the start of a process, nor other requests.
    @cache
    def described() -> bytes:
        description = describe_routes(routes)
        if tasks:
            describe_tasks(description, tasks)
        return msgspec.json.encode(description)

    @found.add("GET", "/openapi.json", role=None, answers={200: dict})
    async def show_openapi(_call: Call) -> Answer:
        """Show this description."""
        return Answer(value=await trio.to_thread.run_sync(described))

    @found.add("GET", "/docs", role=None, answers={200: str})
    async def show_docs(call: Call) -> Answer:
        """Show this description as a readable page."""
        nonce = secrets.token_urlsafe(16)
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; "
            "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        base = escape(call.services.settings.public.base)
        page = _PAGE.replace("{nonce}", nonce).replace("{base}", base).encode()
        return Answer(value=page, media_type=_HTML, headers={"Content-Security-Policy": policy})

    return found


def describe_routes(routes: Iterable[Route]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 description of the routes."""
    routes = list(routes)
    kinds: list[Any] = [Problem]
    for route in routes:
        kinds += [
            kind for kind in (route.body, *route.answers.values()) if kind is not None and kind not in (str, *kinds)
        ]
    queries = [route.query for route in routes if route.query is not None]
    schemas, components = msgspec.json.schema_components([*kinds, *queries], ref_template="#/components/schemas/{name}")
    by_kind = dict(zip(kinds, schemas, strict=False))
    parameters = {query: _parameters(components.pop(query.__name__)) for query in dict.fromkeys(queries)}
    for kind in kinds:
        if (example := getattr(kind, "EXAMPLE", None)) is not None:
            components[kind.__name__]["examples"] = [example]
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = _PART.sub(r"{\2}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, by_kind, parameters)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "dataloader",
            "version": version("dataloader-supervisor"),
            "description": "Durable jobs from a queue in PostgreSQL. Errors are RFC 9457 problems.",
        },
        "security": [{"bearer": []}, {}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": "Required if the server has API tokens."}
            },
        },
    }


def _operation(
    route: Route, schemas: Mapping[Any, Any], parameters: Mapping[type[Struct], list[dict[str, Any]]]
) -> dict[str, Any]:
    summary, _, more = (route.view.__doc__ or "").strip().partition("\n")
    operation: dict[str, Any] = {
        "operationId": route.view.__name__,
        "summary": summary,
        "tags": [_tag(route.path)],
        "parameters": [_path_part(kind, name) for kind, name in _PART.findall(route.path)]
        + (parameters[route.query] if route.query else [])
        + [*map(dict, route.headers), _REQUEST_ID],
        "responses": _responses(route, schemas),
    }
    text = " ".join(more.split())
    if route.role is None:
        operation["security"] = []
    else:
        text = f"{text} Needs the role {route.role.name.lower()}.".strip()
    if text:
        operation["description"] = text
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": schemas[route.body]}}}
    return operation


def _responses(route: Route, schemas: Mapping[Any, Any]) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    good = _SENT_ALWAYS | dict(route.answer_headers) | (LINK if route.pages else {})
    for status, kind in route.answers.items():
        content = {"text/plain": {"schema": {"type": "string"}}} if kind is str else {JSON: {"schema": schemas[kind]}}
        responses[str(status)] = {"description": HTTPStatus(status).phrase, "headers": good, "content": content}
    for status in sorted(_refusals(route)):
        responses[str(status)] = {
            "description": HTTPStatus(status).phrase,
            "headers": _SENT_ALWAYS | _SENT_WITH.get(status, {}),
            "content": {problems.MEDIA_TYPE: {"schema": schemas[Problem]}},
        }
    return responses


def _refusals(route: Route) -> set[int]:
    """Return the statuses of the route's problems. Any request may send a body, even if the route takes none."""
    statuses = {400, 408, 413, 503}
    if route.role is not None:
        statuses |= {401, 403, 429}
    if "<" in route.path or route.names:
        statuses |= {404}
    if route.query is not None or "<path:" in route.path:
        statuses |= {422}
    if route.body is not None:
        statuses |= {415, 422}
    if route.conflicts:
        statuses |= {409}
    return statuses


def _tag(path: str) -> str:
    parts = path.strip("/").split("/")
    return parts[2] if parts[0] == "api" else "system"


def _path_part(kind: str, name: str) -> dict[str, Any]:
    schema = _PATH_PARTS.get(kind, {"type": "string"})
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _parameters(schema: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the fields of a query's struct as parameters; no value of a query string is null."""
    found = []
    for name, field in schema["properties"].items():
        shown = next((kind for kind in field.get("anyOf", []) if kind.get("type") != "null"), field)
        shown = {key: value for key, value in shown.items() if (key, value) != ("default", None)}
        parameter = {"name": name, "in": "query", "required": False, "schema": shown}
        if about := shown.pop("description", None):
            parameter["description"] = about
        if shown.get("type") == "array":
            parameter |= {"style": "form", "explode": False}
        found.append(parameter)
    return found

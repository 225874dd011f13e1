"""Generator of docs/http-routes.md from the OpenAPI description of the server: `just reference` writes the page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from dataloader.web.app import ROUTES
from dataloader.web.openapi import describe_routes

PAGE: Final = Path(__file__).parents[1] / "http-routes.md"
SECTIONS: Final = {
    "jobs": "Jobs",
    "bulk": "Bulk operations",
    "errors": "Errors of jobs",
    "duplicates": "Duplicates",
    "tasks": "Tasks",
    "suppliers": "Suppliers",
    "schedules": "Schedules",
    "runs": "Runs of loads",
    "loads": "Loads",
    "processes": "Durable processes",
    "stats": "Statistics",
    "queues": "Queues",
    "workers": "Workers",
    "audit": "Audit log",
    "system": "The service process",
}
"""Titles of the tags, in the order of the page. A route with another tag is an error."""
HEAD: Final = """\
# HTTP routes

<!-- Generated from the server's OpenAPI description by `just reference`. Do not edit it. -->

Every route with its role, parameters, body and answer. [HTTP API](http.md) has the conventions that all routes share:
authentication, errors, pages, waits and limits. A running service has the same description at `/docs` and
`/openapi.json`, with the arguments of its own tasks.

The listed errors are those that depend on the route. [All others](http.md#errors), such as 401 or 503, may come from
every route. Fields without the mark *required* may be left out.
"""
_COMMON: Final = {"400", "401", "403", "408", "413", "415", "429", "503"}
"""Statuses of errors that any route may answer."""
_REF: Final = "#/components/schemas/"


def page() -> str:
    """Return the text of the page."""
    description = describe_routes(ROUTES)
    by_tag: dict[str, list[tuple[str, str, Mapping[str, Any]]]] = {tag: [] for tag in SECTIONS}
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            by_tag[operation["tags"][0]].append((method.upper(), path, operation))
    parts = [HEAD]
    for tag, title in SECTIONS.items():
        routes = sorted(by_tag[tag], key=lambda route: (route[1].replace("{", "~"), route[0]))
        parts.append(f"## {title}\n")
        parts.append(_table("| route | role | description |", (_summary(*route) for route in routes)))
        parts += [text for route in routes for text in _route(*route)]
    schemas = description["components"]["schemas"]
    parts.append("## Objects\n\nBodies and answers, by name.\n")
    parts += [text for name in sorted(schemas) for text in _object(name, schemas[name])]
    return "\n".join(parts)


def _summary(method: str, path: str, operation: Mapping[str, Any]) -> str:
    name = f"{method} {path}"
    return f"| [`{name}`](#{_anchor(name)}) | {_role(operation)} | {_cell(operation['summary'])} |"


def _route(method: str, path: str, operation: Mapping[str, Any]) -> Iterator[str]:
    text = " ".join([operation["summary"], _without_role(operation.get("description", ""))]).strip()
    yield f"### {method} {path}\n\n{text}\n\n* Role: {_role(operation)}."
    body = operation.get("requestBody")
    if body is not None:
        yield f"* Body: {_type(body['content']['application/json']['schema'])}."
    good = {status: answer for status, answer in operation["responses"].items() if status < "400"}
    kinds = {_type(content["schema"]) for answer in good.values() for content in answer["content"].values()}
    yield f"* Answer: {' or '.join(good)}, {' or '.join(sorted(kinds))}."
    errors = [status for status in operation["responses"] if status >= "400" and status not in _COMMON]
    if errors:
        yield f"* Errors: {', '.join(errors)}."
    yield ""
    fields = [one for one in operation["parameters"] if one["in"] != "path" and one["name"] != "X-Request-ID"]
    if fields:
        rows = (
            _row(one["name"], one["schema"], one.get("description", ""), required=one["required"]) for one in fields
        )
        yield _table("| parameter | type | meaning |", rows)


def _object(name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    text = " ".join(schema.get("description", "").split())
    yield f"### {name}\n"
    if text:
        yield f"{text}\n"
    if "enum" in schema:
        yield f"One of {_values(schema['enum'])}.\n"
    required = schema.get("required", ())
    rows = [
        _row(field, kind, kind.get("description", ""), required=field in required and "additionalProperties" in schema)
        for field, kind in schema.get("properties", {}).items()
    ]
    if rows:
        yield _table("| field | type | meaning |", rows)


def _row(name: str, schema: Mapping[str, Any], description: str, *, required: bool) -> str:
    kinds = [one for one in schema.get("anyOf", ()) if one.get("type") != "null"]
    meaning = description or next((one["description"] for one in kinds if "description" in one), "")
    notes = ["*required*"] if required else []
    if schema.get("default") not in (None, "", [], {}):
        notes.append(f"default `{json.dumps(schema['default'])}`")
    return f"| `{name}` | {', '.join([_type(schema), *notes])} | {_cell(meaning)} |"


def _type(schema: Mapping[str, Any]) -> str:
    """Return the type of a value in words, with its limits."""
    if "anyOf" in schema:
        kinds = [_type(one) for one in schema["anyOf"]]
        return " or ".join(sorted(kinds, key=lambda kind: kind == "null"))
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(_REF)
        return f"[{name}](#{_anchor(name)})"
    if "enum" in schema:
        return _values(schema["enum"])
    return _plain_type(schema.get("type", "any JSON"), schema)


def _plain_type(kind: str, schema: Mapping[str, Any]) -> str:
    match kind:
        case "array":
            shown = f"list of {_type(schema['items'])}" if schema.get("items") else "list"
            return shown + _limits(schema, "minItems", "maxItems", " entries")
        case "object" if isinstance(schema.get("additionalProperties"), dict):
            return f"object of {_type(schema['additionalProperties'])}"
        case "string":
            shown = {"uuid": "UUID", "date-time": "timestamp"}.get(schema.get("format", ""), "string")
            return shown + _limits(schema, "minLength", "maxLength", " characters")
        case _:
            return kind + _limits(schema, "minimum", "maximum", "")


def _limits(schema: Mapping[str, Any], least: str, most: str, unit: str) -> str:
    low, high = schema.get(least), schema.get(most)
    if high is None:
        return "" if low is None else f" (at least {low:,}{unit})"
    if low == high:
        return f" ({high:,}{unit})"
    return f" (at most {high:,}{unit})" if low is None else f" ({low:,} to {high:,}{unit})"


def _values(values: list[Any]) -> str:
    return ", ".join(f"`{value}`" for value in values)


def _role(operation: Mapping[str, Any]) -> str:
    found = re.search(r"Needs the role (\w+)\.", operation.get("description", ""))
    return found[1] if found else "all"


def _without_role(text: str) -> str:
    return re.sub(r" ?Needs the role \w+\.", "", text)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _table(head: str, rows: Iterator[str] | list[str]) -> str:
    rule = "| " + " | ".join(["---"] * (head.count("|") - 1)) + " |"
    return "\n".join([head, rule, *rows]) + "\n"


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


PAGES: Final = {PAGE: page}

if __name__ == "__main__":
    PAGE.write_text(page())

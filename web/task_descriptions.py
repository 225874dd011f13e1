"""OpenAPI descriptions of the addresses of a process's tasks, each with its own arguments."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any
from urllib.parse import quote

import msgspec

from dataloader.jobs.secrets.masking import mask_text
from dataloader.jobs.task import Task
from dataloader.web.api.tasks import TRIGGER, TaskJobFields, own_fields
from dataloader.web.routes import JSON


def describe_tasks(described: dict[str, Any], tasks: Mapping[str, Task[Any]]) -> None:
    """Add an address for each task to the description, which has the common one."""
    path = TRIGGER.replace("<path:task>", "{task}")
    common = described["paths"][path]["post"]
    (_,), components = msgspec.json.schema_components([TaskJobFields], ref_template="#/components/schemas/{name}")
    own = components[TaskJobFields.__name__]["properties"]
    for number, (name, task) in enumerate(sorted(tasks.items())):
        if mask_text(name) != name:
            continue  # its address would show the secret
        schema: dict[str, Any] = {"type": "object"}
        if task.args is not None:
            prefix = f"task{number}."
            schema, parts = task.args.schema(f"#/components/schemas/{prefix}{{name}}")
            described["components"]["schemas"].update({f"{prefix}{part}": value for part, value in parts.items()})
        fields = frozenset(schema.get("properties", ()))
        schema = schema | {
            "title": name,
            "properties": {field: own[field] for field in own_fields(fields)} | schema.get("properties", {}),
        }
        operation = deepcopy(common) | {
            "operationId": f"trigger_task{number}",
            "summary": mask_text(task.description) or f"Enqueue a job of the task {name}.",
            "requestBody": {"required": True, "content": {JSON: {"schema": schema}}},
        }
        operation["parameters"] = [one for one in operation["parameters"] if one["in"] != "path"]
        described["paths"][path.replace("{task}", quote(name, safe=""))] = {"post": operation}

"""Loads over HTTP: the routes of their operations.

A load is started, canceled and retried as a job. Texts of sources and handlers are shown without their secrets.
"""

from __future__ import annotations

from typing import Final

from dataloader.jobs.operations.loads import loads
from dataloader.web.operation_routes import OperationRoutes

routes: Final = OperationRoutes()
routes.operations(loads)

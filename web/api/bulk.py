"""Bulk operations over HTTP: the routes of their operations. A start is answered with 202, or with a count."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

import msgspec

from dataloader.jobs.bulk_listings import BulkCount, BulkRecord
from dataloader.jobs.operations.bulk import CountBulk, StartBulk, bulk
from dataloader.jobs.secrets.record_masks import masked
from dataloader.web.operation_routes import OperationRoutes
from dataloader.web.routes import Answer, Call

routes: Final = OperationRoutes()


@routes.operation(StartBulk, answers={HTTPStatus.OK: BulkCount, HTTPStatus.ACCEPTED: BulkRecord})
async def start_bulk(call: Call, operation: StartBulk) -> Answer:
    """Answer with the operation that has begun, or with the number of its jobs if it is a dry run."""
    if operation.dry_run:
        return Answer(value=await call.perform(CountBulk(**msgspec.structs.asdict(operation))))
    record = await call.perform(operation)
    return Answer(
        value=masked(record),
        status=HTTPStatus.ACCEPTED,
        headers={"Location": f"/api/v1/bulk/{record.bulk_id}"},
    )


routes.operations(bulk)

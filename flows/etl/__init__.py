"""Loads: rate-limited requests, parallel processing, one writer. See docs/loads/.

The names below are public. Each is imported when it is first used, so that the supervisor reads the settings of
pipelines without loading the modules that run them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from dataloader.jobs.former_names import refuse_former_name

if TYPE_CHECKING:
    from dataloader.flows.etl.declare.load import Detail, Load, Table
    from dataloader.flows.etl.declare.pipeline_config import PipelineConfig, PipelineSettings
    from dataloader.flows.etl.declare.rows import Checkpoint, Rows, RowsRun
    from dataloader.flows.etl.declare.windows import Windows
    from dataloader.flows.etl.flow.dimensions import Dimension, Dimensions
    from dataloader.flows.etl.flow.flow import Flow, add_dimensions, add_flows
    from dataloader.flows.etl.formats.csv_format import Csv
    from dataloader.flows.etl.formats.json_format import Json, JsonLines
    from dataloader.flows.etl.formats.packed_format import Compressed, Zip
    from dataloader.flows.etl.formats.xml_format import Xml
    from dataloader.flows.etl.parse.database_reader import Reader
    from dataloader.flows.etl.run.cancellation_token import CancellationToken
    from dataloader.flows.etl.run.load_task import add_loads, run_load
    from dataloader.flows.etl.sources.credentials import Auth
    from dataloader.flows.etl.sources.files import Files
    from dataloader.flows.etl.sources.http import Http
    from dataloader.flows.etl.sources.pagination import Cursor, LinkHeader, NextUrl, Offset, PageNumber
    from dataloader.flows.etl.sources.routing import Routing
    from dataloader.flows.etl.sources.s3 import S3
    from dataloader.flows.etl.sources.source import Page, Record, Request, Response, Source, SourceError, Window
    from dataloader.jobs.limits import RateLimit
    from dataloader.store.etl.history import History

__all__ = [
    "S3",
    "Auth",
    "CancellationToken",
    "Checkpoint",
    "Compressed",
    "Csv",
    "Cursor",
    "Detail",
    "Dimension",
    "Dimensions",
    "Files",
    "Flow",
    "History",
    "Http",
    "Json",
    "JsonLines",
    "LinkHeader",
    "Load",
    "NextUrl",
    "Offset",
    "Page",
    "PageNumber",
    "PipelineConfig",
    "PipelineSettings",
    "RateLimit",
    "Reader",
    "Record",
    "Request",
    "Response",
    "Routing",
    "Rows",
    "RowsRun",
    "Source",
    "SourceError",
    "Table",
    "Window",
    "Windows",
    "Xml",
    "Zip",
    "add_dimensions",
    "add_flows",
    "add_loads",
    "run_load",
]

_NAMES: Final = {
    "flows.etl.declare.load": "Detail Load Table",
    "flows.etl.declare.pipeline_config": "PipelineConfig PipelineSettings",
    "flows.etl.declare.rows": "Checkpoint Rows RowsRun",
    "flows.etl.declare.windows": "Windows",
    "flows.etl.flow.dimensions": "Dimension Dimensions",
    "flows.etl.flow.flow": "Flow add_dimensions add_flows",
    "flows.etl.formats.csv_format": "Csv",
    "flows.etl.formats.json_format": "Json JsonLines",
    "flows.etl.formats.packed_format": "Compressed Zip",
    "flows.etl.formats.xml_format": "Xml",
    "flows.etl.parse.database_reader": "Reader",
    "flows.etl.run.cancellation_token": "CancellationToken",
    "flows.etl.run.load_task": "add_loads run_load",
    "flows.etl.sources.credentials": "Auth",
    "flows.etl.sources.files": "Files",
    "flows.etl.sources.http": "Http",
    "flows.etl.sources.pagination": "Cursor LinkHeader NextUrl Offset PageNumber",
    "flows.etl.sources.routing": "Routing",
    "flows.etl.sources.s3": "S3",
    "flows.etl.sources.source": "Page Record Request Response Source SourceError Window",
    "store.etl.history": "History",
    "store.etl.suppliers": "RateLimit",
}
_WHERE: Final = {name: f"dataloader.{module}" for module, names in _NAMES.items() for name in names.split()}


_FORMER: Final = {"Budget": "RateLimit", "Target": 'Table, such as Table("orders", key="id")'}


def __getattr__(name: str) -> Any:
    """Import a name when it is first used. Raises `ImportError`, with the new name, for one that has been changed."""
    refuse_former_name(__name__, name, _FORMER)
    module = _WHERE.get(name)
    if module is None:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    value = globals()[name] = getattr(import_module(module), name)
    return value

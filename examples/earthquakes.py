"""Earthquakes of the USGS: a list by days, and for each strong one its details, into two tables.

cd examples
createdb quakes && psql quakes -f earthquakes.sql
DL_DB_DSN=postgresql:///quakes dataloader etl run usgs.quakes --tasks earthquakes:tasks --from 2026-01-01
"""

import os
from datetime import UTC, date, datetime, timedelta
from typing import Any

from dataloader import Tasks
from dataloader.flows.etl import Detail, Http, Json, Load, Record, Request, Table, Window, Windows, add_loads

API = os.environ.get("USGS_URL", "https://earthquake.usgs.gov")
STRONG = 6.0


def days(window: Window) -> dict[str, Any]:
    assert window.start is not None  # a load with windows has both ends; the last window ends now
    assert window.end is not None
    span = {"starttime": window.start.isoformat(), "endtime": window.end.isoformat()}
    return {"format": "geojson", "minmagnitude": 4.5, **span}


def quake(feature: Record) -> dict[str, Any]:
    longitude, latitude, depth = feature["geometry"]["coordinates"]
    about = feature["properties"]
    at = datetime.fromtimestamp(int(about["time"]) / 1000, UTC)
    place = {"latitude": latitude, "longitude": longitude, "depth_km": depth}
    return {"id": feature["id"], "at": at, "magnitude": about["mag"], "place": about["place"], **place}


def shaking(quake_id: str, feature: Record) -> dict[str, Any]:
    about = feature["properties"]
    return {"id": quake_id, "felt": about["felt"], "alert": about["alert"], "sources": list(about["products"])}


quakes = Load(
    "usgs.quakes",
    Http(API, endpoint="/fdsnws/event/1/query", params=days, format=Json("features")),
    Table("quake", key="id", delete_missing="deleted_at"),
    windows=Windows(start=date(2026, 1, 1), segment="day", look_back=timedelta(days=7), column="at"),
    transform=quake,
    detail=Detail(
        id=lambda feature: feature["id"] if feature["properties"]["mag"] >= STRONG else None,
        request=lambda quake_id: Request(
            endpoint="/fdsnws/event/1/query", params={"format": "geojson", "eventid": quake_id}
        ),
        source=Http(API, format=Json()),
        transform=shaking,
        table=Table("quake_shaking", key="id"),
    ),
    pipeline={"rate_min": 1, "rate_max": 3},
)

tasks = Tasks()
add_loads(tasks, quakes)

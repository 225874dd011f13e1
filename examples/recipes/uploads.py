"""Uploaded CSV files: a web program stores a file and adds a job; the job imports each file once, all of it or nothing.

pip install 'psycopg[binary]'
dataloader migrate
dataloader psql -c 'CREATE TABLE product (sku text PRIMARY KEY, name text NOT NULL, price numeric NOT NULL)'
dataloader serve --tasks uploads:tasks
"""

import csv
import hashlib
import os
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any
from uuid import UUID

import attrs
import psycopg
from psycopg.types.json import Jsonb

from dataloader import GiveUp, Tasks, ThreadJob

FOLDER = Path(os.environ.get("UPLOADS", "uploads"))  # a disk that the web program and the workers share

tasks = Tasks()


@attrs.frozen
class Upload:
    digest: str


def accept(connection: psycopg.Connection[Any], content: bytes) -> UUID:
    """Store a file and enqueue its import, in the web program's transaction; the same file twice is one job."""
    digest = hashlib.sha256(content).hexdigest()
    FOLDER.mkdir(parents=True, exist_ok=True)
    part = FOLDER / f".{digest}.part"
    part.write_bytes(content)
    part.rename(FOLDER / f"{digest}.csv")  # a job never sees half a file
    rows: list[tuple[UUID]] = connection.execute(
        "SELECT dl_enqueue('product.import', %s, queue => 'uploads', idempotency_key => %s)",
        [Jsonb({"digest": digest}), f"product.import {digest}"],
    ).fetchall()
    return rows[0][0]


@tasks.task("product.import", args=Upload, queue="uploads", lock_key="product", timeout_s=3_600)
def import_products(job: ThreadJob[Upload]) -> GiveUp | None:
    rows: list[tuple[object, ...]] = []
    bad: list[str] = []
    with (FOLDER / f"{job.args.digest}.csv").open(newline="", encoding="utf-8-sig") as file:
        for line, record in enumerate(csv.DictReader(file), 2):
            try:
                rows.append((record["sku"], record["name"], Decimal(record["price"])))
            except (KeyError, TypeError, InvalidOperation) as error:
                bad.append(f"line {line}: {error!r}")
            if line % 1_000 == 0:
                job.progress({"read": line})  # a canceled import stops here
    if bad:
        return GiveUp(f"{len(bad)} bad lines: " + "; ".join(bad[:10]))
    with job.transaction() as transaction:
        transaction.execute("CREATE TEMPORARY TABLE incoming (LIKE product) ON COMMIT DROP")
        transaction.copy("incoming", ["sku", "name", "price"], rows)
        transaction.execute(
            "INSERT INTO product SELECT DISTINCT ON (sku) * FROM incoming ON CONFLICT (sku) DO UPDATE"
            " SET name = excluded.name, price = excluded.price"
        )
        transaction.result = {"rows": len(rows)}
    return None

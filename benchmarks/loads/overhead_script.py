"""Same work as a plain script, without any other function of a pipeline.

python -m benchmarks.loads.overhead_script URL DSN DAYS    prints the seconds that it took
"""

from __future__ import annotations

import sys
import time
from datetime import date, timedelta
from decimal import Decimal

import httpx2
import psycopg

MERGE = """
INSERT INTO plain_item AS t (day, item, amount, note) SELECT day, item, amount, note FROM incoming
ON CONFLICT (day, item) DO UPDATE SET amount = excluded.amount, note = excluded.note
WHERE (t.amount, t.note) IS DISTINCT FROM (excluded.amount, excluded.note)
"""


def load(url: str, dsn: str, days: int) -> None:
    with httpx2.Client(base_url=url) as client, psycopg.connect(dsn) as connection:
        for n in range(days):
            day = date(2026, 1, 1) + timedelta(days=n)
            items = client.get("/items", params={"day": str(day)}, timeout=30).raise_for_status().json()["items"]
            rows = [(item["day"], item["item"], Decimal(item["amount"]), item["note"]) for item in items]
            with connection.transaction(), connection.cursor() as cursor:
                cursor.execute("CREATE TEMP TABLE incoming (LIKE plain_item) ON COMMIT DROP")
                with cursor.copy("COPY incoming (day, item, amount, note) FROM STDIN") as copy:
                    for row in rows:
                        copy.write_row(row)
                cursor.execute(MERGE)


if __name__ == "__main__":
    began = time.perf_counter()
    load(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    print(time.perf_counter() - began)

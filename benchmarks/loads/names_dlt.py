"""Names by dlt: a page for each file, merged by key, with defaults otherwise. Prints its seconds and megabytes.

DSN=… ARCHIVE=… WORK=… python -m benchmarks.loads.names_dlt
"""

from __future__ import annotations

import csv
import io
import os
import tarfile
from collections.abc import Iterator
from typing import Any

import dlt

from benchmarks.loads.run_dlt import run_dlt


@dlt.resource(name="name", write_disposition="merge", primary_key=("year", "name", "sex"))
def names() -> Iterator[list[dict[str, Any]]]:
    with tarfile.open(os.environ["ARCHIVE"]) as files:
        for member in files:
            file = files.extractfile(member)
            if file is None:
                continue
            rows = csv.reader(io.TextIOWrapper(file, "utf-8", newline=""))
            year = int(member.name[-8:-4])
            yield [{"year": year, "name": name, "sex": sex, "count": int(count)} for name, sex, count in rows]


if __name__ == "__main__":
    run_dlt("names", names)

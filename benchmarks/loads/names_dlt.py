"""Names by dlt: a page for each file, merged by key, with defaults otherwise. Prints its seconds and megabytes.

DSN=… ARCHIVE=… WORK=… python -m benchmarks.loads.names_dlt
"""

from __future__ import annotations

import csv
import io
import os
import shutil
import tarfile
import time
from collections.abc import Iterator
from typing import Any

import dlt

from benchmarks.loads.names import told


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


def main() -> None:
    shutil.rmtree(os.environ["WORK"], ignore_errors=True)
    began = time.perf_counter()
    pipeline = dlt.pipeline(
        "names",
        pipelines_dir=os.environ["WORK"],
        # It requires a host name; the one behind it, a folder of sockets, is used.
        destination=dlt.destinations.postgres(os.environ["DSN"].replace("@/", "@localhost/")),
        dataset_name="by_dlt",
    )
    pipeline.run(names()).raise_on_failed_jobs()
    print(told(time.perf_counter() - began))


if __name__ == "__main__":
    os.environ["RUNTIME__DLTHUB_TELEMETRY"] = "false"
    main()

"""Order of a run: tests marked `long` begin first. A plugin of tests/conftest.py.

A long test that begins last keeps one of xdist's workers busy while the others have nothing left to run.
"""

from __future__ import annotations

from itertools import groupby

import pytest


# After pytest has grouped the tests of each server.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    items[:] = shared_out(items, workers, lambda item: item.get_closest_marker("long") is not None)


def shared_out(items, workers, is_long):
    """Return the tests in an order in which each worker's equal part begins with a part of the long ones.

    The long tests of a file stay together, since they share its fixtures.
    """
    files = [list(group) for _, group in groupby(filter(is_long, items), key=lambda item: item.path)]
    others = [item for item in items if not is_long(item)]
    order = []
    for worker in range(workers):
        part = [item for file in files[worker::workers] for item in file]
        room = max(0, (len(items) - len(order)) // (workers - worker) - len(part))
        order += part + others[:room]
        del others[:room]
    return order + others

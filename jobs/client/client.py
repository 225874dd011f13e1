"""`Client`: one object for everything that programs can ask of the system."""

from __future__ import annotations

import attrs

from dataloader.jobs.client.bulk import Bulk
from dataloader.jobs.client.jobs import Jobs
from dataloader.jobs.client.limits import Limits
from dataloader.jobs.client.loads import Loads
from dataloader.jobs.client.processes import ProcessClient
from dataloader.jobs.client.schedules import Schedules
from dataloader.jobs.operations.performer import Performer


@attrs.frozen(kw_only=True)
class Client:
    """Client of the system. `dataloader.open_client` opens one; a supervisor has one as `supervisor.client`."""

    jobs: Jobs
    """Jobs, queues, workers, failures, statistics and the audit log."""
    processes: ProcessClient
    """Durable processes."""
    schedules: Schedules
    """Schedules."""
    limits: Limits
    """Limits of tasks and suppliers."""
    loads: Loads
    """Loads, their runs and their failures."""
    bulk: Bulk
    """Bulk operations on jobs, which continue without their caller."""

    @classmethod
    def over(cls, performer: Performer) -> Client:
        """Return the client of a performer."""
        return cls(
            jobs=Jobs(performer),
            processes=ProcessClient(performer),
            schedules=Schedules(performer),
            limits=Limits(performer),
            loads=Loads(performer),
            bulk=Bulk(performer),
        )

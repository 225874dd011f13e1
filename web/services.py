"""Services for the HTTP side: the supervisor builds one `Services`, which every view reads.

The app has no state and imports no global, so that two apps with two databases can run in one process, as
tests and embedding programs need. Views never start jobs or tasks; they write rows, which the actors process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Annotated, Any, Final

import attrs
import trio

from dataloader.jobs.measures import Measure
from dataloader.jobs.message_source import MessageSourceState
from dataloader.jobs.model import about
from dataloader.jobs.task import Task
from dataloader.store.connection.bridge import Database
from dataloader.store.connection.fair_places import FairPlaces
from dataloader.store.connection.read_share import share_of
from dataloader.store.performer import DatabasePerformer
from dataloader.web.api.process_gauges import LatestProcessGauges
from dataloader.web.api.queue_depths import QueueDepths
from dataloader.web.auth import Token
from dataloader.web.client_address import Network
from dataloader.web.fair_places import FairThreads
from dataloader.web.pages.addresses import PublicAddress
from dataloader.web.pages.menu_numbers import MenuNumbers
from dataloader.web.pages.pace import Pace
from dataloader.web.pages.sessions import Sessions
from dataloader.web.server.bodies import Bound, LongBodies
from dataloader.web.server.connections import Connections, LongAnswers, most_connections
from dataloader.web.server.limits import STANDARD, HttpLimits
from dataloader.web.server.refusals import Refusals
from dataloader.web.token_check import TokenCheck
from dataloader.web.waiting import Waiting

_one: Final = partial(trio.CapacityLimiter, 1)
_two: Final = partial(trio.CapacityLimiter, 2)


@attrs.frozen(kw_only=True)
class WebSettings:
    """Settings for HTTP. Without `tokens`, every client that reaches the socket may do everything.

    `public`: where browsers find this server. `environment`: the installation's name, which the pages show.
    `trusted_proxies`: the proxies whose statement of a client's address is trusted.
    """

    tokens: tuple[Token, ...] = ()
    public: PublicAddress = attrs.field(factory=PublicAddress)
    environment: str | None = None
    trusted_proxies: tuple[Network, ...] = ()
    max_body_bytes: int = 1 << 20
    max_batch_body_bytes: int = 8 << 20
    max_connections: int = 500
    max_waits: int = 200


@attrs.frozen
class QueueLoad:
    """Queue that this process serves: its slots, and how many of them are in use."""

    concurrency: Annotated[int, about("Slots of this process.")]
    running: Annotated[int, about("Used slots.")]


@attrs.frozen(kw_only=True)
class ServiceState:
    """Current state of the process. `worker` is in `claimed_by` of its jobs; `store_ready`: the database works.

    `starting`: its tables and tasks may not be in the database yet.
    """

    version: str
    worker: str
    started_at: datetime
    uptime_s: float
    draining: bool
    queues: Mapping[str, QueueLoad]
    listener_connected: bool
    store_ready: bool
    starting: bool = False
    messages: tuple[MessageSourceState, ...] = ()


@attrs.frozen
class Turns:
    """Limits of concurrent work that takes much memory or many milliseconds. Requests that wait hold no data.

    Threads are not Trio's own, all of which handlers may be using. An app has its own limiters, since a limiter belongs
    to a run.
    """

    long_bodies: trio.CapacityLimiter = attrs.field(factory=_two)
    """Requests of many kilobytes that are decoded and stored; fewer than the pool has connections by default."""
    longest_bodies: trio.CapacityLimiter = attrs.field(factory=_one)
    """Requests of a megabyte and more. Each exists in five copies on its way to the database."""
    long_answers: FairPlaces = attrs.field(factory=FairPlaces)
    """Requests whose answers may have megabytes, and whole pages, shared by the callers."""
    decoding: trio.CapacityLimiter = attrs.field(factory=_two)
    """Threads that decode bodies."""
    masking: FairThreads = attrs.field(factory=FairThreads)
    """Threads that mask secrets, shared by the callers."""
    exports: trio.CapacityLimiter = attrs.field(factory=_one)
    """Parts of job files that are being read."""
    files: FairPlaces = attrs.field(factory=partial(FairPlaces, most=4, most_of_one=2))
    """Job files that are being sent, each with a part in memory while its client reads it."""
    error_pages: trio.CapacityLimiter = attrs.field(factory=_one)
    """Error pages: one is made at a time, for any number of requests that reach their deadline together."""
    scrapes: trio.CapacityLimiter = attrs.field(factory=_one)
    """Scrapes: one is written at a time, for any number of scrapers."""


def _with_share(part: Any) -> Any:
    """Return a part of the services whose reads use the pool's share for reads over HTTP."""
    return attrs.evolve(part, database=share_of(part.database))


@attrs.frozen(kw_only=True)
class Services:
    """All services of a view. Its reads use a share of the pool: see `ReadShare`.

    `state` is called at each request; `/metrics` shows `measures` besides its own; `tasks` are those of this process.
    """

    performer: DatabasePerformer = attrs.field(converter=_with_share)
    settings: WebSettings
    tasks: Mapping[str, Task[Any]] = attrs.field(factory=dict)
    state: Callable[[], ServiceState]
    measures: Sequence[Measure] = ()
    http_limits: HttpLimits = STANDARD
    depths: QueueDepths = attrs.field(init=False)
    process_gauges: LatestProcessGauges = attrs.field(init=False)
    refusals: Refusals = attrs.field(factory=Refusals, init=False)
    waiting: Waiting = attrs.field(init=False)
    receiving: LongBodies = attrs.field(init=False)
    connections: Connections = attrs.field(init=False)
    sending: LongAnswers = attrs.field(init=False)
    at_work: Bound = attrs.field(init=False)
    turns: Turns = attrs.field(factory=Turns, init=False)
    token_check: TokenCheck = attrs.field(init=False)
    sessions: Sessions = attrs.field(init=False)
    pace: Pace = attrs.field(factory=Pace, init=False)
    menu_numbers: MenuNumbers = attrs.field(init=False)

    @property
    def database(self) -> Database:
        """Database of the queue, for reads and writes that are not operations, such as those of pages."""
        return self.performer.database

    @token_check.default
    def _check_of_the_tokens(self) -> TokenCheck:
        return TokenCheck(self.settings.tokens, self.refusals)

    @sessions.default
    def _sessions_of_the_tokens(self) -> Sessions:
        return Sessions(self.settings.tokens, self.performer.database)

    @menu_numbers.default
    def _menu_numbers_of_the_database(self) -> MenuNumbers:
        return MenuNumbers(self.performer.database)

    @depths.default
    def _depths_of_the_database(self) -> QueueDepths:
        return QueueDepths(self.performer.database, self.http_limits.database_s)

    @process_gauges.default
    def _process_gauges_of_the_database(self) -> LatestProcessGauges:
        return LatestProcessGauges(self.performer.database, self.http_limits.database_s)

    @receiving.default
    def _receiving_two_batches_at_least(self) -> LongBodies:
        most = max(self.http_limits.received_bytes, 2 * self.settings.max_batch_body_bytes)
        return LongBodies(most, limits=self.http_limits)

    @connections.default
    def _connections_within_the_files(self) -> Connections:
        return Connections(most_connections(self.settings.max_connections), self.refusals, self.http_limits)

    @sending.default
    def _sending_on_the_connections(self) -> LongAnswers:
        return LongAnswers(self.http_limits.sent_bytes, self.connections)

    @at_work.default
    def _at_work_of_the_connections(self) -> Bound:
        return Bound(self.connections.most_at_work)

    @waiting.default
    def _waiting_in_bounds(self) -> Waiting:
        performer = self.performer
        return Waiting(performer.waits, performer.answers, self.refusals, self.settings.max_waits, self.http_limits)

"""Address of the database, with the sizes of pools and the timeouts."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class DatabaseOptions:
    """Address of the database, sizes of pools, and timeouts in seconds.

    `direct_dsn` is its direct address when `dsn` leads to a pooler.
    """

    dsn: str = attrs.field(repr=False)
    direct_dsn: str | None = attrs.field(default=None, repr=False)
    pool_size: int = 2
    transaction_pool_size: int = 4
    connect_timeout_s: float = 10.0
    statement_timeout_s: float = 30.0
    transaction_timeout_s: float = 600.0
    name: str = "dataloader"
    last_host: dict[str, tuple[str, int | None]] = attrs.field(factory=dict, repr=False, eq=False)
    """Host that accepted the last connection, by address, for addresses with several hosts; copies share it."""

    @property
    def has_pooler(self) -> bool:
        """Return whether there is a pooler between most connections and the server."""
        return self.direct_dsn not in {None, self.dsn}

    @property
    def write_deadline_s(self) -> float:
        """Seconds for which a write may delay a cancellation: the timeouts for connect and statement, plus 2."""
        return self.connect_timeout_s + self.statement_timeout_s + 2.0

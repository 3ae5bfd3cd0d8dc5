"""The scheduler's numbers, with their units; defaults are those of one node (contract §7)."""

from __future__ import annotations

import msgspec


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Raises ValueError where the numbers cannot keep the promises together."""

    #: renewal interval, lease, grace at the fence and margin, in seconds
    renew_s: float = 2.0
    lease_s: float = 20.0
    grace_s: float = 5.0
    margin_s: float = 3.0
    #: silence of a leader after which a standby takes over
    takeover_s: float = 4.0
    #: an idle leader writes a record this often
    heartbeat_s: float = 1.0
    #: renewals alone start an append at most this often
    renewal_append_s: float = 0.25
    #: the longest pause of acknowledgements that the lease must outlive: a JetStream leader change takes up to 8 s
    server_gap_s: float = 0.0
    #: interval of load frames, and how many may be missed before nothing new is placed
    load_s: float = 2.0
    loads_missed_max: int = 3
    #: jobs in memory; beyond it the endpoint answers queue-full and the durable queue waits unread
    jobs_max: int = 200_000
    tombstones_max: int = 10_000
    #: ended jobs kept whole for questions before they are compacted
    ended_max: int = 10_000
    #: how long the history of a finished job is kept, in seconds, and how much of it in all, in bytes; a server with
    #: less room gets a smaller one, and the log says so
    history_keep_s: float = 7 * 24 * 3600.0
    history_bytes: int = 10 * 1024**3
    ranker: str = "pack"

    def __post_init__(self) -> None:
        if self.heartbeat_s >= self.renew_s:  # else every idle tick looks like a leader that was stopped
            raise ValueError(f"heartbeat_s must be below renew_s = {self.renew_s:g}, found {self.heartbeat_s:g}")
        if not 120 <= self.history_keep_s <= 10 * 366 * 24 * 3600:  # JetStream's own window of doubles is 120 s
            raise ValueError(f"history_keep_s must be 120 s to 10 years, found {self.history_keep_s:g}")
        if self.history_bytes < 2**20:
            raise ValueError(f"history_bytes must be at least {2**20}, found {self.history_bytes}")
        needed = self.renew_s + self.takeover_s + 1 + self.server_gap_s + self.margin_s
        if self.lease_s <= needed:
            raise ValueError(
                f"lease_s must be above {needed:g} (renewal, takeover, 1, server gap, margin), found {self.lease_s:g}"
            )

    @property
    def lost_ms(self) -> int:
        """Silence after which a worker is declared lost: lease + grace + margin."""
        return int((self.lease_s + self.grace_s + self.margin_s) * 1000)


#: three servers, R3 (contract §7)
CLUSTER = Config(renew_s=3, lease_s=30, grace_s=10, margin_s=5, takeover_s=12, server_gap_s=8)

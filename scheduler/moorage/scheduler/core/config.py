"""The scheduler's settings, with their units. The defaults are for one node; see also `CLUSTER_DEFAULTS`."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from moorage.scheduler.core.ageing import Ageing
from moorage.scheduler.core.fleet.growing import Growing
from moorage.scheduler.core.ledger.state import AVOID_MAX
from moorage.schemas.frames.fleet import LEASE_S_MAX
from moorage.schemas.settings import setting

GIB: Final = 1 << 30
#: the ranker where nothing else is set; `pack` where it is not installed
RANKER_DEFAULT: Final = "fragments"
#: capacity of the table of finished jobs (`finished.ROWS_MAX`)
FINISHED_ROWS_MAX: Final = 2_000_000
#: the most jobs remembered of each worker that failed to start there
FAILED_KEPT_MAX: Final = 64


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The scheduler's settings. Raises ValueError if `heartbeat_s` is not below `renew_s`, or `lease_s` too short."""

    renew_s: Annotated[float, setting("Interval of a worker's renewals.", unit="s", ge=0.1, le=60)] = 2.0
    lease_s: Annotated[
        float,
        setting(
            "How long a worker may run its jobs after a renewal that was answered, unless it asks for longer.",
            unit="s",
            ge=1,
            le=LEASE_S_MAX,
        ),
    ] = 20.0
    lease_most: Annotated[
        float,
        setting(
            "The longest lease that a worker may ask for (its lease_s), such as 10m where workers are behind a slow"
            " link; 0: lease_s. After a restore nothing is placed for so long.",
            unit="s",
            ge=0,
            le=LEASE_S_MAX,
        ),
    ] = 0.0
    grace_s: Annotated[
        float,
        setting(
            "The longest time that a job has to end once its worker's lease is over (the fence).",
            unit="s",
            ge=0,
            le=600,
        ),
    ] = 5.0
    margin_s: Annotated[
        float, setting("Added to lease and grace before a silent worker counts as lost.", unit="s", ge=0, le=600)
    ] = 3.0
    takeover_s: Annotated[
        float, setting("Silence of a leader after which a standby takes over.", unit="s", ge=1.1, le=600)
    ] = 4.0
    heartbeat_s: Annotated[float, setting("An idle leader writes a record this often.", unit="s", ge=0.05, le=60)] = 1.0
    renewal_append_s: Annotated[
        float,
        setting(
            "Least time after a ledger record before another one is written for renewals alone.",
            unit="s",
            ge=0.01,
            le=60,
        ),
    ] = 0.25
    server_gap_s: Annotated[
        float,
        setting(
            "The longest pause of acknowledgements that a lease must outlive: a JetStream leader change.",
            unit="s",
            ge=0,
            le=600,
        ),
    ] = 0.0
    not_here_max: Annotated[
        int,
        setting(
            "A job that never ran ends once so many workers have refused it because they lack what it needs (a secret, "
            "user, folder, program or image), or all workers that could take it. Of a path of data_dirs it is 16.",
            ge=1,
            le=AVOID_MAX,
        ),
    ] = 3
    start_failures_max: Annotated[
        int,
        setting(
            "After so many jobs in a row that failed to start on a worker, and that have since started on another or "
            "belong to two tenants, the worker gets none for a while.",
            ge=2,
            le=FAILED_KEPT_MAX,
        ),
    ] = 3
    jobs_max: Annotated[
        int,
        setting(
            "Jobs in memory; a job counts once more for each 16 replicas up to 1,024 and each 8 KiB of its request. "
            "Beyond it the endpoint answers queue-full, and the durable queue waits unread. The last tenth is for "
            "tenants that hold less than that.",
            ge=1,
            le=10**7,
        ),
    ] = 200_000
    tombstones_max: Annotated[
        int, setting("Cancels of unknown jobs that are remembered, for each tenant.", ge=1, le=10**6)
    ] = 10_000
    ended_max: Annotated[
        int,
        setting(
            "Ended jobs that are kept whole for questions, counted as for jobs_max, before they are compacted.",
            ge=0,
            le=10**6,
        ),
    ] = 10_000
    finished_keep: Annotated[
        float,
        setting(
            "How long a finished job's id is remembered: until then a second submit makes no second job.",
            unit="s",
            ge=60,
            le=366 * 86400,
        ),
    ] = 24 * 3600.0
    finished_rows: Annotated[
        int,
        setting("Finished jobs that are remembered; beyond it the oldest are forgotten.", ge=1, le=FINISHED_ROWS_MAX),
    ] = FINISHED_ROWS_MAX
    history_keep: Annotated[
        float, setting("How long transitions stay in the history stream.", unit="s", ge=120, le=10 * 366 * 86400)
    ] = 7 * 86400.0
    history_bytes: Annotated[
        int, setting("Size of the history stream; beyond it the oldest go.", unit="bytes", ge=1 << 20, le=1 << 50)
    ] = 10 * GIB
    dead_letters_keep: Annotated[
        float, setting("How long queued requests that were refused are kept.", unit="s", ge=120, le=10 * 366 * 86400)
    ] = 30 * 86400.0
    requests_per_s: Annotated[
        int,
        setting(
            "Messages that the leader takes of one tenant in a second, with 1 KiB for each; further ones are refused.",
            ge=10,
            le=10**6,
        ),
    ] = 20_000
    ranker: Annotated[
        str,
        setting(
            "How the hosts that fit are ranked: fragments, pack, headroom, or module:Class of your own. pack is the"
            " default where fragments is not installed."
        ),
    ] = RANKER_DEFAULT
    tflops_file: Annotated[
        str,
        setting(
            "TOML file with a table [tflops]: what each GPU model does at half precision. Default: NVIDIA's models."
        ),
    ] = ""
    reserve_after: Annotated[
        float,
        setting(
            "The first job that has waited this long and cannot start gets hosts reserved for it; 0: at once.",
            unit="s",
            ge=0,
            le=86400,
        ),
    ] = 30.0
    data_wait: Annotated[
        float,
        setting(
            "How long a job may wait, from when it could start, for a host that has its data (run.data) while others"
            " have room; 0: not at all.",
            unit="s",
            ge=0,
            le=86400,
        ),
    ] = 0.0
    ageing: Annotated[
        float,
        setting("Points by which a waiting job's priority grows each hour; 0: none. No effect while all jobs that wait "
                "have one priority.", ge=0, le=100_000),
    ] = 0.0  # fmt: skip
    ageing_to: Annotated[int, setting("The priority up to which age lifts a waiting job.", ge=0, le=100)] = 100
    preempt_priority: Annotated[
        int,
        setting("Jobs of this priority or above end jobs of lower ones to start; 101: none does.", ge=1, le=101),
    ] = 101
    preempt_after: Annotated[
        float,
        setting("A job that has run for less than this is not ended for another.", unit="s", ge=0, le=366 * 86400),
    ] = 60.0
    reclaim: Annotated[
        bool,
        setting("Take borrowed GPUs back at once, by ending the borrowers' jobs; else as they end by themselves."),
    ] = False
    growing: Annotated[
        tuple[str, ...],
        setting(
            "Shapes of hosts of which more can come, as 8xH100: what such a host could run waits for one, whatever the"
            " request's on_no_match says, and is a demand (moorage admin demand)."
        ),
    ] = ()
    scale_up_s: Annotated[
        float, setting("Least time between two steps to one member more of a service.", unit="s", ge=0.1, le=3600)
    ] = 5.0
    scale_down_s: Annotated[
        float,
        setting("So long must fewer members of a service do before there is one less.", unit="s", ge=0.1, le=86400),
    ] = 60.0
    fair_share_half_life: Annotated[
        float,
        setting(
            "The time after which a tenant's past usage counts half in its fair share.", unit="s", ge=1, le=366 * 86400
        ),
    ] = 3600.0

    def __post_init__(self) -> None:
        if self.heartbeat_s >= self.renew_s:  # else every idle tick would look like a suspended leader
            raise ValueError(f"heartbeat_s must be below renew_s = {self.renew_s:g}, found {self.heartbeat_s:g}")
        needed = self.renew_s + self.takeover_s + 1 + self.server_gap_s + self.margin_s
        if self.lease_s <= needed:
            raise ValueError(
                f"lease_s must be above {needed:g} = renew_s + takeover_s + 1 s + server_gap_s + margin_s,"
                f" found {self.lease_s:g}"
            )
        Growing(self.growing)
        if 0 < self.lease_most < self.lease_s:
            raise ValueError(
                f"lease_most must be at least lease_s, the lease of a worker that asks for none: {self.lease_s:g},"
                f" found {self.lease_most:g}"
            )

    @property
    def lost_ms(self) -> int:
        """The silence after which a worker is declared lost that asked for no lease: lease + grace + margin."""
        return self.lost_after_ms(0)

    @property
    def lost_most_ms(self) -> int:
        """The longest silence after which any worker is declared lost."""
        return self.lost_after_ms(LEASE_S_MAX)

    def lease_of(self, asked_s: float) -> float:
        """Return the lease, in s, of a worker that asks for `asked_s`: within `lease_s` and `lease_most`."""
        return min(max(asked_s, self.lease_s), self.lease_most or self.lease_s)

    def lost_after_ms(self, asked_s: float) -> int:
        """Return the silence, in ms, after which a worker is declared lost that asked for a lease of `asked_s`."""
        return int((self.lease_of(asked_s) + self.grace_s + self.margin_s) * 1000)

    @property
    def told(self) -> tuple[tuple[str, str], ...]:
        """The settings that are not the default, by name, as a settings file has them; without files and lists."""
        found = {field.name: (getattr(self, field.name), field.default) for field in msgspec.structs.fields(Config)}
        return tuple(
            (name, str(value).lower() if isinstance(value, bool) else str(value))
            for name, (value, default) in sorted(found.items())
            if value != default and not name.endswith("_file") and isinstance(value, str | int | float)
        )

    @property
    def half_life_ms(self) -> int:
        return int(self.fair_share_half_life * 1000)

    @property
    def ages(self) -> Ageing | None:
        """How priorities rise with waiting; None if they do not."""
        rate_milli = round(self.ageing * 1000)
        return Ageing(rate_milli, self.ageing_to) if rate_milli else None

    @property
    def finished_keep_ms(self) -> int:
        return int(self.finished_keep * 1000)


#: other defaults for a ledger with copies on three servers (R3)
CLUSTER_DEFAULTS: Final = {
    "renew_s": 3.0,
    "lease_s": 30.0,
    "grace_s": 10.0,
    "margin_s": 5.0,
    "takeover_s": 12.0,
    "server_gap_s": 8.0,
}

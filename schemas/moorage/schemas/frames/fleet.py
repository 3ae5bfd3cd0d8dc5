"""Public frames in which workers and schedulers describe themselves. They name no job, tenant or session."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Final

import msgspec

from moorage.schemas.always import always
from moorage.schemas.capabilities import Capabilities
from moorage.schemas.driver_config import canonical_id
from moorage.schemas.frames.version import VERSION
from moorage.schemas.held_data import HELD_MAX

#: seconds between the load frames of a worker that does not say otherwise
LOAD_S_DEFAULT: Final = 2.0
#: the longest lease of a worker, in s
LEASE_S_MAX: Final = 3600.0


class Device(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One slot of a worker's pool.

    `index` is the device's own index, and may skip numbers; `name` is the driver's name for it. (vendor, uuid)
    identifies it: in the whole fleet if the uuid has 16 characters or more (`gpu-lent-twice`), else on its machine.
    `numa` is the NUMA node or -1; `peers` are the indices that it reaches over NVLink.
    """

    index: int
    vendor: str
    name: str  # the vendor's name of the GPU; `gpu.model` of a request is looked for in it
    uuid: str
    memory_mib: int = 0
    pci: str = ""
    numa: int = -1
    compute: str = ""
    peers: list[int] = []
    mig: bool = False  # whether it is a GPU in MIG mode, or a slice of one
    profile: str = ""  # profile of a MIG slice, as 1g.10gb; its `index` and `pci` are those of its GPU
    cdi: list[str] = []  # its names in the host's CDI specs, as nvidia.com/gpu=0
    modes: list[str] = []  # the sharing modes that its worker keeps it for; empty: all that the worker offers
    labels: dict[str, str] = {}  # its own, which requests may require; each is asked before its worker's of that name


def names_of(uuid: str, pci: str, cdi: Iterable[str]) -> list[str]:
    """Return the names other than its index by which a request may ask for a device. uuid and address have the spelling
    of `canonical_id`."""
    domain, _, rest = pci.lower().partition(":")
    address = f"{domain.lstrip('0').zfill(4)}:{rest}"
    return [name for name in (canonical_id(uuid), address if rest else "", *cdi) if name]


def slots_named(ids: Iterable[str], by_name: Callable[[str], int], slots: int) -> int:
    """Return the slots of the devices with these ids as a mask, a device of its own for each id; 0 if one is not there.

    `by_name` gives the slots of a name. If several of `slots` have it (the same index of two vendors), the lowest one
    that no other id needs is taken. Names with the fewest slots come first, whatever order they were asked for in.
    """
    found = 0
    for one in sorted(ids, key=lambda one: (by_name(one) & slots).bit_count()):
        left = by_name(one) & slots & ~found
        if not left:
            return 0
        found |= left & -left
    return found


class Hello(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, tag_field="kind", tag="hello"):
    """A worker's full description of itself, sent at its start, at a reconnect, at a roll-call and every half minute.
    Public, except for `drivers_for`, `mps_users` and `own_user`.

    `modes` are the sharing modes that it offers, `drivers` the ways in which it can run a job; `gpu_pool` is in the
    order of its slots.
    """

    worker: str
    boot: str
    v: int = VERSION
    release: str = ""
    hostname: str = ""
    drivers: list[str] = []
    modes: list[str] = msgspec.field(default_factory=lambda: ["exclusive", "time-slice"])
    sharers_max: dict[str, int] = {}
    labels: dict[str, str] = {}
    cpu_milli: int = 0
    memory_mib: int = 0
    #: of `cpu_milli`, so much is kept for each GPU that it lends: jobs without a GPU get the rest
    gpu_cpu_milli: int = 0
    counts: dict[str, int] = {}  # what jobs take of it with `uses` as `host.NAME`: cameras, licences bound to it
    gpu_pool: list[Device] = []
    interface: str | None = None
    address: str = ""
    simulated: bool = False
    #: slots the scheduler may use, by position; null means all (a service may keep some for its own claims)
    lent_slots: list[int] | None = None
    #: how long (s) and how much (bytes) output and results are kept: `output_s`, `output_bytes`, `result_s`,
    #: `result_bytes`
    keeps: dict[str, float] = {}
    #: drivers that jobs may have, by tenant, `*` for all others; empty: any. Sent with a join, never in public
    drivers_for: dict[str, list[str]] = {}
    #: number of the user that a tenant's jobs run as, by tenant, `*` for all others; other jobs run as their requests
    #: say. A GPU is shared by mps among jobs of one user only; null: of any. Sent with a join, never in public
    mps_users: dict[str, int] | None = None
    #: name and number of the user that the agent runs as. Sent with a join, never in public
    own_user: list[str] = []
    ports: int = 0  # number of ports that its jobs may have in all
    #: seconds between its load frames; after three missed ones nothing new is placed there
    load_s: Annotated[float, msgspec.Meta(ge=0.2, le=60)] = LOAD_S_DEFAULT
    #: capabilities of each of `drivers`, by its name; one that is not listed has the defaults
    capabilities: dict[str, Capabilities] = {}
    #: the lease that it asks for, in s; the scheduler gives one within its bounds. 0: the scheduler's own
    lease_s: Annotated[float, msgspec.Meta(ge=0, le=LEASE_S_MAX)] = 0.0


class SlotLoad(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The load of one slot, in the order of hello's `gpu_pool`. It names no job and no tenant, because the frame is
    public."""

    index: int
    leased: bool = False  # whether a job, or a process of the host, leases it
    sharers: int = 0  # number of jobs that share it now
    mode: str = ""  # its lease's mode: exclusive, mps or time-slice
    util_percent: int = 0  # the greatest of compute, encoder and decoder
    encoder_percent: int = 0
    decoder_percent: int = 0
    power_w: int | None = None
    memory_used_mib: int = 0
    temperature_c: int | None = None
    #: ok, thermal, ecc, xid, remap, reset-needed, missing, unresponsive, fabric, probation, mig, check, quarantined
    health: str = "ok"
    foreign: str = ""  # the foreign process on the device, as "pid 8812 python (user bob)"; empty without one
    #: the cause of its health, as "Xid 79: the GPU has fallen off the bus"; or that a VM has the device
    detail: str = ""
    #: what is wrong and closes nothing, after the kind of fault: `cdi: no CDI spec has this GPU`, or `cut-off: …`
    warning: str = ""


#: the kind of a host's warning that its wall clock is wrong, which the leader adds
CLOCK: Final = "clock"


class Load(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, tag_field="kind", tag="load"):
    """A worker's periodic report: every 2 s, and at most 5 a second when leases change. Public.

    `n` counts up within a boot. `generation` grows with every change of the pool: a frame with an older one is used as
    telemetry only.
    """

    worker: str
    boot: str
    n: int
    generation: int
    v: int = VERSION
    pending_claimers: int = 0  # number of processes of the host that wait for a GPU
    gpu_pool: list[SlotLoad] = []
    simulated: bool = False
    #: what is wrong with the host and closes nothing, in one line after its kind, such as `disk: …`; "" for nothing
    warning: str = ""
    time_ms: int = 0  # the host's wall clock, ms since 1970; 0 if it does not say
    #: digests of what was fetched there for jobs (`run.data`), the last used first
    data: Annotated[list[str], msgspec.Meta(max_length=HELD_MAX)] = []


class FleetRow(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A worker in the fleet frame."""

    worker: str
    state: str = always(str)  # as in the answer `admin.fleet`
    cells: str = always(str)  # a character for each GPU, as `moorage fleet` explains them
    simulated: bool = always(bool)


class LedgerCopies(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, kw_only=True):
    """The ledger's copies on NATS servers."""

    wanted: int = always(int)  # number of copies that there should be
    lacking: list[str] = always(list[str])  # servers whose copy is not up to date
    seen_ms_ago: int | None = None  # ms since the leader saw the copies; left out for one copy
    holder: str | None = None  # the server of the only copy; left out for several copies
    servers: list[str] | None = None  # servers of the cluster around the only copy; left out for several copies


class FleetFrame(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, tag_field="kind", tag="fleet"):
    """The leader's summary of the fleet for observers, one frame for all workers. It names no job and no tenant."""

    epoch: int  # the leader's epoch
    ledger: int  # number of the ledger's last record
    v: int = VERSION
    workers: list[FleetRow] = []  # the workers by name
    queued: int = 0
    running: int = 0
    ledger_copies: LedgerCopies | None = None


class RollCall(msgspec.Struct, frozen=True, gc=False, tag_field="kind", tag="roll-call"):
    """A new leader asks every worker for its hello and a renewal, now."""

    epoch: int = msgspec.field(name="reign")
    v: int = VERSION


class Standing(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="standing"):
    """Sent every two seconds by each scheduler, whether it leads or stands by. Public.

    It has the scheduler's release, the newest feature level that it can write and fold, and the ledger record up to
    which it has folded. `settings` are those of its numbers, orders and rankers that differ from the defaults: only the
    leader's take effect. `time_ms` is its wall clock, in ms since 1970; 0 if it does not say.
    """

    scheduler: str
    release: str
    level: int
    ledger: int
    leads: bool = False
    settings: dict[str, str | int | float | bool | None] = {}
    v: int = VERSION
    time_ms: int = 0

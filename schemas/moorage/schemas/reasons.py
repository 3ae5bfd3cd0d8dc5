"""Every reason for which a job waits, once: its name, what it means, what ends it, what cures it and what to do.

A new reason is one entry here; everything that speaks of reasons reads the entry. A reason that says that no worker has
what a request asks for has a filter as well, in `core/filters.py` of the scheduler. The names are part of the API.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final, NamedTuple


class Ends(Enum):
    """What the wait for a reason ends by."""

    NEVER = auto()  # not by waiting, while the fleet is as it is
    BY_ACT = auto()  # by what a person or a worker does, so no start can be estimated
    BY_ITSELF = auto()  # by what runs, or by time


class Cure(Enum):
    """What may start the job at once; each change is tried before it is suggested."""

    REQUEST = auto()  # another request
    TIME_LIMIT = auto()  # a time limit with which it ends before the hosts are needed
    LIMIT = auto()  # a higher limit of its tenant, or less of the tenant under it
    TURN = auto()  # a higher priority, or without the job before it
    RELEASE = auto()  # an operator lets it go on


_REQUEST: Final = (Cure.REQUEST,)
_IN_TIME: Final = (Cure.TIME_LIMIT, Cure.REQUEST)


class Reason(NamedTuple):
    """One reason. `cures` are tried in their order; `fix` is the command's advice where none of them is found."""

    name: str
    means: str
    ends: Ends
    cures: tuple[Cure, ...]
    fix: str  # {job} and {asks} are filled in
    step: str  # how the command names the workers that pass its filter

    @property
    def is_never(self) -> bool:
        return self.ends is Ends.NEVER


#: by name, in the order of the reference page
REASONS: Final[dict[str, Reason]] = {}


def add(
    name: str, means: str, fix: str = "", *, ends: Ends = Ends.BY_ITSELF, cures: tuple[Cure, ...] = (), step: str = ""
) -> Reason:
    """Return a reason that `REASONS` has from now on."""
    REASONS[name] = reason = Reason(name, means, ends, cures, fix, step or name)
    return reason


PLACING: Final = add("placing", "it fits now and is placed with the next record")
RESTORED: Final = add(
    "restored",
    "the ledger was restored from a backup, or may be an older copy: nothing is placed while jobs that it does not know"
    " may still run",
    ends=Ends.BY_ACT,
)
NO_WORKER: Final = add("no-worker", "no worker has joined", "start one: moorage worker", ends=Ends.NEVER)
NOT_HEARD: Final = add("not-heard", "no worker that could run it has reported to this leader yet", ends=Ends.BY_ACT)
DRIVER: Final = add(
    "driver",
    "no worker offers the driver",
    "ask for a driver that moorage fleet --json shows, or start a worker that offers it",
    ends=Ends.NEVER,
)
RULES: Final = add(
    "rules",
    "no remaining worker lets its tenant have the driver: the worker's own rules exclude it",
    "ask the worker's administrator to add it to the tenant's drivers_for, or ask for another driver",
    ends=Ends.NEVER,
)
LABEL: Final = add(
    "label",
    "no remaining worker has all the labels that it requires",
    "ask for labels of a worker that has its driver: moorage fleet --json shows them",
    ends=Ends.NEVER,
    cures=_REQUEST,
)
NO_GPU: Final = add("no-gpu", "no remaining worker has a GPU", ends=Ends.NEVER, cures=_REQUEST, step="with-a-gpu")
GPU_DRIVER: Final = add(
    "gpu-driver", "no remaining worker gives GPUs to jobs of the driver", ends=Ends.NEVER, cures=_REQUEST
)
SHARING: Final = add("sharing", "no remaining worker offers the sharing mode", ends=Ends.NEVER, cures=_REQUEST)
ENFORCE: Final = add(
    "enforce",
    "no remaining worker enforces the job's share of a GPU as strictly as gpu.enforce requires",
    "ask for a lower level in gpu.enforce, for exclusive GPUs, or see capabilities in moorage fleet --json",
    ends=Ends.NEVER,
    cures=_REQUEST,
)
VENDOR: Final = add("vendor", "no remaining worker has a GPU of the vendor", ends=Ends.NEVER, cures=_REQUEST)
MODE: Final = add(
    "mode",
    "no remaining worker has a GPU with such a mode: there is no driver for Apple's GPUs",
    ends=Ends.NEVER,
    cures=_REQUEST,
)
MODEL: Final = add(
    "model",
    "no remaining worker has a GPU of the model",
    "ask for a model that moorage fleet shows",
    ends=Ends.NEVER,
    cures=_REQUEST,
)
COMPUTE: Final = add(
    "compute",
    "no GPU of the model has the compute capability",
    "ask for a lower min_compute_capability, or for another model; moorage fleet WORKER --json shows what each GPU has",
    ends=Ends.NEVER,
    cures=_REQUEST,
)
PROFILE: Final = add(
    "profile",
    "no remaining worker has a MIG slice of the profile",
    "ask for a profile that moorage fleet shows in the names of its models, or for a whole GPU",
    ends=Ends.NEVER,
    cures=_REQUEST,
)
MEMORY: Final = add(
    "memory",
    "no GPU of the model has the memory",
    "ask for less memory than {asks}; moorage fleet shows the models",
    ends=Ends.NEVER,
    cures=_REQUEST,
)
SLOT: Final = add("slot", "no worker has the device with that index", ends=Ends.NEVER, cures=_REQUEST)
SLOT_MODE: Final = add(
    "slot-mode",
    "the workers reserve the remaining GPUs for other sharing modes",
    "ask for a mode that the GPU allows, or ask the worker's administrator to change slot_modes",
    ends=Ends.NEVER,
    cures=_REQUEST,
)
COUNT: Final = add(
    "count",
    "no worker has that many matching GPUs",
    "ask for fewer GPUs a replica: all of them must be on one host",
    ends=Ends.NEVER,
    cures=_REQUEST,
)
DEVICE: Final = add("device", "no remaining worker has the devices that it names", ends=Ends.NEVER, cures=_REQUEST)
HOST_SIZE: Final = add(
    "host-size",
    "no remaining worker is large enough: none has as much CPU and memory, even when idle",
    ends=Ends.NEVER,
    cures=_REQUEST,
)
GANG_SIZE: Final = add(
    "gang-size",
    "all workers together could not hold the gang, even if they were empty",
    "ask for fewer replicas, or smaller ones",
    ends=Ends.NEVER,
    cures=_REQUEST,
)
REFUSED: Final = add(
    "refused",
    "every worker that could hold it refused to run it, by its rules or because it cannot run it there",
    "fix what the reason names and submit it again; a worker that was restarted is tried again",
    ends=Ends.NEVER,
    cures=_REQUEST,
)
CLOSED: Final = add(
    "closed",
    "the workers that could run it are cordoned, draining, stale or taken by local claims",
    "moorage fleet shows which are cordoned or draining; moorage uncordon WORKER opens one",
    ends=Ends.BY_ACT,
    cures=_REQUEST,
)
BUSY: Final = add(
    "busy",
    "the GPUs that could run it are leased",
    "wait, or cancel what you need no longer: moorage ls --state RUNNING",
    cures=_REQUEST,
)
SICK: Final = add(
    "sick",
    "the GPUs that could run it are sick, quarantined or used by processes outside moorage",
    "moorage fleet shows what is wrong; moorage admin release --worker WORKER puts a repaired one back to use",
    ends=Ends.BY_ACT,
    cures=_REQUEST,
)
FOREIGN: Final = add(
    "foreign",
    "the GPUs that could run it are used by processes that belong to no lease",
    "end that process, or wait: the GPU comes back by itself once the process has ended",
    cures=_REQUEST,
)
LEAVING: Final = add(
    "leaving",
    "the workers it would fit on are to be drained before its time limit is over",
    "give it a shorter time limit, or wait: moorage fleet shows the drains to come",
    cures=_IN_TIME,
)
HOST_BUSY: Final = add("host-busy", "the workers with free GPUs have no CPU or memory left", cures=_REQUEST)
GANG: Final = add("gang", "some of the gang would fit now, not all of it", cures=_IN_TIME)
RESERVED: Final = add(
    "reserved",
    "the hosts it would fit on are reserved for another job, which has waited longer or for which jobs were ended",
    "a smaller request may fit beside the reservation",
    cures=_IN_TIME,
)
AHEAD: Final = add(
    "ahead",
    "the order is strict, and a job before it waits",
    "wait, or ask your operator for a higher priority: moorage admin priority {job} --to 90",
    cures=(Cure.TURN, Cure.REQUEST),
)
PREEMPTING: Final = add(
    "preempting",
    "running jobs were asked to end for it, and it waits until they have ended",
    "wait: the jobs that make room for it end within their grace",
)
HELD: Final = add(
    "held",
    "an operator has put it, or the whole queue of its tenant, on hold",
    "an operator releases it: moorage admin release {job}, or with --queue if the tenant is on hold",
    ends=Ends.BY_ACT,
    cures=(Cure.RELEASE, Cure.REQUEST),
)
LIMIT: Final = add(
    "limit",
    "its tenant has as many GPUs leased as an operator's limit allows, or an earlier job of the tenant waits for that",
    "cancel what you need no longer, or ask an operator: moorage admin tenants shows the limits",
    cures=(Cure.LIMIT, Cure.REQUEST),
)
BACKOFF: Final = add("backoff", "it pauses after a failure, a loss or a refusal")
SCHEDULER_FAILED: Final = add(
    "scheduler-failed",
    "the scheduler itself failed while it handled the job, and tries again after a pause",
    "moorage doctor shows what failed: report it; the job is tried again by itself",
)
CONTENDED: Final = add(
    "contended",
    "its worker's pool refused it several times: other processes claim its GPUs",
    "moorage fleet shows what local claims hold",
)

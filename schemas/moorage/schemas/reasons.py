"""Every reason for which a job waits: its name, its meaning, what ends the wait, and what a user can do.

A new reason is one entry here; everything that shows reasons reads the entry. A reason which says that no worker has
what a request asks for also has a filter, in `core/fleet/filters.py` of the scheduler. The names are part of the API.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final, NamedTuple


class Ends(Enum):
    """What ends the wait for a reason."""

    NEVER = auto()  # not by waiting, while the fleet is as it is
    BY_ACT = auto()  # by what a person or a worker does, so no start can be estimated
    BY_ITSELF = auto()  # by what runs, or by time


class Cure(Enum):
    """A change that may start the job at once. It is tried on a copy of the state before it is suggested."""

    REQUEST = auto()  # another request
    TIME_LIMIT = auto()  # a time limit with which it ends before the hosts are needed
    LIMIT = auto()  # a higher limit of its tenant, or less of the tenant under it
    COUNTER = auto()  # more of a counter
    RELEASE = auto()  # an operator lets it go on


_REQUEST: Final = (Cure.REQUEST,)
_IN_TIME: Final = (Cure.TIME_LIMIT, Cure.REQUEST)


class Reason(NamedTuple):
    """One reason. `cures` are tried in their order; if none helps, the command shows `fix`."""

    name: str
    means: str
    ends: Ends
    cures: tuple[Cure, ...]
    fix: str  # {job} and {asks} are filled in
    step: str  # how the command names the workers that pass its filter
    more_hosts: bool = False  # whether one more host like those of the fleet may end the wait

    @property
    def is_never(self) -> bool:
        return self.ends is Ends.NEVER


#: the reasons for which the fleet as it is has too little room; of a reason that never ends by itself, only a host of
#: another shape helps
MORE_HOSTS: Final = frozenset(
    {
        "no-worker", "busy", "fragmented", "host-busy", "gang", "gang-size", "place", "place-size", "reserved",
        "leaving", "preempting", "closed", "starts-fail", "jobs-fail", "disk-full", "driver-down", "sick", "foreign",
        "lent", "just-refused", "frozen-here",
    }
)  # fmt: skip
#: by name, in the order of the reference page
REASONS: Final[dict[str, Reason]] = {}


def add(
    name: str, means: str, fix: str = "", *, ends: Ends = Ends.BY_ITSELF, cures: tuple[Cure, ...] = (), step: str = ""
) -> Reason:
    """Add a reason to `REASONS` and return it."""
    REASONS[name] = reason = Reason(name, means, ends, cures, fix, step or name, name in MORE_HOSTS)
    return reason


PLACING: Final = add("placing", "it fits now and is placed with the next record")
RESTORED: Final = add(
    "restored",
    "the ledger was restored from a backup, or may be an older copy: no job is placed while jobs that the ledger does"
    " not know may still run",
    ends=Ends.BY_ACT,
)
NO_WORKER: Final = add("no-worker", "no worker is connected", "start one: moorage worker", ends=Ends.NEVER)
NOT_HEARD: Final = add("not-heard", "no worker that could run it has reported to this leader yet", ends=Ends.BY_ACT)
DRIVER: Final = add(
    "driver",
    "no worker offers the driver of the job",
    "ask for a driver that workers offer, or start a worker that offers it",
    ends=Ends.NEVER,
)
RULES: Final = add(
    "rules",
    "the own rules of each worker that offers the driver exclude the tenant from it",
    "ask the administrator of a worker to list the driver for your tenant in drivers_for, or ask for another driver",
    ends=Ends.NEVER,
)
NO_USERS: Final = add(
    "no-users",
    "it names a user, and no remaining worker may run jobs of its driver as another user than its own",
    "leave out --user, or ask an operator for a worker that runs as root and whose folder_dir other users may enter",
    ends=Ends.NEVER,
)
NO_MEMORY_LIMIT: Final = add(
    "no-memory-limit",
    "it asks for resources.enforce = hard, and no remaining worker can hold jobs of its driver to their memory",
    "leave out resources.enforce, or have an operator give a worker the memory controller of its cgroup",
    ends=Ends.NEVER,
)
NO_CALLS: Final = add(
    "no-calls",
    "it answers or makes calls of services, and no remaining worker lets jobs of its driver reach the server",
    "ask for a driver with answers_calls, as process is, or have an operator give its containers a network",
    ends=Ends.NEVER,
)
NO_SLEEP: Final = add(
    "no-sleep",
    "its service sleeps without calls, and no remaining worker can freeze jobs of its driver",
    "leave out sleep_after_s, or have it scale to zero: replicas.min 0, as --replicas 0-4; an engine that sleeps by a"
    " request needs no driver for it: sleep_by, as --sleep-by vllm",
    ends=Ends.NEVER,
)
NO_PORTS: Final = add(
    "no-ports",
    "it asks for run.ports or run.ready, and no remaining worker gives that to jobs of its driver",
    'ask for fewer ports or another driver, or have an operator set ports = "20000-29999" in a worker\'s settings',
    ends=Ends.NEVER,
)
LABEL: Final = add(
    "label",
    "no remaining worker has all the labels that it requires",
    "ask for labels that a worker with the job's driver has",
    ends=Ends.NEVER,
    cures=_REQUEST,
)
NO_GPU: Final = add("no-gpu", "no remaining worker has a GPU", ends=Ends.NEVER, cures=_REQUEST, step="with-a-gpu")
GPU_DRIVER: Final = add(
    "gpu-driver", "no remaining worker gives GPUs to jobs of its driver", ends=Ends.NEVER, cures=_REQUEST
)
SHARING: Final = add(
    "sharing", "no remaining worker offers the sharing mode that it asks for", ends=Ends.NEVER, cures=_REQUEST
)
ENFORCE: Final = add(
    "enforce",
    "no remaining worker enforces the job's share of a GPU as strictly as gpu.enforce requires",
    "ask for a lower level in gpu.enforce, or for exclusive GPUs",
    ends=Ends.NEVER,
    cures=_REQUEST,
)
VENDOR: Final = add(
    "vendor", "no remaining worker has a GPU of the vendor that it asks for", ends=Ends.NEVER, cures=_REQUEST
)
MODE: Final = add(
    "mode",
    "it asks for gpu.mode (native or vm); the remaining workers have only Apple's GPUs, and no driver offers it there",
    "leave gpu.mode out",
    ends=Ends.NEVER,
    cures=_REQUEST,
)
MODEL: Final = add(
    "model",
    "no remaining worker has a GPU of the model that it asks for",
    "ask for a model that the fleet has, which the warning of submit and of plan names",
    ends=Ends.NEVER,
    cures=_REQUEST,
)
COMPUTE: Final = add(
    "compute",
    "every GPU of the remaining workers that matches otherwise has a lower compute capability than it asks for",
    "ask for a lower min_compute_capability, or for another model",
    ends=Ends.NEVER,
    cures=_REQUEST,
)
PROFILE: Final = add(
    "profile",
    "no remaining worker has a MIG slice of the profile that it asks for",
    "ask for a profile that the fleet has, or for a whole GPU",
    ends=Ends.NEVER,
    cures=_REQUEST,
)
MEMORY: Final = add(
    "memory",
    "every GPU of the remaining workers that matches otherwise has less memory than it asks for",
    "ask for less memory than {asks}",
    ends=Ends.NEVER,
    cures=_REQUEST,
)
SLOT: Final = add(
    "slot", "no remaining worker has a matching GPU with the index that it asks for", ends=Ends.NEVER, cures=_REQUEST
)
SLOT_MODE: Final = add(
    "slot-mode",
    "the remaining workers keep all matching GPUs for other sharing modes, by their setting slot_modes",
    "ask for a sharing mode for which a worker keeps such GPUs, or ask the worker's administrator to change slot_modes",
    ends=Ends.NEVER,
    cures=_REQUEST,
)
COUNT: Final = add(
    "count",
    "no remaining worker has as many matching GPUs as one replica asks for",
    "ask for fewer GPUs per replica, as all GPUs of one replica must be on one host; the replicas of a gang may be on"
    " several (--gpu 8x8xH100 --gang)",
    ends=Ends.NEVER,
    cures=_REQUEST,
)
NVLINK: Final = add(
    "nvlink",
    "no remaining worker has as many matching GPUs joined by NVLink as one replica asks for, by gpu.topology",
    "ask for fewer GPUs, or leave out gpu.topology: GPUs that NVLink joins are preferred anyway",
    ends=Ends.NEVER,
    cures=_REQUEST,
)
DEVICE: Final = add("device", "no remaining worker has the devices that it names", ends=Ends.NEVER, cures=_REQUEST)
HOST_SIZE: Final = add(
    "host-size",
    "no remaining worker has as much CPU and memory, and as many of its own counters, as one replica asks for",
    ends=Ends.NEVER,
    cures=_REQUEST,
)
GANG_SIZE: Final = add(
    "gang-size",
    "all matching workers together could not hold all replicas of the gang at once, even if they were empty",
    "ask for fewer replicas, or smaller ones",
    ends=Ends.NEVER,
    cures=_REQUEST,
)
PLACE_SIZE: Final = add(
    "place-size",
    "no place that the gang's ranks may share, by --same or as a site, could hold all of them, even if it were empty",
    "let the ranks run in several places, with --same any; or ask for fewer of them",
    ends=Ends.NEVER,
    cures=_REQUEST,
)
REFUSED: Final = add(
    "refused",
    "the workers that could hold it have refused it: their rules exclude it, or they cannot run it",
    "mend what the workers' reason names and submit the job again; a worker that was restarted is tried again",
    ends=Ends.NEVER,
    cures=_REQUEST,
)
CLOSED: Final = add(
    "closed",
    "the workers that could run it are cordoned, draining, stopped, stale, lost or kept for local claims",
    "wait, or ask those who run this fleet: moorage uncordon WORKER opens one that is cordoned or draining, and moorage"
    " admin place JOB --on WORKER starts one job alone on a cordoned one",
    ends=Ends.BY_ACT,
    cures=_REQUEST,
)
STARTS_FAIL: Final = add(
    "starts-fail",
    "jobs failed to start on the workers that could run it, so these get none for a while",
    "tell those who run this fleet: moorage fleet shows why; once mended, moorage uncordon WORKER opens it at once",
    cures=_REQUEST,
)
JOBS_FAIL: Final = add(
    "jobs-fail",
    "the workers with room for it are those on which it, or jobs that do well elsewhere, failed within seconds: it"
    " waits for another one",
    "wait; or tell those who run this fleet, who open a worker at once by moorage uncordon WORKER",
    cures=_REQUEST,
)
DATA: Final = add(
    "data",
    "it waits for a worker that has its data: a path of data_dirs, or, for at most data_wait of the scheduler, what"
    " others would fetch",
    "wait; or free one of these workers",
)
DRIVER_DOWN: Final = add(
    "driver-down",
    "the engine behind its driver does not answer on the workers that could run it",
    "have that engine started on the host that moorage fleet shows operators; the worker takes jobs again by itself",
    cures=_REQUEST,
)
DISK_FULL: Final = add(
    "disk-full",
    "the disk below the state folder of each worker that could run it is full",
    "have room freed in the folder that moorage fleet shows operators; the worker takes jobs again by itself",
    cures=_REQUEST,
)
BUSY: Final = add(
    "busy",
    "jobs lease the GPUs that it needs",
    "wait, or cancel what you need no longer: moorage ls --state RUNNING",
    cures=_REQUEST,
)
FRAGMENTED: Final = add(
    "fragmented",
    "as many GPUs as it needs are free, and no host has them together",
    "wait, or ask for fewer GPUs per replica; a gang's replicas may be on several hosts (--gpu 2x4xH100 --gang)",
    cures=_REQUEST,
)
OVERTAKEN: Final = add(
    "overtaken",
    "jobs that came after it lease the GPUs that it needs",
    "wait, or ask an operator for a higher priority or share: moorage explain names the right by which they passed",
    cures=_REQUEST,
)
FROZEN_HERE: Final = add(
    "frozen-here",
    "unleased GPUs could run it, but frozen jobs wait for them: until those have ended, only preemptible jobs get them",
    "say --preemptible if it may be ended for those jobs, or cancel them: moorage ls --state FROZEN",
    ends=Ends.BY_ACT,
    cures=_REQUEST,
)
SICK: Final = add(
    "sick",
    "unleased GPUs could run it, but some are sick, quarantined or used by processes outside moorage",
    "tell those who run this fleet: moorage fleet shows what is wrong; moorage admin release puts repaired GPUs to use",
    ends=Ends.BY_ACT,
    cures=_REQUEST,
)
FOREIGN: Final = add(
    "foreign",
    "unleased GPUs could run it, but processes that belong to no lease use some of them",
    "end that process, or wait: the GPU comes back by itself once the process has ended",
    cures=_REQUEST,
)
LENT: Final = add(
    "lent",
    "unleased GPUs could run it, but processes of the workers' hosts borrow them through the worker",
    "wait: the GPUs come back once those processes give them back",
    cures=_REQUEST,
)
JUST_REFUSED: Final = add(
    "just-refused",
    "unleased GPUs could run it, but their workers have just refused a start on them, and have not said since which "
    "are free",
    "wait a moment: the next renewal tells; moorage show names the refusal of a job",
    cures=_REQUEST,
)
LEAVING: Final = add(
    "leaving",
    "workers that it would fit on are to be drained before its time limit is over, or too soon for a job without one",
    "give it a shorter time limit, or wait until they are open again",
    cures=_IN_TIME,
)
HOST_BUSY: Final = add(
    "host-busy",
    "the workers that have the GPUs for it free have too little CPU or memory for it, or too few of their counters",
    cures=_REQUEST,
)
GANG: Final = add(
    "gang", "a gang starts as a whole, and now there is room for only some of its replicas", cures=_IN_TIME
)
PLACE: Final = add(
    "place",
    "there is room for all ranks of the gang, and no place that they may share, by --same or as a site, has all of it",
    "wait; or let the ranks run in several places, with --same any",
    cures=_IN_TIME,
)
RESERVED: Final = add(
    "reserved",
    "hosts that it would fit on are reserved for another job: one that comes first and has waited long, or one for "
    "which jobs were ended",
    "a smaller request may fit beside the reservation",
    cures=_IN_TIME,
)
PREEMPTING: Final = add(
    "preempting",
    "running jobs were asked to end for it, and it waits until they have ended",
    "wait: those that make room for it end with their notice and grace, members of services up to a grace later",
)
HELD: Final = add(
    "held",
    "its tenant or an operator has put it, or an operator the whole queue of its tenant, on hold",
    "moorage change {job} --release if you held it; an operator: moorage admin release, with --queue for all",
    ends=Ends.BY_ACT,
    cures=(Cure.RELEASE, Cure.REQUEST),
)
SCHEDULER_FAILED: Final = add(
    "scheduler-failed",
    "the scheduler itself failed as it placed the job, and holds it",
    "an operator sees what failed (moorage doctor): report it; moorage admin release {job} has the job tried again",
    ends=Ends.BY_ACT,
    cures=(Cure.RELEASE,),
)
LATER_RELEASE: Final = add(
    "later-release",
    "its request has a field that only a later release of the scheduler knows, and the leader is not of that one",
    "it goes on once a scheduler of that release leads; or moorage cancel {job}, and submit it without that field",
    ends=Ends.BY_ACT,
)
MAX_RUNNING: Final = add(
    "max-running",
    "its max_running lets no more of its replicas run at once; the next one starts as soon as one has ended",
    "wait, or moorage change {job} --max-running N",
)
EACH_WORKER: Final = add(
    "each-worker",
    "it has begun on each worker that fits and is here; what waits starts on a worker that joins or comes back",
    "wait for a worker; moorage show {job} tells how far each came, and moorage cancel {job} ends it",
    ends=Ends.BY_ACT,
)
AFTER: Final = add(
    "after",
    "it starts once the jobs that it names in `after` have ended as it asks; until then it has no place in the queue",
    "wait for those jobs, or submit it again without --after",
    cures=_REQUEST,
)
NOT_BEFORE: Final = add(
    "not-before",
    "it was submitted for a time that is still to come; until then it has no place in the queue",
    "wait for that time, or submit it again without --at",
    cures=_REQUEST,
)
SCALED: Final = add(
    "scaled",
    "as many members of its service run as its calls need",
    "call it: more members start when calls wait; or submit it again with a higher replicas.min",
    ends=Ends.BY_ACT,
)
LIMIT: Final = add(
    "limit",
    "it would take its tenant over one of its limits, or an earlier job of the tenant waits for room under it",
    "cancel what you need no longer, or ask an operator: moorage admin tenants shows the limits",
    cures=(Cure.LIMIT, Cure.REQUEST),
)
BUDGET: Final = add(
    "budget",
    "its tenant has spent its budget of GPU-hours of this day, week or month",
    "wait until it begins anew, or ask an operator: moorage admin tenants shows what is spent",
    cures=(Cure.LIMIT,),
)
COUNTER: Final = add(
    "counter",
    "others use as many as there are of a counter that it uses",
    "wait until they end, or ask an operator for more: moorage admin counter shows how many there are",
    cures=(Cure.COUNTER,),
)
BACKOFF: Final = add(
    "backoff",
    "its last attempt ended, was lost or was refused, and the next one begins after a pause",
    "wait; moorage logs shows what its last attempt wrote",
)
CONTENDED: Final = add(
    "contended",
    "workers refused it several times because local claims had taken the GPUs; it is tried again after a pause",
    "wait: its turn comes when the local claims end",
)

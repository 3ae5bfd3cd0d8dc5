"""Frames between a worker and the leader: joins, renewals, reports, and what the leader wants of the worker."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from moorage.schemas.frames.fleet import Hello
from moorage.schemas.frames.reported import Reported, Values
from moorage.schemas.frames.running import Exec, Signal
from moorage.schemas.frames.use import AttemptUse
from moorage.schemas.frames.version import VERSION

#: how the detail of a `refused` report begins where the worker's own rules forbid the job
NOT_PERMITTED: Final = "not-permitted: "
#: and where this worker cannot run the job, though another worker may: it lacks a secret, user, folder, program, image
#: or handler that the job needs
NOT_HERE: Final = "not-here: "
#: and where no worker could run it, because the request itself is wrong: it fails
CANNOT_RUN: Final = "cannot-run: "
#: and where the job's setup failed by its own fault, behind which stands why: all its replicas that wait fail
SETUP_FAILED: Final = "setup-failed: "
#: a refusal that begins so is about the job and not about its GPUs: they stay free for others
ABOUT_THE_JOB: Final = (NOT_PERMITTED, NOT_HERE, CANNOT_RUN, SETUP_FAILED)
#: how the detail of a `not-frozen` report begins where the RAM has no room for the job's GPU memory
NO_RAM: Final = "no-ram: "
#: how that of a `refused` report begins where this worker failed to start the job, by a fault that may pass
START_FAILED: Final = "start-failed"
#: an attempt that a supervisor's death ended may have killed it. The worker runs such jobs one after another: each gets
#: so many seconds without another suspect beside it
SUSPECT_S: Final = 30.0
#: a worker that is told to end takes at most so many seconds for that
LEAVING_S_MAX: Final = 24 * 3600
#: in rules by tenant, every tenant that is not named
OTHERS: Final = "*"
#: how the detail of an `exited` report begins that names the attempt's result; behind it is what `result_of` reads
RESULT: Final = "result:"
RESULT_DIGITS_MAX: Final = 14


def result_of(detail: str) -> int | None:
    """Return the sequence that a detail names of a message in the tenant's stream of results; 0 if there is no result.

    None if the detail names none.
    """
    digits = detail[len(RESULT) :]
    if not detail.startswith(RESULT) or len(digits) > RESULT_DIGITS_MAX or not (digits.isascii() and digits.isdigit()):
        return None
    return int(digits)


#: how the detail of a `freed` report begins that says what the attempt used of its GPUs; behind it is what
#: `used_of` reads
USED: Final = "used:"
USED_DIGITS_MAX: Final = 14
#: GPU milliseconds where the device tells only what memory was used
UNKNOWN_MS: Final = -1


def used_detail(gpu_ms: int, memory_mib_s: int) -> str:
    """Return the `detail` of a `freed`: milliseconds of a whole GPU at work (or UNKNOWN_MS), and memory in MiB
    seconds."""
    most = 10**USED_DIGITS_MAX - 1
    return f"{USED}{min(gpu_ms, most)},{min(memory_mib_s, most)}"


def used_of(detail: str) -> tuple[int, int] | None:
    """Return GPU milliseconds (or UNKNOWN_MS) and MiB seconds of a detail of `used_detail`; None for any other
    detail."""
    if not detail.startswith(USED):
        return None
    words = detail[len(USED) :].split(",")
    numbers = words[1:] if words[0] == str(UNKNOWN_MS) else words
    if len(words) != 2 or not all(n.isascii() and n.isdigit() and len(n) <= USED_DIGITS_MAX for n in numbers):
        return None
    return int(words[0]), int(words[1])


def sum_known(one_ms: int, other_ms: int) -> int:
    """Return the sum of two durations, without those that are unknown; UNKNOWN_MS if both are."""
    known = [each for each in (one_ms, other_ms) if each != UNKNOWN_MS]
    return sum(known) if known else UNKNOWN_MS


UNKNOWN: Final = -1
#: bound of each number of `Peaks`
PEAK_MAX: Final = (1 << 48) - 1


class Peaks(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The most memory that an attempt had at once, in MiB, and its CPU time in ms; -1 is not known.

    `memory_mib` is of all its processes together. Where its worker cannot tell that, `largest_mib` is of the largest of
    those that it has waited for. `gpu_memory_mib` is of all its GPUs, as read once a second.
    """

    memory_mib: int = UNKNOWN
    largest_mib: int = UNKNOWN
    gpu_memory_mib: int = UNKNOWN
    cpu_ms: int = UNKNOWN

    @property
    def is_known(self) -> bool:
        """Whether any of them is."""
        return self != NO_PEAKS

    @property
    def fits(self) -> bool:
        """Whether each number is within its bounds."""
        return all(UNKNOWN <= getattr(self, name) <= PEAK_MAX for name in self.__struct_fields__)

    def beside(self, other: Peaks) -> Peaks:
        """Return those of two attempts: the higher peaks, and the sum of CPU time."""
        return Peaks(
            max(self.memory_mib, other.memory_mib),
            max(self.largest_mib, other.largest_mib),
            max(self.gpu_memory_mib, other.gpu_memory_mib),
            min(sum_known(self.cpu_ms, other.cpu_ms), PEAK_MAX),
        )


NO_PEAKS: Final = Peaks()


class Held(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """An attempt that a worker holds. `phase` is claimed, running, frozen, ending or exited (its device is not yet
    free)."""

    tenant: str
    job: str
    replica: int
    attempt: int
    fence: int
    phase: str


ReportKind = Literal[
    "claimed",
    "refused",
    "withdrawn",
    "not-held",
    "started",
    "ran",
    "ready",
    "not-ready",
    "idle",
    "frozen",
    "not-frozen",
    "resumed",
    "not-resumed",
    "freeze-due",
    "resume-due",
    "exited",
    "freed",
    "quarantined",
]


class Report(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What happened to an attempt at its worker. Only a report frees a GPU.

    `detail` is one short word or line, and `code` is 0 except where it is named here:

    - `claimed`: of rank 0 of a gang, `detail` is `address:port`, where the gang meets.
    - `refused`: `detail` is why. If it begins with `cannot-run: `, the request is at fault, and the job ends. With
      `setup-failed: ` its `setup` is, and all of its replicas that wait end. With `not-here: ` or `not-permitted: `,
      the job goes to another worker and its GPUs stay open; a job that several workers refuse with `not-here: ` and a
      code ends. Otherwise the placement is tried again after a pause. `code` is the exit code of a start that was
      tried: 126, 127 or that of the setup; and 0 if none was.
    - `started`: `detail` is where the ports are reached that the worker gave it, as `10.0.0.5:20000,20001`; empty
      without ports. Behind a semicolon it says which stored checkpoint it could not begin with. It is sent again with
      each checkpoint that the attempt stores while it runs: `checkpoint` is its digest, "" for none yet, and `code` its
      step, 0 if that is unknown; `detail` begins with `checkpoint-not-stored: ` if a newer one could not be stored.
      Only what is acknowledged takes the place of the one before.
    - `ready`: the check of its request's `ready` says that it is ready for work. `not-ready`: it said so before, and
      does not any more; `detail` is why.
    - `exited`: `code` is the exit status (negative: minus the signal). `detail` is the reason: exit, timeout, end,
      fence, start-failed, not-ready or lost; or, with code 0, `result:` and the sequence of the message that has the
      result (0: there is none). An attempt that the worker ended because its lease, or its time to leave, was over is
      `fence`, one that it cannot account for `lost`: both are tried again within `retries_on_lost`. Any other reason is
      the job's own end, and tried again within `retries` only.
    - `ran`: the attempt has started and exited, and was claimed unless that was reported. It stands for those reports
      if none of them had left before the exit; `code` and `detail` are those of `exited`, and `ran_ms` is for how long
      it ran.
    - Of `exited` and `ran`, `checkpoint` is the digest of the checkpoint that was stored, as the object store writes
      it, "" if none was, and null if the worker cannot tell. The next attempt begins with no other one.
    - `quarantined`: `detail` is the slots, as `0,3`.
    - `freed`: `detail` is what the attempt used of its GPUs, if the worker has measured it: `used:` with milliseconds
      of a GPU at work (-1: unknown) and MiB seconds. `peaks` is what it had at most; null if nothing of it is known.
      `reported` has the newest value of each name that it reported of itself.
    - `idle`: `code` is for how many seconds the GPUs have shown no use, and `detail` after
      how many the worker ends the attempt (empty: never).
    - `frozen`: the attempt's processes are frozen, the memory of its devices was seen free, and their lease has ended.
    - `not-frozen`: the attempt runs on; `detail` is why.
    - `resumed`, `not-resumed`: the answer to the order to resume with the number `code`. `not-resumed`: the worker does
      not give it its devices now (`detail` is why), and it stays frozen without them.
    - `freeze-due`: the worker asks for a `Freeze`, because the GPUs have shown no use for `code` seconds.
    - `resume-due`: the worker asks for the order to resume, because a process of the attempt waits to use its GPUs.
    """

    kind: ReportKind
    tenant: str
    job: str
    replica: int
    attempt: int
    fence: int
    code: int = 0
    detail: str = ""
    ran_ms: int = 0
    checkpoint: str | None = None
    peaks: Peaks | None = None
    reported: Values | None = None


class Unwell(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A device that the worker judges unfit to be given out. `slot` is a position in hello's `gpu_pool`.

    `kind` is a word of `SlotLoad.health`, or `state-gone` if the worker's state folder was removed. `detail` is one
    line. With `ends`, jobs that run on the device are asked to end as well.
    """

    slot: int
    kind: str
    detail: str = ""
    ends: bool = False


#: how `DriverDown.why` begins where the disk of the worker's state folder is full
DISK_FULL: Final = "disk-full"
#: and where the worker's agent was stopped, while jobs run on
AGENT_STOPPED: Final = "agent-stopped"


class DriverDown(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A driver of a worker that starts nothing: the worker gets no jobs of that driver, and keeps those that it has.

    Its engine does not answer. Or all drivers of the worker are down: its disk is full, then `why` begins with
    `disk-full: `; or its agent stops and leaves its jobs running, then with `agent-stopped: `, until the next agent
    joins. `why` is one line, `for_s` for how many seconds that has been so.
    """

    driver: str
    why: str
    for_s: int = 0


class Join(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, tag_field="kind", tag="join"):
    """A worker asks for a new lease session for this boot. All that it ran before is proven to be over, or is listed
    here.

    - `n` comes from the worker's journal and only grows.
    - `facts` are all reports without an answer, under their old names.
    - `holding` are the attempts that still live here, which the new session takes over. What is not listed is over.
    - `reign` is the highest number of a leader's term that the worker has heard of, in the ledger `ledger`. A leader
      whose ledger ends below it has an older backup of that ledger.
    """

    machine: str
    boot: str
    n: int
    hello: Hello
    v: int = VERSION
    reports: list[Report] = msgspec.field(default_factory=list, name="facts")
    holding: list[Held] = []
    epoch: int = msgspec.field(default=0, name="reign")
    ledger: str = ""


class Joined(msgspec.Struct, frozen=True, gc=False, tag_field="kind", tag="joined"):
    """The new session and its numbers.

    - `session` is a secret that proves the sender, and is never in a public frame.
    - `renew_s`, `lease_s`, `grace_s`: the worker renews every `renew_s`. It begins to end its jobs `lease_s` after it
      sent the last renewal that was answered, and leaves them at most `grace_s` to end.
    - `formerly` is the id of the ledger from which an operator has restored `ledger`.
    """

    session: str
    n: int
    epoch: int = msgspec.field(name="reign")
    renew_s: float
    lease_s: float
    grace_s: float
    ledger: str
    v: int = VERSION
    formerly: str = ""


class Stopped(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """How many `processes` of a running attempt a signal such as SIGSTOP has stopped."""

    tenant: str
    job: str
    replica: int
    attempt: int
    fence: int
    processes: int


class Renew(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, tag_field="kind", tag="renew"):
    """A renewal of the lease session, with the state of the worker.

    - `n` counts up within the session.
    - `no` is the number of the last report frame that was answered.
    - `held` are the attempts that the worker holds for the scheduler.
    - `busy` lists the positions of slots that local claimers hold. `waiting` says that a local claimer waits, so that
      the worker counts as full.
    - `unwell` is the complete list of devices that must not be given out. `well_n` is the number of the newest release
      of devices by an operator that the worker has carried out (see `Wanted`).
    - `reign` is the highest number of a leader's term that the worker has heard of.
    - `resized` are those of `held` whose part of their devices, or whose time limit, was changed.
    - `down` is the complete list of drivers whose engine does not answer.
    - `use` is what those of `held` that run use of their devices, by the newest reading.
    - `stopped` are those of `held` of which some processes are stopped, as of the last seconds.
    - `reported` is what some of `held` reported of themselves, at most 16 KiB; in each renewal others.
    - `leaving_s`: the worker was told to end, and ends what it still holds in so many seconds. Nothing new is placed
      there. Members of services go on until others serve in their place, or this time is nearly over; all other jobs
      are asked to end now, which costs them no retry. Null: it stays.
    """

    session: str
    n: int
    no: int = 0
    generation: int = 0
    held: list[Held] = []
    busy: list[int] = []
    waiting: bool = False
    v: int = VERSION
    unwell: list[Unwell] = []
    well_n: int = 0
    epoch: int = msgspec.field(default=0, name="reign")
    resized: list[Resized] = []
    down: list[DriverDown] = []
    use: list[AttemptUse] = []
    stopped: list[Stopped] = []
    leaving_s: Annotated[int, msgspec.Meta(ge=0, le=LEAVING_S_MAX)] | None = None
    reported: list[Reported] = []


class GangSets(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Of a rank of a gang: the digests of those of its attempt's sets that count, or may come to.

    Its worker keeps them, and those that it has told since. It may write over any other. `earlier`: those of an earlier
    attempt count still.
    """

    tenant: str
    job: str
    replica: int
    attempt: int
    fence: int
    digests: list[str]
    earlier: bool = False


class Renewed(msgspec.Struct, frozen=True, gc=False, tag_field="kind", tag="renewed"):
    """The answer to a renewal. A ledger record was acknowledged that was appended after the renewal came, which proves
    the term.

    `draining`: an operator drains the worker, which then asks back what it lends to processes of its host, within
    `drain_s` seconds from now; null: the drain has no deadline.

    `sets` are the worker's ranks of gangs that have stored checkpoints.
    """

    n: int
    epoch: int = msgspec.field(name="reign")
    v: int = VERSION
    draining: bool = False
    drain_s: float | None = None
    sets: list[GangSets] = []


class Resized(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """An attempt that now has the part of its devices and the time limit which the order `n` gave to its job; see
    `Place.resized`."""

    tenant: str
    job: str
    replica: int
    attempt: int
    fence: int
    n: int


class ReportFrame(msgspec.Struct, frozen=True, gc=False, tag_field="kind", tag="facts"):
    """A numbered frame of reports. The worker sends it again, with the same number, until it is answered; only then the
    next one."""

    session: str
    no: int
    reports: list[Report] = msgspec.field(name="facts")
    v: int = VERSION


class ReportAck(msgspec.Struct, frozen=True, gc=False, tag_field="kind", tag="recorded"):
    """The frames up to `no` are in the ledger."""

    no: int
    epoch: int = msgspec.field(name="reign")
    v: int = VERSION


class Goodbye(msgspec.Struct, frozen=True, gc=False, tag_field="kind", tag="goodbye"):
    """The worker leaves for good, and everything that it held is over. Its id is free at once. Sent on `.join`."""

    session: str
    v: int = VERSION


class Place(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The scheduler's proposal to a worker: claim these slots (positions in hello's `gpu_pool`), or refuse at once.

    - `mode` is exclusive, mps, time-slice or none.
    - `hold`: claim the slots, and wait for START (a gang).
    - `body` is the request, in JSON for a worker that joined in JSON, and else as it came, JSON or msgpack.
    - `ends_in_s` is the time from this frame to the job's deadline. The leader ends the job then. If the request names
      a checkpoint signal, the worker sends it before.
    - `resized` is the number of the order that gave the job the part of its devices, or the time limit, in `body`; 0:
      they are the request's own.
    - `accepted_ms` is the ledger's time at which the job was accepted: an id is free again some time after the end.
    - `checkpoints` are the digests that earlier attempts of the replica told (see Report), by attempt: the new one
      begins with the newest of these that is there. Of an attempt up to `untold` that is not among them, nobody knows,
      and it may be one that its name alone finds. Null: the leader does not know of any.
    """

    tenant: str
    job: str
    replica: int
    attempt: int
    fence: int
    slots: list[int]
    mode: str
    hold: bool
    body: bytes
    traceparent: str = ""
    ends_in_s: float | None = None
    resized: int = 0
    accepted_ms: int = 0
    checkpoints: list[tuple[int, str]] = []
    untold: int | None = None


class Start(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A gang's attempt may run now, since every rank is held and STARTED is in the ledger. All ranks get the same
    address. Of a gang with groups all ranks of a group do, with the size of their group; `groups` are the addresses of
    all groups by name, as `address:port`, "" for one that is not known."""

    tenant: str
    job: str
    replica: int
    attempt: int
    fence: int
    master_addr: str
    master_port: int
    world_size: int
    groups: dict[str, str] = {}


class End(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """End an attempt or withdraw its placement, and remember this: a later placement with the same fence is refused.

    - An attempt that is not held is answered with `withdrawn`.
    - One that is held and has not started is released, and answered with `withdrawn`.
    - One that runs is ended within `grace_s` (null: the job's own grace), and answered with `exited` and `freed`. With
      `notice_s`, an attempt that has a checkpoint signal gets that first, and is asked to end `notice_s` seconds later.
    """

    tenant: str
    job: str
    replica: int
    attempt: int
    fence: int
    why: str
    grace_s: float | None = None
    notice_s: float = 0.0


class Freeze(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Freeze a running attempt, or resume it if `on` is false. A report answers this, even if nothing had to change.

    A frozen attempt holds no devices: their lease ends once their memory was seen free. It keeps its place in the
    worker's session, its host's CPU and memory, and all its time limits go on. `n` is the number of an order to resume:
    the ledger has leased the attempt's devices to it again, and the worker's pool decides. 0: it is not to be frozen,
    as far as it has not given its devices up yet.
    """

    tenant: str
    job: str
    replica: int
    attempt: int
    fence: int
    on: bool = True
    n: int = 0


class Wanted(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, tag_field="kind", tag="wanted"):
    """What the ledger wants of a worker and the worker's renewal does not show yet. Sent again until done; each
    attempt's part may be repeated safely.

    A frame of another session, or of a lower term than one heard before, is dropped and counted. `well` are slots that
    an operator has released, whatever was seen of them before; `well_n` is the number of that release, which the
    renewal repeats. `resize` are held attempts whose job has another part of its devices now, or another time limit
    (`run.timeout_s`, from the attempt's start on): `body` and `resized` say which. `execs` are commands to run in
    running attempts, `signals` are signals for their processes; those are sent once.
    """

    worker: str
    session: str
    epoch: int = msgspec.field(name="reign")
    v: int = VERSION
    place: list[Place] = []
    start: list[Start] = []
    end: list[End] = []
    well: list[int] = []
    well_n: int = 0
    resize: list[Place] = []
    freeze: list[Freeze] = []
    execs: list[Exec] = []
    signals: list[Signal] = []

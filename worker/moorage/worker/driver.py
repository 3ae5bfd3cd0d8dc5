"""Define what a driver is: it runs an attempt, ends it, and proves that it is over.

An attempt is one run of a replica, on this host.

A new driver derives from `Driver` in a file of its own, sets `name` and `capabilities`, and implements `start` and
`end`. It reports what happens to each attempt:

- `Started`, and later `Ended`: the driver has proven that nothing of the attempt is left.
- `StartFailed`: nothing of the attempt ever ran.
- `NotStarted`: nothing of the attempt ever ran, because of this host. The scheduler tries the job again.
- `Stuck`: the driver cannot end the attempt, or cannot prove that it is over.

The agent calls the methods from its event loop, so they must not block: a method begins what takes time and reports the
outcome later. The agent may call `end` twice for one attempt, the second time with less grace. It may also call `end`
for an attempt that has just ended: then there is nothing to do, because `Ended` is on its way.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, cast, runtime_checkable

import msgspec

from moorage.schemas.attempt import AttemptName
from moorage.schemas.capabilities import COUNTED, Capabilities
from moorage.schemas.driver_config import Fault, keys_fault
from moorage.schemas.errors import ENDED_AS_ASKED, MoorageError, refuse
from moorage.schemas.frames import (
    CANNOT_RUN,
    NOT_HERE,
    Device,
    Exec,
    LogPage,
    ReadLog,
    Rescue,
    Rescued,
    Start,
    Terminal,
)
from moorage.schemas.gpu import Share, Sharing
from moorage.schemas.groups import GROUP, address_variable, size_variable
from moorage.schemas.items import Item
from moorage.schemas.job import SETUP_VARIABLE, Request, Run
from moorage.schemas.staying import port_variable
from moorage.system.device_environment import HostAtFault, JobEnvironment
from moorage.worker.attempt.attempt_files import Before
from moorage.worker.attempt.attempt_folders import FolderBounds
from moorage.worker.attempt.environment import Gang, SetupFailed, gpu_environment, not_here
from moorage.worker.attempt.output_cleaner import OutputBounds
from moorage.worker.attempt.reports import Reporting
from moorage.worker.devices.readers.base import Inventory
from moorage.worker.devices.readers.machine import CombinedInventory
from moorage.worker.session.attempt_messages import (
    CheckpointStored,
    Ended,
    FreezeAnswered,
    MpsNotAsked,
    NotFree,
    NotStarted,
    Replaced,
    ResumeDue,
    SeenFree,
    Started,
    StartFailed,
    Stuck,
)
from moorage.worker.settings import WorkerSettings
from moorage.worker.start_codes import CODE_CANNOT_START

if TYPE_CHECKING:
    from moorage.worker.drivers.execution import Execution
    from moorage.worker.drivers.kit import Kit
    from moorage.worker.sharing.limiter.limits import Limits

#: minus SIGTERM: the code reported for an attempt that was asked to end before any of its processes ran
CODE_ENDED: Final = -15
#: the reason reported for an attempt that is gone, or cannot go on because of this host: it is tried again
LOST: Final = "lost"
#: minus SIGKILL: the code reported for an attempt whose exit status could not be read
CODE_LOST: Final = -9

DriverEvent = (
    Started
    | Ended
    | StartFailed
    | NotStarted
    | Stuck
    | MpsNotAsked
    | CheckpointStored
    | SeenFree
    | NotFree
    | Replaced
    | FreezeAnswered
    | ResumeDue
)
ReportEvent = Callable[[DriverEvent], None]

log = logging.getLogger("moorage.worker")


def never_ran(name: AttemptName, error: Exception) -> NotStarted | StartFailed:
    """Return the event for an attempt that this error kept from starting: this host is at fault, or the job is.

    It is the host's fault if it cannot start the attempt now (`HostAtFault`), or lacks what the attempt needs
    (`not_here`).
    """
    if isinstance(error, HostAtFault):
        return NotStarted([(name, error.problem.message)])
    if not isinstance(error, MoorageError):  # no request may end an agent: every worker that gets it would go down
        log.error("job %s of tenant %s could not be prepared to start", name[1], name[0], exc_info=error)
        return StartFailed([(name, CODE_CANNOT_START, "moorage failed on this request")])
    if isinstance(error, SetupFailed):
        return NotStarted([(name, error.problem.message)], error.exit_code)
    why = not_here(error) or error.problem.message
    if why.startswith((NOT_HERE, CANNOT_RUN)):
        return NotStarted([(name, why)], CODE_CANNOT_START)
    return StartFailed([(name, CODE_CANNOT_START, why)])


def ended_unstarted(name: AttemptName, why: str) -> Ended:
    """Return the event for an attempt that was asked to end, for this reason, before any of its processes ran."""
    return Ended([(name, CODE_ENDED, "fence" if why == "fence" else ENDED_AS_ASKED)])


def kept_within(output: OutputBounds, folders: FolderBounds | None = None) -> dict[str, float]:
    """Return what `Driver.keeps` says of a driver that keeps output, and perhaps folders, within these bounds."""
    kept = {"output_s": output.keep_s, "output_bytes": output.bytes_max}
    return kept if folders is None else kept | {"folder_s": folders.keep_s, "folder_bytes": folders.bytes_max}


#: takes whose output it is and the payload of the output frame; the agent adds the subject
Publish = Callable[[AttemptName, bytes], None]


class Assignment(msgspec.Struct, frozen=True):
    """An attempt with everything that a driver needs to run it.

    `devices` are the devices of its lease, in the lease's order.

    `start` is the START frame of its gang. A single replica with `gpu.distributed` gets one as a gang of one; else it
    is None.

    `mode` is `exclusive`, `mps`, `time-slice`, or `none` for a job without GPUs.

    `ends_in_s` is the number of seconds until the job's deadline; None without a deadline.

    `config` is the job's `driver_config` for this driver, converted to `Driver.config`, or as the caller sent it if the
    driver declares no `config`.

    `item` is what the replica works on, if its job has items; `run.argv` has it in place of what stands for it.

    With `by_uuid` NVIDIA devices are shown to CUDA by uuid, not by number.

    `ports` are ports of this host that are the attempt's own as long as it lives; `worker` is this host's id.

    `accepted_ms` is the time at which the job was accepted, which tells it from an earlier job of its id.

    `checkpoints` and `untold` are those of its placement: which checkpoints the attempts before it have stored.

    `setup` is the folder that the job's setup fills, or has filled; "" if it has none. `data` are the paths of what it
    reads on this host.

    The attempt has a folder of its own, and starts in `run.cwd` below it; an absolute `run.cwd` replaces it.
    """

    name: AttemptName
    request: Request
    devices: list[Device]
    mode: str
    start: Start | None = None
    traceparent: str = ""
    ends_in_s: float | None = None
    config: Any = None
    by_uuid: bool = False
    ports: list[int] = []
    item: Item | None = None
    worker: str = ""
    accepted_ms: int = 0
    setup: str = ""
    checkpoints: list[tuple[int, str]] = []
    untold: int | None = None
    data: dict[str, str] = {}

    @property
    def before(self) -> Before:
        return Before(self.accepted_ms, dict(self.checkpoints), self.untold, self.request.is_gang)

    @property
    def rank(self) -> int:
        """Its rank in its gang, of a gang with groups in its group."""
        replica, groups = self.name[2], self.request.groups
        return replica - self.request.group_of(replica)[1] if groups else replica

    @property
    def ranks(self) -> int:
        """How many ranks its gang has; 0 if it is in none."""
        return self.request.copies if self.request.is_gang else 0

    @property
    def is_setup(self) -> bool:
        """Whether it is the setup of a job, which fills that folder."""
        return bool(self.setup) and self.run.setup is None

    @property
    def run(self) -> Run:
        return self.request.workload

    def with_setup(self, environment: JobEnvironment, at: str, path: str) -> JobEnvironment:
        """Return the variables with those of the job's setup: its folder is `at`, and its programs are found first.

        `path` is the PATH that an image has by itself.
        """
        if not self.setup:
            return environment
        path = f"{at}/bin{os.pathsep}{environment.get('PATH', path)}"
        return JobEnvironment(environment | {SETUP_VARIABLE: at, "PATH": path})

    @property
    def part(self) -> tuple[Request, list[Device], str]:
        """Return the request, devices and mode: they decide which part of its devices the attempt may use."""
        return self.request, self.devices, self.mode

    @property
    def checkpoint_in_s(self) -> float | None:
        """Return in how many seconds to ask the attempt to save its work; None for never.

        That is `checkpoint_before_s` before its timeout or the job's deadline, whichever is first; 0 if that is over.
        """
        run = self.run
        ends = [end for end in (run.timeout_s, self.ends_in_s) if end is not None]
        if run.checkpoint_signal is None or not ends:
            return None
        return max(0.0, min(ends) - run.checkpoint_before_s)

    def environment(
        self,
        *,
        interface: str | None = None,
        simulated: bool = False,
        has_own_mps: bool = False,
        sees_only_its_own: bool = False,
    ) -> JobEnvironment:
        """Return the variables of the lease, the gang and the item, from `gpu_environment`. Raises SharingUnavailable.

        A driver sets `sees_only_its_own` if its attempts can open no NVIDIA device but those of their lease.
        """
        tenant, job, replica, attempt, fence = self.name
        start = self.start
        gang = None
        if start is not None:
            ranks = self.request.ranks
            least = 0 if ranks is None else ranks.min
            gang = Gang(start.world_size, start.master_addr, start.master_port, interface, least, self.rank)
        environment = gpu_environment(
            self.devices,
            tenant=tenant,
            job=job,
            replica=replica,
            attempt=attempt,
            fence=fence,
            mode=cast(Sharing, self.mode),
            gpu_spec=self.request.effective_gpu,
            gang=gang,
            traceparent=self.traceparent,
            worker=self.worker,
            simulated=simulated,
            has_own_mps=has_own_mps,
            by_uuid=self.by_uuid,
            sees_only_its_own=sees_only_its_own,
        )
        if start is not None and self.request.groups:
            environment |= _group_variables(self.request, replica, start.groups)
        environment |= {port_variable(number): str(port) for number, port in enumerate(self.ports)}
        return environment if self.item is None else JobEnvironment(environment | self.item.variables)


def _group_variables(request: Request, rank: int, addresses: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that tell a rank its own group, and where all groups are and how large."""
    found = {GROUP: request.groups[request.group_of(rank)[0]].name}
    for group in request.groups:
        found[address_variable(group.name)] = addresses.get(group.name, "")
        found[size_variable(group.name)] = str(group.replicas)
    return found


class Living(msgspec.Struct, frozen=True):
    """An attempt from before the agent's restart that the driver still knows.

    `phase` is starting, running, ending, exited, stuck, or refused (this host could not start it). `code` and
    `reason` are set if it is exited or refused. `frozen` is set for a running attempt that is frozen.
    """

    name: AttemptName
    phase: str
    code: int = 0
    reason: str = ""
    frozen: bool = False


class Driver:
    """Base class of all drivers; the module's docstring says what a driver does."""

    name: str = ""
    capabilities: Capabilities = Capabilities()
    #: the driver's own settings: a struct whose fields are annotated with `schemas.settings.setting`. Their values come
    #: from the section `[driver.<name>]` and from `MOORAGE_DRIVER_<NAME>_<KEY>`
    settings: type[msgspec.Struct] | None = None
    #: the keys of `driver_config.<name>` that the driver reads: other keys are refused, and a key without a default is
    #: required
    config: type[msgspec.Struct] | None = None
    #: set by the loader for a driver that does not come with moorage: an exception that it raises must not end the
    #: worker
    is_foreign: bool = False
    #: whether `attempts_of` can tell to which attempt a process of this host belongs
    tells_processes: bool = False
    #: the limiter of its attempts (`Kit.limits`), which the agent then gives tokens; None: it has none
    limits: Limits | None = None
    #: whether its attempts connect to an MPS daemon that the worker runs, if they share a GPU by mps
    joins_mps: bool = False
    #: sharing modes for which `check` refuses every job
    modes_refused: Collection[str] = ()
    #: most attempts that it has at once, claimed ones included; further placements are refused. None: no limit of its
    #: own
    attempts_max: int | None = None
    #: identifies the environment in which this driver's attempts live: if it changes, all earlier attempts are over.
    #: The driver then reports `Replaced(self.name)`; the attempts of other drivers run on
    boot: str = ""

    @classmethod
    def from_kit(cls, kit: Kit) -> Driver:
        """Return a driver for the worker of this kit; a driver that declares settings gets them as its argument."""
        return cls() if cls.settings is None else cls(kit.own)  # type: ignore[call-arg]

    @classmethod
    async def open_inventory(cls, worker: str, settings: WorkerSettings, own: Any) -> Inventory | None:
        """Return the devices of this worker if they are not the devices of this host, else None.

        `own` are the settings that the driver declares. Raises Refused.
        """
        return None

    @classmethod
    async def open_handing(
        cls, settings: WorkerSettings, open_host: Callable[[], Awaitable[CombinedInventory]]
    ) -> Inventory | None:
        """Return the devices of this host, opened by `open_host`, so that this driver can take them from the host and
        give them back; None for a driver that does not. Raises Refused.
        """
        return None

    @classmethod
    async def ask_engine(cls, own: Any) -> str:
        """Return a line that says that the engine of this driver answers here; "" for a driver without an engine.

        `own` are the settings that the driver declares. Raises Refused, with what to do, if it does not answer.
        """
        return ""

    def can(self) -> Capabilities:
        """Return the capabilities for the worker's hello frame: `capabilities`, with the keys of `config`."""
        if self.config is None:
            return self.capabilities
        return msgspec.structs.replace(self.capabilities, config=list(self.config.__struct_encode_fields__))

    def __init__(self) -> None:
        self._to_agent: ReportEvent = _unattached
        self._to_clients: Publish = _unattached

    def attach(self, report: ReportEvent, publish: Publish) -> None:
        """Set the functions that take events and output; the agent calls this once, before `open`."""
        self._to_agent = report
        self._to_clients = publish

    def report(self, event: DriverEvent) -> None:
        """Report an event to the agent. Raises RuntimeError before `attach`."""
        self._to_agent(event)

    def publish(self, name: AttemptName, payload: bytes) -> None:
        """Publish a frame of an attempt's output for those who follow it. Raises RuntimeError before `attach`."""
        self._to_clients(name, payload)

    def folder_of(self, name: AttemptName) -> str:
        """Return the path of an attempt's folder on this host, whether it exists or not; "" if it has none here."""
        return ""

    def reaches_host_ports(self, tenant: str, request: Request) -> bool:
        """Return whether a port of the host, which a request names by its number, may be one that its job listens on.

        A job on a network of its own is looked at by its own ports alone: what else listens is not its business.
        """
        return True

    def engine_down(self) -> tuple[str, float] | None:
        """Return why the engine behind this driver does not answer, and since when in seconds of CLOCK_BOOTTIME.

        None if it answers, or if the driver has none. While it is down, the worker gets no jobs of this driver.
        """
        return None

    async def open(self) -> list[Living]:
        """Get ready to start attempts. Return the earlier attempts that still run, or whose end was not reported yet.

        Raises MoorageError.
        """
        return []

    async def close(self) -> None:
        """Release what the driver holds. Attempts run on if the driver's attempts can outlive the agent."""

    def read_config(self, request: Request) -> Any:
        """Return the request's `driver_config` for this driver, converted to `config` if the driver declares one.

        If the request has none, return `config` with its defaults, or None if the driver declares no `config`.

        Raises Refused with invalid-argument for a key or value that `config` does not allow.
        """
        said = request.blocks.get(self.name)
        if self.config is None:
            return said
        self._refuse(None if said is None else keys_fault(self.name, said, self.config.__struct_encode_fields__))
        try:
            return msgspec.convert(said or {}, self.config)
        except (msgspec.ValidationError, ValueError) as error:
            place = f"driver_config.{self.name}"
            raise refuse("invalid-argument", f"{place}: {error}", field=f"$.{place}", found=said) from None

    def check_block(self, request: Request) -> None:
        """Raise `Refused` if the request's block for this driver is wrong, or asks for what this driver does not
        support.
        """
        self._refuse(request.driver_fault(self.capabilities))

    @staticmethod
    def _refuse(fault: Fault | None) -> None:
        if fault is not None:
            field, message, found, allowed = fault.trouble
            raise refuse(fault.code, message, field=f"$.{field}", found=found, allowed=allowed)

    def check(self, request: Request) -> None:
        """Raise `Refused` for a request that this driver could never run here.

        With the code `invalid-argument` the request itself is wrong, and the job ends FAILED. With any other code, or
        any other exception, the job goes to another worker.
        """

    def start(self, assignments: list[Assignment]) -> None:
        """Begin to start these attempts and return at once.

        Report `Started` for attempts that run, and `StartFailed` or `NotStarted` for attempts that never ran.

        An exception counts as `StartFailed` for all of them, even for attempts that do run. So report errors; do not
        raise.
        """
        raise NotImplementedError

    def end(self, name: AttemptName, grace_s: float, why: str) -> None:
        """Begin to end an attempt, by force after `grace_s` seconds; report `Ended`. See the module's docstring.

        An exception counts as `Stuck`: the attempt's devices stay quarantined.
        """
        raise NotImplementedError

    def end_with_notice(self, name: AttemptName, grace_s: float, why: str, notice_s: float) -> None:
        """Ask the attempt to save its work, and `notice_s` seconds later end it as `end` does.

        This default, for drivers that cannot ask an attempt, ends it now. The agent may call `end` meanwhile; that
        call takes precedence.
        """
        self.end(name, grace_s, why)

    def resizes(self, mode: str) -> str:
        """Return how running attempts of this mode are given another part of a shared device.

        `live`: `resize` makes a running attempt keep to its new part. `counted`: the running attempt does not learn
        of it, only the scheduler's count changes.
        """
        return COUNTED

    def resize(self, name: AttemptName, share: Share) -> None:
        """Make a running attempt keep to another part of each of its devices.

        Called only where `resizes` returns `live`.
        """

    def relimit(self, name: AttemptName, timeout_s: float) -> None:
        """Give a running attempt another time limit, in seconds from its start; one that is over ends it as a timeout.

        Called only where the capabilities say `relimits`, also with the limit that it has already.
        """

    def signal(self, name: AttemptName, signal: str) -> None:
        """Send a signal, such as `SIGUSR1`, to those of a running attempt's processes that handle it.

        Called only where the capabilities say `signals`.
        """

    def forget(self, names: list[AttemptName]) -> None:
        """Forget these attempts: their ends are in the ledger."""

    def sets_count(self, name: AttemptName, digests: Sequence[str], *, earlier: bool) -> None:
        """The ledger remembers these sets of a rank of a gang, and perhaps some of an `earlier` attempt; others that it
        has noted count no more."""

    def tell_sets(self) -> None:
        """Report the sets of all ranks of gangs again, as `CheckpointStored`."""

    def checkpoints_noted(self, names: list[AttemptName]) -> None:
        """What was last reported as `CheckpointStored` of these attempts is in the ledger."""

    async def living(self, names: Collection[AttemptName]) -> Collection[AttemptName] | None:
        """Return those of these attempts of which something is left on this host, or for which the driver still works.

        Others may be returned as well.

        Ask what really has them, the supervisor, an engine or the kernel, and add those for which the driver pulls an
        image or stores files. The worker ends an attempt as lost that two answers leave out, a renewal apart.

        Return None if this cannot be told, as this default does; then no attempt is ended so.
        """
        return None

    def give_up(self, name: AttemptName) -> None:
        """Forget an attempt that `living` left out, and report its end as lost."""
        self.report(Ended([(name, CODE_LOST, LOST)]))

    def keeps(self, settings: WorkerSettings) -> dict[str, float]:
        """Return what the driver keeps of ended jobs, for the hello frame: `output_s`, `output_bytes` and the like."""
        return {}

    def reporting(self) -> dict[AttemptName, Reporting]:
        """Return what running attempts without a folder have reported of themselves, of those that did."""
        return {}

    def held_data(self) -> list[str]:
        """Return what it has fetched for jobs, the last used first, as a load frame tells it. It must be quick."""
        return []

    def attempts_of(self, pids: Collection[int]) -> dict[int, AttemptName | None]:
        """Return the attempt of each of these processes that belongs to this driver.

        The value is None for a process that is an attempt's and hides whose; processes of no attempt are left out. It
        must be quick: the agent calls it each second.
        """
        return {}

    def can_measure(self) -> bool:
        """Return whether `attempts_of` can attribute the use of a shared device to each attempt now."""
        return self.tells_processes

    def uid_of(self, tenant: str, request: Request) -> int | None:
        """Return the uid on this host under which a tenant's job would run.

        Return None if its jobs cannot use an MPS daemon that the worker runs: then no job of this driver shares by mps.
        """
        return None

    def set_fence(self, deadline_s: float, grace_s: float) -> None:
        """End all attempts at `deadline_s` (CLOCK_BOOTTIME seconds), each within `grace_s`, unless a later call sets a
        later time.

        Attempts that outlive a partition are exempt (H29).

        The agent calls this with each renewal. A driver whose `fence` is `agent` need do nothing: when the lease is
        over, the agent calls `end` for each attempt. A driver whose attempts outlive the agent hands the deadline to
        the process that ends them when the agent is dead: the supervisor (`Kit.supervisor.set_fence`), which fences the
        processes that it started, or a watchdog of the driver's own.
        """


@runtime_checkable
class Freezes(Protocol):
    """A driver that can freeze its attempts: its `capabilities.freezes` says whether it does on this host."""

    def freeze(self, name: AttemptName, slots: Sequence[int]) -> None:
        """Begin to take a running attempt's memory off the devices in these slots; report `FreezeAnswered`.

        It is not called again before the answer; `end` may be called meanwhile.
        """

    def resume(self, name: AttemptName) -> None:
        """Begin to let a frozen attempt run on; report `FreezeAnswered`. The rules of `freeze` hold."""

    def wakes(self, name: AttemptName) -> bool:
        """Return whether this driver would report the attempt's first use of its devices, once frozen, as `ResumeDue`.

        Only then does the worker freeze the attempt for not using its devices.
        """


@runtime_checkable
class Executes(Protocol):
    """A driver that runs commands in its attempts: its `capabilities.execs` says whether it does on this host."""

    async def execute(self, request: Request, asked: Exec, size: Terminal) -> Execution:
        """Run a command in a running attempt, as one more of its processes; return once it runs.

        Without a command it holds the terminal of the attempt's own program, which has one only with
        `capabilities.holds_stdin`. `request` is the attempt's job, `size` that of the caller's terminal. Raises
        MoorageError, with the reason.
        """


@runtime_checkable
class KeepsOutput(Protocol):
    """A driver that keeps the output of its attempts."""

    async def read_log(self, ask: ReadLog) -> LogPage:
        """Return a page of an attempt's kept output.

        Raises `Refused` with not-kept if the output was never kept or is gone.
        """


@runtime_checkable
class KeepsFolders(Protocol):
    """A driver that keeps the folders of ended attempts for some time."""

    async def rescue(self, ask: Rescue) -> Rescued:
        """Begin to store what an ended attempt left in its folder, and return whether it is stored. It must be quick.

        Raises `Refused` with not-kept if there is no such folder, or storing it failed.
        """


def _unattached(*_: object) -> None:
    raise RuntimeError("the driver is not attached to an agent")

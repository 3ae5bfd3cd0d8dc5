"""What a driver is: how a worker runs a member, ends it, and proves that it is over.

A new driver derives from `Driver` in a file of its own, sets `name` and `capabilities`, implements `start` and `end`,
and reports what happens: `Started` and later `Ended` (nothing of the member is left, which is proven), or `StartFailed`
(nothing ever ran), or `NotStarted` (nothing ever ran because of this host: the job is tried again), or `Stuck` (the
member cannot be ended, or its end cannot be proven). Methods are called from the event loop and must not block: they
begin what takes time, and report it later. `end` may be called twice for one member, the second time with less grace,
and for a member that has just ended: then there is nothing to do, since `Ended` is on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from moorage.schemas.capabilities import COUNTED, Capabilities
from moorage.schemas.driver_config import Fault, keys_fault
from moorage.schemas.errors import refuse
from moorage.schemas.frames import Device, LogPage, ReadLog, Start
from moorage.schemas.gpu import Share, Sharing
from moorage.schemas.job import Request, Run
from moorage.worker.environment import Gang, JobEnvironment, gpu_environment
from moorage.worker.inventory.base import Inventory
from moorage.worker.member_messages import (
    Ended,
    FreezeAnswered,
    MemberName,
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

if TYPE_CHECKING:
    from moorage.worker.drivers.kit import Kit

#: exit status of a command that cannot be started, as sh(1) gives it
CODE_CANNOT_START: Final = 126
CODE_NOT_FOUND: Final = 127
#: minus SIGTERM: how the end of a member is told that was asked to end before any process of it ran
CODE_ENDED: Final = -15
#: minus SIGKILL: how the end of a member is told whose status nobody could read
CODE_LOST: Final = -9

DriverEvent = (
    Started | Ended | StartFailed | NotStarted | Stuck | SeenFree | NotFree | Replaced | FreezeAnswered | ResumeDue
)
Report = Callable[[DriverEvent], None]
#: subject after the prefix is the agent's affair: a driver says whose output it is, and gives the frame's payload
Publish = Callable[[MemberName, bytes], None]


class Assignment(msgspec.Struct, frozen=True):
    """A member with all that a driver needs to run it. `devices` are those of its lease, in the lease's order.

    `start` is the gang's START, that of a gang of one for a single replica with `gpu.distributed`, else None.
    `mode` is exclusive, mps, time-slice or none. `ends_in_s` is when
    the job's deadline comes, in seconds from now; None without one. `config` is the job's `driver_config` for this
    driver, as its `Driver.config` declares it; as it was sent where it declares none. With `has_folder` the member
    has a folder of its own, in which it starts unless `run.cwd` is absolute; requests of older ledgers have none.
    """

    name: MemberName
    request: Request
    devices: list[Device]
    mode: str
    start: Start | None = None
    traceparent: str = ""
    ends_in_s: float | None = None
    config: Any = None
    has_folder: bool = True

    @property
    def run(self) -> Run:
        return self.request.workload

    @property
    def part(self) -> tuple[Request, list[Device], str]:
        """What says which part of its devices it may have."""
        return self.request, self.devices, self.mode

    @property
    def checkpoint_in_s(self) -> float | None:
        """When to tell it to save itself, in seconds from now: before its timeout or the job's deadline; None: not."""
        run = self.run
        ends = [end for end in (run.timeout_s, self.ends_in_s) if end is not None]
        if run.checkpoint_signal is None or not ends:
            return None
        return max(0.0, min(ends) - run.checkpoint_before_s)

    def environment(
        self, *, interface: str | None = None, simulated: bool = False, has_own_mps: bool = False
    ) -> JobEnvironment:
        """The variables of the lease and the gang, as `gpu_environment` gives them. Raises SharingUnavailable."""
        tenant, job, replica, attempt, fence = self.name
        start = self.start
        gang = None
        if start is not None:
            gang = Gang(start.world_size, start.master_addr, start.master_port, interface)
        return gpu_environment(
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
            simulated=simulated,
            has_own_mps=has_own_mps,
        )


class Living(msgspec.Struct, frozen=True):
    """A member that a driver still knows from before the agent's restart: starting, running, ending, exited, stuck, or
    refused (this host could not start it). `frozen` is one that runs, and was frozen."""

    name: MemberName
    phase: str
    code: int = 0
    reason: str = ""
    frozen: bool = False


class Driver:
    """Base of all drivers; see the module's text."""

    name: str = ""
    capabilities: Capabilities = Capabilities()
    #: declares the driver's own settings: a struct whose fields are annotated with `schemas.settings.setting`. Their
    #: values are found in the section `[driver.<name>]` and in `MOORAGE_DRIVER_<NAME>_<KEY>`
    settings: type[msgspec.Struct] | None = None
    #: declares what the driver reads of `driver_config.<name>`: other keys are refused, and a key without a default
    #: has to be there
    config: type[msgspec.Struct] | None = None
    #: set where it is loaded: it does not come with moorage, so what it raises must not end the worker
    is_foreign: bool = False
    #: whether `members_of` can tell whose a process of this host is
    tells_processes: bool = False
    #: whether its members are clients of an MPS daemon that the worker runs, where they share by mps
    joins_mps: bool = False
    #: sharing modes in which `check` refuses all of its jobs
    modes_refused: Collection[str] = ()
    #: members that it holds at once, claimed ones counted; a placement beyond it is refused. None: no bound of its own
    members_max: int | None = None
    #: names the world in which this driver's members live: another word means that all of before are over. With a new
    #: word the driver reports `Replaced(self.name)`, and the members of other drivers run on
    boot: str = ""

    @classmethod
    def from_kit(cls, kit: Kit) -> Driver:
        """Return a driver for the worker of this kit; one that declares settings gets them as its argument."""
        return cls() if cls.settings is None else cls(kit.own)  # type: ignore[call-arg]

    @classmethod
    async def open_inventory(cls, worker: str, settings: WorkerSettings, own: Any) -> Inventory | None:
        """Return the devices of the worker with this id, where they are not those of this host; None where they are.

        `own` are the settings that the driver declares. Raises Refused.
        """
        return None

    def can(self) -> Capabilities:
        """Return what hello tells of it: its capabilities, with the keys of its `config`."""
        if self.config is None:
            return self.capabilities
        return msgspec.structs.replace(self.capabilities, config=list(self.config.__struct_encode_fields__))

    def __init__(self) -> None:
        self.report: Report = _unattached
        self.publish: Publish = _unattached

    def attach(self, report: Report, publish: Publish) -> None:
        """Set where events and output go; called once, before `open`."""
        self.report = report
        self.publish = publish

    async def open(self) -> list[Living]:
        """Get ready to start members; returns those from before that live, or ended untold. Raises MoorageError."""
        return []

    async def close(self) -> None:
        """Release what the driver holds; what runs goes on if the driver's members can outlive the agent."""

    def read_config(self, request: Request) -> Any:
        """Return the request's `driver_config` for this driver, as `config` declares it, or as it was sent.

        Raises Refused with invalid-argument for what it does not declare.
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
        """Raise `Refused` for what the request says for this driver and no job may, or this driver does not support."""
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
        """Begin these members and return at once; report `Started`, or `StartFailed` of those that never ran.

        An exception counts as `StartFailed` for all of them, even if some run: so report what goes wrong, and do not
        raise.
        """
        raise NotImplementedError

    def end(self, name: MemberName, grace_s: float, why: str) -> None:
        """Begin to end a member, by force once `grace_s` seconds are over; report `Ended`. See the module's text.

        An exception counts as `Stuck`: the member's devices stay quarantined.
        """
        raise NotImplementedError

    def end_with_notice(self, name: MemberName, grace_s: float, why: str, notice_s: float) -> None:
        """As `end`, but tell the member to save its work so many seconds before; a driver that cannot ends it now.

        `end` may be called meanwhile, and then takes precedence.
        """
        self.end(name, grace_s, why)

    def resizes(self, mode: str) -> str:
        """Return how its members take another part of a device that they share in this mode while they run.

        `live` where `resize` makes them keep to it; else `counted`: they are told nothing.
        """
        return COUNTED

    def resize(self, name: MemberName, share: Share) -> None:
        """Have a member that runs keep to another part of each of its devices, where `resizes` says live."""

    def freeze(self, name: MemberName, slots: Sequence[int]) -> None:
        """Begin to take a running member's memory off the devices in these slots; report `FreezeAnswered`.

        Called only where `capabilities.freezes` is set, and not again before the answer; `end` may be called meanwhile.
        """
        raise NotImplementedError

    def resume(self, name: MemberName) -> None:
        """Begin to have a frozen member run on; report `FreezeAnswered`. As `freeze`."""
        raise NotImplementedError

    def wakes(self, name: MemberName) -> bool:
        """Return whether a frozen member's first use of its devices is reported, as `ResumeDue`.

        Only then is a member frozen that does not use its devices.
        """
        return False

    def forget(self, names: list[MemberName]) -> None:
        """The ends of these members are in the ledger: nothing need be remembered of them."""

    def keeps(self, settings: WorkerSettings) -> dict[str, float]:
        """For hello: how much is kept of jobs that are over, and how long: `output_s`, `output_bytes` and the like."""
        return {}

    async def read_log(self, ask: ReadLog) -> LogPage:
        """A page of a member's kept output. Raises `Refused` with not-kept where there is none, or no longer."""
        raise refuse(
            "not-kept",
            f"the driver {self.name} keeps no output: what its jobs say is on their log subject while they run",
            job=ask.job,
        )

    def members_of(self, pids: Collection[int]) -> dict[int, MemberName | None]:
        """Return which of its members each of these processes belongs to; None for one that hides of which.

        Processes of none of its members are left out. Quick: it is called each second.
        """
        return {}

    def can_measure(self) -> bool:
        """Return whether `members_of` tells now what each of its members uses of a shared device."""
        return self.tells_processes

    def uid_of(self, tenant: str, request: Request) -> int | None:
        """Return the user of this host that a tenant's job would run as.

        None where its jobs cannot use an MPS daemon that the worker runs: then none of them shares by mps there.
        """
        return None

    def set_fence(self, deadline_s: float, grace_s: float) -> None:
        """Have all members but those that outlive a partition end at this moment (CLOCK_BOOTTIME seconds), each within
        `grace_s`, unless a later moment is set before (H29).

        It is called with each renewal. A driver whose `fence` is `agent` need do nothing: once the lease is over the
        agent calls `end` for each member. One whose members live on without the agent hands the moment to what ends
        them then: the supervisor (`Kit.supervisor.set_fence`), which fences what it has started, or a watchdog of its
        own.
        """


def _unattached(*_: object) -> None:
    raise RuntimeError("the driver is not attached to an agent")

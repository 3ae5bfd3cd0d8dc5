"""Publish a worker's hello and load frames, and read the devices for them."""

from __future__ import annotations

import os
import platform
import pwd
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, Literal, TypeVar

from msgspec.structs import replace

from moorage.schemas.attempt import AttemptName
from moorage.schemas.capabilities import COUNTED, LIVE, LIVE_MEMORY, NEXT_ATTEMPT, Capabilities
from moorage.schemas.codec import encode
from moorage.schemas.frames import AGENT_STOPPED, Device, DriverDown, Hello, Load, Look, Looked, SlotLoad
from moorage.schemas.frames.reported import Reported
from moorage.schemas.gpu import SHARERS_MAX
from moorage.schemas.held_data import HELD_MAX
from moorage.schemas.subjects import Subjects
from moorage.schemas.where import GPU_MODEL, HOST_ARCH, HOST_NAME
from moorage.system.build import build
from moorage.system.proctree import boottime_s
from moorage.worker.agent.inspection import FINDINGS_MAX, inspect
from moorage.worker.agent.lost_attempts import LostAttempts
from moorage.worker.agent.state_disk import StateDisk
from moorage.worker.attempt.reports import Reporting, Reports
from moorage.worker.devices.device_watch import DeviceWatch
from moorage.worker.devices.pool import GpuPool, SlotState
from moorage.worker.devices.readers.base import Inventory, SlotReading
from moorage.worker.devices.readers.faults import Fault, Gravity
from moorage.worker.devices.readers.host import HostFacts
from moorage.worker.driver import Driver, Freezes
from moorage.worker.drivers.policy import Policy
from moorage.worker.freezing.unused import UnusedJobs
from moorage.worker.lend.lender import LeaseServer
from moorage.worker.session.attempt_messages import Attempt, Event, HealthChanged, Log
from moorage.worker.session.lease_session import NEVER_S
from moorage.worker.session.shell import Shell
from moorage.worker.settings import LOADS_ON_CHANGE_PER_S_MAX, WorkerSettings
from moorage.worker.sharing.idle_watch import IdleJobs
from moorage.worker.sharing.limiter.escapes import Escapes
from moorage.worker.sharing.memory_guard import MemoryGuard
from moorage.worker.sharing.usage_meter import UsageMeter

T = TypeVar("T")
#: how often devices are read while jobs use them: the rhythm of what `RecentUse` keeps
SAMPLE_S: Final = 1.0
#: how often hello is said again: who came later, as an observer's page, learns from it what the devices are
HELLO_S: Final = 30.0
#: why nothing is started by an agent that stops
STOPPED: Final = f"{AGENT_STOPPED}: its jobs run on; it takes jobs again once its agent is started"
Meter = Callable[[Sequence[SlotReading], float], Event | None]  # takes the reading of each slot, and the time


class Reporter:
    """Publishes one worker's hello and load frames, and passes on what its devices show.

    `open` it, then call `publish_due` at the end of each turn, and by `due_s` at the latest.
    """

    def __init__(
        self,
        shell: Shell,
        worker: str,
        settings: WorkerSettings,
        facts: HostFacts,
        inventory: Inventory,
        drivers: Mapping[str, Driver],
        pool: GpuPool,
        watch: DeviceWatch,
        policy: Policy,
        guard: MemoryGuard,
        held: Mapping[AttemptName, Attempt],
        lost: LostAttempts,
        lender: LeaseServer | None,
        disk: StateDisk | None,
    ) -> None:
        self.worker = worker
        self.settings = settings
        self.facts = facts
        self.inventory = inventory
        self.drivers = drivers
        self.pool = pool
        self.watch = watch
        self.policy = policy
        self.guard = guard
        self._lost = lost
        self._disk = disk
        #: what the running attempts use of their devices
        self.usage = UsageMeter(held, drivers, hears_output=settings.stream_output)
        #: each takes every reading of real devices and may return an event
        self._meters: list[Meter] = [
            self.usage.read,
            IdleJobs(held, settings.idle_warn_s, settings.idle_reclaim_s).read,
            UnusedJobs(held, settings.freezes_after_s, self._wakes).read,
            Escapes(held, drivers, lambda driver, mode: guard.levels(driver)[mode].memory).read,
            *([] if lender is None else [lender.seen]),
        ]
        self.stops = False  # set once this agent stops, and leaves its jobs running
        #: how many processes of each running attempt are stopped
        self.stopped: dict[AttemptName, int] = {}
        #: what they report of themselves
        self.reports = Reports()
        self.devices = pool.devices
        self.subjects = Subjects(settings.prefix)
        self._shell = shell
        self._is_open = False
        self._sampling = False
        self._looking = False
        self._readings = [SlotReading() for _ in self.devices]
        self._load_n = 0
        self._load_at_s = NEVER_S
        self._load_sent_s = 0.0
        self._hello_said_s = NEVER_S
        self._sample_at_s = NEVER_S
        self._read_told_s = 0.0  # of the last load frame that a reading led to
        self._started = str(time.monotonic_ns())

    async def open(self) -> None:
        """Read the devices once, then say hello; the drivers must be open."""
        self.inventory.watch(self._on_fault)
        self._seen(await self.inventory.sample())
        self._load_at_s = self._sample_at_s = self._shell.now()
        self.publish_hello()
        self._is_open = True

    @property
    def boot(self) -> str:
        """The machine's boot id and the `boot` of each driver that has one; if none has, when this agent started."""
        boots = dict.fromkeys(driver.boot for _, driver in sorted(self.drivers.items()) if driver.boot)
        return f"{self.facts.boot}.{'+'.join(boots) or self._started}"

    @property
    def due_s(self) -> float:
        """When `publish_due` has work next, in seconds of CLOCK_BOOTTIME."""
        return min(self._load_at_s, self._sample_at_s)

    def slept(self, seconds: float) -> None:
        """Move the deadlines by time that was skipped."""
        self._load_at_s += seconds
        self._load_sent_s += seconds
        self._hello_said_s += seconds
        self._sample_at_s += seconds
        self._read_told_s += seconds

    def publish_due(self) -> None:
        """Begin a reading of the devices that is due: a load frame follows. Else publish a load frame that is due."""
        now = self._shell.now()
        if now >= self._sample_at_s:
            self._sample_at_s = now + self._sample_s()
            self._shell.spawn(self._sample_and_publish_load())
        elif now >= self._load_at_s:
            self._publish_load()

    def _sample_s(self) -> float:
        """Return in how many seconds the devices are read again: each second while a job uses real ones."""
        if self.inventory.simulated or not any(state.sharers for state in self.pool.slot_states()):
            return self.settings.load_s
        return min(SAMPLE_S, self.settings.load_s)

    def drivers_down(self) -> list[DriverDown]:
        """Return the drivers whose engine does not answer now; all of them if the disk is full, or the agent stops."""
        if self.stops:
            return [DriverDown(name, STOPPED) for name in self.drivers]
        now_s = boottime_s()
        if self._disk is not None and self._disk.is_full:
            why, for_s = self._disk.why, max(0, int(now_s - self._disk.full_since_s))
            return [DriverDown(name, why, for_s) for name in self.drivers]
        told = ((name, driver.engine_down()) for name, driver in self.drivers.items() if not driver.is_foreign)
        return [DriverDown(name, down[0], max(0, int(now_s - down[1]))) for name, down in told if down is not None]

    def _own_labels(self) -> dict[str, str]:
        """Return what a request may ask for of any worker: its name, its processors, and its GPUs if all are alike."""
        models = {device.name for device in self.devices}
        of_gpus = {GPU_MODEL: models.pop()} if len(models) == 1 else {}
        return {HOST_NAME: self.worker, HOST_ARCH: platform.machine(), **of_gpus, **self.inventory.versions}

    def hello(self) -> Hello:
        settings, facts = self.settings, self.facts
        nothing: dict[str, float] = {}
        return Hello(
            self.worker,
            self.boot,
            release=build(),
            hostname=facts.hostname,
            drivers=list(self.drivers),
            modes=list(settings.modes_offered),
            sharers_max={mode: sharers for mode, sharers in settings.sharers_max.items() if sharers},
            labels=self._own_labels() | settings.labels,
            cpu_milli=facts.cpu_milli,
            memory_mib=facts.memory_mib,
            gpu_cpu_milli=round(settings.cores_per_gpu * 1000),
            counts=settings.counts,
            gpu_pool=self.devices,
            interface=settings.interface,
            address=settings.address or "",
            ports=len(settings.ports_lent),
            load_s=settings.load_s,
            lease_s=settings.lease_s,
            simulated=self.inventory.simulated,
            lent_slots=None if settings.lent_slots is None else list(settings.lent_slots),
            capabilities={name: self._capabilities(driver) for name, driver in self.drivers.items()},
            keeps={
                key: value
                for driver in self.drivers.values()
                for key, value in self._ask(driver, partial(driver.keeps, settings), nothing).items()
            },
        )

    def _capabilities(self, driver: Driver) -> Capabilities:
        """Return a driver's capabilities, with how well this worker keeps its jobs to their part of a device."""
        can = self._ask(driver, driver.can, driver.capabilities)
        offered = [mode for mode in self.settings.modes_offered if mode not in driver.modes_refused]
        shared = [mode for mode in offered if mode in SHARERS_MAX and can.gpu_enabled]
        resizes = {mode: self._ask(driver, partial(driver.resizes, mode), COUNTED) for mode in shared}
        # a client of MPS keeps the variables that it started with
        if "mps" in resizes and self.settings.mps == "managed" and driver.joins_mps:
            resizes["mps"] = NEXT_ATTEMPT
        elif resizes.get("mps") == LIVE and driver.limits is not None:
            resizes["mps"] = LIVE_MEMORY
        levels = {mode: level for mode, level in self.guard.levels(driver).items() if mode in offered}
        return replace(can, enforced=levels, resizes=resizes)

    def limits_memory(self, driver: Driver) -> bool:
        """Return whether this host ends a job of the driver that takes more memory than it asked for."""
        return self._ask(driver, driver.can, driver.capabilities).memory_limit

    def told_reports(self) -> list[Reported]:
        """Return what the next renewal tells of what attempts report of themselves."""
        nothing: dict[AttemptName, Reporting] = {}
        drivers = [driver for driver in self.drivers.values() if not driver.is_foreign]
        return self.reports.told(
            {name: each for driver in drivers for name, each in self._ask(driver, driver.reporting, nothing).items()}
        )

    def _held_data(self, driver: Driver) -> list[str]:
        nothing: list[str] = []
        return self._ask(driver, driver.held_data, nothing) if driver.capabilities.sets_up else nothing

    def _wakes(self, attempt: Attempt) -> bool:
        driver = self.drivers[attempt.driver]
        return isinstance(driver, Freezes) and self._ask(driver, partial(driver.wakes, attempt.name), False)

    def _ask(self, driver: Driver, question: Callable[[], T], otherwise: T) -> T:
        """Return a driver's answer to `question`; `otherwise` if it is a foreign driver and raises."""
        said = [otherwise]
        self._shell.call_driver(driver, lambda: said.append(question()))
        return said[-1]

    def hello_to_the_leader(self) -> Hello:
        """Return hello with the rules by tenant, which only the leader may see."""
        users = self.policy.mps_users() if self.settings.mps == "managed" else None
        return replace(self.hello(), drivers_for=self.policy.drivers_by_tenant(), mps_users=users, own_user=own_user())

    def publish_hello(self) -> None:
        self._hello_said_s = self._shell.now()
        self._shell.post(self.subjects.hello(self.worker), encode(self.hello()))

    def look(self, frame: Look) -> None:
        """Compare the devices with the leases and send the leader the findings.

        While an earlier request is not answered, drop this one: a device may hang.
        """
        if self._looking or not self._is_open:
            self._shell.dropped["look"] += 1
            return
        self._looking = True
        self._shell.spawn(self._look(frame))

    async def _look(self, frame: Look) -> None:
        try:
            before = self.pool.slot_states()
            readings = await self.inventory.sample()
            baselines = [self.inventory.memory_baseline_mib(slot) for slot in range(len(self.devices))]
            found, more = inspect(self.devices, before, self.pool.slot_states(), readings, baselines)
            findings = [*found, *(await self._lost.findings())]
            more += max(0, len(findings) - FINDINGS_MAX)
        finally:
            self._looking = False
        looked = Looked(self.worker, frame.ask, findings=findings[:FINDINGS_MAX], more=more)
        self._shell.post(self.subjects.worker(self.worker, "looked"), encode(looked, json=False))

    def pool_changed(self) -> None:
        """Have a load frame publish the change soon: at most `LOADS_ON_CHANGE_PER_S_MAX` such frames a second."""
        if self._load_at_s == NEVER_S:
            self._load_at_s = self._load_sent_s + 1 / LOADS_ON_CHANGE_PER_S_MAX
            self._shell.wake()

    async def _sample_and_publish_load(self) -> None:
        if self._sampling:
            return  # an earlier reading is still pending: the devices' driver is slow
        self._sampling = True
        try:
            self._seen(await self.inventory.sample())
        finally:
            self._sampling = False
        if (now := self._shell.now()) - self._read_told_s > self.settings.load_s - self._sample_s() / 2:
            self._read_told_s = now
            self._publish_load()

    # ------------------------------------------------------------------------------------------- the devices' health

    def _seen(self, readings: list[SlotReading]) -> None:
        self._readings = readings
        if self.watch.seen(readings, self._shell.now()):
            self.health_changed()
        if self.inventory.simulated:  # what it shows of use is not charged, and ends no job
            self.usage.measure(readings, self._shell.now())
        for meter in () if self.inventory.simulated else self._meters:
            if (event := meter(readings, self._shell.now())) is not None:
                self._shell.enqueue(event)

    def _on_fault(self, slot: int, fault: Fault) -> None:
        """Handle a fault that a device reports by itself."""
        level: Literal["info", "error"] = "info" if fault.gravity == Gravity.NOTE else "error"
        self._shell.say(Log(level, "device-fault", f"GPU {slot} ({self.devices[slot].uuid}): {fault.detail}"))
        if self.watch.happened(slot, fault, self._shell.now()):
            self.health_changed()

    def health_changed(self) -> None:
        """Log and tell the devices that are out of use."""
        for each in self.watch.told:
            self._shell.say(Log("error", "device-unwell", f"GPU {each.slot} is out of use: {each.kind}: {each.detail}"))
        self._shell.enqueue(HealthChanged())
        self.pool_changed()

    def _publish_load(self) -> None:
        self._load_at_s = NEVER_S
        now = self._load_sent_s = self._shell.now()
        self._load_n += 1
        frame = Load(
            self.worker,
            self.boot,
            self._load_n,
            self.pool.generation,
            pending_claimers=self.pool.pending_claimers(),
            gpu_pool=[
                self._slot_load(device, state, reading, now)
                for device, state, reading in zip(self.devices, self.pool.slot_states(), self._readings, strict=True)
            ],
            simulated=self.inventory.simulated,
            warning=self._disk.warning if self._disk is not None else "",
            time_ms=int(time.time() * 1000),
            data=[key for driver in self.drivers.values() for key in self._held_data(driver)][:HELD_MAX],
        )
        self._shell.post(self.subjects.load(self.worker), encode(frame))
        if now - self._hello_said_s >= HELLO_S:
            self.publish_hello()

    def _slot_load(self, device: Device, state: SlotState, reading: SlotReading, now: float) -> SlotLoad:
        health, foreign, detail = self.watch.shown(state, reading, now)
        return SlotLoad(
            index=device.index,
            leased=state.sharers > 0,
            sharers=state.sharers,
            mode=state.mode or "",
            util_percent=reading.util_percent or 0,
            encoder_percent=reading.encoder_percent,
            decoder_percent=reading.decoder_percent,
            power_w=reading.power_w,
            memory_used_mib=reading.memory_used_mib,
            temperature_c=reading.temperature_c,
            health=health,
            foreign=foreign,
            detail=detail,
            warning=self.watch.warning(state.slot, reading),
        )


def own_user() -> list[str]:
    """Return the name, if it has one, and the number of the user that this process runs as."""
    uid = os.geteuid()
    try:
        return [pwd.getpwuid(uid).pw_name, str(uid)]
    except KeyError:
        return [str(uid)]

"""Run virtual machines: the supervisor starts a runner for each job, and the runner starts QEMU.

The runner is ended, timed out, fenced and taken over like any job's process, so this is the driver of processes with
another command line. `vm/runner.py` says how a job gets into its VM and its results out. A GPU is bound to vfio-pci
before its runner starts, and given back once nothing of the attempt is left (`inventory/handed_on.py`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from moorage.schemas.attempt import AttemptName
from moorage.schemas.capabilities import KERNEL, Capabilities
from moorage.schemas.driver_config import VmBlock
from moorage.schemas.errors import Refused, refuse
from moorage.schemas.frames import NOT_PERMITTED, OTHERS
from moorage.schemas.job import Request
from moorage.schemas.settings import setting
from moorage.system.device_environment import HostAtFault
from moorage.system.proctree import MARK_NAMES
from moorage.worker.attempt.environment import LacksHere, process_environment
from moorage.worker.attempt.secret_files import resolve_secrets
from moorage.worker.devices.readers.base import Inventory
from moorage.worker.devices.readers.machine import CombinedInventory, sysfs_address
from moorage.worker.driver import Assignment, Driver, Living
from moorage.worker.drivers.kit import Kit
from moorage.worker.drivers.process.driver import STAGE_BOOT, ProcessDriver
from moorage.worker.drivers.supervisor_link import name_of
from moorage.worker.drivers.vm.handed_on import HandingInventory, open_handing
from moorage.worker.drivers.vm.images import FORMATS, find, format_of
from moorage.worker.drivers.vm.initramfs import WORK
from moorage.worker.drivers.vm.passthrough import NotHandedOn
from moorage.worker.drivers.vm.runner import SIGNALS, UP, VARIABLE, Plan
from moorage.worker.settings import WorkerSettings, check_rules
from moorage.worker.supervisor.capped_output import cut_at, output_path
from moorage.worker.supervisor.client import python_variables
from moorage.worker.supervisor.protocol import Ended, Event, Output, StartAttempt, Started

log = logging.getLogger("moorage.worker")

_MIB: Final = 1024 * 1024
#: memory for the guest's own kernel and programs, on top of what the job asked for
GUEST_MIB: Final = 128
#: size of a VM with a GPU if its job names no resources
GPU_CPUS: Final = 4
GPU_MEMORY_MIB: Final = 8192
#: how long after a failed return of a GPU it is tried again
GIVE_BACK_S: Final = 10.0
#: folder, in the state folder, for the GPUs that VMs have: journals and locks
HANDED_ON: Final = "handed-on"
PASSED_ON: Final = tuple(number.name for number in SIGNALS)
#: most bytes that a runner writes while its VM boots
_BOOT_BYTES_MAX: Final = 1 << 16
_KVM: Final = Path("/dev/kvm")
_CPUINFO: Final = Path("/proc/cpuinfo")


class VmSettings(msgspec.Struct, frozen=True):
    """Settings of the driver `vm`. A job cannot change them."""

    gpu_enabled: Annotated[bool, setting("Whether its jobs may have GPUs.")] = True
    kernel: Annotated[Path | None, setting("Linux kernel that the VMs boot. Required.")] = None
    initramfs: Annotated[
        Path | None, setting("Initramfs with the programs that jobs need: a shell, tar, virtio modules. Required.")
    ] = None
    qemu: Annotated[str, setting("QEMU's program: a path, or a name in PATH.")] = "qemu-system-x86_64"
    accelerator: Annotated[
        Literal["auto", "kvm", "tcg"],
        setting("How the guests' code runs: kvm, the slow tcg, or auto: kvm if it works, else tcg."),
    ] = "auto"
    boot: Annotated[float, setting("How long a VM may take to boot.", unit="s", ge=1, le=3600)] = 120.0
    cpus: Annotated[int, setting("CPUs of a VM if its job asks for none.", ge=1, le=255)] = 1
    memory: Annotated[
        int, setting("Memory of a VM if its job asks for none.", unit="bytes", ge=32 * _MIB, le=1 << 44)
    ] = 512 * _MIB
    images: Annotated[
        tuple[str, ...], setting("Folders with disk images that jobs may name; empty: jobs may name none.")
    ] = ()
    images_for: Annotated[
        dict[str, str],
        setting("Folders with a tenant's disk images instead of images, split by blanks; * is every other tenant."),
    ] = {}
    disk: Annotated[
        int, setting("How much a job may write to its copy of a disk image.", unit="bytes", ge=_MIB, le=1 << 44)
    ] = 10 * 1024 * _MIB
    user: Annotated[
        str | None, setting("User that QEMU switches to once it has opened its files, if the agent is root.")
    ] = "nobody"

    def __post_init__(self) -> None:
        check_rules("images_for", self.images_for)

    @property
    def all_folders(self) -> list[str]:
        """Return all folders with disk images, those of a single tenant included."""
        return [*self.images, *(folder for words in self.images_for.values() for folder in words.split())]

    def folders_of(self, tenant: str) -> Sequence[str]:
        """Return the folders whose disk images this tenant may use."""
        own = self.images_for.get(tenant, self.images_for.get(OTHERS))
        return self.images if own is None else own.split()


class VmDriver(ProcessDriver):
    """The driver `vm`; see the module's docstring. `own` are its settings."""

    name = "vm"
    tells_processes = False  # the processes that use a GPU are in the guest, not on the host
    joins_mps = False
    settings = VmSettings
    config = VmBlock
    capabilities = msgspec.structs.replace(
        ProcessDriver.capabilities,
        devices=KERNEL,  # a guest has what it was handed, and no process of its host
        answers_calls=False,
        reaches=False,
        sets_up=False,
        execs=False,
        signals=False,
        holds_stdin=False,
        exec_instead="run a server for shells in the VM, as sshd",
    )

    @classmethod
    async def open_handing(
        cls, settings: WorkerSettings, open_host: Callable[[], Awaitable[CombinedInventory]]
    ) -> Inventory:
        return await open_handing(settings.state_dir / HANDED_ON, open_inner=open_host)

    def __init__(self, kit: Kit) -> None:
        # QEMU takes what the guest gets, and what the guest does with a GPU is not seen here
        super().__init__(kit._replace(gpu_nodes=None, freezer=None))
        self.own: VmSettings = kit.own
        self._booting: dict[AttemptName, str] = {}  # attempts whose VM is still booting, with the runner's last line
        #: the PCI addresses of the GPUs that are handed on to attempts that this agent has started
        self._handed: dict[AttemptName, str] = {}
        #: hands GPUs on to VMs; None if that is not possible
        self._hands = kit.inventory if isinstance(kit.inventory, HandingInventory) else None
        self._gives_back: asyncio.Task[None] | None = None
        self._gives_again = False
        if not kit.simulated and (why_not := self._hands.why_not() if self._hands else "no real devices"):
            if kit.devices and kit.own.gpu_enabled:
                log.warning(
                    "worker %s: VMs get no GPUs on this host: %s", kit.worker, why_not.removeprefix("passthrough: ")
                )
            self.capabilities = msgspec.structs.replace(self.capabilities, gpu_enabled=False)

    async def open(self) -> list[Living]:
        own = self.own
        for name, path in (("kernel", own.kernel), ("initramfs", own.initramfs), ("qemu", shutil.which(own.qemu))):
            if path is None or not os.access(path, os.R_OK):
                raise refuse(
                    "failed-precondition",
                    f"the driver vm has no {name} that it can read",
                    field=f"$.driver.vm.{name}",
                    found=str(path or getattr(own, name)),
                    next=f"set {name} in [driver.vm], or remove vm from drivers",
                )
        if own.accelerator == "kvm" and not has_kvm():
            raise refuse(
                "failed-precondition",
                "accelerator is kvm, and this host has no KVM: /dev/kvm does not open, or there is no vmx or svm",
                field="$.driver.vm.accelerator",
                found="kvm",
                allowed="auto or tcg",
                next="set accelerator in [driver.vm], or remove vm from drivers",
            )
        living = [self._starting_while_it_boots(each) for each in await super().open()]
        self._give_back()
        return living

    async def close(self) -> None:
        if self._gives_back is not None:
            self._gives_back.cancel()
            await asyncio.wait((self._gives_back,))
        await super().close()

    def can(self) -> Capabilities:
        return self._link.here(Driver.can(self))  # a job is the root of its VM, whose memory is what it asked for

    def check(self, request: Request) -> None:
        """Raise Refused for what no VM can offer, and LacksHere for an image that this worker lacks."""
        gpu, run = request.effective_gpu, request.workload
        if run.user is not None:
            raise _wrong("run.user", run.user, "a VM runs its job as the guest's root: name no user")
        if run.checkpoint_signal is not None and run.checkpoint_signal not in PASSED_ON:
            allowed = ", ".join(PASSED_ON)
            raise _wrong("run.checkpoint_signal", run.checkpoint_signal, f"a VM gets only these signals: {allowed}")
        if request.image and format_of(request.image) is None:
            allowed = ", ".join(FORMATS)
            raise _wrong("run.image", request.image, f"an image of a VM is the name of a file that ends with {allowed}")
        if request.image and find(request.image, self.own.all_folders) is None:
            next_step = "put it into a folder of the setting images of [driver.vm]"
            raise LacksHere(f"this worker has no disk image {request.image}", found=request.image, next_step=next_step)
        if gpu is not None and (gpu.scheduling == "gang" or gpu.distributed is not None):
            raise _wrong("gpu.scheduling", "gang", "the ranks of a gang cannot meet: a VM has no network")
        if gpu is not None and gpu.effective_sharing != "exclusive":
            raise _wrong("gpu.sharing", gpu.effective_sharing, "a VM has its GPU alone: ask for the mode exclusive")
        if gpu is not None and gpu.count > 1:
            raise _wrong("gpu.count", str(gpu.count), "a VM gets one GPU")

    # -- events of the supervisor about runners

    def on_event(self, key: str, event: Event) -> None:
        name = name_of(key)
        if isinstance(event, Started):
            return  # the start of the job is reported once its VM has booted
        if isinstance(event, Output):
            if event.stream == "stderr" and name in self._booting:
                self._on_boot_lines(name, event.data.decode(errors="replace"))
            if not self._stream_output:
                return
        super().on_event(key, event)

    def _on_boot_lines(self, name: AttemptName, said: str) -> None:
        """Take what the runner writes while its VM boots; the guest writes nothing there yet.

        Note the start of the attempt if its VM is up; else keep the last line, which says why a VM did not boot.
        """
        if UP in said:
            del self._booting[name]
            self._started.append(name)
        else:
            lines = [line for line in said.split("\n") if line]
            self._booting[name] = lines[-1] if lines else self._booting[name]

    def _reported_end(self, name: AttemptName, event: Ended) -> Ended:
        """Return the end of an attempt: a runner that an unrequested signal ended means that its VM did not boot, or is
        lost.
        """
        if event.reason != "exit" or event.signal is None:
            return event
        if name not in self._booting and self._boot_lines(name):  # it ended while no agent ran
            self._taken_over(name)
        if name in self._booting:
            message = self._booting[name].removeprefix("moorage: ") or "its runner was killed"
            return msgspec.structs.replace(event, reason="start-failed", stage=STAGE_BOOT, message=message)
        return msgspec.structs.replace(event, reason="supervisor-died")

    def _taken_over(self, name: AttemptName) -> None:
        """Read again how far the VM has booted: its runner may have reported it to an earlier agent."""
        if (said := self._boot_lines(name)) is not None:
            self._booting[name] = ""
            self._on_boot_lines(name, said)

    # -- inside

    def _boot_lines(self, name: AttemptName) -> str | None:
        """Return what a runner has written while its VM boots; "" if there is no file yet.

        Return None if the VM is up, or the file cannot be read or was cut.
        """
        try:
            with open(output_path(self._link.state, self._key(name), "stderr"), "rb") as file:
                said = file.read(_BOOT_BYTES_MAX)
        except FileNotFoundError:
            return ""
        except OSError:
            return None
        text = said.decode(errors="replace")
        return None if UP in text or cut_at(said, 0) is not None else text

    def _starting_while_it_boots(self, living: Living) -> Living:
        """Return an attempt with the phase `starting` while its VM boots."""
        is_up = living.phase != "running" or living.name not in self._booting
        return living if is_up else msgspec.structs.replace(living, phase="starting")

    def _release(self, names: Sequence[AttemptName]) -> None:
        super()._release(names)
        for name in names:
            self._booting.pop(name, None)
            self._handed.pop(name, None)
        self._give_back()

    def _disk_of(self, tenant: str, image: str) -> str:
        """Return the file of a job's disk image, "" for none. Raises Refused if the tenant may not use that image."""
        if not image:
            return ""
        folders = self.own.folders_of(tenant)
        found = find(image, folders)
        if found is None:
            allowed = f"a file in {', '.join(folders[:5])}" if folders else "none"
            message = f"{NOT_PERMITTED}no disk image {image} that {tenant} may use on this worker (allowed: {allowed})"
            raise refuse("not-permitted", message, found=image, allowed=allowed, next="ask the operator of the worker")
        return found

    def _is_ready(self, assignment: Assignment) -> bool:
        return super()._is_ready(assignment) and not self._gets_device(assignment)

    def _gets_device(self, assignment: Assignment) -> bool:
        return bool(assignment.devices) and not self._simulated

    async def _made_ready(self, assignment: Assignment, attempt: StartAttempt) -> StartAttempt:
        attempt = await super()._made_ready(assignment, attempt)
        if not self._gets_device(assignment):
            return attempt
        [device] = assignment.devices
        if self._hands is None:
            raise LacksHere("this worker cannot hand a GPU on to a VM")
        address = self._handed[assignment.name] = sysfs_address(device.pci)
        # in a task of its own: if the start is cancelled meanwhile, the GPU must not be left half bound
        binding = asyncio.get_running_loop().create_task(self._hands.hand_on(device))
        binding.add_done_callback(self._bound)
        try:
            functions = await asyncio.shield(binding)
        except NotHandedOn as error:
            raise HostAtFault(error.problem.message) from None
        *words, plan = attempt.argv
        own = msgspec.json.decode(plan, type=Plan)
        own = msgspec.structs.replace(
            own, devices=functions, lock=str(self._hands.lock_of(address)), root=str(self._hands.passthrough.root)
        )
        return msgspec.structs.replace(attempt, argv=(*words, msgspec.json.encode(own).decode()))

    def _bound(self, binding: asyncio.Task[list[str]]) -> None:
        if not binding.cancelled() and binding.exception() is None:
            self._give_back()  # if its start was withdrawn

    def _give_back(self) -> None:
        """Begin to give back to the host all GPUs that were handed on and that no attempt has now."""
        self._gives_again = True
        if self._hands is not None and self._hands.away and self._gives_back is None:
            self._gives_back = asyncio.get_running_loop().create_task(self._give_back_all())

    async def _give_back_all(self) -> None:
        """Give back the GPUs that no attempt has now; try again what the kernel refuses, and log each fault once."""
        assert self._hands is not None
        told: list[str] = []
        while self._gives_again:
            self._gives_again = False
            try:
                faults = await self._hands.take_back(set(self._handed.values()))
            except OSError as error:  # no descriptor left
                faults = [f"the GPUs of ended VMs cannot be given back: {error.strerror or error}"]
            if faults:
                if faults != told:
                    log.error("%s", "; ".join(faults))
                told, self._gives_again = faults, True
                await asyncio.sleep(GIVE_BACK_S)
        self._gives_back = None

    def _start_attempt(self, assignment: Assignment) -> StartAttempt:
        """Return the runner to start. Raises HostAtFault, SecretRefused, and Refused if the policy forbids it."""
        run, own = assignment.run, self.own
        tenant, resources = assignment.name[0], assignment.request.resources
        self._policy.check_program(tenant, run)
        self._policy.check_secrets(tenant, run.env)
        ours = assignment.environment(simulated=self._simulated, sees_only_its_own=not self._simulated)
        guest = process_environment(resolve_secrets(run.env, self._secrets_dir), ours, folder=f"/{WORK}")
        folder = self._folders.make(assignment.name, run.grace_s, run.keep, run.checkpoint, assignment.accepted_ms)
        has_gpu = self._gets_device(assignment)
        cpu_milli = (resources.cpu_milli if resources else 0) or 1000 * (GPU_CPUS if has_gpu else own.cpus)
        memory_mib = (resources.memory_mib if resources else 0) or (GPU_MEMORY_MIB if has_gpu else own.memory // _MIB)
        disk = self._disk_of(tenant, assignment.request.image)
        plan = Plan(
            argv=run.argv,
            cwd=os.path.join(f"/{WORK}", run.cwd or ""),
            folder=folder,
            keep=bool(run.keep or run.checkpoint),
            folder_bytes=self._folders.bounds.bytes_max,
            qemu=shutil.which(own.qemu) or own.qemu,
            kernel=str(own.kernel),
            initramfs=str(own.initramfs),
            accelerators=accelerators(own.accelerator),
            boot_s=own.boot,
            cpus=-(-cpu_milli // 1000),
            memory_mib=memory_mib + GUEST_MIB,
            disk=disk,
            disk_bytes=own.disk,
            user=_qemu_user(self._policy.user_of(tenant) or own.user),
        )
        self._booting[assignment.name] = ""
        marks = {name: ours[name] for name in MARK_NAMES}
        return StartAttempt(
            key=self._key(assignment.name),
            argv=(sys.executable, "-P", "-m", "moorage.worker.drivers.vm.runner", msgspec.json.encode(plan).decode()),
            env={**python_variables(), **marks, **{VARIABLE + name: value for name, value in guest.items()}},
            timeout_s=run.timeout_s,
            ends_in_s=assignment.ends_in_s,
            grace_s=run.grace_s,
            checkpoint_signal=run.checkpoint_signal,
            checkpoint_before_s=run.checkpoint_before_s if run.checkpoint_signal else None,
            on_partition=assignment.request.on_partition,
            output_cap_bytes=self._output_cap_bytes,
            stream_output=True,  # the runner's report that the VM is up is always needed
            cpu_milli=cpu_milli if resources and resources.cpu_milli else None,
        )


def _qemu_user(user: str | None) -> str | None:
    """Return a user in the form of QEMU's -runas; None for no user, or if this agent cannot change the user."""
    if user is None or os.geteuid() != 0:
        return None
    return f"{user}:{user}" if user.isdecimal() else user


def has_kvm(kvm: Path = _KVM, cpuinfo: Path = _CPUINFO) -> bool:
    """Return whether KVM can work here.

    /dev/kvm alone proves nothing: it may exist on a machine whose processor lacks virtualization. QEMU then starts
    without an error, and the guest never runs.
    """
    try:
        flags = next(line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")).split()
    except (OSError, StopIteration):
        flags = []
    return os.access(kvm, os.R_OK | os.W_OK) and not {"vmx", "svm"}.isdisjoint(flags)


def accelerators(wanted: str, kvm: Path = _KVM, cpuinfo: Path = _CPUINFO) -> list[str]:
    """Return the accelerators that QEMU tries, in this order; `wanted` is the setting `accelerator`."""
    if wanted != "auto":
        return [wanted]
    return ["kvm", "tcg"] if has_kvm(kvm, cpuinfo) else ["tcg"]


def _wrong(field: str, found: str, message: str) -> Refused:
    return refuse("invalid-argument", message, field=f"$.{field}", found=found)

"""The driver of virtual machines: the supervisor starts a runner for each job, and the runner starts QEMU.

The runner is a process as any job's: it is asked to end, timed out, fenced and taken over as one, so this is the driver
of processes with another command line. `vm/runner.py` tells how a job comes into its VM and out of it.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from moorage.schemas.driver_config import VmBlock
from moorage.schemas.errors import Refused, refuse
from moorage.schemas.job import Request
from moorage.schemas.settings import setting
from moorage.system.proctree import MARK_NAMES
from moorage.worker.drivers.base import Assignment, Living
from moorage.worker.drivers.kit import Kit
from moorage.worker.drivers.process import STAGE_BOOT, ProcessDriver
from moorage.worker.drivers.supervisor_link import name_of
from moorage.worker.environment import process_environment
from moorage.worker.member_messages import MemberName
from moorage.worker.secret_files import resolve_secrets
from moorage.worker.supervisor.client import python_variables
from moorage.worker.supervisor.protocol import Ended, Event, Output, Started, StartMember
from moorage.worker.vm.initramfs import WORK
from moorage.worker.vm.runner import SIGNALS, UP, VARIABLE, Plan

_MIB: Final = 1024 * 1024
#: what the guest's own kernel and programs may take, beside what the job asked for
GUEST_MIB: Final = 128
#: of a VM with a GPU whose job names no resources
GPU_CPUS: Final = 4
GPU_MEMORY_MIB: Final = 8192
PASSED_ON: Final = tuple(number.name for number in SIGNALS)
_KVM: Final = Path("/dev/kvm")
_CPUINFO: Final = Path("/proc/cpuinfo")


class VmSettings(msgspec.Struct, frozen=True):
    """Settings of the driver `vm`. A job can change none of it."""

    gpu_enabled: Annotated[bool, setting("Whether its jobs may have GPUs.")] = True
    kernel: Annotated[Path | None, setting("Linux kernel that the VMs boot. Needed.")] = None
    initramfs: Annotated[
        Path | None, setting("Initramfs with what jobs run: a shell, tar, the modules of virtio. Needed.")
    ] = None
    qemu: Annotated[str, setting("QEMU's program: a path, or a name in PATH.")] = "qemu-system-x86_64"
    accelerator: Annotated[
        Literal["auto", "kvm", "tcg"],
        setting("What runs the guests' code: kvm, the slow tcg, or auto: kvm where it works, else tcg."),
    ] = "auto"
    boot: Annotated[float, setting("How long a VM may take to come up.", unit="s", ge=1, le=3600)] = 120.0
    cpus: Annotated[int, setting("CPUs of a VM whose job asks for none.", ge=1, le=255)] = 1
    memory: Annotated[
        int, setting("Memory of a VM whose job asks for none.", unit="bytes", ge=32 * _MIB, le=1 << 44)
    ] = 512 * _MIB
    user: Annotated[
        str | None, setting("User that QEMU becomes once it has opened its files, where the agent is root.")
    ] = "nobody"


class VmDriver(ProcessDriver):
    """See the module's text. `own` are its settings."""

    name = "vm"
    tells_processes = False  # what holds a GPU is in the guest, and no process of the host
    joins_mps = False
    settings = VmSettings
    config = VmBlock
    own = VmSettings()
    #: what the runners of these members said last; their VMs are not up yet
    _booting: dict[MemberName, str]

    @classmethod
    def from_kit(cls, kit: Kit) -> VmDriver:
        driver = super().from_kit(kit)
        assert isinstance(driver, VmDriver)
        driver.own = kit.own
        driver._booting = {}
        if not kit.simulated:  # devices are not handed on yet (see vm/passthrough.py)
            driver.capabilities = msgspec.structs.replace(cls.capabilities, gpu_enabled=False)
        return driver

    async def open(self) -> list[Living]:
        own = self.own
        for name, path in (("kernel", own.kernel), ("initramfs", own.initramfs), ("qemu", shutil.which(own.qemu))):
            if path is None or not os.access(path, os.R_OK):
                raise refuse(
                    "failed-precondition",
                    f"the driver vm has no {name} that it can read",
                    field=f"$.driver.vm.{name}",
                    found=str(path or getattr(own, name)),
                    next=f"set {name} in [driver.vm], or take vm out of drivers",
                )
        return await super().open()

    def check(self, request: Request) -> None:
        """Raise Refused (`invalid-argument`) for what no VM gives."""
        gpu, run = request.gpu, request.workload
        if run.user is not None:
            raise _wrong("run.user", run.user, "a VM runs its job as the guest's root: name no user")
        if run.checkpoint_signal is not None and run.checkpoint_signal not in PASSED_ON:
            allowed = ", ".join(PASSED_ON)
            raise _wrong("run.checkpoint_signal", run.checkpoint_signal, f"a VM is told of these alone: {allowed}")
        if request.image:
            raise _wrong("run.image", request.image, "the driver vm takes no image: its worker's initramfs has all")
        if gpu is not None and (gpu.scheduling == "gang" or gpu.distributed is not None):
            raise _wrong("gpu.scheduling", "gang", "the ranks of a gang cannot meet: a VM has no network")
        if gpu is not None and gpu.effective_sharing != "exclusive":
            raise _wrong("gpu.sharing", gpu.effective_sharing, "a VM has its GPU alone: ask for the mode exclusive")

    # -- what the supervisor says of runners

    def on_event(self, key: str, event: Event) -> None:
        name = name_of(key)
        if isinstance(event, Started):
            return  # the start of the job is reported once its VM is up
        if isinstance(event, Output):
            if event.stream == "stderr" and name in self._booting:
                self._hear(name, event.data.decode(errors="replace"))
            if not self._stream_output:
                return
        super().on_event(key, event)

    def _hear(self, name: MemberName, said: str) -> None:
        """What the runner writes while its VM comes up; all of it is its own, and none the guest's."""
        if UP in said:
            del self._booting[name]
            self._started.append(name)
        else:
            lines = [line for line in said.split("\n") if line]
            self._booting[name] = lines[-1] if lines else self._booting[name]

    def _end_of(self, name: MemberName, event: Ended) -> Ended:
        """A runner that a signal ended, unasked, heard no end of its job: the VM did not come up, or is lost."""
        if event.reason != "exit" or event.signal is None:
            return event
        if name in self._booting:
            message = self._booting[name].removeprefix("moorage: ") or "its runner was killed"
            return msgspec.structs.replace(event, reason="start-failed", stage=STAGE_BOOT, message=message)
        return msgspec.structs.replace(event, reason="supervisor-died")

    # -- inside

    def _over(self, names: Sequence[MemberName]) -> None:
        super()._over(names)
        for name in names:
            self._booting.pop(name, None)

    def _start_member(self, assignment: Assignment) -> StartMember:
        """Raises FolderUnavailable, SecretRefused, and Refused for what the policy forbids."""
        run, own = assignment.run, self.own
        tenant, resources = assignment.name[0], assignment.request.resources
        self._policy.check_program(tenant, run)
        self._policy.check_secrets(tenant, run.env)
        ours = assignment.environment(simulated=self._simulated)
        guest = process_environment(resolve_secrets(run.env, self._secrets_dir), ours, folder=f"/{WORK}")
        folder = ""
        if self._folders is not None and assignment.has_folder:
            folder = self._folders.make(assignment.name, run.grace_s, run.keep)
        has_gpu = bool(assignment.devices) and not self._simulated
        cpu_milli = (resources.cpu_milli if resources else 0) or 1000 * (GPU_CPUS if has_gpu else own.cpus)
        memory_mib = (resources.memory_mib if resources else 0) or (GPU_MEMORY_MIB if has_gpu else own.memory // _MIB)
        plan = Plan(
            argv=run.argv,
            cwd=os.path.join(f"/{WORK}", run.cwd or ""),
            folder=folder,
            keep=bool(folder and run.keep),
            folder_bytes=self._folders.bounds.bytes_max if self._folders is not None else 0,
            qemu=shutil.which(own.qemu) or own.qemu,
            kernel=str(own.kernel),
            initramfs=str(own.initramfs),
            accelerators=accelerators(own.accelerator),
            boot_s=own.boot,
            cpus=-(-cpu_milli // 1000),
            memory_mib=memory_mib + GUEST_MIB,
            user=_qemu_user(self._policy.user_of(tenant) or own.user),
        )
        self._booting[assignment.name] = ""
        marks = {name: ours[name] for name in MARK_NAMES}
        return StartMember(
            key=self._key(assignment.name),
            argv=(sys.executable, "-P", "-m", "moorage.worker.vm.runner", msgspec.json.encode(plan).decode()),
            env={**python_variables(), **marks, **{VARIABLE + name: value for name, value in guest.items()}},
            timeout_s=run.timeout_s,
            ends_in_s=assignment.ends_in_s,
            grace_s=run.grace_s,
            checkpoint_signal=run.checkpoint_signal,
            checkpoint_before_s=run.checkpoint_before_s if run.checkpoint_signal else None,
            on_partition=assignment.request.on_partition,
            output_cap_bytes=self._output_cap_bytes,
            stream_output=True,  # the runner's word that the VM is up is needed in any case
            cpu_milli=cpu_milli if resources and resources.cpu_milli else None,
        )


def _qemu_user(user: str | None) -> str | None:
    """Return what QEMU's -runas takes for a user; None where this agent can make it no other one."""
    if user is None or os.geteuid() != 0:
        return None
    return f"{user}:{user}" if user.isdecimal() else user


def accelerators(wanted: str, kvm: Path = _KVM, cpuinfo: Path = _CPUINFO) -> list[str]:
    """Return what QEMU is to try, in this order. /dev/kvm alone says nothing: a machine without the processor's part
    of it may have the file, and QEMU then starts, gives no error, and the guest never begins."""
    if wanted != "auto":
        return [wanted]
    try:
        flags = next(line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")).split()
    except (OSError, StopIteration):
        flags = []
    has_kvm = os.access(kvm, os.R_OK | os.W_OK) and not {"vmx", "svm"}.isdisjoint(flags)
    return ["kvm", "tcg"] if has_kvm else ["tcg"]


def _wrong(field: str, found: str, message: str) -> Refused:
    return refuse("invalid-argument", message, field=f"$.{field}", found=found)

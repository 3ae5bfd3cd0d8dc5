"""The checks of `moorage doctor` that concern this host: what a worker needs here, and the settings file."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Final

from moorage.cli.doctor.check import failed
from moorage.client.view.checks import Check
from moorage.schemas.errors import MPS_NOT_ASKED, MoorageError
from moorage.schemas.optional import pip_install
from moorage.schemas.units import many

if TYPE_CHECKING:
    from moorage.worker.settings import WorkerSettings

NVML_S_MAX: Final = 10.0


def settings() -> Check:
    from moorage.cli.framework.settings import the_file, unread_here
    from moorage.schemas.settings import NO_FILE

    try:
        file = the_file()
    except MoorageError as error:
        return failed("settings", error)
    if file is NO_FILE:
        found = "no settings file is used; settings come from defaults, environment variables and flags"
    else:
        found = f"{file.path}: {', '.join(f'[{name}]' for name in file.tables) or 'empty'}"
    if unread := unread_here(file):
        return Check("settings", "warn", found, f"only moorage up reads the moorage.toml of this folder: {unread}")
    return Check("settings", "ok", found)


def _of_worker() -> WorkerSettings | None:
    """Return the settings of a worker on this machine; None if they cannot be used, which another check reports."""
    from moorage.cli.framework.settings import the_file
    from moorage.schemas.settings import made, settle
    from moorage.worker.settings import SECTION, WorkerSettings

    try:
        return made(WorkerSettings, settle(SECTION, WorkerSettings, file=the_file(), defaults={"state_dir": Path()}))
    except MoorageError:
        return None


def secrets() -> Check | None:
    """Check that only this user can read a worker's secrets, and that the settings say who may use them; None if no
    folder of secrets is set."""
    from moorage.worker.attempt.secret_files import trouble_with_secrets
    from moorage.worker.drivers.policy import Policy

    of_worker = _of_worker()
    if of_worker is None or of_worker.secrets_dir is None:
        return None
    folder, is_open = of_worker.secrets_dir, Policy.of(of_worker).leaves_secrets_open
    if trouble := trouble_with_secrets(folder):
        fix = f"as the worker's user: mkdir -p -m 700 {folder}; chmod 700 {folder}; chmod 600 {folder}/*"
        return Check("secrets", "warn", trouble, fix)
    if is_open:
        fix = "set secrets_for, which says which tenant may use which secret; moorage doctor --example shows its form"
        return Check("secrets", "warn", f"every tenant may use every secret in {folder}", fix)
    return Check("secrets", "ok", f"only this user can read the secrets in {folder}")


def root_jobs() -> Check | None:
    """Check that no tenant's processes run as root; None unless this user is root, as a worker's agent would be."""
    from moorage.worker.drivers.policy import ROOT_FIX, ROOT_OPEN, Policy

    of_worker = _of_worker()
    if of_worker is None or os.geteuid() != 0:
        return None
    if Policy.of(of_worker).leaves_root_open:
        return Check("root jobs", "warn", f"of a worker with these settings, {ROOT_OPEN}", ROOT_FIX)
    return Check("root jobs", "ok", "a worker with these settings runs no process of a job as root")


def moorage() -> Check:
    from moorage.system.build import build

    return Check("moorage", "ok", f"{build()}, in {sys.prefix}")


def python() -> Check:
    return Check("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.release()}")


def uvloop() -> Check:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return Check("uvloop", "ok", version("uvloop"))
    except PackageNotFoundError:
        return Check(
            "uvloop",
            "warn",
            "uvloop is not installed",
            f"{pip_install('uvloop')}: an idle scheduler then needs half the CPU time",
        )


def launcher() -> Check:
    """Check whether a worker of this installation starts jobs with the compiled launcher."""
    from moorage.worker.supervisor.launcher_client import open_compiled

    descriptor, why = open_compiled()
    if why:
        fix = (
            "without it each job starts some milliseconds later: install gcc, then install moorage again, as "
            "root or as the worker's user"
        )
        return Check("launcher", "warn", why, fix)
    os.close(descriptor)
    return Check("launcher", "ok", "the compiled launcher starts jobs")


def users() -> Check:
    """Tell whether a worker that this user starts can run jobs as other users."""
    if os.geteuid() == 0:
        return Check("users", "ok", "a worker that this user starts can run jobs as any user")
    return Check("users", "ok", "a worker that this user starts runs jobs as this user alone: it is not root")


def limits_words(controllers: Collection[str]) -> str:
    """Return which of a job's cores and memory are limits, and which are only counted when hosts are chosen."""
    named = {"cpu": "cores (--cpu)", "memory": "memory (--memory)"}
    kept = [words for name, words in named.items() if name in controllers]
    counted = [words for name, words in named.items() if name not in controllers]
    parts = [f"{' and '.join(kept)} of jobs are enforced"] if kept else []
    parts += [f"{' and '.join(counted)} of jobs are counted, not enforced"] if counted else []
    return ", ".join(parts)


def cgroup() -> Check:
    from moorage.system.cgroup import cgroup_of, controllers_below

    own = cgroup_of()
    if own is None:
        return Check(
            "cgroup",
            "warn",
            "no cgroup v2 is mounted",
            "mount cgroup v2: without it a worker finds the processes of a job by reading /proc",
        )
    probe = own / f"moorage-doctor-{os.getpid()}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        return Check(
            "cgroup",
            "warn",
            f"cgroup {own} is not writable: {error.strerror}",
            "run workers as root, or give their unit Delegate=yes",
        )
    return Check("cgroup", "ok", f"cgroup v2 at {own} is writable; {limits_words(controllers_below(own))}")


def device_fence() -> Check:
    """Tell whether the kernel keeps the jobs of a worker that this user starts to their GPUs; it is tried."""
    from moorage.system.cgroup import CgroupBase
    from moorage.system.device_fence import ControllerFences, fences_here

    name = f"moorage-doctor-{os.getpid()}"
    base = CgroupBase.open(name)
    fences, why = fences_here(name, base)
    if base is not None:
        base.remove_empty()
    if isinstance(fences, ControllerFences):
        fences.remove()
    if fences is None:
        found = f"a worker that this user starts names a job's GPUs by a variable alone: {why}"
        return Check("device-fence", "ok", f"{found} (as root the kernel keeps jobs to their GPUs)")
    return Check("device-fence", "ok", f"the kernel can keep jobs to their GPUs ({fences.kind})")


async def nvml() -> Check:
    from moorage.worker.devices.readers.nvml import NvmlUnavailable, open_nvml

    try:
        inventory = await open_nvml(open_timeout_s=NVML_S_MAX)
    except NvmlUnavailable as error:
        return Check(
            "nvml", "warn", str(error), "a worker can offer this host's NVIDIA GPUs only if nvidia-smi works here"
        )
    try:
        devices = inventory.devices()
        if inventory.faults:
            return Check("nvml", "warn", "; ".join(inventory.faults), "reset or replace the GPUs that are named")
        names = ", ".join(sorted({device.name for device in devices}))
        return Check(
            "nvml", "ok", f"{many(len(devices), 'GPU')}: {names}" if devices else "this host has no NVIDIA GPU"
        )
    finally:
        inventory.close()


async def engines() -> list[Check]:
    """Check that the engines answer of the drivers that the settings name: none for drivers without an engine."""
    from moorage.cli.framework.settings import the_file
    from moorage.worker.drivers.loading import find

    of_worker = _of_worker()
    if of_worker is None:
        return []
    checks = []
    try:
        for each in find(of_worker.drivers, the_file(), simulated=True):
            try:
                found = await each.kind.ask_engine(each.own)
            except MoorageError as error:
                checks.append(failed("engine", error))
            else:
                checks += [Check("engine", "ok", found)] if found else []
    except MoorageError as error:
        checks.append(failed("drivers", error))
    return checks


async def limiter() -> Check | None:
    """Check whether the limiter can tell what jobs use of each GPU; None if the settings do not turn a limiter on."""
    from moorage.worker.devices.readers.base import HeldUnknown
    from moorage.worker.devices.readers.nvml import NvmlUnavailable, open_nvml

    of_worker = _of_worker()
    if of_worker is None or not of_worker.limiter:
        return None
    try:
        inventory = await open_nvml(open_timeout_s=NVML_S_MAX, sample_timeout_s=NVML_S_MAX)
    except NvmlUnavailable:
        return None  # the line of NVML has told it
    found = list[str]()
    try:
        for slot, device in enumerate(inventory.devices()):
            try:
                await inventory.worked(slot)
            except HeldUnknown as unknown:
                found.append(f"{device.uuid}: {unknown.reason}")
    finally:
        inventory.close()
    if found:
        fix = (
            "on those GPUs the limiter allows a constant rate of kernel launches, set by the share, not by measured use"
        )
        return Check("limiter", "warn", "; ".join(found), fix)
    return Check("limiter", "ok", "the use of each GPU can be measured for each process")


def mps(pipe: Path | None = None) -> Check | None:
    """Check whether ends of MPS clients can be announced to an operator's daemon; None if the settings offer none.

    `pipe` is the daemon's directory, by default the one that CUDA has.
    """
    from moorage.system.device_environment import MPS_PIPE_DIRECTORY
    from moorage.worker.sharing.mps.control import PROGRAM

    of_worker = _of_worker()
    if of_worker is None or of_worker.mps != "operator" or "mps" not in of_worker.modes:
        return None
    control, why = (pipe or Path(MPS_PIPE_DIRECTORY)) / "control", ""
    try:
        owner = control.stat().st_uid
    except FileNotFoundError:
        why = f"there is no {control}: no daemon runs there"
    except OSError as error:
        why = f"{control} cannot be reached: {error.strerror}"
    else:
        if os.geteuid() not in (0, owner):
            why = f"the daemon of {control} is that of uid {owner}, and this is uid {os.geteuid()}"
    if shutil.which(PROGRAM) is None:
        why = f"{PROGRAM} is not on the PATH"
    if not why:
        return Check("mps", "ok", "the MPS daemon is asked before one of its clients ends")
    fix = "start the daemon and the worker as one user; else a job that ends in a kernel makes its neighbours fail"
    return Check("mps", "warn", f"{MPS_NOT_ASKED}: {why}", fix)


def huge_pages(setting: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled")) -> Check | None:
    """Check whether the host's pages slow freezing down; None if the settings freeze no job, or the kernel has no huge
    pages."""
    of_worker = _of_worker()
    if of_worker is None or not of_worker.auto_freeze:
        return None
    try:
        now = setting.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return None
    if now == "always":
        return Check("huge pages", "ok", "jobs freeze into huge pages")
    found = f"{setting} is {now or 'unknown'}: jobs freeze at two thirds of the speed that they have with always"
    return Check("huge pages", "warn", found, f"as root: echo always > {setting}")

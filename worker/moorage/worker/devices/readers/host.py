"""Describe the host: ids that last as long as they should, and the cores and memory that this process may use."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moorage.schemas.names import worker_slug
from moorage.system.cgroup import cgroup_levels
from moorage.system.proctree import boot_id

#: Turns the machine id into one of moorage's own: machine-id(5) forbids to show the raw one on a network.
_APPLICATION: Final = b"moorage worker machine"
#: file in a state folder with that folder's id
FOLDER_FILE: Final = "folder-id"
_MACHINE_ID: Final = re.compile(r"[0-9a-f]{32}")
_MIB: Final = 1024 * 1024
_ROOT: Final = Path("/")


@dataclass(frozen=True, slots=True)
class HostFacts:
    """A host's description. `machine` survives reboots, `boot` does not; `cpu_milli` is in thousandths of a core."""

    worker: str
    hostname: str
    machine: str
    boot: str
    cpu_milli: int
    memory_mib: int


def host_facts(state_folder: Path, root: Path = _ROOT) -> HostFacts:
    """Return the description; `root` is the root of the file system.

    Raises OSError if a random machine id must be kept in `state_folder` and cannot be written (see `machine_id`).
    """
    hostname = socket.gethostname()
    return HostFacts(
        worker=worker_slug(hostname),
        hostname=hostname,
        machine=machine_id(state_folder, root),
        boot=boot_id(root),
        cpu_milli=cpu_milli(root),
        memory_mib=memory_mib(root),
    )


def machine_id(state_folder: Path, root: Path = _ROOT) -> str:
    """Return 32 hex digits that identify this machine: keyed from machine-id(5), else the firmware's uuid, else random.

    The random one is kept in `state_folder`. If a host has neither of the first two and loses that folder, it becomes
    another machine.
    """
    for path, clean in (("etc/machine-id", str.strip), ("sys/class/dmi/id/product_uuid", _without_dashes)):
        try:
            raw = clean((root / path).read_text()).lower()
        except OSError:
            continue
        if _MACHINE_ID.fullmatch(raw) and len(set(raw)) > 1:  # firmware without a uuid reports all 0 or all f
            return hmac.new(bytes.fromhex(raw), _APPLICATION, hashlib.sha256).hexdigest()[:32]
    return _drawn_machine_id(state_folder)


def _without_dashes(text: str) -> str:
    return text.strip().replace("-", "")


def _drawn_machine_id(state_folder: Path) -> str:
    path = state_folder / "machine-id"
    kept = _kept(path)
    return kept if _MACHINE_ID.fullmatch(kept) else _keep(path, secrets.token_hex(16))


def folder_machine(machine: str, state_folder: Path) -> str:
    """Return the machine id that the worker of a state folder sends in its joins (docs/decisions/0044).

    Only the state folder records which jobs outlive an agent. A second agent with another folder of the same machine
    does not know those jobs, so it joins as another machine: its join is refused until the session of the first agent,
    and with it the leases of those jobs, is lost. A folder without an id gets one. Raises OSError.
    """
    path = state_folder / FOLDER_FILE
    kept = _kept(path)
    if not _MACHINE_ID.fullmatch(kept):
        kept = _keep(path, secrets.token_hex(16))
    return hmac.new(bytes.fromhex(kept), machine.encode(), hashlib.sha256).hexdigest()[:32]


def _kept(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except FileNotFoundError:
        return ""


def _keep(path: Path, text: str) -> str:
    """Write the text into the file, atomically and synced to the disk, and return it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    with open(unfinished, "w", opener=_owner_only) as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    return text


def _owner_only(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def cpu_milli(root: Path = _ROOT) -> int:
    """Return the thousandths of a core that this process may use: its CPU affinity, or less by a cgroup's quota."""
    allowed = len(os.sched_getaffinity(0)) * 1000
    for folder in cgroup_levels("", root=root):
        fields = _read(folder / "cpu.max").split()
        if len(fields) == 2 and fields[0].isdigit() and int(fields[1]):
            allowed = min(allowed, int(fields[0]) * 1000 // int(fields[1]))
    for folder in cgroup_levels("cpu", root=root):
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):
            allowed = min(allowed, int(quota) * 1000 // int(period))
    return allowed


def memory_mib(root: Path = _ROOT) -> int:
    """Return the machine's memory in MiB, or less if a cgroup limits it; 0 if /proc/meminfo cannot be read."""
    total = re.search(r"^MemTotal:\s+(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    allowed = int(total[1]) * 1024 if total else 0
    limits = [_read(folder / "memory.max") for folder in cgroup_levels("", root=root)]
    limits += [_read(folder / "memory.limit_in_bytes") for folder in cgroup_levels("memory", root=root)]
    return min([allowed, *(int(limit) for limit in limits if limit.isdigit())]) // _MIB


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""

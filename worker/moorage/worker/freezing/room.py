"""Decide whether the host's RAM, and the memory that the job may use, have room for what a process holds on its GPUs.

The driver keeps the GPU memory of a frozen process in that process, so it counts for the job's own memory limit: by
going beyond it the job would be killed for being frozen.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from moorage.system.cgroup import cgroup_levels

#: MiB of the host's RAM that stay free for all else
MARGIN_MIB: Final = 1024
_MIB: Final = 1 << 20
#: by version of cgroups (the controller's name is "" in version 2): limit, use, and the use's parts that the kernel
#: gives up before it kills
_FILES: Final = {
    "": ("memory.max", "memory.current", ("active_file", "inactive_file")),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
}

log = logging.getLogger("moorage.worker")


def room_fault(pid: int, wanted_mib: int, root: Path = Path("/")) -> str:
    """Return why `wanted_mib` more of a process's memory have no room; "" if they have, or if that is unknown."""
    return _fault_of_host(wanted_mib, root) or _fault_of_job(pid, wanted_mib, root)


def _fault_of_host(wanted_mib: int, root: Path) -> str:
    try:
        available_mib = _numbers(root / "proc/meminfo")["MemAvailable:"] // 1024
    except (OSError, KeyError) as error:
        log.warning("the host's available RAM is unknown: %r", error)
        return ""
    if wanted_mib <= available_mib - MARGIN_MIB:
        return ""
    return (
        f"its {wanted_mib} MiB of GPU memory do not fit into the RAM of its host: {available_mib} MiB are available, "
        f"and {MARGIN_MIB} MiB of them are left to all else; free RAM there, and freeze it again"
    )


def _fault_of_job(pid: int, wanted_mib: int, root: Path) -> str:
    for controller, (limit_file, used_file, reclaimable) in _FILES.items():
        for level in cgroup_levels(controller, pid, root):
            try:
                limit = int((level / limit_file).read_text())
                stat = _numbers(level / "memory.stat")
                used = int((level / used_file).read_text()) - sum(stat.get(name, 0) for name in reclaimable)
            except (OSError, ValueError):  # no limit ("max"), or no such controller here
                continue
            left_mib = max(0, limit - used) // _MIB
            if wanted_mib > left_mib:
                return (
                    f"its {wanted_mib} MiB of GPU memory would count as memory of the job, which has {left_mib} MiB "
                    f"left of the {limit // _MIB} MiB that it may use, and would be killed; ask for more memory for it"
                )
    return ""


def _numbers(file: Path) -> Mapping[str, int]:
    """Return the number behind each name of a file of names and numbers. Raises OSError."""
    rows = [line.split() for line in file.read_text().splitlines()]
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}

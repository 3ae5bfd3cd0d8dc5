"""What is told of a workload that asks for more memory than its jobs use."""

from __future__ import annotations

from typing import Final

from moorage.schemas.sizes import SizedRow

#: with fewer measured jobs nothing is advised
JOBS_SURE: Final = 5
#: what was used, with a fifth more, is advised where it is at most half of what was asked for
_ROOM: Final = 1.2
_GIB: Final = 1024


def advice_of(row: SizedRow) -> list[str]:
    """Return what a workload could ask for instead, in words; nothing if that is not known, or not much less."""
    found: list[str] = []
    if row.instead and row.gpu_jobs >= JOBS_SURE and row.gpu_mib and row.gpu_used_mib is not None:
        say = f"{_gib(row.gpu_mib)} GPU memory had, at most {_gib(row.gpu_used_mib)} used in"
        found.append(f"{row.workload}: {say} {row.gpu_jobs} of {row.jobs} jobs: --gpu {row.instead[0]} has room")
    if row.memory_jobs >= JOBS_SURE and row.memory_mib and row.memory_used_mib is not None:
        enough = max(1, -(-int(row.memory_used_mib * _ROOM) // 64)) * 64
        by = " by one process" if row.memory_of_one else ""
        if 2 * enough <= row.memory_mib:
            say = f"{_gib(row.memory_mib)} memory asked, at most {_gib(row.memory_used_mib)} used{by} in"
            found.append(
                f"{row.workload}: {say} {row.memory_jobs} of {row.jobs} jobs: --memory {_told(enough)} has room"
            )
    return found


def _gib(mib: int) -> str:
    return f"{mib / _GIB:.1f} GiB" if mib >= _GIB else f"{mib} MiB"


def _told(mib: int) -> str:
    return f"{-(-mib // _GIB)}Gi" if mib > _GIB else f"{mib}Mi"

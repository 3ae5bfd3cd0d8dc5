"""When a job was submitted, started and ended, and what it has taken: GPU time, memory, CPU time."""

from __future__ import annotations

from typing import Final

from moorage.cli.framework.render import age, utc
from moorage.client.answers import JobInfo
from moorage.schemas.job import TERMINAL

_HOUR_S: Final = 3600
_GIB_MIB: Final = 1024

#: less than so many hours are shown in seconds
_HOURS_MIN: Final = 0.1
#: below so many seconds of CPU time, tenths are shown
_TENTHS_S: Final = 60


def spent_rows(shown: JobInfo) -> list[tuple[str, str]]:
    """Return rows of the times of a job, and of what its attempts that have ended took at most; "" for what is not
    known or does not apply."""
    return [
        ("submitted", _time(shown.accepted_ms)),
        ("started", _time(shown.started_ms)),
        ("ended", _time(shown.ended_ms)),
        ("gpu time", _gpu_time(shown)),
        ("memory", _memory(shown)),
        ("gpu memory", _gpu_memory(shown)),
        ("cpu time", _cpu_time(shown)),
    ]


def _time(at_ms: int | None) -> str:
    return utc(at_ms) if at_ms else ""


def _gpu_time(shown: JobInfo) -> str:
    usage = shown.usage
    if usage is None or not usage.gpu_s:
        return ""
    hours = usage.gpu_s / _HOUR_S
    words = f"{hours:.2f} GPU-hours" if hours >= _HOURS_MIN else f"{usage.gpu_s:.3g} GPU-seconds"
    if usage.used_gpu_s is None:
        return words
    return f"{words}, {min(100 * usage.used_gpu_s / usage.gpu_s, 100):.0f} % used"


def _memory(shown: JobInfo) -> str:
    """Return the peak of memory, beside what was asked for; where it is not counted, what is known in its place."""
    peaks = shown.peaks
    if peaks is None or (peaks.memory_mib is None and peaks.largest_mib is None):
        return ""
    asked_mib = (shown.asked.get("resources") or {}).get("memory_mib")
    of = f" of {_gib(asked_mib)}" if asked_mib else ""
    if peaks.memory_mib is not None:
        return f"at most {_gib(peaks.memory_mib)}{of}"
    said = f"at most {_gib(peaks.largest_mib or 0)}{of} in one process; its host, without cgroup v2, counts no more"
    killed = shown.state in TERMINAL and shown.code in (-9, 137)
    return f"{said}, so it is not known whether it was killed for memory" if killed else said


def _gpu_memory(shown: JobInfo) -> str:
    peaks = shown.peaks
    return "" if peaks is None or peaks.gpu_memory_mib is None else f"at most {_gib(peaks.gpu_memory_mib)} on its GPUs"


def _cpu_time(shown: JobInfo) -> str:
    spent_s = None if shown.peaks is None else shown.peaks.cpu_s
    return "" if spent_s is None else f"{spent_s:.1f}s" if spent_s < _TENTHS_S else age(spent_s * 1000)


def _gib(mib: int) -> str:
    return f"{mib / _GIB_MIB:.1f} GiB" if mib >= _GIB_MIB else f"{mib} MiB"

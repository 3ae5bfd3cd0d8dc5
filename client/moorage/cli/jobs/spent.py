"""When a job was submitted, started and ended, and what it has taken: GPU time, memory, CPU time."""

from __future__ import annotations

from typing import Final

from moorage.cli.framework.render import age, utc
from moorage.client.answers import JobInfo
from moorage.schemas.answers.jobs import PromisedStart
from moorage.schemas.exit_words import was_killed
from moorage.schemas.job import TERMINAL
from moorage.schemas.units import many
from moorage.schemas.waited import MEANS, WaitedPart

_HOUR_S: Final = 3600
_GIB_MIB: Final = 1024

#: less than so many hours are shown in seconds
_HOURS_MIN: Final = 0.1
#: shorter waits are not told, nor parts below a hundredth of the wait
_WAITED_MS_MIN: Final = 1000
_PART_MIN: Final = 100
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


def promised_words(promised: PromisedStart | None) -> str:
    """Return by when a job was told to start, and what came of it; "" without a promise."""
    if promised is None:
        return ""
    became = {None: "", True: ", kept", False: ", missed"}[promised.kept]
    return f"to start by {utc(promised.by_ms)} (9 of 10 do){became}"


def waited_words(parts: list[WaitedPart], shown: JobInfo) -> str:
    """Return for how long a job waited and why, as in `3h12m: 2h40m a limit of its tenant; 32m …`; "" below a second.

    Of a job of several replicas it is the mean of these.
    """
    whole, replicas = sum(part.ms for part in parts), _apart(shown)
    if whole < _WAITED_MS_MIN:
        return ""
    said = [f"{age(part.ms // replicas)} {part_words(part)}" for part in parts if part.ms * _PART_MIN >= whole]
    of = f" in the mean of {many(replicas, 'replica')}" if replicas > 1 else ""
    return f"{age(whole // replicas)}{of}: {'; '.join(said)}"


def part_words(part: WaitedPart) -> str:
    """Return why a part of a wait passed, as in `hosts reserved for other jobs (of its own tenant)`."""
    means = MEANS.get(part.cause, part.cause)
    return means if part.own is None else f"{means} ({'its own tenant' if part.own else 'another tenant'})"


def _apart(shown: JobInfo) -> int:
    """Return how many replicas of a job wait each for itself: a gang waits as one."""
    gpu = shown.asked.get("gpu") or {}
    return 1 if gpu.get("scheduling") == "gang" or shown.replicas is None else max(1, shown.replicas.of)


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
    peaks, killed = shown.peaks, shown.state in TERMINAL and was_killed(shown.code)
    if peaks is None or (peaks.memory_mib is None and peaks.largest_mib is None):
        return "not looked at before its end, so it is not known whether it was killed for memory" if killed else ""
    asked_mib = (shown.asked.get("resources") or {}).get("memory_mib")
    of = f" of {_gib(asked_mib)}" if asked_mib else ""
    if peaks.memory_mib is not None:
        return f"at most {_gib(peaks.memory_mib)}{of}"
    said = f"at most {_gib(peaks.largest_mib or 0)}{of} in one process; its host, without cgroup v2, counts no more"
    return f"{said}, so it is not known whether it was killed for memory" if killed else said


def _gpu_memory(shown: JobInfo) -> str:
    peaks = shown.peaks
    return "" if peaks is None or peaks.gpu_memory_mib is None else f"at most {_gib(peaks.gpu_memory_mib)} on its GPUs"


def _cpu_time(shown: JobInfo) -> str:
    spent_s = None if shown.peaks is None else shown.peaks.cpu_s
    return "" if spent_s is None else f"{spent_s:.1f}s" if spent_s < _TENTHS_S else age(spent_s * 1000)


def _gib(mib: int) -> str:
    return f"{mib / _GIB_MIB:.1f} GiB" if mib >= _GIB_MIB else f"{mib} MiB"

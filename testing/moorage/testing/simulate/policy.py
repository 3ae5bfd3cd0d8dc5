"""Rules that waits have to keep, tried on shaken copies of a trace; and the smallest part of it that breaks one."""

from __future__ import annotations

import math
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from moorage.schemas.errors import Refused, refuse
from moorage.testing.simulate.shaken import JobName, Side, copies, waits_of
from moorage.testing.simulate.trace import TraceEvent, TraceJob

RULES_MAX: Final = 100
#: a counter-example is made smaller until it has so few jobs, nothing can be left out, or so long has passed
SHRUNK_JOBS: Final = 20
SHRUNK_S: Final = 60.0
_KINDS: Final = ("mean_wait_s", "p50_wait_s", "p90_wait_s", "max_wait_s")


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Bounds on the waits of some jobs, in seconds; a job that has not started waits until the trace ends.

    `tenant` and `workload` choose jobs; without both it is about all.
    """

    tenant: str | None = None
    workload: str | None = None
    mean_wait_s: float | None = None
    p50_wait_s: float | None = None
    p90_wait_s: float | None = None
    max_wait_s: float | None = None

    def __post_init__(self) -> None:
        said = [getattr(self, kind) for kind in _KINDS if getattr(self, kind) is not None]
        if not said or min(said) < 0:
            raise ValueError(f"a rule has at least one of {', '.join(_KINDS)}, each 0 or more")

    @property
    def words(self) -> str:
        of = [f"{name} {value}" for name in ("tenant", "workload") if (value := getattr(self, name)) is not None]
        bounds = [f"{kind} {value:g}" for kind in _KINDS if (value := getattr(self, kind)) is not None]
        return f"{', '.join(of) or 'all'}: {', '.join(bounds)}"

    def chooses(self, job: TraceJob) -> bool:
        workload = job.request.labels.get("workload")
        return self.tenant in (None, job.tenant) and self.workload in (None, workload)

    def broken_by(self, waits_ms: Sequence[int]) -> dict[str, float]:
        """Return the bounds that these waits break, with what it is instead, in seconds."""
        if not waits_ms:
            return {}
        ordered = sorted(waits_ms)
        found = {
            "mean_wait_s": sum(ordered) / len(ordered),
            "p50_wait_s": _part(ordered, 0.5),
            "p90_wait_s": _part(ordered, 0.9),
            "max_wait_s": ordered[-1],
        }
        bounds = {kind: getattr(self, kind) for kind in _KINDS if getattr(self, kind) is not None}
        return {kind: found[kind] / 1000 for kind, bound in bounds.items() if found[kind] > bound * 1000}


class Judged(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What became of a rule: in how many of the copies it was broken, and by what in the first of these."""

    rule: str
    jobs: int
    copies: int
    broken: int
    by: dict[str, float] = {}
    copy: int = -1  # the first copy in which it was

    @property
    def fails(self) -> bool:
        """Whether all copies but one at most broke it."""
        return self.broken >= max(1, self.copies - 1)


class _Rules(msgspec.Struct, forbid_unknown_fields=True):
    rule: list[Rule]


def read_rules(path: Path) -> list[Rule]:
    """Read rules, as tables `[[rule]]`. Raises Refused, which names the file, and OSError."""
    try:
        found = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _Rules).rule
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise _wrong(path, str(error)) from None
    if not 1 <= len(found) <= RULES_MAX:
        raise _wrong(path, f"it has {len(found)} rules, allowed are 1..{RULES_MAX}")
    return found


def _wrong(path: Path, why: str) -> Refused:
    form = '[[rule]] with tenant = "vision" and p90_wait_s = 600'
    return refuse("invalid-argument", f"{path}: {why}", allowed=form, next="moorage policy test --help")


def judge(
    rules: Sequence[Rule],
    side: Side,
    count: int,
    *,
    until_ms: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> list[Judged]:
    """Play `count` copies, and return what became of each rule, in their order."""
    broken = [0] * len(rules)
    first: list[tuple[int, dict[str, float]]] = [(-1, {})] * len(rules)
    jobs = [0] * len(rules)
    for number in range(count):
        played, events = copies(side, number)
        waits = waits_of(side, played, events, until_ms)
        for at, rule in enumerate(rules):
            chosen = _chosen(rule, played, waits)
            jobs[at] = len(chosen)
            if by := rule.broken_by(chosen):
                broken[at] += 1
                first[at] = first[at] if first[at][0] >= 0 else (number, by)
        if progress is not None:
            progress((number + 1) / count)
    return [
        Judged(rule=rule.words, jobs=of, copies=count, broken=times, copy=copy, by=by)
        for rule, of, times, (copy, by) in zip(rules, jobs, broken, first, strict=True)
    ]


def shrunk(rule: Rule, side: Side, copy: int, until_ms: int | None = None) -> tuple[list[TraceJob], list[TraceEvent]]:
    """Return a part of a copy that breaks the rule, too: its jobs without ever smaller parts of them."""
    jobs, events = copies(side, copy)
    ends_s = time.monotonic() + SHRUNK_S
    parts = 2
    while len(jobs) > 1 and parts <= len(jobs) and time.monotonic() < ends_s:
        size = math.ceil(len(jobs) / parts)
        for at in range(0, len(jobs), size):
            fewer = jobs[:at] + jobs[at + size :]
            if fewer and rule.broken_by(_chosen(rule, fewer, waits_of(side, fewer, _of(events, fewer), until_ms))):
                jobs, parts = fewer, max(2, parts - 1)
                break
        else:
            if len(jobs) <= SHRUNK_JOBS or size == 1:
                break
            parts *= 2
    return jobs, _of(events, jobs)


def _of(events: Sequence[TraceEvent], jobs: Sequence[TraceJob]) -> list[TraceEvent]:
    """Return events without the cancels of jobs that are left out."""
    names = {(job.tenant, job.request.job) for job in jobs}
    return [event for event in events if event.kind != "cancel" or (event.data["tenant"], event.data["job"]) in names]


def _chosen(rule: Rule, jobs: Sequence[TraceJob], waits: Mapping[JobName, int]) -> list[int]:
    found = [waits[job.tenant, job.request.job or ""] for job in jobs if rule.chooses(job)]
    return [ms if ms >= 0 else -1 - ms for ms in found]


def _part(ordered: Sequence[int], part: float) -> int:
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]

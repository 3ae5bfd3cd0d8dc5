"""The judge of the demo: compares what was accepted with what ended, and the jobs' own records with each other."""

from __future__ import annotations

from collections import Counter
from typing import Final

import msgspec

from moorage.schemas.gpu import SHARERS_MAX
from moorage.schemas.job import TERMINAL
from moorage.testing.demo.drawn_jobs import Planned
from moorage.testing.demo.intervals import ALONE, Span, overlaps

_SHARED: Final = "time-slice"
_SHARERS: Final = SHARERS_MAX[_SHARED]


class Verdict(msgspec.Struct):
    """The counts of one demo. `kept` says whether every promise was kept."""

    accepted: int = 0
    succeeded: int = 0
    failed_as_intended: int = 0
    cancelled: int = 0
    refused: int = 0
    lost: int = 0
    started_twice: int = 0
    double_leases: int = 0
    runs: int = 0
    placements_per_s: float = 0.0
    unexpected: list[str] = []
    bad: list[str] = []
    waits_ms: list[float] = []

    @property
    def kept(self) -> bool:
        return not (self.lost or self.started_twice or self.double_leases or self.unexpected or self.bad)


class _Run(msgspec.Struct):
    job: str
    unit: str
    began_ns: int
    uuids: list[str]
    ended_ns: int | None = None


def judge(
    plans: list[Planned], states: dict[str, str], refused: dict[str, str], submitted_ns: dict[str, int], record: str
) -> Verdict:
    """Return the counts of how the jobs ended, and of the `start`, `end` and `bad` lines that they wrote (`record`)."""
    verdict = Verdict(unexpected=[], bad=[], waits_ms=[])
    runs, verdict.bad = _read(record)
    verdict.runs = len(runs)
    for plan in plans:
        got = "REFUSED" if plan.name in refused else states.get(plan.name, "UNKNOWN")
        if got != plan.expect:
            verdict.unexpected.append(f"{plan.name}: {got}, expected {plan.expect}")
        if got == "REFUSED":
            verdict.refused += 1
            continue
        verdict.accepted += 1
        verdict.lost += got not in TERMINAL
        verdict.succeeded += got == "SUCCEEDED"
        verdict.failed_as_intended += got == plan.expect == "FAILED"
        verdict.cancelled += got == "CANCELLED"
    expected = {plan.name: plan.runs for plan in plans}
    for job, count in Counter(run.job for run in runs).items():
        verdict.started_twice += max(0, count - expected[job])
    shares = {plan.name for plan in plans if plan.request.get("gpu", {}).get("sharing") == "time-slice"}
    verdict.double_leases = double_leases(runs, shares)
    first: dict[str, int] = {}
    for run in runs:
        first[run.job] = min(first.get(run.job, run.began_ns), run.began_ns)
    verdict.waits_ms = [(began - submitted_ns[job]) / 1e6 for job, began in first.items()]
    if first:
        span_s = (max(run.began_ns for run in runs) - min(submitted_ns.values())) / 1e9
        verdict.placements_per_s = len(runs) / max(span_s, 1e-9)
    return verdict


def _read(record: str) -> tuple[list[_Run], list[str]]:
    runs: dict[str, _Run] = {}
    bad: list[str] = []
    for line in record.splitlines():
        kind, job, *rest = line.split()
        if kind == "bad":
            bad.append(line)
            continue
        unit = " ".join([job, *rest[:3]])
        if kind == "start":
            uuids = [] if rest[4] == "-" else rest[4].split(",")
            # the same attempt twice would overwrite: give the second a name of its own
            key = unit if unit not in runs else f"{unit} again {len(runs)}"
            runs[key] = _Run(job, unit, int(rest[3]), uuids)
        elif unit in runs:
            runs[unit].ended_ns = int(rest[3])
    return list(runs.values()), bad


def double_leases(runs: list[_Run], shares: set[str]) -> int:
    """Return the number of starts on a device that another job had alone, that too many jobs shared, or that was shared
    in another mode.

    A start without an end line, as of the cancelled job, has no known end: see `Span`.
    """
    spans = (
        Span(uuid, run.unit, run.began_ns, run.ended_ns, _SHARED if run.job in shares else ALONE)
        for run in runs
        for uuid in run.uuids
    )
    return sum(1 for _ in overlaps(spans, {_SHARED: _SHARERS}))

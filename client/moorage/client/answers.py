"""What the scheduler answers to `show`, `ls`, `explain`, `fleet`, `audit` and `cancel`, as structs.

The first four have in `data` the whole answer as on the wire, with what no field here names: `--json` prints it, and it
alone has the request of a job that a newer release made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from moorage.schemas.answers.fleet import FleetAnswer
from moorage.schemas.answers.jobs import Cancelled as Cancelled
from moorage.schemas.answers.jobs import Explained, JobsAnswer, ShownJob
from moorage.schemas.answers.jobs import JobRow as JobRow
from moorage.schemas.answers.jobs import ReplicaInfo as ReplicaInfo
from moorage.schemas.answers.jobs import Used as Used
from moorage.schemas.answers.operators import ActRow as ActRow
from moorage.schemas.answers.operators import ActsAnswer as ActsAnswer
from moorage.schemas.answers.operators import Audit as Audit
from moorage.schemas.answers.operators import Drift as Drift
from moorage.schemas.capabilities import DRIVER_DEFAULT
from moorage.schemas.plan import Plan
from moorage.schemas.ranges import Ranges, first_numbers, parse_ranges
from moorage.schemas.units import age

#: rows of a table in a notebook
SHOWN_MAX: Final = 100


class JobInfo(ShownJob, frozen=True, kw_only=True):
    """One job in full. `request` is None once it is no longer kept, and if it has fields of a newer release. A
    `compacted` job may have nothing but its end."""

    data: dict[str, Any] = msgspec.field(default_factory=dict)

    @property
    def asked(self) -> dict[str, Any]:
        """The request as on the wire, also that of a newer release; empty once it is no longer kept."""
        return self.data.get("request") or {}

    @property
    def run(self) -> dict[str, Any]:
        """The part `run` of the request."""
        return self.asked.get("run") or {}

    @property
    def driver(self) -> str:
        """The driver of the request; "" once that is no longer kept."""
        return str(self.run.get("driver", DRIVER_DEFAULT)) if self.run else ""

    @property
    def numbers(self) -> Ranges:
        """The numbers of the job's replicas."""
        indices = self.asked.get("indices")
        return first_numbers(self.asked.get("replicas", 1)) if indices is None else parse_ranges(indices)


class JobList(JobsAnswer, frozen=True, kw_only=True):
    """Jobs of a tenant, newest first, and how many there are in each state."""

    data: dict[str, Any] = msgspec.field(default_factory=dict)

    def _repr_html_(self) -> str:
        from moorage.client.notebook import grid
        from moorage.client.reported_words import reported_words

        rows = [
            (
                row.job,
                row.state,
                row.gpu,
                age(row.age_ms),
                row.code,
                row.worker,
                reported_words(row.reported, of_several=row.replicas is not None),
                row.why or row.reason,
            )
            for row in self.jobs[:SHOWN_MAX]
        ]
        counted = ", ".join(f"{count} {state}" for state, count in self.counts.items() if count)
        heads = ("job", "state", "GPUs", "age", "code", "worker", "reported", "why")
        return grid(f"Jobs: {counted or 'none'}", heads, rows, len(self.jobs) - len(rows))


class Explanation(Explained, frozen=True, kw_only=True):
    """Why a job waits: the main `reason` and what it `means`; both are "" for a job that does not wait."""

    data: dict[str, Any] = msgspec.field(default_factory=dict)

    def _repr_html_(self) -> str:
        from moorage.client.notebook import table

        return table(f"Job {self.job}", {"state": self.state, **_words_of(self)})


class FleetInfo(FleetAnswer, kw_only=True):
    """The workers in the order of their names, what fits now, and counts of jobs. `epoch` is the leader's term."""

    data: dict[str, Any] = msgspec.field(default_factory=dict)

    def _repr_html_(self) -> str:
        from moorage.client.notebook import grid

        rows = [
            (row.worker, row.state, ", ".join(dict.fromkeys(row.models)), row.gpus, row.free, row.why or row.warning)
            for row in self.workers[:SHOWN_MAX]
        ]
        fits = "; ".join(f"{each.free} of {each.gpus} {each.model} free" for each in self.fits_now)
        heads = ("worker", "state", "GPUs", "number", "free", "why")
        return grid(f"Fleet: {fits or 'no GPUs'}", heads, rows, len(self.workers) - len(rows))


class PlanInfo(Plan, kw_only=True):
    """A `Plan`, which a notebook shows as a table."""

    def _repr_html_(self) -> str:
        from moorage.client.notebook import table

        later = "" if self.in_ms is None else f"in about {age(self.in_ms.p50_ms)}"
        places = [f"{place.replica}: {place.worker}" for place in self.places[:SHOWN_MAX]]
        rows = {
            "starts": " ".join(filter(None, (self.starts, later, self.on and f"on {self.on}"))),
            "replicas": f"{self.replicas_now} of {self.replicas} now" if self.replicas > 1 else "",
            "places": ", ".join(places) + (" …" if len(self.places) > len(places) else ""),
            **({} if self.waiting is None else _words_of(self.waiting)),
            "warnings": "\n".join(self.warnings),
            "refused": "" if self.problem is None else self.problem.message,
        }
        return table("Plan", rows)


def _words_of(explained: Explained) -> dict[str, str]:
    """Return the lines about why a job waits, or how it ended."""
    starts = explained.starts
    queued = f"{explained.position} of {explained.queued}" if explained.position is not None else ""
    return {
        "reason": f"{explained.reason}: {explained.means}" if explained.reason else "",
        "because": explained.because,
        "needs": explained.needs,
        "held by": "\n".join(explained.held_by),
        "starts": f"in about {age(starts.p50_ms)}" if starts is not None else explained.starts_unknown,
        "place in the queue": queued,
        "why": explained.why,
        "fixes": "\n".join(fix.say for fix in explained.fixes),
    }


def explained_in(waiting: Mapping[str, Any]) -> Explained:
    """Return why a job waits, from an acceptance or an event."""
    return msgspec.convert(waiting, Explained)

"""What the scheduler answers to `show`, `ls`, `explain`, `fleet`, `audit` and `cancel`, as structs.

The first four have in `data` the whole answer as on the wire, with what no field here names: `--json` prints it, and it
alone has the request of a job that a newer release made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
from moorage.schemas.ranges import Ranges, first_numbers, parse_ranges


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


class Explanation(Explained, frozen=True, kw_only=True):
    """Why a job waits: the main `reason` and what it `means`; both are "" for a job that does not wait."""

    data: dict[str, Any] = msgspec.field(default_factory=dict)


class FleetInfo(FleetAnswer, kw_only=True):
    """The workers in the order of their names, what fits now, and counts of jobs. `epoch` is the leader's term."""

    data: dict[str, Any] = msgspec.field(default_factory=dict)


def explained_in(waiting: Mapping[str, Any]) -> Explained:
    """Return why a job waits, from an acceptance or an event."""
    return msgspec.convert(waiting, Explained)

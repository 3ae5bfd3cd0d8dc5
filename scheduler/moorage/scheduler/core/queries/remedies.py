"""What others than the request can change so that a waiting job starts at once: an operator's act, a job less.

Like the changes of `relax`, each is tried on the state as it is before it is told (see `trial`). A tenant's own jobs
are named, those of others never.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from moorage.scheduler.core.queries.trial import Trials
from moorage.scheduler.core.queue.queue import Line
from moorage.scheduler.core.schedule.runtime import DEPTH_MAX
from moorage.scheduler.core.state import Job
from moorage.schemas.reasons import Cure, Reason

#: the highest priority that an operator can give
PRIORITY_MAX: Final = 100
#: own jobs that are tried for one answer
JOBS_TRIED_MAX: Final = 16


def remedies(trials: Trials, reason: Reason) -> list[dict[str, Any]]:
    """What helps against a reason, the best first. Each has `say`, `command`, and `who` may give that command."""
    return [each for cure in reason.cures for remedy in _OF.get(cure, ()) for each in remedy(trials)]


def _order(say: str, command: str) -> dict[str, Any]:
    return {"say": say, "command": command, "who": "operator"}


def _cancel(job: Job, say: str) -> dict[str, Any]:
    return {"say": say, "command": f"moorage cancel {job.name} --tenant {job.tenant}", "who": "tenant"}


def _of_tenant(trials: Trials) -> int | None:
    """GPUs for those of the tenant's queue that come before the job; None where they are too many to count."""
    job, count = trials.job, 0
    for line, items in trials.others(frozenset((job.num,))).items():
        if line.tenant == job.tenant and trials.engine.planner.could_ever(line.shape):
            if len(items) > DEPTH_MAX:
                return None
            each = line.shape.gpus
            count += each * sum(trials.comes_before(line, item, trials.priority, trials.item) for item in items)
    return count


def _raise_limit(trials: Trials) -> Iterator[dict[str, Any]]:
    job, shape = trials.job, trials.shape
    before, need = _of_tenant(trials), shape.gpus
    if before is None:
        return
    gpus_max = trials.leased + before + need

    def lets_go(line: Line) -> bool:
        return line.tenant == job.tenant or line.verdict.change != trials.engine.fleet.changes

    if trials.in_place(gpus_max=gpus_max, gpus=trials.leased + before, lets_go=lets_go):
        queued = f", {before} of them for jobs of yours before it" if before else ""
        say = f"ask your operator for {gpus_max} GPUs{queued}"
        yield _order(say, f"moorage admin limit --tenant {job.tenant} --gpus {gpus_max}")


def _cancel_for_limit(trials: Trials) -> Iterator[dict[str, Any]]:
    """The least of the tenant's own jobs whose end makes room under the limit; of those alike the youngest."""
    job, shape = trials.job, trials.shape
    before, need = _of_tenant(trials), shape.gpus
    if before is None:
        return
    rows: list[tuple[int, int, Job]] = []
    for other in trials.engine.state.tenants[job.tenant].jobs.values():
        members = [replica.member for replica in other.replicas if replica.member is not None]
        gpus = sum(member.mask.bit_count() for member in members)
        if other is not job and gpus and trials.leased + before + need - gpus <= trials.gpus_max:
            rows.append((gpus, -max(member.fence for member in members), other))
    for gpus, _, other in sorted(rows, key=lambda row: row[:2])[:JOBS_TRIED_MAX]:
        # what it leaves, whoever comes before this one may take, and go beyond it
        if trials.in_place(
            gpus=trials.leased + before - gpus, lets_go=lambda line: True, without=frozenset((other.num,))
        ):
            yield _cancel(other, f"cancel {other.name}, which has {gpus} GPU{'s' * (gpus > 1)} of your limit")
            return


def _cancel_first(trials: Trials) -> Iterator[dict[str, Any]]:
    """The tenant's own job that waits for the limit before it, where what is left of that is enough for this one."""
    num = trials.engine.planner.lines.waits_for_limit(trials.job.tenant)
    first = trials.engine.state.jobs.get(num) if num is not None else None
    if first is None or first is trials.job or any(replica.member for replica in first.replicas):
        return
    if trials.in_place(lets_go=lambda line: True, without=frozenset((first.num,))):
        yield _cancel(first, f"cancel {first.name}, which waits for your limit before it")


def _cancel_ahead(trials: Trials) -> Iterator[dict[str, Any]]:
    """The one job that stops it, where that is the tenant's own."""
    first = trials.first_ahead()
    if first is None or first.tenant != trials.job.tenant or any(replica.member for replica in first.replicas):
        return
    if trials.in_place(lets_go=lambda line: True, without=frozenset((first.num,))):
        yield _cancel(first, f"cancel {first.name}, which waits before it")


def _go_ahead(trials: Trials) -> Iterator[dict[str, Any]]:
    job = trials.job
    stops = trials.stops(trials.priority, trials.item, frozenset((job.num,)))
    aged = trials.engine.planner.lines.aged_of
    priority = 1 + max((aged(line.priority, item) for line, item in stops), default=PRIORITY_MAX)
    if priority <= PRIORITY_MAX and trials.in_place(priority=priority, lets_go=lambda line: True):
        say = f"ask your operator for priority {priority}: then it is first"
        yield _order(say, f"moorage admin priority {job.name} --tenant {job.tenant} --to {priority}")


def _release(trials: Trials) -> Iterator[dict[str, Any]]:
    job = trials.job
    if trials.draft.tenant(job.tenant).hold is not None or trials.draft.job(job).hold is None:
        return  # who else of the queue goes on then cannot be told
    before = _of_tenant(trials) if trials.gpus_max else 0
    if before is None:
        return
    if trials.in_place(
        gpus=trials.leased + before, lets_go=lambda line: line.verdict.change != trials.engine.fleet.changes
    ):
        yield _order("ask your operator to let it go on", f"moorage admin release {job.name} --tenant {job.tenant}")


_OF: Final[dict[Cure, tuple[Callable[[Trials], Iterator[dict[str, Any]]], ...]]] = {
    Cure.LIMIT: (_raise_limit, _cancel_first, _cancel_for_limit),
    Cure.TURN: (_cancel_ahead, _go_ahead),
    Cure.RELEASE: (_release,),
}

"""Confirms jobs of several replicas under numbers of their own, and runs again, by what replicas said of their ends.

No more of a job run at once than its `max_running`, and what is beyond that is nobody's rival. Once `max_failed` of it
have failed, none of the others starts. What is run again is what ended without success, as the events told it.
"""

from __future__ import annotations

from typing import Protocol, cast

from moorage.scheduler.answers.history_reader import HistoryReader
from moorage.scheduler.core.ledger.state import Job
from moorage.scheduler.questions.agains import Agains, again_asked
from moorage.schemas.codec import decode_request
from moorage.schemas.errors import Problem
from moorage.schemas.job import STATES, TERMINAL
from moorage.schemas.ranges import numbers_in, parse_ranges
from tests.release.workloads.record import Record


class World(Protocol):
    @property
    def drive(self) -> Record: ...


def _states(job: Job) -> dict[int, str]:
    return {replica.index: STATES[replica.state] for replica in job.replicas}


def room(job: Job) -> int | None:
    """How many more of a job may run now; None for any number."""
    most = decode_request(job.body).max_running
    if most is None:
        return None
    return max(0, most - sum(state != "QUEUED" and state not in TERMINAL for state in _states(job).values()))


def confirm(world: World) -> None:
    """After each record."""
    for job in world.drive.state.jobs.values():
        request = decode_request(job.body)
        if request.max_running is not None:
            on = [index for index, state in _states(job).items() if state != "QUEUED" and state not in TERMINAL]
            assert len(on) <= request.max_running, f"{job.name} runs {on}, and may run {request.max_running} at once"


def restless(world: World) -> list[str]:
    """What is wrong in rest."""
    wrong = []
    for job in world.drive.state.jobs.values():
        most = decode_request(job.body).failed_max
        states = _states(job).values()
        failed = sum(state in ("FAILED", "TIMED_OUT") for state in states)
        if job.live and most is not None and len(states) > 1 and failed >= most:
            wrong.append(f"{job.name} goes on, and {failed} of its replicas have failed, {most} at most")
    return wrong


def _ended(world: World, job: Job) -> dict[int, str]:
    """How its replicas ended, as events told; of a job that is not listed they have counts, and its row tells it."""
    found: dict[int, str] = {}
    if not job.is_listed:
        return {number: STATES[state] for state, ended in job.ended for number in numbers_in(ended)}
    for event in world.drive.events:
        if (event["tenant"], event["job"]) != (job.tenant, job.name):
            continue
        for change in event["changes"]:
            if change["state"] in TERMINAL:
                last = change.get("through", change["replica"])
                numbers = range(change["replica"], last + 1) if change["replica"] >= 0 else _states(job)
                for number in numbers:
                    found.setdefault(number, change["state"])
    return found


def again(world: World, job: Job, *, failed: bool) -> None:
    """Submit what the leader answers, once it is confirmed."""
    drive = world.drive
    asked = again_asked({"job": job.name, "failed": failed})
    answer = Agains(drive.engine, cast("HistoryReader", None)).ask(job.tenant, asked, "", True)
    request, ended = decode_request(job.body), _ended(world, job)
    bad = sorted(number for number, state in ended.items() if state != "SUCCEEDED")
    if answer is None or isinstance(answer, Problem):
        assert isinstance(answer, Problem), "it is in memory"
        assert failed, answer
        assert not bad, f"{job.name} is not run again ({answer.message}), and of it ended badly: {bad}"
        return
    body = dict(answer.request)
    name = body.pop("job")
    if failed and request.copies > 1 and not request.is_gang:
        wanted = list(numbers_in(parse_ranges(body["indices"])) if "indices" in body else numbers_in(request.numbers))
        assert wanted == bad, f"{name} is of {wanted}, and of {job.name} ended badly: {bad}"
    assert drive.state.job(job.tenant, name) is None, f"{name} is there already"
    assert body["again_of"] == job.name
    drive.offer_submit(name, tenant=job.tenant, **body)

"""Answers `again`: the request with which a job, or what of it did not succeed, is run again.

The leader alone knows which replicas of a job failed and which ids are taken, so it makes the request; the caller
changes what it wants in it and submits it. The question itself records nothing, and may be asked any number of times.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import msgspec

from moorage.scheduler.answers.history_reader import Gone, HistoryReader
from moorage.scheduler.answers.reruns import reruns
from moorage.scheduler.answers.views import finished_row, request_in
from moorage.scheduler.arguments import replicas_asked
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.request_reader import asked_now, later_words
from moorage.scheduler.history.unpacking import unsuccessful
from moorage.schemas.answers.jobs import ShownJob
from moorage.schemas.codec import REQUEST_BYTES_MAX, encode
from moorage.schemas.decode_errors import asked_as
from moorage.schemas.errors import Problem, problem
from moorage.schemas.frames import AgainAnswer, AgainAsked
from moorage.schemas.job import STATES, SUCCEEDED, TERMINAL, Request
from moorage.schemas.names import word_of
from moorage.schemas.ranges import (
    NOTHING,
    RANGES_MAX,
    RANGES_SAID,
    Ranges,
    both,
    count_of,
    format_ranges,
    joined,
    without,
)

AGAIN_HELP: Final = "moorage again --help"
#: fields that a request has for its first time alone
_FIRST_TIME: Final = ("job", "if_seq", "after", "start_after_s", "on_no_match", "person")


def again_asked(arguments: dict[str, Any]) -> AgainAsked:
    """Return the checked arguments of `again`. Raises `Refused`, naming the field."""
    asked = asked_as(AgainAsked, arguments, AGAIN_HELP)
    replicas_asked(arguments)
    return asked


class Agains:
    """Makes the answers, from the ledger's state or, for a job that has left memory, from its history."""

    def __init__(self, engine: Engine, history: HistoryReader) -> None:
        self._engine = engine
        self._history = history

    def ask(self, tenant: str, asked: AgainAsked, reply: str, json: bool) -> AgainAnswer | Problem | None:
        """Return the answer; None if it is sent later, once the history was read."""
        job = self._engine.state.job(tenant, asked.job)
        if job is not None:
            later = self._engine.reader.requests.read_accepted(job.body)[1].later
            if later:  # what it means would be lost in the new job
                return problem(
                    "failed-precondition", f"job {asked.job} cannot be run again: {later_words(later)}", field=later,
                    job=asked.job, next="run it again once a scheduler of a newer release leads",
                )  # fmt: skip
            bad = {STATES[state]: numbers for state, numbers in job.unsuccessful}
            return self._answer(tenant, asked, asked_now(job), job.state, bad)
        known = finished_row(self._engine, tenant, asked.job, ShownJob)
        if isinstance(known, Problem):
            return known
        return self._history.later("again", partial(self._of_history, tenant, asked), reply, json, tenant, asked.job)

    async def _of_history(self, tenant: str, asked: AgainAsked) -> AgainAnswer | Problem:
        try:
            frame, found = await self._history.last_part(tenant, asked.job)
        except Gone:
            return _gone(asked.job)
        request = request_in(found)
        if request is None:
            return _gone(asked.job)
        return self._answer(tenant, asked, request, found.state, unsuccessful(frame, found))

    def _answer(
        self, tenant: str, asked: AgainAsked, request: Request, state: str, bad: dict[str, Ranges]
    ) -> AgainAnswer | Problem:
        numbers = whole = request.numbers
        undivided = _undivided(request)
        if asked.failed:
            if state == SUCCEEDED or not (bad or state in TERMINAL):
                return _none_failed(asked.job, state)
            if request.each_worker:
                return problem(
                    "failed-precondition", f"job {asked.job} is {undivided}: it is run again on all of them, not only"
                    " where it failed", job=asked.job, field="$.failed", found="true",
                    next="leave out failed (--failed), or name one worker in a new job (--on WORKER)",
                )  # fmt: skip
            if request.copies > 1 and not undivided:
                numbers = joined(sorted(pair for ranges in bad.values() for pair in ranges))
        if asked.replicas is not None:
            only = replicas_asked({"replicas": asked.replicas}) or NOTHING
            if undivided and only != whole:
                return problem(
                    "failed-precondition", f"job {asked.job} is {undivided}: it is run again as a whole", job=asked.job,
                    field="$.replicas", found=asked.replicas, next="leave out replicas",
                )  # fmt: skip
            if unknown := without(only, whole):
                return problem(
                    "failed-precondition", f"job {asked.job} has no replica {format_ranges(unknown, RANGES_SAID)}",
                    job=asked.job, field="$.replicas", found=asked.replicas,
                    allowed=format_ranges(whole, RANGES_SAID), next=f"moorage show {word_of(asked.job)}",
                )  # fmt: skip
            ended, numbers = numbers, both(numbers, only)
            if not numbers:
                return problem(
                    "failed-precondition", f"none of these replicas of job {asked.job} ended without success",
                    job=asked.job, field="$.replicas", found=asked.replicas,
                    allowed=format_ranges(ended, RANGES_SAID),
                    next="leave out failed (--failed) to run again what you name, however it ended",
                )  # fmt: skip
        body = {name: value for name, value in msgspec.to_builtins(request).items() if name not in _FIRST_TIME}
        name, earlier = reruns(self._engine, tenant, asked.job, request)
        body = {"job": name, **body, "again_of": asked.job}
        if numbers != whole:
            body.pop("replicas", None)
            body["indices"] = format_ranges(numbers, len(numbers)).replace(" ", "")
        if len(numbers) > RANGES_MAX or len(encode(body)) > REQUEST_BYTES_MAX:
            return _too_many(asked.job, numbers)
        return AgainAnswer(name, asked.job, count_of(numbers), body, earlier)


def _undivided(request: Request) -> str:
    """Return what a job is of which no part is run again by itself; "" for other jobs."""
    if request.is_gang:
        return "a gang, whose ranks start together"
    if request.each_worker:
        return "for each worker"
    if request.service is not None and request.workload.items is None:
        return "a service, whose members may have moved to other numbers"
    return ""


def _gone(name: str) -> Problem:
    return problem(
        "request-gone",
        f"the request of job {name} is no longer kept",
        job=name,
        next="submit it anew; history_keep and history_bytes say how long the scheduler keeps requests",
    )


def _none_failed(name: str, state: str) -> Problem:
    over = state in TERMINAL
    why = f"all of job {name} has succeeded" if over else f"job {name} is {state}, and nothing of it has failed"
    fix = f"moorage again {word_of(name)} runs all of it again" if over else f"moorage wait {word_of(name)}"
    return problem("failed-precondition", why, job=name, found=state, next=fix)


def _too_many(name: str, numbers: Ranges) -> Problem:
    half = numbers[len(numbers) // 2][0]
    return problem(
        "too-large",
        f"{len(numbers)} ranges of replicas of job {name} do not fit into one request",
        job=name,
        found=len(numbers),
        allowed=f"{RANGES_MAX} ranges, and {REQUEST_BYTES_MAX} bytes in all",
        next="run them again in parts: "
        f"moorage again {word_of(name)} --failed --replica {numbers[0][0]}-{half - 1}, and so on",
    )

"""Answers why a job waits and when it starts: to `explain`, to submits, and to followers when that changes.

This process finds the reason. A copy of it (`whatif.child`) finds when the job starts and what would start it now: one
copy for all questions that arrived while none was running. A forecast is shared by the questions of `FORECAST_KEPT_MS`.
Without a copy, or where it takes longer than `ANSWERED_S`, the answer has the reason, and the start only if an earlier
forecast has it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec
from msgspec.structs import replace

from moorage.scheduler.answers.promises import Promises
from moorage.scheduler.answers.waiting import explain_job, may_be_cured
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.events import Submit
from moorage.scheduler.core.ledger.state import Job
from moorage.scheduler.core.outputs.outputs import Message
from moorage.scheduler.questions import question_queue
from moorage.scheduler.questions.question_queue import RoundRobin, contained, overloaded
from moorage.scheduler.whatif.child import FAILED, Children
from moorage.scheduler.whatif.forecast import Forecast
from moorage.scheduler.whatif.foreseen import Fixes, decode_foreseen, foresee
from moorage.scheduler.whatif.future import waits, why_unknown
from moorage.scheduler.whatif.plan import TOO_LATE, PlanAsk, check_known, decode_planned, plan
from moorage.schemas.always import sent
from moorage.schemas.answers.jobs import Explained
from moorage.schemas.codec import encode
from moorage.schemas.decode_errors import asked_as
from moorage.schemas.errors import Problem, problem, refuse
from moorage.schemas.frames import Answer, Event
from moorage.schemas.job import OR_REFUSE, Request
from moorage.schemas.plan import Plan
from moorage.schemas.reasons import REASONS, Ends
from moorage.schemas.sizes import SizedRow

log = logging.getLogger("moorage.scheduler")

#: a client is answered after so long even if the copy has not ended: it asks again after 3 s, and hears that alone
ANSWERED_S: Final = 2.5
#: why an answer that did not wait for its copy has no start
LOOKING: Final = "the look ahead takes some seconds here; ask again"
FORECAST_KEPT_MS: Final = 2_000
#: one part in this many of a CPU's time may go into forecasts that no client waits for
FORECAST_SHARE: Final = 4
#: how often followed waiting jobs are checked, and how many each time
FOLLOW_S: Final = 2.0
#: how often a job is looked for that may be promised a start
PROMISED_S: Final = 1.0
FOLLOWED_AT_ONCE: Final = 16
FOLLOWED_MAX: Final = 256
#: a job is no longer followed this long after the last question about it
FOLLOWED_MS: Final = 60_000
#: one part in this many of the leader's time may go into explanations in answers to submits, and another in those to
#: wakes
UNASKED_SHARE: Final = 100
#: answers to wakes of one job have the same explanation for so long; so many of them are remembered
WOKEN_KEPT_MS: Final = 1_000
WOKEN_MAX: Final = 256
#: an estimate counts as changed if it is off by a fifth and by more than this
CHANGED_MS: Final = 5_000


class _Followed(NamedTuple):
    """A job whose followers get changes, until ledger time `until_ms`. `gist` is what was sent last; () for nothing."""

    until_ms: int
    gist: tuple[Any, ...]
    starts_at_ms: int  # ledger ms of the start that was sent; 0 for none


class _Question:
    """A question about a waiting job; `told` is called once, with the fixes, or None if they are unknown.

    `is_late` says that the answer does not wait for the copy any more.
    """

    def __init__(self, tenant: str, job: str, told: Callable[[Fixes | None], None]) -> None:
        self.tenant = tenant
        self.job = job
        self._message = told
        self.is_answered = self.is_late = False

    def answer(self, fixes: Fixes | None) -> None:
        if not self.is_answered:
            self.is_answered = True
            self._message(fixes)


class _Share:
    """Bounds the part of the leader's time that goes into explanations of one kind."""

    def __init__(self) -> None:
        self._from_s = 0.0

    def spend(self, explain: Callable[[], Explained | None]) -> Explained | None:
        """Return what `explain` returns; None if its kind has used up its share."""
        if time.perf_counter() < self._from_s:
            return None
        began_s = time.thread_time()  # a leader that waits for a busy machine's CPU meanwhile has spent nothing
        told = explain()
        self._from_s = time.perf_counter() + UNASKED_SHARE * (time.thread_time() - began_s)
        return told


class Foresight:
    """Answers `explain` and `plan`, and sends followers of waiting jobs what changed.

    `now_ms` returns ledger time. `answer` sends an answer to `explain`, `plain` a frame; `send` sends messages. Without
    `forks` no copy of this process is made: then there are no forecasts and fixes.
    """

    def __init__(
        self,
        engine: Engine,
        now_ms: Callable[[], int],
        answer: Callable[[Callable[[], Any], str, bool], None],
        send: Callable[[list[Message]], None],
        plain: Callable[[str, Any, bool], None],
        *,
        forks: bool,
        sized: Callable[[str, Request], SizedRow | None] = lambda _tenant, _request: None,
        promises: Callable[[], Promises] | None = None,
    ) -> None:
        self._sized = sized
        self._promises = promises
        self._engine = engine
        self._now_ms = now_ms
        self._answer = answer
        self._send = send
        self._plain = plain
        self.children = Children() if forks else None
        self._forecast: Forecast | None = None
        self._forecast_wanted = False
        self._asked: RoundRobin[_Question] = RoundRobin()  # for the next copy
        self._asking = False  # whether a copy is running, or starts with this turn of the loop
        #: questions of clients, and when they are answered at the latest in seconds of the loop, earliest first
        self._due: deque[tuple[float, _Question]] = deque()
        self._next_due: asyncio.TimerHandle | None = None
        self._free_from_ms = 0  # ledger ms from which on fixes are searched that no client waits for
        self._answering: set[asyncio.Task[None]] = set()
        self._followed: OrderedDict[tuple[str, str], _Followed] = OrderedDict()
        self._of_submits = _Share()
        self._of_wakes = _Share()
        #: by job number: ledger ms of the last explanation for a wake, and that explanation
        self._woken: dict[int, tuple[int, Explained | None]] = {}

    # ------------------------------------------------------------------------------------------- asked

    def explain(self, tenant: str, job: str, reply: str, json: bool) -> Problem | None:
        """Answer at once, or, if the job waits, after a copy of this process was asked. The waiting job is followed.

        Returns None, or a problem to answer with if too many questions wait.
        """
        found = self._engine.state.job(tenant, job)
        if found is None or not waits(found):
            self._answer_explain(tenant, job, reply, json, None)
            return None
        self._follow(tenant, job)

        def answer(fixes: Fixes | None) -> None:
            self._answer_explain(tenant, job, reply, json, fixes, is_late=question.is_late)

        question = _Question(tenant, job, answer)
        if reply and not self._ask(question, found):
            return overloaded(tenant)
        if reply and not question.is_answered:
            self._answer_in_time(question)
        return None

    def _answer_in_time(self, question: _Question) -> None:
        loop = asyncio.get_running_loop()
        self._due.append((loop.time() + ANSWERED_S, question))
        if self._next_due is None:
            self._next_due = loop.call_at(self._due[0][0], self._answer_due)

    def _answer_due(self) -> None:
        """Answer without their copy the questions that have waited for it long enough."""
        loop, due = asyncio.get_running_loop(), list[_Question]()
        while self._due and self._due[0][0] <= loop.time():
            question = self._due.popleft()[1]
            if not question.is_answered:
                question.is_late = True
                due.append(question)
        self._next_due = loop.call_at(self._due[0][0], self._answer_due) if self._due else None
        self._begin_answers(due, {})

    def _answer_explain(
        self, tenant: str, job: str, reply: str, json: bool, fixes: Fixes | None, *, is_late: bool = False
    ) -> None:
        def explanation() -> Explained | Problem:
            told = self.explained(tenant, job, fixes)
            if is_late and isinstance(told, Explained) and told.reason:
                told = _still_looking(told)
            self._note_explained((tenant, job), told)
            return told

        self._answer(explanation, reply, json)

    def explained(self, tenant: str, job: str, fixes: Fixes | None = None) -> Explained | Problem:
        """Return the answer to `explain`; a problem for an unknown job.

        It has the start in the last forecast if the reason ends by itself, and the fixes if they are for this reason.
        """
        told = explain_job(self._engine, tenant, job)
        if isinstance(told, Problem) or not told.reason:
            return told
        if REASONS[told.reason].ends is Ends.BY_ITSELF:
            told = self._with_start(told)
        if fixes is not None and fixes.reason == told.reason and may_be_cured(told):
            told = sent(told, fixes=fixes.fixes)
        return told

    def _with_start(self, told: Explained) -> Explained:
        """Add the start in the last forecast, or why it has none."""
        known, tenant, job = self._forecast, told.tenant, told.job
        if known is None:
            return told
        start = known.starts.get(tenant, {}).get(job)
        if start is None:
            found = self._engine.state.job(tenant, job)
            if why := known.late.get(tenant, {}).get(job):
                return replace(told, starts_unknown=why)
            is_newer = found is not None and found.accepted_ms > known.time_ms  # the forecast does not contain it
            why = "" if is_newer else why_unknown(known.unknown_runs, known.unknown_starts, cut=known.cut)
            return replace(told, starts_unknown=why)
        passed = max(0, self._now_ms() - known.time_ms)
        end = known.ends.get(tenant, {}).get(job)
        return replace(told, starts=start.as_answer(passed), ends=None if end is None else end.as_answer(passed))

    def _wants_forecast(self, job: Job, *, asked: bool = True) -> bool:
        """Return whether to make a forecast: there is none yet, or the last one is too old; never without copies.

        `asked` says that a client waits for the answer. Then a forecast from before the job was accepted expires
        earlier.
        """
        if self.children is None:
            return False
        known = self._forecast
        if known is None:
            return True
        age_ms = self._now_ms() - known.time_ms
        if asked and job.accepted_ms > known.time_ms:  # it does not contain jobs accepted since
            return age_ms > max(FORECAST_KEPT_MS // 4, known.cpu_ms)
        return age_ms > max(FORECAST_KEPT_MS, FORECAST_SHARE * known.cpu_ms)

    # ------------------------------------------------------------------------- asked of a copy of this process

    def _ask(self, question: _Question, job: Job) -> bool:
        """Let the next copy answer a question, or answer without one if there are no copies; False if too many wait."""
        if self.children is None:
            question.answer(None)
            return True
        if not self._asked.put(question.tenant, question):
            return False
        self._forecast_wanted |= self._wants_forecast(job)
        self._begin()
        return True

    def _begin(self) -> None:
        """Start a copy in the next turn of the event loop, unless one is running or is about to start."""
        if not self._asking:
            self._asking = True
            asyncio.get_running_loop().call_soon(self._make_copy)

    def _make_copy(self) -> None:
        """Pass all waiting questions to a copy; if none can be started, answer them without fixes."""
        assert self.children is not None
        engine, now_ms, forecasts = self._engine, self._now_ms(), self._forecast_wanted
        asked, self._asked, self._forecast_wanted = self._asked, RoundRobin(), False
        questions = [asked.take() for _ in range(asked.size)]
        jobs = list(dict.fromkeys((question.tenant, question.job) for question in questions))

        def answered(answer: bytes | None) -> None:
            self._free_from_ms = self._now_ms() + FORECAST_SHARE * (self._now_ms() - now_ms)
            self._answered(questions, answer)
            if self._asked.size or self._forecast_wanted:
                self._begin()

        if not self.children.ask(lambda: foresee(engine, now_ms, jobs, forecasts=forecasts), answered):
            self._answered(questions, None)

    def _answered(self, questions: list[_Question], answer: bytes | None) -> None:
        self._asking = False
        fixes: dict[tuple[str, str], Fixes] = {}
        try:
            if answer:
                found = decode_foreseen(answer)
                self._forecast = found.forecast or self._forecast
                fixes = {(row.tenant, row.job): row for row in found.fixes}
        except msgspec.MsgspecError:
            log.exception(
                "the answer of a forecast process could not be read; requests are answered without a forecast"
            )
        self._begin_answers(questions, fixes)

    def _begin_answers(self, questions: list[_Question], fixes: dict[tuple[str, str], Fixes]) -> None:
        if questions:
            task = asyncio.get_running_loop().create_task(self._answer_all(questions, fixes))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    async def _answer_all(self, questions: list[_Question], fixes: dict[tuple[str, str], Fixes]) -> None:
        """Answer all questions; there may be thousands, so other tasks of the event loop run in between."""
        ends = time.monotonic() + question_queue.QUESTIONS_S
        for question in questions:
            question.answer(fixes.get((question.tenant, question.job)))
            if time.monotonic() >= ends:
                await asyncio.sleep(0)
                ends = time.monotonic() + question_queue.QUESTIONS_S

    def plan(self, asker: str, tenant: str, arguments: dict[str, Any], reply: str, json: bool) -> None:
        """Have a copy find what would happen, and answer on `reply` then. `asker` is the tenant, "" for an operator.

        Raises Refused for an invalid question, if this process makes no copies, and if no copy can take it now.
        """
        question = asked_as(PlanAsk, arguments)
        check_known(self._engine, question)
        if self.children is None:
            raise refuse("unknown-verb", "plan needs a scheduler that runs in a separate process", found="plan")
        engine, now_ms = self._engine, self._now_ms()

        def planned(answer: bytes | None) -> None:
            found: Any = problem("overloaded", "the plan took too long", retry_after_s=1.0)
            if answer == FAILED:
                found = problem("internal", "moorage failed on this question")
            elif answer is not None and answer != TOO_LATE:
                found = contained(lambda: self._planned(answer, tenant, question.request))
            self._plain(reply, found, json)

        if not self.children.ask(lambda: plan(engine, now_ms, tenant, question), planned, asker):
            why = "too many plans are under way, or the scheduler's machine has no room for another process"
            raise refuse("overloaded", why, retry_after_s=1.0)

    # ---------------------------------------------------------------------------------------- before submit

    def before_submit(self, event: Submit) -> None:
        """Have a copy find when a request would start that is to be refused if that is too late; offer it if not.

        Without copies it is offered: there is no forecast by which it could be refused.
        """
        engine, now_ms, request = self._engine, self._now_ms(), event.request
        if self.children is None:
            engine.offer(event)
            return
        question = PlanAsk(request=replace(request, if_seq=None, job=event.name, start_within_s=None))

        def planned(answer: bytes | None) -> None:
            if answer in (None, FAILED, TOO_LATE):
                why = problem("overloaded", "the forecast took too long", retry_after_s=1.0)
            else:
                found = contained(lambda: self._too_late(decode_planned(answer or b""), event))
                why = found
            if why is None:
                engine.offer(event)
                return
            replies = list[tuple[Any, str, bool]]()
            event.answer(why, replies)
            for frame, reply, json in replies:
                self._plain(reply, frame, json)

        if not self.children.ask(lambda: plan(engine, now_ms, event.tenant, question), planned, event.tenant):
            planned(None)

    def _too_late(self, found: Plan, event: Submit) -> Problem | None:
        """Return the problem of a request that does not start in time; None if it does, or if others decide on it."""
        if found.starts not in ("later", "unknown") and not found.replicas_now < found.replicas:
            return None
        request, start = event.request, found.in_ms
        part, within_s = request.or_refuse, request.start_within_s or 0.0
        in_ms = None if start is None else start.p50_ms if part == OR_REFUSE[0] else start.p90_ms
        if in_ms is not None and part != OR_REFUSE[0] and self._promises is not None:
            is_sweep = request.copies > 1 and not request.is_gang
            in_ms = self._promises().within_ms(event.tenant, in_ms, is_sweep=is_sweep)
        if in_ms is not None and in_ms <= within_s * 1000:
            return None
        cases = "half of the cases" if part == OR_REFUSE[0] else "nine of ten cases"
        why = (found.waiting.starts_unknown if found.waiting is not None else "") or "the forecast has no bound"
        when = f"it would start within {in_ms / 1000:.0f} s in {cases}" if in_ms is not None else f"not known: {why}"
        fixes = found.waiting.fixes if found.waiting is not None else []
        return problem(
            "failed-precondition",
            f"it is not expected to start in time: {when}",
            field="$.or_refuse",
            found=f"{in_ms / 1000:.0f} s" if in_ms is not None else "unknown",
            allowed=f"a start within start_within_s = {within_s:g} s" if within_s else "a start now",
            next=f"{fixes[0].say}: it would start sooner" if fixes else "wait for longer, or leave out or_refuse",
            job=event.name,
        )

    def _planned(self, answer: bytes, tenant: str, request: Request | None) -> Answer:
        found = decode_planned(answer)
        if request is not None and found.starts != "refused":
            found.sized = self._sized(tenant, request)
        return Answer("plan", found.ledger, msgspec.to_builtins(found))

    # --------------------------------------------------------------------------------------- at submit

    def at_submit(self, job: Job) -> dict[str, Any] | None:
        """Return why a job waits, for the answer to its submit. The job is followed if there is room.

        None if explanations have used up their share of the leader's time, and on failure.
        """
        if len(self._followed) < FOLLOWED_MAX:
            self._follow(job.tenant, job.name)
        told = self._of_submits.spend(lambda: self._unasked(job.tenant, job.name))
        if told is None:
            return None
        data: dict[str, Any] = msgspec.to_builtins(told)
        del data["state"]  # the answer has a state of its own: that of the submit
        return data

    def at_wake(self, job: Job) -> Explained | None:
        """Return why a service's job waits, for the answer to a wake: many callers may wake it in one second.

        None if such explanations have used up their share of the leader's time, and on failure.
        """
        now_ms = self._now_ms()
        at_ms, told = self._woken.get(job.num, (-WOKEN_KEPT_MS, None))
        if now_ms - at_ms < WOKEN_KEPT_MS:
            return told
        told = self._of_wakes.spend(lambda: self._unasked(job.tenant, job.name))
        if told is not None:
            if len(self._woken) >= WOKEN_MAX:
                self._woken.clear()
            self._woken[job.num] = now_ms, told
        return told

    def _unasked(self, tenant: str, job: str, fixes: Fixes | None = None) -> Explained | None:
        """Return an explanation that no client asked for; None for an unknown job.

        None on failure, too: a defect here must not end the term.
        """
        try:
            told = self.explained(tenant, job, fixes)
        except Exception:
            log.exception("the reason why job %s of tenant %s waits could not be computed", job, tenant)
            return None
        return None if isinstance(told, Problem) else told

    # ----------------------------------------------------------------------------------- when it changes

    def _follow(self, tenant: str, job: str) -> None:
        key = (tenant, job)
        known = self._followed.pop(key, _Followed(0, (), 0))
        if len(self._followed) >= FOLLOWED_MAX:
            self._followed.popitem(last=False)
        self._followed[key] = known._replace(until_ms=self._now_ms() + FOLLOWED_MS)

    def _note_explained(self, key: tuple[str, str], told: Explained | Problem) -> None:
        """Remember the first explanation that the caller got, so that only differences from it are sent."""
        followed = self._followed.get(key)
        if followed is not None and not followed.gist and isinstance(told, Explained) and told.reason:
            self._followed[key] = followed._replace(gist=_gist(told), starts_at_ms=_starts_at_ms(told, self._now_ms()))

    async def run(self) -> None:
        """Send, forever, the followers of waiting jobs a message when the reason, position or estimate has changed."""
        for turn in itertools.count():
            await asyncio.sleep(PROMISED_S)
            if turn * PROMISED_S % FOLLOW_S == 0 and (messages := self._news()):
                self._send(messages)
            self.promise()

    def promise(self) -> None:
        """Tell a job that has waited for some seconds by when it starts, if a forecast says so; else ask for one."""
        if self._promises is None:
            return
        promises, now_ms = self._promises(), self._now_ms()
        promises.look(now_ms)
        if (found := promises.choose(self._forecast, now_ms)) is not None:
            self._engine.offer(found)
        if self.children is not None and promises.wants(self._forecast, now_ms):
            self._forecast_wanted = True
            self._begin()

    def _news(self) -> list[Message]:
        """Return the messages that can be sent now. Those with fixes follow once a copy has found them."""
        state, now_ms, messages = self._engine.state, self._now_ms(), []
        with_fixes = now_ms >= self._free_from_ms
        for key in list(self._followed)[:FOLLOWED_AT_ONCE]:
            followed = self._followed.pop(key)
            job = state.job(*key)
            if job is None or now_ms > followed.until_ms or not waits(job):
                continue
            if self._wants_forecast(job, asked=False):
                self._forecast_wanted = True
                self._begin()
            told = self._unasked(*key)
            if told is None:  # it is no longer followed
                continue
            gist, starts_at_ms = _gist(told), _starts_at_ms(told, now_ms)
            if followed.gist and (gist != followed.gist or _moved(followed.starts_at_ms, starts_at_ms, now_ms)):
                if not (with_fixes and may_be_cured(told) and self._ask_for_news(job)):
                    messages.append(self._message(job, told))
            elif followed.gist:
                starts_at_ms = followed.starts_at_ms
            self._followed[key] = _Followed(followed.until_ms, gist, starts_at_ms)
        return messages

    def _ask_for_news(self, job: Job) -> bool:
        """Send a job's news with its fixes once a copy has found them; return False if no copy can be asked now."""

        def told(fixes: Fixes | None) -> None:
            explained = self._unasked(job.tenant, job.name, fixes)
            if explained is not None and explained.reason:
                self._send([self._message(job, explained)])

        return self.children is not None and self._ask(_Question(job.tenant, job.name, told), job)

    def _message(self, job: Job, explained: Explained) -> Message:
        data = msgspec.to_builtins(explained)
        event = Event(job.tenant, job.name, job.rev, job.state, self._engine.state.seq, waiting=data)
        return self._engine.subjects.event(job.tenant, job.name), encode(event), ""

    def close(self) -> None:
        if self._next_due is not None:
            self._next_due.cancel()
        for task in self._answering:
            task.cancel()
        if self.children is not None:
            self.children.close()


def _still_looking(told: Explained) -> Explained:
    """Add that a copy is looking for the start, to an answer that has none and does not wait for it."""
    if told.starts is not None or told.starts_unknown or REASONS[told.reason].ends is not Ends.BY_ITSELF:
        return told
    return replace(told, starts_unknown=LOOKING)


def _gist(told: Explained) -> tuple[Any, ...]:
    """Return the parts of an explanation whose change is news."""
    return (told.reason, told.position, told.needs, told.waiting_replicas)


def _starts_at_ms(told: Explained, now_ms: int) -> int:
    """Return the ledger time of the median estimate of the start; 0 if unknown."""
    return 0 if told.starts is None else now_ms + told.starts.p50_ms


def _moved(before_ms: int, now_is_ms: int, now_ms: int) -> bool:
    """Return whether the expected start differs much from the one sent before.

    A run without known history is expected to continue for as long as it has lasted. So the start of a job behind it
    moves all the time; it is sent when it is off by a fifth of the remaining time, not every few seconds.
    """
    if not before_ms or not now_is_ms:
        return before_ms != now_is_ms
    off = abs(now_is_ms - before_ms)
    return off > CHANGED_MS and off * 5 > max(before_ms - now_ms, now_is_ms - now_ms)

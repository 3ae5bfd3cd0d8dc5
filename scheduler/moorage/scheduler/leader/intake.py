"""Decodes incoming messages: each becomes an event for the core, or is refused at once.

Message handlers only enqueue; `Intake.drain` decodes in batches, outside the code that reads the socket. No message,
whatever it contains, stops the loop.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import msgspec

from moorage.bus.transport import Delivery
from moorage.scheduler.arguments import REASON_CHARS_MAX, cancel_of, check_fields, check_job, uncancel_of
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.events import Batch, Cancel, ChangeOrder, Execute, FromWorker, SignalOrder, Submit, Wake
from moorage.scheduler.leader.sender_rates import SenderRates
from moorage.scheduler.leader.worker_clocks import WorkerClocks
from moorage.scheduler.pacing.reminders import Reminders
from moorage.scheduler.questions import question_queue
from moorage.scheduler.questions.question_queue import QuestionQueue, RoundRobin, overloaded
from moorage.scheduler.tflops import resolved
from moorage.schemas.codec import Decoder, encode, is_json, refuse_twice, split_array
from moorage.schemas.decode_errors import asked_as
from moorage.schemas.errors import Problem, Refused, refuse
from moorage.schemas.frames import ExecAsked, Goodbye, Join, Load, Renew, ReportFrame
from moorage.schemas.memo import Memo
from moorage.schemas.names import JOB_ID_DIGITS, SERVICE, TENANT, WORKER, is_job, is_service, is_tenant, is_worker
from moorage.schemas.nearest import nearest
from moorage.schemas.operate import ChangeAsked, SignalAsked
from moorage.schemas.roles import may_answer
from moorage.schemas.service import MemberLoad
from moorage.schemas.subjects import API_VERBS, EXEC, Subjects
from moorage.schemas.ways import way

log = logging.getLogger("moorage.intake")

#: names that verbs have elsewhere
_CALLED: Final = {
    "status": "show", "get": "show", "list": "ls", "jobs": "ls", "run": "submit", "create": "submit",
    **dict.fromkeys(("stop", "kill", "delete"), "cancel"),
}  # fmt: skip
#: the most messages of workers that wait for decoding, the same for operators and for tenants, and the most of one
#: tenant: the rest is kept for other tenants
WAITING_MAX: Final = 100_000
WAITING_MAX_TENANT: Final = 90_000
#: the most messages of one worker that are decoded in a second, and bytes for each: a true one has one report under
#: way at a time, with what happened to thousands of jobs
WORKER_FRAMES_PER_S: Final = 5_000
WORKER_FRAME_BYTES: Final = 4 * 1024
BATCH_MAX: Final = 10_000
#: the most load frames of one tenant's members that wait for decoding, and of all that one turn of the loop decodes
CALLS_MAX_TENANT: Final = 4_096
CALLS_AT_ONCE: Final = 500
#: the most submit subjects whose tenant is remembered
SUBMITTERS_MAX: Final = 10_000
#: one turn of the loop decodes this many requests; this many bytes of other messages count like one request
AT_ONCE: Final = 4_000
AT_ONCE_BYTES: Final = 256
#: the part of a turn reserved for tenants' requests, however much workers send
REQUESTS_PART: Final = 4

_decode_from_worker: Final = Decoder[Any](Join | Goodbye | ReportFrame | Renew)
_decode_load: Final = Decoder[Load](Load)
#: bytes of a member's load frame, which comes from a tenant's program; a true one has at most about a quarter of it
LOAD_BYTES_MAX: Final = 8 * 1024
_decode_calls: Final = Decoder[MemberLoad](MemberLoad, LOAD_BYTES_MAX)
_decode_any: Final = Decoder[dict[str, Any]](dict[str, Any], 64 * 1024)

_KIND_OF_VERB: Final = {"join": (Join, Goodbye), "renew": (Renew,), "fact": (ReportFrame,)}


def fresh_job_id() -> str:
    """Return an id that sorts by time: `j`, 9 characters of milliseconds, then 5 random ones."""
    ms, text = int(time.time() * 1000), ""
    for _ in range(9):
        ms, digit = divmod(ms, 32)
        text = JOB_ID_DIGITS[digit] + text
    return f"j{text}{''.join(JOB_ID_DIGITS[byte & 31] for byte in os.urandom(5))}"


def _arguments_in(payload: bytes) -> dict[str, Any]:
    """Return what a question or an order says. Raises `Refused`, also for a key twice: the last one would count."""
    arguments = _decode_any(payload) if payload else {}
    refuse_twice(payload)
    return arguments


class Intake:
    """The queue of undecoded messages, and their decoding.

    `on_read` is called for questions (tenant, verb, arguments, reply subject, whether JSON, the way it came),
    `on_admin` for operators' verbs (operator, then the same). `answer` sends what depends on the state, `refuse` what
    does not. `on_unsure` takes submits that may be refused by the forecast. `has_keys` says whether the server has
    rights for each user, `persons` whose keys are persons' (see `ways.way`).
    """

    def __init__(
        self,
        engine: Engine,
        subjects: Subjects,
        answer: Callable[[str, bytes], None],
        refuse: Callable[[str, bytes], None],
        on_read: Callable[[str, str, dict[str, Any], str, bool, str], None],
        on_admin: Callable[[str, str, dict[str, Any], str, bool, str], None],
        on_calls: Callable[[str, str, MemberLoad, int], None] | None = None,
        has_keys: Callable[[], bool] = lambda: False,
        persons: Callable[[], Mapping[str, str]] = dict,
        on_unsure: Callable[[Submit], None] | None = None,
    ) -> None:
        self._engine = engine
        self._prefix = subjects.prefix
        self._answer = answer
        self._refuse_now = refuse
        self._on_read = on_read
        self._on_admin = on_admin
        self._on_calls = on_calls
        self._has_keys = has_keys
        self._persons = persons
        self._on_unsure = on_unsure or engine.offer
        self._raw: deque[Delivery] = deque()  # of workers
        self._orders: deque[Delivery] = deque()  # of operators
        self.frames_came = self.frames_taken = 0  # of workers
        #: tenants take turns: a tenant that sends without pause, or large messages, delays only itself
        self._requests: RoundRobin[Delivery] = RoundRobin(WAITING_MAX_TENANT)
        self._array: _Array | None = None  # the batch of requests being read
        #: what members of services have to do: tenants take turns, and a flood of one is dropped
        self._calls: RoundRobin[Delivery] = RoundRobin(CALLS_MAX_TENANT)
        self._skip = len(subjects.prefix) + 1
        self._questions = QuestionQueue(self._skip)
        #: tenant by submit subject
        self._submitters: Memo[str, str] = Memo(SUBMITTERS_MAX)
        self.rates = SenderRates(engine.config.requests_per_s)
        self.worker_rates = SenderRates(WORKER_FRAMES_PER_S, WORKER_FRAME_BYTES, by_part=False)
        self._flooding = Reminders()
        self._clocks = WorkerClocks(lambda worker: worker in engine.state.workers)
        self.counters: Counter[str] = Counter()

    def put(self, delivery: Delivery) -> None:
        """Enqueue a message; if the queue is full, drop and count it, since its sender repeats it.

        A message beyond its tenant's rate is refused, and so is a question beyond its tenant's bound; one beyond its
        worker's rate is dropped. If the sender itself may not publish to the reply subject, the message is taken
        without the reply subject.
        """
        if (worker := self._worker_of(delivery.subject)) and not self.may_send(worker, delivery):
            return
        if delivery.reply and not may_answer(self._prefix, delivery.subject, delivery.reply):
            self.counters["reflected"] += 1
            count = self.counters["reflected"]
            if count & (count - 1) == 0:  # at 1, 2, 4, 8, …: a flood must not fill the log
                log.warning(
                    "a request on %s names the reply subject %s, which its sender may not use: the request gets "
                    "no answer (%d such requests so far)",
                    delivery.subject,
                    delivery.reply,
                    count,
                )
            delivery = msgspec.structs.replace(delivery, reply="")
        if (whose := self._whose(delivery.subject)) and (
            wait_s := self.rates.take(whose, len(delivery.data), delivery.received_monotonic_s)
        ):
            self.counters["over_rate"] += 1
            self._refuse(delivery, Refused(self.rates.refusal(whose, wait_s)))
            return
        tenant = self._submitters.get(delivery.subject)
        if tenant is None:
            self._put_other(delivery)
        elif self._requests.size + self._questions.size >= WAITING_MAX or not self._requests.put(tenant, delivery):
            self.counters["dropped"] += 1

    def _worker_of(self, subject: str) -> str:
        """Return the worker of a message on subjects of workers; "" for any other message."""
        skip = self._skip
        if subject[skip : skip + 7] == "worker.":
            return subject[skip + 7 :].partition(".")[0]
        return subject[skip + 5 :] if subject[skip : skip + 5] == "load." else ""

    def may_send(self, worker: str, delivery: Delivery) -> bool:
        """Count a message for its worker's rate; return whether it is within that."""
        if not self.worker_rates.take(worker, len(delivery.data), delivery.received_monotonic_s):
            return True
        self.counters["over_rate"] += 1
        if self._flooding.due(worker):
            log.warning(
                "worker %s sends more than %d messages a second, or larger ones: the rest is dropped",
                worker,
                WORKER_FRAMES_PER_S,
            )
        return False

    def _whose(self, subject: str) -> str:
        """Return the tenant of a message on subjects of tenants; "" for any other message."""
        skip = self._skip
        if subject[skip : skip + 4] == "api.":
            return subject[skip + 4 :].partition(".")[0]
        return subject[skip + 6 :].partition(".")[0] if subject[skip : skip + 6] == "calls." else ""

    def count_queued(self, delivery: Delivery) -> None:
        """Count a message of the durable queue for its tenant's rate."""
        tenant = delivery.subject[self._skip :].split(".")[1]
        self.rates.take(tenant, len(delivery.data), delivery.received_monotonic_s)

    def _put_other(self, delivery: Delivery) -> None:
        """Enqueue a message that is not a submit on a known subject."""
        subject, skip = delivery.subject, self._skip
        if subject[skip : skip + 6] == "calls.":
            if not self._calls.put(subject[skip + 6 :].partition(".")[0], delivery):
                self.counters["dropped"] += 1
            return
        if subject[skip : skip + 4] != "api.":
            waiting = self._orders if subject[skip : skip + 6] == "admin." else self._raw
            if len(waiting) >= WAITING_MAX:
                self.counters["dropped"] += 1
                return
            waiting.append(delivery)
            self.frames_came += waiting is self._raw
            return
        if self._requests.size + self._questions.size >= WAITING_MAX:
            self.counters["dropped"] += 1
            return
        asker = self._questions.tenant_of(subject)
        if not asker:
            if not self._requests.put(subject[skip + 4 :].partition(".")[0], delivery):
                self.counters["dropped"] += 1
        elif not self._questions.put(asker, delivery):
            self.counters["overloaded"] += 1
            self._refuse(delivery, Refused(overloaded(asker)))

    @property
    def waiting(self) -> int:
        return len(self._raw) + len(self._orders) + self._requests.size + self._questions.size + self._calls.size

    def drain(self, mono_ms: int) -> bool:
        """Handle waiting messages for one turn of the loop; return whether none is left.

        Questions are answered, other messages are offered to the engine, invalid ones are refused.
        """
        raw, requests, questions, room = self._raw, self._requests, self._questions, AT_ONCE
        for_requests = AT_ONCE // REQUESTS_PART if requests.size or self._array is not None else 0
        while room > for_requests and raw:
            self.frames_taken += 1
            room -= self._try(raw.popleft(), None, room, mono_ms)
        ends = time.monotonic() + question_queue.QUESTIONS_S
        while self._orders:
            self._try(self._orders.popleft(), None, 1, mono_ms)
            if time.monotonic() >= ends:
                break
        while room > 0 and (self._array is not None or requests.size):
            array = self._array
            room -= self._try(requests.take() if array is None else array.delivery, array, room, mono_ms)
        for _ in range(min(self._calls.size, CALLS_AT_ONCE)):
            self._try(self._calls.take(), None, 1, mono_ms)
        ends = time.monotonic() + question_queue.QUESTIONS_S
        while questions.size:
            self._try(questions.take(), None, 1, mono_ms)
            if time.monotonic() >= ends:
                break
        return self._array is None and not self.waiting

    def _try(self, delivery: Delivery, array: _Array | None, room: int, mono_ms: int) -> int:
        """Handle a message, or the next part of an array; return how much of the turn it used."""
        took = 1 + len(delivery.data) // AT_ONCE_BYTES
        try:
            if array is not None:
                return self._read(array, room)
            tenant = self._submitters.get(delivery.subject)
            if tenant is not None:
                self._submit(tenant, delivery)
            else:
                self._take(delivery, mono_ms)
        except Refused as refused:
            self.counters["refused"] += 1
            self._refuse(delivery, refused)
        except Exception:  # a defect of moorage must not stop the loop
            self._refuse(delivery, self._defect(delivery))
        return took

    def _defect(self, delivery: Delivery) -> Refused:
        """Log the exception being handled; return the refusal to send."""
        self.counters["defects"] += 1
        log.exception("a frame on %s could not be handled", delivery.subject)
        return refuse("internal", "moorage failed on this; nothing of it was recorded")

    def _refuse(self, delivery: Delivery, refused: Refused) -> None:
        if delivery.reply:
            self._refuse_now(delivery.reply, encode(refused.problem, json=is_json(delivery.data)))

    def _take(self, delivery: Delivery, mono_ms: int) -> None:
        parts = delivery.subject[self._skip :].split(".")
        room = parts[0]
        if room == "worker" and len(parts) == 3:
            self._from_worker(parts[1], parts[2], delivery)
        elif room == "api" and len(parts) == 3:
            self._api(parts[1], parts[2], delivery)
        elif room == "load" and len(parts) > 1:
            load = self._clocks.checked(parts[1], _decode_load(delivery.data))
            self._engine.offer_load(parts[1], load, mono_ms)
        elif room == "calls" and len(parts) == 4 and is_service(parts[2]):
            calls = _decode_calls(delivery.data)
            self._engine.offer_member_load(parts[1], parts[2], calls, mono_ms)
            if self._on_calls is not None:
                self._on_calls(parts[1], parts[2], calls, mono_ms)
        elif room == "admin" and len(parts) == 3:
            operator, verb = parts[1:]
            arguments = _arguments_in(delivery.data)
            self._on_admin(operator, verb, arguments, delivery.reply, is_json(delivery.data), self._way(delivery))
        else:
            raise refuse("unknown-verb", f"nothing listens on {delivery.subject[:REASON_CHARS_MAX]}")

    def _way(self, delivery: Delivery) -> str:
        return way(delivery.headers, delivery.reply, has_keys=self._has_keys(), persons=self._persons())

    # ------------------------------------------------------------------------------------------- workers

    def _from_worker(self, worker: str, verb: str, delivery: Delivery) -> None:
        kinds = _KIND_OF_VERB.get(verb)
        if kinds is None:
            return  # one of the scheduler's own frames
        if not is_worker(worker):
            raise refuse("invalid-argument", f"a worker id must match {WORKER.pattern}", found=worker)
        frame = _decode_from_worker(delivery.data)
        if not isinstance(frame, kinds):
            raise refuse("invalid-argument", f"a frame of this kind does not belong on .{verb}", field="$.kind")
        if isinstance(frame, Renew) and frame.use and not frame.use[0].attempt:
            self._note_unnamed(worker)
        fresh = secrets.token_hex(16) if isinstance(frame, Join) else ""
        self._engine.offer(FromWorker(worker, frame, delivery.reply, is_json(delivery.data), fresh))

    def _note_unnamed(self, worker: str) -> None:
        """Log once that a worker says what attempts use without their names."""
        self.counters["unnamed"] += 1
        if self.counters["unnamed"] == 1:
            log.warning(
                "worker %s names the attempts whose use it reports by their fences alone, as an earlier release does. "
                "Replicas placed together share a fence, so what such workers report of use counts for nothing, and "
                "no stall is seen there; upgrade them",
                worker,
            )

    # ----------------------------------------------------------------------------------------------- api

    def _api(self, tenant: str, verb: str, delivery: Delivery) -> None:
        if not is_tenant(tenant):
            raise refuse("invalid-argument", f"a tenant must match {TENANT.pattern}", found=tenant)
        if (refused := self._engine.refuses(tenant, verb)) is not None:
            raise Refused(refused)
        if verb == "submit":
            self._submitters.put(delivery.subject, tenant)
            self._submit(tenant, delivery)
        elif verb in API_VERBS:
            self.counters[f"api.{verb}"] += 1
            arguments = _arguments_in(delivery.data)
            json, came = is_json(delivery.data), self._way(delivery)
            event: Wake | Execute | ChangeOrder | SignalOrder | Cancel
            if verb == "wake":
                event = wake_of(tenant, arguments, delivery.reply, json=json)
            elif verb == EXEC:
                event = execute_of(tenant, arguments, delivery.reply, json)
            elif verb == "change":
                change = asked_as(ChangeAsked, arguments, "moorage change --help")
                event = ChangeOrder(tenant, change, delivery.reply, json)
            elif verb == "signal":
                event = SignalOrder(
                    tenant, asked_as(SignalAsked, arguments, "moorage signal --help"), delivery.reply, json
                )
            elif verb == "cancel":
                event = cancel_of(tenant, arguments, reply=delivery.reply, json=json, came=came)
            elif verb == "uncancel":
                event = uncancel_of(tenant, arguments, reply=delivery.reply, json=json)
            else:
                self._on_read(tenant, verb, arguments, delivery.reply, json, came)
                return
            event.came = came
            self._engine.offer(event)
        else:
            near = _CALLED.get(verb) or nearest(verb[:32], API_VERBS)
            step = f"ask {near}" if near else ""
            raise refuse("unknown-verb", f"no verb {verb}", found=verb, allowed=", ".join(API_VERBS), next=step)

    def _submit(self, tenant: str, delivery: Delivery) -> None:
        self.counters["api.submit"] += 1
        data, headers, engine, json = delivery.data, delivery.headers, self._engine, True
        trace = headers.get("traceparent", "") if headers else ""
        if data[:1] != b"{":  # nearly all are one request in JSON
            json = is_json(data)
            if is_array(data):
                self._array = _Array(tenant, delivery, trace, self._way(delivery))
                return
        unnamed = partial(named_by_header, headers) if headers else fresh_job_id
        data = resolved(data, engine.config.tflops_file)
        event = engine.submitted(tenant, data, unnamed, delivery.reply, json, 0, trace, came=self._way(delivery))
        if event.request.or_refuse is None:
            engine.offer(event)
        else:
            self._on_unsure(event)

    def _read(self, array: _Array, at_most: int) -> int:
        """Offer up to `at_most` more requests of an array, each decided by itself; return how many were read."""
        batch, engine, tenant, trace = array.batch, self._engine, array.tenant, array.trace
        submitted, offer, json, first = engine.submitted, engine.offer, batch.json, array.read
        bodies = array.bodies[first : first + at_most]
        failed: Problem | None = None
        array.read += len(bodies)
        if array.read == len(array.bodies):
            self._array = None
        for position, body in enumerate(map(bytes, bodies), first):
            try:
                body = resolved(body, engine.config.tflops_file)
                event = submitted(tenant, body, fresh_job_id, "", json, 0, trace, batch, position, array.came)
                offer(event) if event.request.or_refuse is None else self._on_unsure(event)
                continue
            except Refused as refused:
                answer = refused.problem
            # a defect of moorage fails this request only: other requests of the array may be accepted already
            except Exception:
                answer = failed = failed or self._defect(array.delivery).problem  # logged once a turn
            if batch.decide(position, answer) and batch.reply:
                self._answer(batch.reply, encode(batch.answers, json=json))
        return len(bodies)


class _Array:
    """An array of requests in one message; `read` of them are read so far. The answer is an array in the same order."""

    __slots__ = ("batch", "bodies", "came", "delivery", "read", "tenant", "trace")

    def __init__(self, tenant: str, delivery: Delivery, trace: str, came: str) -> None:
        """Split the message into requests. Raises `Refused` unless it is an array of 1 to `BATCH_MAX` of them."""
        self.bodies = split_array(delivery.data)
        if not 1 <= len(self.bodies) <= BATCH_MAX:
            raise refuse("invalid-argument", f"a batch must hold 1..{BATCH_MAX} requests", found=len(self.bodies))
        self.tenant = tenant
        self.delivery = delivery
        self.trace = trace
        self.came = came
        self.batch = Batch(delivery.reply, is_json(delivery.data), len(self.bodies))
        self.read = 0


def is_array(payload: bytes) -> bool:
    """Return whether a JSON or msgpack payload begins as an array."""
    if not payload:
        return False
    first = payload[0]
    if first in b" \t\r\n":
        return payload.lstrip()[:1] == b"["
    return first == 0x5B or 0x90 <= first <= 0x9F or first in (0xDC, 0xDD)


def named_by_header(headers: dict[str, str]) -> str:
    """Return the job id in `Nats-Msg-Id`, for a request without an id: then a retry creates no second job.

    Where there is no such header, or it is no valid job id, the id is a new one.
    """
    name = headers.get("Nats-Msg-Id", "")
    return name if is_job(name) else fresh_job_id()


def wake_of(tenant: str, arguments: dict[str, Any], reply: str, *, json: bool) -> Wake:
    """Return the wake that these arguments ask for: `service`, its name. Raises `Refused` for any other."""
    check_fields("wake", arguments)
    service = arguments.get("service")
    if not isinstance(service, str) or not is_service(service):
        raise refuse(
            "invalid-argument", "wake needs the name of a service", field="$.service", found=service,
            allowed=SERVICE.pattern,
        )  # fmt: skip
    return Wake(tenant, service, reply, json)


def execute_of(tenant: str, arguments: dict[str, Any], reply: str, json: bool) -> Execute:
    """Return the command that these arguments ask for, under a new stream. Raises `Refused`, naming the field."""
    asked = asked_as(ExecAsked, arguments, "moorage exec --help")
    check_job("exec", asked.job)
    return Execute(tenant, asked, secrets.token_hex(16), reply, json)

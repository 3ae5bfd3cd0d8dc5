"""The dead letters: queued requests that could not be read or were refused, kept for an operator to resend.

No client waits for the answer to a message published to the durable queue. So a refusal is stored with the message: the
reason, the sequence in the queue, and the subject to which it was published. An operator lists the letters, shows one,
resends it (unchanged or corrected, under the same job id, so that resending twice makes one job) or drops it.

The tenant, which may read no dead letter, gets an event with the state REJECTED, and `show` says why. Both are of the
leader that refused the request: a later one knows the letter alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec

from moorage.bus.errors import BusError, JetStreamRefused
from moorage.bus.jetstream import COPIES_FOLLOW, MESSAGE_ID, Ack, JetStream, StoredMessage, wall_seconds
from moorage.scheduler.arguments import cancel_of
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.ledger.finished import job_key
from moorage.scheduler.core.outputs.outputs import Message
from moorage.scheduler.durable.refused_submits import RefusedSubmits
from moorage.scheduler.pacing.answering import Answering
from moorage.scheduler.tflops import resolved
from moorage.schemas.actors import by_operator, words
from moorage.schemas.answers.letters import Letter, LetterDone, LetterRow, LettersAnswer
from moorage.schemas.codec import Decoder, encode
from moorage.schemas.errors import Problem, Refused, problem, refuse
from moorage.schemas.frames import Accepted, Answer, Event, Events
from moorage.schemas.memo import Memo
from moorage.schemas.names import is_job
from moorage.schemas.operate import DeadLetter, DlqAct
from moorage.schemas.subjects import Subjects

log = logging.getLogger("moorage.dlq")

LETTERS_MAX: Final = 100_000
#: of one tenant; beyond it that tenant's oldest are dropped
LETTERS_MAX_TENANT: Final = 10_000
#: JetStream reserves this much, if the server has it
BYTES_MAX: Final = 64 * 1024**2
BYTES_MIN: Final = 1024**2
#: of what one tenant's letters take that are stored in one term, this part of the stream; beyond it that tenant's
#: oldest are dropped, so that they drive out no other tenant's
TENANT_PART: Final = 8
#: tenants whose letters of this term are counted
TENANTS_MAX: Final = 10_000
#: settings that may change on an existing stream: they affect only what is kept
MAY_CHANGE: Final = frozenset({"max_age", "max_bytes", "max_msgs", "max_msgs_per_subject", *COPIES_FOLLOW})
#: those that an operator may enlarge
BOUNDS: Final = frozenset({"max_bytes", "max_msgs", "max_msgs_per_subject"})
AT_ONCE_MAX: Final = 8
LIST_BYTES_MAX: Final = 256 * 1024
AGAIN_S: Final = 1.0
#: marks answers to resent letters; a subject has no blank
_REPLY_MARK: Final = "letter "

_decode_letter: Final = Decoder[DeadLetter](DeadLetter, 1024 * 1024)
_decode_verdict: Final = Decoder[Any](Accepted | Answer | Problem)
_decode_cancel: Final = Decoder[dict[str, Any]](dict[str, Any], 64 * 1024)

Say = Callable[[str, bytes], None]


class _Stored:
    """The letters of one tenant that were stored in this term: sequences and bytes."""

    __slots__ = ("bytes", "letters")

    def __init__(self) -> None:
        self.letters: deque[tuple[int, int]] = deque()
        self.bytes = 0


class DeadLetters:
    """Stores and resends dead letters during one term. `wake` is called when something was offered to the engine.

    `say` sends messages that may be lost.
    """

    def __init__(
        self,
        jetstream: JetStream,
        subjects: Subjects,
        engine: Engine,
        wake: Callable[[], None],
        say: Callable[[list[Message]], None],
        replicas: int,
    ) -> None:
        self._js = jetstream
        self._subjects = subjects
        self._engine = engine
        self._wake = wake
        self._say = say
        self._refused = RefusedSubmits()
        self._replicas = replicas
        self._waiting: dict[str, asyncio.Future[Any]] = {}
        self._answers = Answering("acts on dead letters", AT_ONCE_MAX)
        self._stored: Memo[str, _Stored] = Memo(TENANTS_MAX)
        self._number = 0

    @staticmethod
    def stream(subjects: Subjects, replicas: int, keep_s: float) -> dict[str, Any]:
        """Return the stream's settings: bounded in number, bytes and age; the oldest letters are dropped."""
        return {
            "name": subjects.dead_letter_stream,
            "subjects": [subjects.dead_letters_all],
            "storage": "file",
            "retention": "limits",
            "discard": "old",
            "num_replicas": replicas,
            "max_msgs": LETTERS_MAX,
            "max_msgs_per_subject": LETTERS_MAX_TENANT,
            "max_bytes": BYTES_MAX,
            "max_age": int(keep_s * 1e9),
            "allow_direct": True,
        }

    @staticmethod
    async def ensure(jetstream: JetStream, subjects: Subjects, replicas: int, keep_s: float) -> None:
        """Create the stream, smaller than `BYTES_MAX` if the server lacks room, or check it. A bound that an
        operator has enlarged stays as large. Raises `BusError`."""
        config = DeadLetters.stream(subjects, replicas, keep_s)
        await jetstream.ensure_stream_with_room(config, MAY_CHANGE, BYTES_MIN, keeps_larger=BOUNDS)

    async def bury(self, tenant: str, message: StoredMessage, why: Problem, evidence: str = "") -> None:
        """Store a refused message with the reason, and tell of a submit; try again, without end, until it is stored."""
        while True:
            if await self.keep(tenant, message, why, evidence):
                break
            await asyncio.sleep(AGAIN_S)
        if message.subject == self._subjects.request(tenant, "submit"):
            self.reject(tenant, job_in(why, message.data, message.seq), why)

    async def keep(self, tenant: str, message: StoredMessage, why: Problem, evidence: str = "") -> bool:
        """Try once to store a refused message, and return whether it is stored. A failure is logged.

        A deleted stream is made again, for the next try. `evidence` is the traceback if the scheduler itself failed on
        the request.
        """
        headers = {MESSAGE_ID: f"{message.subject}.{message.seq}", "Moorage-Code": why.code}
        trace = (message.headers or {}).get("traceparent", "")
        letter = DeadLetter(message.subject, message.seq, why, message.data, trace[:256], evidence)
        payload = encode(letter)
        try:
            answer = await self._js.append(self._subjects.dead_letter(tenant), payload, headers)
            if isinstance(answer, Ack):
                log.warning("request %d of tenant %s is refused: %s", message.seq, tenant, why.message)
                await self._make_room(tenant, answer.seq, len(payload))
                return True
            trouble = answer.description
            if answer.nobody_listens:  # the stream no longer exists
                keep_s = self._engine.config.dead_letters_keep
                await DeadLetters.ensure(self._js, self._subjects, self._replicas, keep_s)
        except BusError as error:
            trouble = str(error)
        log.warning("request %d of tenant %s cannot be stored as a dead letter now: %s", message.seq, tenant, trouble)
        return False

    async def _make_room(self, tenant: str, seq: int, size: int) -> None:
        """Drop a tenant's oldest letters if those of this term take more than its part of the stream.

        Without an answer of the server they stay, until the tenant has too many again.
        """
        mine = self._stored.get(tenant) or self._stored.put(tenant, _Stored())
        mine.letters.append((seq, size))
        mine.bytes += size
        most = BYTES_MAX // TENANT_PART
        if mine.bytes <= most:
            return
        while mine.bytes > most // 2 and len(mine.letters) > 1:
            mine.bytes -= mine.letters.popleft()[1]
        log.warning("tenant %s has more than %d MiB of dead letters: its oldest are dropped", tenant, most >> 20)
        try:
            subject, first = self._subjects.dead_letter(tenant), mine.letters[0][0]
            await self._js.purge(self._subjects.dead_letter_stream, subject=subject, below_seq=first)
        except BusError as error:
            log.warning("the oldest dead letters of tenant %s cannot be dropped now: %s", tenant, error)

    def reject(self, tenant: str, job: str, why: Problem) -> None:
        """Publish for the tenant that its queued submit makes no job, unless there is a job with its id."""
        state = self._engine.state
        if state.job(tenant, job) is not None or state.finished.find(job_key(tenant, job)) is not None:
            return
        self._refused.note(tenant, job, why)
        event = Event(tenant, job, 0, "REJECTED", state.seq, why=why.message)
        self._say(
            [
                (self._subjects.event(tenant, job), encode(event), ""),
                (self._subjects.events(tenant), encode(Events(tenant, state.seq, [event])), ""),
            ]
        )

    def refusal(self, tenant: str, job: str) -> Problem | None:
        """Return why a job does not exist whose queued submit was refused in this term; None for any other."""
        why = self._refused.why(tenant, job)
        if why is None:
            return None
        text = f"job {job} of tenant {tenant} does not exist: its request in the durable queue was refused"
        return msgspec.structs.replace(why, code="not-found", message=f"{text}, {why.code}: {why.message}", job=job)

    def decided(self, reply: str, answer: bytes) -> bool:
        """Pass an answer of the engine to the act that resent the letter; return False if it is about no letter.

        `reply` is the mark with which the letter was offered.
        """
        if not reply.startswith(_REPLY_MARK):
            return False
        waiting = self._waiting.pop(reply, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(_decode_verdict(answer))
        return True

    def ask(self, operator: str, arguments: dict[str, Any], answer: Say, reply: str, json: bool) -> None:
        """Begin an act of the operator that its subject names in a task of its own, which answers on `reply`.

        Raises `Refused` for an invalid act, and if `AT_ONCE_MAX` acts are under way.
        """
        act = DlqAct.of(arguments)
        if (full := self._answers.overloaded()) is not None:
            raise Refused(full)

        def reject(data: LettersAnswer | Letter | LetterDone | Problem) -> None:
            frame = data if isinstance(data, Problem) else Answer("dlq", self._engine.state.seq, data)
            if reply:
                answer(reply, encode(frame, json=json))

        self._answers.begin(partial(self._do, act, words(by_operator(operator), act.by)), reject)

    async def close(self) -> None:
        await self._answers.close()

    # --------------------------------------------------------------------------------------------------- acts

    async def _do(self, act: DlqAct, by: str) -> LettersAnswer | Letter | LetterDone:
        """Carry out an act, and return the data of its answer. Raises `Refused`, `BusError`."""
        if act.act == "list":
            return await self._list(act)
        message = await self._get(act.sequence)
        if act.act == "show":
            return _whole(message)
        if act.act == "drop":
            await self._delete(message.seq)
            log.warning("dead letter %d was deleted by %s: %s", message.seq, by, act.why or "no reason")
            return LetterDone(sequence=message.seq, dropped=True)
        return await self._resend(act, by, message)

    async def _list(self, act: DlqAct) -> LettersAnswer:
        """Return at most `limit` letters after the sequence `after`, oldest first, and the number of each tenant's.

        `next` is the `after` of the next page, which may be empty; 0 at the end. Without a tenant, all are listed.
        """
        subject = self._subjects.dead_letter(act.tenant) if act.tenant else self._subjects.dead_letters_all
        stream = self._subjects.dead_letter_stream
        info = await self._js.stream_info(stream, subject)
        counts = {self._subjects.token(name, 1): number for name, number in sorted(info.subjects.items())}
        messages = await self._js.direct_get_batch(
            stream, seq=act.after + 1, next_by_subject=subject, batch=act.limit, max_bytes=LIST_BYTES_MAX
        )
        rows = [self._listed(message) for message in messages]
        more = bool(messages) and messages[-1].seq < info.last_seq
        return LettersAnswer(letters=rows, counts=counts, next=messages[-1].seq if more else 0)

    def _listed(self, message: StoredMessage) -> LetterRow:
        """Return a letter's row; foreign messages in the stream get a row too, so that they can be dropped."""
        try:
            return _row(message, _decode_letter(message.data))
        except (Refused, LookupError):
            nothing = problem(
                "invalid-argument", "this message is not a dead letter of moorage: another program wrote it; drop it"
            )
            tenant = self._subjects.token(message.subject, 1)
            letter = DeadLetter(f"{message.subject}.{tenant}.-", 0, nothing, message.data)
            return msgspec.structs.replace(_row(message, letter), tenant=tenant, verb="", subject=message.subject)

    async def _get(self, sequence: int) -> StoredMessage:
        stream = self._subjects.dead_letter_stream
        message = await self._js.get_message(stream, sequence)
        if message is not None:
            return message
        told, next_step = f"there is no dead letter {sequence}", "moorage dlq list"
        if sequence <= (await self._js.stream_info(stream)).last_seq:  # an act may be asked again that got no answer
            told = f"dead letter {sequence} is gone: it was submitted again, deleted, or it was too old"
            next_step = "an act that got no answer may have been done: moorage show its job, or moorage dlq list"
        raise refuse("not-found", told, found=sequence, next=next_step)

    async def _delete(self, sequence: int) -> None:
        """Delete a letter; it may be gone already, since a client that got no answer in time asks again."""
        stream = self._subjects.dead_letter_stream
        try:
            await self._js.delete_message(stream, sequence)
        except JetStreamRefused:
            if await self._js.get_message(stream, sequence) is not None:
                raise

    async def _resend(self, act: DlqAct, by: str, message: StoredMessage) -> LetterDone:
        """Offer a letter's request or cancel again, under its tenant and job id unless its body names another job.

        The letter is deleted once a record contains the request. Raises `Refused` if it is refused again; the letter
        then stays.
        """
        letter = _decode_letter(message.data)
        tenant, verb = self._subjects.token(message.subject, 1), letter.subject.rpartition(".")[2]
        body = letter.body if act.body is None else msgspec.json.encode(act.body)
        self._number += 1
        mark = f"{_REPLY_MARK}{self._number}"
        if verb == "cancel":
            self._engine.offer(cancel_of(tenant, _decode_cancel(body), reply=mark))
        else:
            body = resolved(body, self._engine.config.tflops_file)
            self._engine.offer(
                self._engine.submitted(
                    tenant, body, lambda: job_in(letter.problem, letter.body, letter.sequence), mark, trace=letter.trace
                )
            )
        waiting: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[mark] = waiting
        self._wake()
        try:
            verdict = await waiting
        finally:
            self._waiting.pop(mark, None)
        if isinstance(verdict, Problem):
            raise Refused(verdict)
        await self._delete(message.seq)
        log.warning("dead letter %d was submitted again by %s: %s", message.seq, by, act.why or "no reason")
        return LetterDone(sequence=message.seq, resent=True, tenant=tenant, verb=verb, answer=verdict)


def _row(message: StoredMessage, letter: DeadLetter) -> LetterRow:
    """Return a letter's row in a list: what it was, and why it is here. Raises LookupError if it has no verb."""
    return LetterRow(
        sequence=message.seq,
        tenant=message.subject.rpartition(".")[2],
        verb=letter.subject.split(".")[1:][-1],
        subject=letter.subject,
        queued=letter.sequence,
        time_ms=int(wall_seconds(message.stored_at) * 1000),
        job=_job_of(letter.problem, letter.body),
        code=letter.problem.code,
        message=letter.problem.message,
        bytes=len(letter.body),
    )


def _whole(message: StoredMessage) -> Letter:
    """Return a letter with its problem, evidence and body as text; a body that is not UTF-8 also as bytes."""
    letter = _decode_letter(message.data)
    row = msgspec.structs.asdict(_row(message, letter))
    try:
        body, data = letter.body.decode(), None
    except UnicodeDecodeError:
        body, data = letter.body.decode("utf-8", "replace"), letter.body
    return Letter(**row, problem=letter.problem, evidence=letter.evidence, body=body, data=data)


def job_in(why: Problem, body: bytes, sequence: int) -> str:
    """Return the id of the job that a refused submit was to make: one without an id has its place in the queue."""
    return _job_of(why, body) or f"q{sequence}"


def _job_of(why: Problem, body: bytes) -> str:
    """Return the job id in a refused request; "" if it has none or it cannot be read."""
    if why.job:
        return why.job
    try:
        job = _decode_cancel(body).get("job")
    except Refused:
        return ""
    return job if isinstance(job, str) and is_job(job) else ""

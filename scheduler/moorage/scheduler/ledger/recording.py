"""A recording: all inputs of a leader in order, from which its decisions can be repeated byte for byte.

The ledger contains the decisions. But decisions also depend on hello, load and renewal frames, which are in no record.
With `--record FILE` a leader appends to a file, for each term: the state at its beginning, every input of the engine,
and the bytes of each record. A frame of the file is a length of four bytes (big endian), then msgpack. The file
contains request bodies and lease sessions: it is for operators only, and only its owner may read it.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import msgspec

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.contained_engine import ContainedEngine
from moorage.scheduler.core.engine import Displaced, Engine
from moorage.scheduler.core.events import (
    Ask,
    Cancel,
    ChangeOrder,
    Event,
    Execute,
    FromWorker,
    Order,
    Promising,
    QueueRead,
    Resign,
    ScheduleOrder,
    ScheduleRun,
    SignalOrder,
    SnapshotTaken,
    Submit,
    Wake,
)
from moorage.scheduler.core.fleet.slots import slots_of
from moorage.scheduler.core.ledger.record import Record, decode_record
from moorage.scheduler.core.ledger.records import STEP_WIDTH, Op
from moorage.scheduler.core.ledger.state import State
from moorage.scheduler.core.outputs.output_writer import ExplainWaiting
from moorage.scheduler.core.outputs.outputs import Outputs
from moorage.scheduler.core.rank.rankers import ranker_class
from moorage.scheduler.ledger import state_bytes as snapshot
from moorage.scheduler.ledger.state_bytes import BadSnapshot
from moorage.schemas.codec import Decoder, encode, is_json
from moorage.schemas.errors import Refused
from moorage.schemas.frames import ExecAsked, Goodbye, Join, Load, Renew, ReportFrame
from moorage.schemas.operate import ACTS, ChangeAsked, SignalAsked
from moorage.schemas.own_class import is_own
from moorage.schemas.ranges import joined
from moorage.schemas.schedules import ScheduleAsked
from moorage.schemas.service import MemberLoad
from moorage.schemas.subjects import Subjects

log = logging.getLogger("moorage.recording")

FORMAT: Final = 9
#: at this size the recording ends, and the leader continues without it
FILE_BYTES_MAX: Final = 8 << 30
FRAME_BYTES_MAX: Final = 1 << 31
#: the first bytes in the body of a frame that begins a term: an array of seven, then the word `reign`
_TERM: Final = b"\x97\xa5reign"
#: what the core and the decoders raise for input that no leader wrote
_DAMAGED: Final = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    AssertionError,
    RuntimeError,
    Refused,
    BadSnapshot,
    msgspec.MsgspecError,
)
#: a frame's length, and enough of its body to recognise it
_HEAD_BYTES: Final = 6
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder().decode
_frame: Final = Decoder[Join | Goodbye | ReportFrame | Renew](Join | Goodbye | ReportFrame | Renew, FRAME_BYTES_MAX)
_calls: Final = msgspec.msgpack.Decoder(MemberLoad).decode
_load: Final = msgspec.msgpack.Decoder(Load).decode


class Recorder:
    """Writes the file. On failure the recording ends with a warning, and the leader continues."""

    def __init__(self, path: Path) -> None:
        """Append to `path`. Raises OSError."""
        self._file: BinaryIO | None = os.fdopen(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600), "ab")
        self._bytes = path.stat().st_size

    def put(self, *what: Any) -> None:
        if self._file is None:
            return
        frame = _encode(what)
        self._bytes += len(frame) + 4
        try:
            if self._bytes > FILE_BYTES_MAX:
                raise OSError(f"the recording has {FILE_BYTES_MAX} bytes, its bound")
            self._file.write(len(frame).to_bytes(4, "big") + frame)
            if what[0] == "commit":
                self._file.flush()
        except OSError as error:
            self._fail(error)

    def close(self) -> None:
        """Write what is left. If that fails, the recording ends with a warning, too."""
        try:
            if self._file is not None:
                self._file.close()
        except OSError as error:
            self._fail(error)
        self._file = None

    def _fail(self, error: OSError) -> None:
        log.warning("the recording (--record) ends here, because it cannot be written: %s", error)
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # it writes its buffer again
                file.close()


#: the arguments of an engine, in order
Begins = tuple[State, Config, Subjects, int, int, ExplainWaiting | None]


class RecordedEngine(ContainedEngine):
    """An engine whose inputs and records are written to a `Recorder`."""

    def __init__(self, recorder: Recorder, *begins: *Begins) -> None:
        self._recorder = recorder
        state, config, subjects, leader, mono_ms, _ = begins
        said = {name: getattr(config, name) for name in Config.__struct_fields__}
        known = snapshot.dump(state, with_facts=True), state.settings  # which are soft, and decide if they are told
        recorder.put("reign", FORMAT, known, said, subjects.prefix, leader, mono_ms)
        super().__init__(*begins)

    def offer(self, event: Event) -> None:
        if not isinstance(event, Ask):  # a question is in no record
            self._recorder.put("offer", *_written(event))
        super().offer(event)

    def offer_load(self, worker_id: str, frame: Load, mono_ms: int) -> None:
        self._recorder.put("load", worker_id, _encode(frame), mono_ms)
        super().offer_load(worker_id, frame, mono_ms)

    def offer_member_load(self, tenant: str, service: str, frame: MemberLoad, mono_ms: int) -> None:
        self._recorder.put("calls", tenant, service, _encode(frame), mono_ms)
        super().offer_member_load(tenant, service, frame, mono_ms)

    def unheard(self, ms: int, mono_ms: int) -> None:
        self._recorder.put("unheard", ms, mono_ms)
        super().unheard(ms, mono_ms)

    def build(self, time_ms: int, mono_ms: int, *, folds: bool = True) -> bytes:
        payload = super().build(time_ms, mono_ms, folds=folds)
        self._recorder.put("build", time_ms, mono_ms, payload, folds)
        return payload

    def prepare_outputs(self, mono_ms: int) -> Outputs | None:
        self._recorder.put("prepare", mono_ms)
        return super().prepare_outputs(mono_ms)

    def commit(self, seq: int, mono_ms: int) -> Outputs:
        self._recorder.put("commit", seq, mono_ms)
        return super().commit(seq, mono_ms)


def _written(event: Event) -> tuple[Any, ...]:
    match event:
        case Submit():
            return "submit", event.tenant, event.name, event.body, event.sequence, event.trace, event.came
        case QueueRead():
            return "read", event.tenant, event.which, event.through
        case Cancel():
            which = event.before, event.lifts, event.came
            return "cancel", event.tenant, event.job, event.why, event.by, event.sequence, event.replicas, *which
        case FromWorker():
            return "worker", event.worker, encode(event.frame, json=event.json), event.fresh
        case Order():
            return "order", event.verb, msgspec.to_builtins(event.act), event.announced, event.operator, event.came
        case ChangeOrder():
            return "change", event.tenant, msgspec.to_builtins(event.asked), event.came
        case SignalOrder():
            return "signal", event.tenant, msgspec.to_builtins(event.asked), event.came
        case Execute():
            return "exec", event.tenant, msgspec.to_builtins(event.asked), event.stream, event.came
        case ScheduleOrder():
            body = event.submit.body if event.submit is not None else b""
            return "schedule", event.tenant, msgspec.to_builtins(event.asked), body, event.came
        case ScheduleRun():
            return "run", event.tenant, event.name, event.wish, event.sequence, event.next_ms, event.latest_ms
        case Wake():
            return "wake", event.tenant, event.service, event.came
        case Promising():
            return "promise", event.job, event.by_ms, event.p50_ms, event.p90_ms, event.runs
        case SnapshotTaken():
            return "snapshot", event.name, event.seq, event.digest
        case _:
            return ("resign",)


def _read(engine: Engine, kind: str, rest: list[Any]) -> Event:
    match kind:
        case "submit":
            tenant, name, body, sequence, trace, *came = rest  # an earlier release wrote no way, here and below
            return engine.submitted(tenant, body, lambda: str(name), sequence=sequence, trace=trace, came="".join(came))
        case "read":
            return QueueRead(*rest)
        case "cancel":
            tenant, job, why, by, sequence, replicas, *which = rest
            before, lifts, came = (*which, *(False, False, "")[len(which) :])[:3]
            only = None if replicas is None else joined(map(tuple, replicas))
            cancel = Cancel(tenant, job, why, by=by, sequence=sequence, replicas=only, before=before, lifts=lifts)
            cancel.came = came
            return cancel
        case "worker":
            worker, frame, fresh = rest
            return FromWorker(worker, _frame(frame), "", is_json(frame), fresh)
        case "order":
            verb, arguments, *announced = rest
            return Order(verb, msgspec.convert(arguments, ACTS[verb]), "", True, *announced)
        case "change":
            tenant, arguments, *came = rest
            return ChangeOrder(tenant, msgspec.convert(arguments, ChangeAsked), came="".join(came))
        case "signal":
            tenant, arguments, *came = rest
            return SignalOrder(tenant, msgspec.convert(arguments, SignalAsked), came="".join(came))
        case "exec":
            tenant, command, stream, *came = rest
            return Execute(tenant, msgspec.convert(command, ExecAsked), stream, "", True, "".join(came))
        case "schedule":
            tenant, arguments, body, *came = rest
            asked = ScheduleAsked.of(arguments)
            submit = engine.submitted(tenant, body, lambda: asked.name) if body else None
            return ScheduleOrder(tenant, asked, submit, came="".join(came))
        case "run":
            return ScheduleRun(*rest)
        case "wake":
            tenant, service, *came = rest
            return Wake(tenant, service, came="".join(came))
        case "promise":
            return Promising(*rest)
        case "snapshot":
            return SnapshotTaken(*rest)
        case "resign":
            return Resign()
    raise CannotReplay(f"this release knows no event {kind!r}")


class CannotReplay(Exception):
    """The file is not a recording, is damaged, or needs another release or a ranker that is not imported."""


class Replayed(NamedTuple):
    """A record as recorded; `same` says whether it was built again with the same bytes.

    `state` is the state after the record if so, else before it; replaying the next record changes it. Where the record
    ended its term, since it is stored elsewhere than foreseen, it is the state that was thrown away then.
    """

    seq: int
    record: Record
    same: bool
    state: State


def placements(one: Replayed) -> Iterator[dict[str, Any]]:
    """Yield the recorded placements of a record with their evidence."""
    record, state = one.record, one.state
    known = {record.evidence[at]: record.evidence[at + 2 : at + 4] for at in range(0, len(record.evidence) - 3, 4)}
    steps = record.steps
    evidence: list[int] = []
    for at in range(0, len(steps), STEP_WIDTH):
        op, num, replica, worker, mask = steps[at : at + 5]
        if op != Op.PLACE:
            continue
        found = state.jobs.get(num)
        evidence = known.get(num, evidence)
        yield {
            "kind": "placement",
            "ledger": one.seq,
            "time_ms": record.time,
            "tenant": found.tenant if found is not None else "",
            "job": found.name if found is not None else str(num),
            "replica": replica,
            "worker": state.worker_by_num[worker].id,
            "slots": slots_of(mask),
            **({"workers_known": evidence[0], "free_left": evidence[1]} if len(evidence) == 2 else {}),
        }


def _frames(path: Path) -> Iterator[list[Any]]:
    """Yield the frames of a file in order.

    If a leader was killed while it wrote, its unfinished frame is skipped, up to where the next term begins. Raises
    CannotReplay if the file does not begin like a recording, and OSError.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            raise CannotReplay(f"{path.name} is empty: a scheduler writes to it once it leads")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            at = 0
            while at < size:
                frame, then = _frame_at(data, at)
                if not at and (not frame or frame[0] != "reign"):
                    raise CannotReplay(f"{path.name} is not a recording of a leader")
                if frame is not None:
                    yield frame
                else:
                    log.warning(
                        "the recording %s is incomplete at byte %d, and continues with the next leader's term",
                        path.name,
                        at,
                    )
                    then = _next_term(data, at + 1)
                at = then


def _frame_at(data: mmap.mmap, at: int) -> tuple[list[Any] | None, int]:
    """Return the frame at this position and the position after it; None for the frame if it is not whole."""
    body_at = at + 4
    then = body_at + int.from_bytes(data[at:body_at], "big")
    if then - body_at >= FRAME_BYTES_MAX or then > len(data):
        return None, then
    try:
        frame = _decode(data[body_at:then])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None, then
    is_one = isinstance(frame, list) and bool(frame) and isinstance(frame[0], str) and _goes_on(data, then)
    return (frame if is_one else None), then


def _goes_on(data: mmap.mmap, at: int) -> bool:
    """Return whether a frame can begin here, or the file ends; if not, the frame before it was incomplete."""
    if at + _HEAD_BYTES > len(data):
        return True
    head = data[at + 4 : at + _HEAD_BYTES]
    if 0x91 <= head[0] <= 0x9F and 0xA0 < head[1] < 0xC0:  # a short array that begins with a short text
        return True
    return data.find(_TERM, at + 4, at + 4 + _HEAD_BYTES + len(_TERM)) >= 0  # after the first bytes of a torn frame


def _next_term(data: mmap.mmap, start: int) -> int:
    """Return the position of the next whole frame that begins a term; the end of the file if there is none."""
    found = data.find(_TERM, start + 4)
    while found >= 0:
        frame, _ = _frame_at(data, found - 4)
        if frame is not None:
            return found - 4
        found = data.find(_TERM, found + 1)
    return len(data)


def replay(path: Path) -> Iterator[Replayed]:
    """Repeat the decisions of a recording, and yield each record. After the first difference, its term is skipped.

    Raises CannotReplay and OSError.
    """
    term: _ReplayedTerm | None = None
    for kind, *rest in _frames(path):
        replayed: Replayed | None = None
        try:
            if kind == "reign":
                term = _ReplayedTerm(_begin(path, rest))
            elif term is not None:
                replayed = term.take(kind, rest)
        except _DAMAGED as error:
            raise CannotReplay(f"{path.name} is damaged: its {kind!r} cannot be read: {error}") from error
        if replayed is not None:
            yield replayed
            if not replayed.same or (term is not None and term.ended):
                term = None  # from here on the decisions have diverged, or the next term begins


class _ReplayedTerm:
    """An engine that gets the inputs of a recorded term again."""

    def __init__(self, engine: ContainedEngine) -> None:
        self._engine = engine
        self._built = self._recorded = b""  # the last record, as built now and as recorded
        self.ended = False  # by a record that is stored elsewhere than foreseen

    def take(self, kind: str, rest: list[Any]) -> Replayed | None:
        """Repeat one frame; return the record that it completes, or None."""
        engine = self._engine
        match kind:
            case "offer":
                engine.offer(_read(engine, rest[0], rest[1:]))
            case "load":
                engine.offer_load(rest[0], _load(rest[1]), rest[2])
            case "calls":
                engine.offer_member_load(rest[0], rest[1], _calls(rest[2]), rest[3])
            case "unheard":
                engine.unheard(rest[0], rest[1])
            case "build":
                self._built, self._recorded = engine.build(rest[0], rest[1], folds=rest[3]), rest[2]
            case "prepare":
                if self._built == self._recorded:
                    engine.prepare_outputs(rest[0])
            case "commit":
                same = self._built == self._recorded
                if same:
                    try:
                        engine.commit(rest[0], rest[1])
                    except Displaced:
                        self.ended = True
                return Replayed(rest[0], decode_record(self._recorded), same, engine.state)
        return None


def _begin(path: Path, rest: list[Any]) -> ContainedEngine:
    try:
        if rest[0] != FORMAT:
            raise CannotReplay(f"{path.name} has format {rest[0]}; this release reads {FORMAT}")
        _, (known, settings), config, prefix, leader, mono_ms = rest
        if is_own(ranker := config.get("ranker", "fragments")) and ranker.partition(":")[0] not in sys.modules:
            # a file must not decide which code is loaded
            raise CannotReplay(
                f"{path.name} was decided with the ranker {ranker}: import it in a program of yours, and call"
                " moorage.scheduler.ledger.recording.replay"
            )
        ranker_class(ranker)
        state = snapshot.load(known, with_facts=True)
        state.settings = msgspec.convert(settings, tuple[str, tuple[tuple[str, str], ...]])
        return ContainedEngine(state, Config(**config), Subjects(prefix), leader, mono_ms)
    except (LookupError, ValueError, TypeError, msgspec.MsgspecError) as error:
        raise CannotReplay(f"{path.name}: {error}") from None

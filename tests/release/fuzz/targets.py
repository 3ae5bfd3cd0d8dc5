"""Everything that reads bytes or text from outside, with the errors that it may raise: all else is an escape.

The frames' decoders are found, not listed: whatever module of ours holds a `Decoder` is a target.
"""

from __future__ import annotations

import asyncio
import importlib
import pkgutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest import mock

import msgspec

from moorage.bus import jetstream, jetstream_answers
from moorage.bus.errors import BusError
from moorage.bus.framing import parse_headers
from moorage.bus.inbox import MUX_ALL, Answers
from moorage.bus.lend import protocol as leases
from moorage.bus.transport import Delivery
from moorage.scheduler.core.ledger import record
from moorage.scheduler.core.ledger.folding import FoldError
from moorage.scheduler.core.ledger.state import State
from moorage.scheduler.ledger.ledger import Ledger, LedgerBroken
from moorage.scheduler.ledger.state_bytes import BadSnapshot, load
from moorage.schemas import frames, job, operate
from moorage.schemas.codec import Decoder, encode, split_array
from moorage.schemas.errors import CODES, MoorageError, Problem, Refused
from moorage.schemas.gpu import parse_token
from moorage.schemas.release import release_problem
from moorage.schemas.settings import read_file
from moorage.schemas.subjects import Subjects
from moorage.schemas.units import duration_s, size_bytes
from moorage.system.framing import FrameRefused, framed
from moorage.testing.requests import drawn
from moorage.worker.agent import journal
from moorage.worker.supervisor import journal as supervisor_journal
from moorage.worker.supervisor import protocol as supervisor
from moorage.worker.supervisor.client import Supervised, SupervisorGone
from moorage.worker.supervisor.server import Connection
from tests.release.fuzz.kept import ledger, said, snapshot
from tests.release.fuzz.made import made

ROOMS: Final = ("schemas", "system", "bus", "scheduler", "worker", "client", "cli")
#: what looks at nothing of ours when it is imported, or starts something
#: so many whole requests, as the net of options draws them, are what is changed at random
DRAWN: Final = 24
_NOT_IMPORTED: Final = ("__main__",)


class Target(NamedTuple):
    """`read` takes bytes; whatever it raises beyond `errors` is an escape. `kind` is what it reads, to make some.

    `right` are those of the samples that it takes: of requests, whose rules are strict, hardly any that is made is.
    """

    name: str
    read: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    kind: Any = None
    samples: tuple[bytes, ...] = ()
    msgpack_only: bool = False
    right: tuple[bytes, ...] = ()


def targets() -> list[Target]:
    return [*_frames(), *_files(), *_streams(), *_texts()]


# ------------------------------------------------------------------------------------------------------------ frames


def modules() -> Iterator[Any]:
    for room in ROOMS:
        package = importlib.import_module(f"moorage.{room}")
        yield package
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not found.name.endswith(_NOT_IMPORTED):
                yield importlib.import_module(found.name)


def _decoders() -> dict[str, Decoder[Any]]:
    """By module and name, each object once."""
    found: dict[int, tuple[str, Decoder[Any]]] = {}
    for module in modules():
        for name, value in vars(module).items():
            held = value.items() if isinstance(value, dict) else [("", value)]
            for key, each in list(held):
                if isinstance(each, Decoder):
                    found.setdefault(id(each), (f"{module.__name__}.{name}{f'.{key}' if key else ''}", each))
    return dict(found.values())


def _frames() -> list[Target]:
    requests = (msgspec.json.encode({**drawn(seed).body, "job": f"j{seed}"}) for seed in range(DRAWN))
    payloads = (*{payload for _, payload in said()}, *requests)
    decoders = {name: (decoder, decoder._json.type) for name, decoder in _decoders().items()}
    known = {kind for _, kind in decoders.values() if isinstance(kind, type)}
    for kind in vars(frames).values():  # one that is read only as a part of another is read by itself, too
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind not in known:
            decoders[f"frames.{kind.__name__}"] = (Decoder(kind), kind)
    acts = [Target(f"act {verb}", _acts(verb), (Refused,), kind) for verb, kind in operate.ACTS.items()]
    read = [Target(name, _checked(decoder), (Refused,), kind, payloads) for name, (decoder, kind) in decoders.items()]
    read.append(Target("a batch of requests", _checked(split_array), (Refused,), list[job.Request], payloads))
    return [*(each._replace(right=tuple(filter(partial(_takes, each), payloads))) for each in read), *acts]


def _takes(target: Target, payload: bytes) -> bool:
    try:
        target.read(payload)
    except target.errors:
        return False
    return True


def _checked(decode: Callable[[bytes], object]) -> Callable[[bytes], object]:
    """What is read can be written again; a refusal is one that can be told: a known code, and small."""

    def read(payload: bytes) -> object:
        try:
            found = decode(payload)
        except Refused as refused:
            told: Problem = refused.problem
            assert told.code in CODES, told.code
            assert len(msgspec.json.encode(told)) < 16_384, "a refusal of over 16 KiB"
            raise
        assert encode(found, json=False), "what was read can be answered and recorded"
        return found

    return read


def _acts(verb: str) -> Callable[[bytes], object]:
    read = Decoder[dict[str, Any]](dict[str, Any], 64 * 1024)
    return lambda payload: operate.act_of(verb, read(payload))


# -------------------------------------------------------------------------------------- what is kept, and read again


def _files() -> list[Target]:
    records = tuple(ledger())
    return [
        Target("a ledger record", _folds(), (LedgerBroken, FoldError), record.Record, records, msgpack_only=True),
        Target("a snapshot", load, (BadSnapshot,), None, (snapshot(),), msgpack_only=True),
        Target("an agent's journal", _file(_agent_journal), (MoorageError,), journal._Record, (), msgpack_only=True),
        Target(
            "a supervisor's journal", _file(_supervisor_journal), (), supervisor_journal.Record, (), msgpack_only=True
        ),
        Target("a settings file", _file(lambda path, data: _written(path, data) and read_file(path)), (Refused,), None,
               (b'[worker]\nlabels = { zone = "a" }\nlease = "20s"\n[scheduler]\nhistory_bytes = "10GiB"\n',)),
    ]  # fmt: skip


def _folds() -> Callable[[bytes], object]:
    """As a standby folds what stands in the stream, over a ledger up to a record drawn by what comes."""
    reader = Ledger(None, Subjects(), 1)  # type: ignore[arg-type]  # it only folds
    rows = ledger()

    def fold(payload: bytes) -> object:
        state = State()
        for seq, data in enumerate(rows[: len(payload) % 8], 1):
            reader.fold_message(state, jetstream.StoredMessage("L", "moorage.ledger.record", seq, "", data))
        reader.fold_message(state, jetstream.StoredMessage("L", "moorage.ledger.record", state.seq + 1, "", payload))
        return state

    return fold


def _file(read: Callable[[Path, bytes], object]) -> Callable[[bytes], object]:
    def reads(data: bytes) -> object:
        with tempfile.TemporaryDirectory(prefix="moorage-fuzz-", dir=_MEMORY) as folder:
            return read(Path(folder) / "file", data)

    return reads


_MEMORY: Final = "/dev/shm" if Path("/dev/shm").is_dir() else None


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def _agent_journal(path: Path, data: bytes) -> object:
    """A whole record with these bytes as its body, and the bytes themselves behind it, as a crash might leave them."""
    body = framed(data, 1 << 30)
    _written(path, journal.FORM.magic + body + data)
    opened = journal.Journal(path)
    opened.close()
    return opened.state.unanswered


def _supervisor_journal(path: Path, data: bytes) -> object:
    return supervisor_journal.read_journal(
        _written(path, supervisor_journal.FORM.magic + supervisor_journal.FORM.mark + framed(data, 1 << 30) + data)
    )


# ------------------------------------------------------------------------------------------------- streams and answers


def _streams() -> list[Target]:
    return [
        Target("the supervisor's socket", _asked_of_the_supervisor, (), supervisor.Request, (), msgpack_only=True),
        Target("the agent's end of it", _told_to_the_agent, (SupervisorGone,), list[supervisor.Message], (), True),
        Target("a lease's request", _framed(leases.read_request), (FrameRefused,), leases.Request, (), True),
        Target("a lease's answer", _framed(leases.read_answer), (FrameRefused,), leases.Answer, (), True),
        Target("answers in one frame", _mux, (), list[tuple[int, bytes]], (), msgpack_only=True),
        Target("an acknowledgement", jetstream_answers.read_ack, (), jetstream_answers.AckAnswer),
        *(
            Target(f"JetStream's {name}", read, (BusError,), kind)
            for name, read, kind in (
                ("info", jetstream_answers.read_info, jetstream_answers.InfoAnswer),
                ("message", jetstream_answers.read_get, jetstream_answers.GetAnswer),
                ("done", jetstream_answers.read_done, jetstream_answers.DoneAnswer),
            )
        ),
        Target("a block of headers", parse_headers, (), None, (b"NATS/1.0 503\r\nNats-Msg-Id: a\r\nB: c\r\n\r\n",)),
    ]


def _asked_of_the_supervisor(payload: bytes) -> object:
    """The connection must end with a refusal: an exception in a protocol's callback would be the supervisor's."""
    connection = Connection(mock.Mock())
    connection._welcome = True
    connection.data_received(framed(payload, 1 << 30))
    return connection


def _told_to_the_agent(payload: bytes) -> object:
    async def told() -> object:
        client = Supervised()
        client.data_received(framed(payload, 1 << 30))
        for future in (client._identity, client._gone):
            if future.done():
                future.exception()
        return client

    return _loop.run_until_complete(told())


def _framed(read: Callable[[asyncio.StreamReader], Any]) -> Callable[[bytes], object]:
    def reads(payload: bytes) -> object:
        reader = asyncio.StreamReader(loop=_loop)
        reader.feed_data(framed(payload, 1 << 30))
        reader.feed_eof()
        return _loop.run_until_complete(read(reader))

    return reads


def _mux(payload: bytes) -> object:
    answers = Answers("_INBOX.fuzz")
    answers.deliver(Delivery(f"_INBOX.fuzz.{MUX_ALL}", "", payload, None, 0.0))
    return answers


_loop: Final = asyncio.new_event_loop()


# -------------------------------------------------------------------------------------------------------------- texts


def _texts() -> list[Target]:
    def of_text(read: Callable[[str], object]) -> Callable[[bytes], object]:
        return lambda payload: read(payload.decode("utf-8", "surrogateescape"))

    tokens = (b"2xH100:80G", b"3x2xA100:40G@mps", b"=A10", b"1xL40S@time-slice", b"cpu", b"1")
    durations = (b"1h30m", b"500ms", b"90", b"2d", b"0", b"10GiB", b"1.5h")
    return [
        Target("a GPU token", of_text(parse_token), (ValueError, MoorageError), None, tokens),
        Target("a duration", of_text(duration_s), (ValueError,), None, durations),
        Target("a size", of_text(size_bytes), (ValueError,), None, durations),
        Target("a release", of_text(release_problem), (), None, (b"0.2.0", b"0.10.1rc1", b"1.2")),
    ]


def samples_of(target: Target, rng: Any) -> bytes:
    """One right, or nearly right, payload for a target."""
    if target.right and rng.random() < 0.3:
        return bytes(rng.choice(target.right))
    if target.samples and (target.kind is None or rng.random() < 0.4):
        return bytes(rng.choice(target.samples))
    value = made(rng, target.kind)
    if target.msgpack_only or rng.random() < 0.5:
        return msgspec.msgpack.encode(value)
    return msgspec.json.encode(value)

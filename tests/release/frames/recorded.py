"""What `record.py` wrote, and which type each message is of.

`walk` goes over a message and its decoded frame together, so that one check serves every type: `Lost` says where the
frame does not hold what the message says, and `newer` makes the message that a later release might send.
"""

from __future__ import annotations

import base64
import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from moorage.schemas.codec import Decoder, decode_request, encode, is_json
from moorage.schemas.errors import Problem
from moorage.schemas.frames import (
    Accepted,
    Answer,
    Event,
    Events,
    FactAck,
    FactFrame,
    FleetDetail,
    FleetFrame,
    Goodbye,
    Hello,
    Join,
    Joined,
    Load,
    LogPage,
    Look,
    Looked,
    Output,
    ReadLog,
    Renew,
    Renewed,
    RollCall,
    Standing,
    Wanted,
)
from moorage.schemas.release import release_problem

FOLDER: Final = Path(__file__).parent
PREFIX: Final = "moorage"
#: this release, as it is: recorded anew by each process that asks for it
PRESENT: Final = "present"
#: the releases whose frames are kept, the first being 0.3, and the present one
KEPT: Final = sorted(folder.name for folder in FOLDER.iterdir() if (folder / "expected.json").exists())
RELEASES: Final = [*KEPT, PRESENT]
#: those kept whose workers this release works with
NEIGHBOURS: Final = [release for release in KEPT if release_problem(release) is None]

#: by the word after the prefix, and of a worker's subject by its verb
_SAID: Final[dict[str, Decoder[Any]]] = {
    "hello": Decoder(Hello),
    "load": Decoder(Load),
    "event": Decoder(Event),
    "events": Decoder(Events),
    "log": Decoder(Output),
    "fleet.frame": Decoder(FleetFrame),
    "fleet.detail": Decoder(FleetDetail),
    "fleet.rollcall": Decoder(RollCall),
    "fleet.look": Decoder(Look),
    "fleet.standing": Decoder(Standing),
    "worker.join": Decoder(Join | Goodbye),
    "worker.renew": Decoder(Renew),
    "worker.fact": Decoder(FactFrame),
    "worker.wanted": Decoder(Wanted),
    "worker.logs": Decoder(ReadLog),
    "worker.looked": Decoder(Looked),
}
#: by the verb of the question
_ANSWERED: Final[dict[str, Decoder[Any]]] = {
    "join": Decoder(Joined | Problem),
    "renew": Decoder(Renewed | Problem),
    "fact": Decoder(FactAck | Problem),
    "submit": Decoder(Accepted | Problem),
    "logs": Decoder(LogPage | Problem),
}
_decode_answer: Final[Decoder[Any]] = Decoder(Answer | Problem)


@dataclass(frozen=True)
class Message:
    """One message as it was heard."""

    subject: str
    reply: str
    payload: bytes

    @functools.cached_property
    def words(self) -> list[str]:
        """The subject's words behind the prefix; empty for an answer."""
        return self.subject.split(".")[1:] if self.subject.startswith(f"{PREFIX}.") else []

    @property
    def raw(self) -> Any:
        return msgspec.json.decode(self.payload) if is_json(self.payload) else msgspec.msgpack.decode(self.payload)

    def with_raw(self, raw: Any) -> bytes:
        """Another content in this message's encoding."""
        return msgspec.json.encode(raw) if is_json(self.payload) else msgspec.msgpack.encode(raw)

    @property
    def decode(self) -> Decoder[Any] | None:
        """The decoder of what is said on this subject; None for questions with plain arguments."""
        words = self.words
        if words[0] == "worker":
            return _SAID[f"worker.{words[2]}"]
        if words[0] == "fleet":
            return _SAID[".".join(words)]
        if words[0] in ("api", "request") and words[2] == "submit":
            return decode_request
        return _SAID.get(words[0])

    @property
    def decode_its_answer(self) -> Decoder[Any] | None:
        """The decoder of the answer to this question; None where it is JetStream's or has no type of its own."""
        words = self.words
        verb = words[-1]
        if words[0] == "worker" or (words[0] == "api" and verb == "submit"):
            return _ANSWERED.get(verb)
        return _decode_answer if words[0] == "api" and verb != "cancel" else None


class Recorded:
    """One release's recording."""

    def __init__(self, folder: Path) -> None:
        expected = json.loads((folder / "expected.json").read_text())
        self.release: str = expected["release"]
        self.digest: int = expected["digest"]
        self.states: dict[str, str] = expected["states"]
        self.session = [_message(row) for row in _lines(folder / "session.jsonl")]
        #: sequence, subject, bytes
        self.ledger = [
            (row["seq"], row["subject"], base64.b64decode(row["record"])) for row in _lines(folder / "ledger.jsonl")
        ]
        snapshot = json.loads((folder / "snapshot.json").read_text())
        self.snapshot: tuple[int, bytes] = (snapshot["seq"], base64.b64decode(snapshot["snapshot"]))
        self.answers = {m.subject: m for m in self.session if not m.words}

    def said(self) -> list[Message]:
        """Everything but the answers."""
        return [message for message in self.session if message.words]

    def answer(self, question: Message) -> Message | None:
        """What the release answered."""
        return self.answers.get(question.reply)


@functools.cache
def recorded(release: str) -> Recorded:
    if release != PRESENT:
        return Recorded(FOLDER / release)
    with tempfile.TemporaryDirectory(prefix="moorage-rec-") as out:
        command = [sys.executable, "-m", "tests.release.frames.record", "--out", out]
        done = subprocess.run(command, cwd=FOLDER.parents[2], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        (folder,) = Path(out).iterdir()
        return Recorded(folder)


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    for line in file.read_text().splitlines():
        yield json.loads(line)


def _message(row: dict[str, Any]) -> Message:
    payload = row["data"].encode() if "data" in row else base64.b64decode(row["msgpack"])
    return Message(row["subject"], row.get("reply", ""), payload)


# ------------------------------------------------------------------------------------- a message and its frame


def lost(raw: Any, frame: Any, path: str = "$") -> list[str]:
    """Where a decoded frame lacks something that its message says, or says it otherwise."""
    if isinstance(frame, msgspec.Struct):
        fields = frame.__struct_fields__
        if isinstance(raw, list):
            extra = [f"{path}: {len(raw)} items, {len(fields)} fields"] if len(raw) > len(fields) else []
            pairs = [(name, value) for name, value in zip(fields, raw, strict=False)]
        else:
            extra = [f"{path}.{name} is unknown" for name in raw if name not in fields and name != "kind"]
            pairs = [(name, value) for name, value in raw.items() if name in fields]
        return extra + [text for name, value in pairs for text in lost(value, getattr(frame, name), f"{path}.{name}")]
    if isinstance(frame, dict):
        gone = [f"{path}.{name} is gone" for name in raw if name not in frame]
        return gone + [text for name in frame for text in lost(raw.get(name), frame[name], f"{path}.{name}")]
    if isinstance(frame, list):
        if len(raw) != len(frame):
            return [f"{path}: {len(raw)} items are {len(frame)}"]
        return [text for at, value in enumerate(raw) for text in lost(value, frame[at], f"{path}[{at}]")]
    return [] if raw == frame else [f"{path}: {raw!r} is {frame!r}"]


def newer(raw: Any, frame: Any) -> Any:
    """The message with something unknown wherever a later release may add a field."""
    if isinstance(frame, msgspec.Struct):
        fields = frame.__struct_fields__
        if isinstance(raw, list):
            known = [newer(value, getattr(frame, name)) for name, value in zip(fields, raw, strict=False)]
            # fields that this release leaves out at the end come before those of a later one
            rest = [msgspec.to_builtins(getattr(frame, name), builtin_types=(bytes,)) for name in fields[len(raw) :]]
            return [*known, *rest, "novelty", {"novelty": [1]}]
        return {name: newer(value, getattr(frame, name, None)) for name, value in raw.items()} | {
            "novelty": {"of": ["a later release", 1, None]}
        }
    if isinstance(frame, list):
        return [newer(one, other) for one, other in zip(raw, frame, strict=True)]
    return raw


def encode_newer(frame: Any, *, json: bool = True) -> bytes:
    """`codec.encode` as a later release would have it."""
    if not isinstance(frame, msgspec.Struct):
        return encode(frame, json=json)
    as_sent = Message("", "", encode(frame, json=json))
    return as_sent.with_raw(newer(as_sent.raw, frame))


def narrower(old: Any, new: Any, path: str = "$") -> list[str]:
    """Where `new` does not give a reader of the old release what `old` gave: every field, of the same type.

    What was null may be told now: `null` stands for what is not known, in fields that hold a value for others.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        missing = [f"{path}.{name} is gone" for name in old if name not in new]
        return missing + [t for name in old if name in new for t in narrower(old[name], new[name], f"{path}.{name}")]
    if isinstance(old, list) and isinstance(new, list):
        return []  # of its own length: a list of rows
    number = isinstance(old, int | float) and isinstance(new, int | float)
    if number or old is None or type(old) is type(new):
        return []
    return [f"{path}: {type(old).__name__} became {type(new).__name__}"]

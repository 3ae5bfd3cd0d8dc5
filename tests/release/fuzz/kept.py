"""What the fuzzers begin with: one of everything that is sent, and a ledger with each act."""

from __future__ import annotations

import base64
import functools
import json
from pathlib import Path

from moorage.scheduler.core.ledger.fold import fold
from moorage.scheduler.core.ledger.record import decode_record
from moorage.scheduler.core.ledger.state import State
from moorage.scheduler.ledger.state_bytes import dump
from moorage.schemas.codec import encode
from tools.examples_of_frames import ACTS, EXAMPLES, REQUEST


def said() -> list[tuple[str, bytes]]:
    """Payloads, each with the last word of the subject where it is sent that names nobody."""
    acts = [(verb, encode(act, json=True)) for verb, act in ACTS]
    frames = []
    for _, where, frame in EXAMPLES:
        word = next(word for word in reversed(where.split(".")) if word[0] != "<")
        frames += [(word, encode(frame, json=json)) for json in (True, False)]
    return [("submit", REQUEST), *acts, *frames]


@functools.cache
def ledger() -> list[bytes]:
    """The records of a ledger, from the first on."""
    _, *records = Path(__file__).parents[2].joinpath("unit", "scheduler", "every_act.jsonl").read_text().splitlines()
    return [base64.b64decode(json.loads(record)) for record in records]


def snapshot() -> bytes:
    state = State()
    for seq, payload in enumerate(ledger(), 1):
        fold(state, decode_record(payload), seq)
    return dump(state)

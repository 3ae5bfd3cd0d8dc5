"""Acts are the bytes that they were when they were lists: `every_act.jsonl` is a ledger that code before wrote."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any, Final, get_args

import msgspec
import pytest

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.ledger import acts
from moorage.scheduler.core.ledger.acts import AnyAct
from moorage.scheduler.core.ledger.fold import fold
from moorage.scheduler.core.ledger.folding import FoldError
from moorage.scheduler.core.ledger.record import Record, decode_record, encode_record
from moorage.scheduler.core.ledger.records import FORMAT
from moorage.scheduler.core.ledger.state import State
from moorage.scheduler.ledger.ledger_reader import FoldedRecord, rows

#: the digest of the state after its records, and the records: each act is in it
FILE: Final = Path(__file__).parents[1].joinpath("every_act.jsonl")
#: the fields of what is shown of each decision, as they are shown
SHOWN: Final[dict[str, tuple[str, ...]]] = {
    "epoch": ("ledger_id", "scheduler"),
    "gone": ("worker", "why"),
    "flag": ("worker", "flag", "by", "why"),
    "forget": ("worker",),
    "unquarantine": ("worker", "slots", "by", "why"),
    "shut": ("worker", "until_ms", "why"),
    "window": ("worker", "from_ms", "leave_ms", "until_ms", "by", "why"),
    "hold": ("tenant", "job", "by", "why"),
    "unhold": ("tenant", "job", "by", "why"),
    "priority": ("job", "priority", "by", "why"),
    "freeze": ("job", "replica", "word", "by", "why"),
    "exec": ("job", "replica", "by", "why"),
    "change": ("job", "max_running", "priority", "timeout_ms", "ceiling", "by", "why"),
    "resize": ("job", "memory_mib", "compute_percent", "rate_milli", "by", "why"),
    "limit": ("tenant", "gpus", "jobs", "by", "why"),
    "share": ("tenant", "weight", "gpus", "by", "why"),
    "met": ("ended", "waiting"),
    "preempt": ("job", "workers", "victims"),
    "stays": ("job", "victim", "replica", "by_ms"),
    "scale": ("job", "wanted", "why"),
    "relocate": ("job", "old", "new"),
    "relocated": ("job", "gone"),
    "avoid": ("job", "worker", "slots"),
    "level": ("level", "by", "why"),
    "restored": ("formerly",),
    "behind": ("why",),
    "schedule": ("tenant", "name", "cron", "tz", "overlap", "by"),
    "schedule-pause": ("tenant", "name", "on", "by"),
    "schedule-remove": ("tenant", "name", "by"),
}


def written() -> tuple[int, list[bytes]]:
    expected, *records = [json.loads(line) for line in FILE.read_text().splitlines()]
    return expected["digest"], [base64.b64decode(record) for record in records]


def test_each_act_is_read_folded_and_written_as_ever() -> None:
    digest, payloads = written()
    state, found, shown = State(), set(), {}
    for seq, payload in enumerate(payloads, 1):
        record = decode_record(payload)
        assert encode_record(record) == payload
        folded = fold(state, record, seq)
        plain = msgspec.msgpack.decode(payload)[10]
        assert [(act.tag, len(act.__struct_fields__) + 1) for act in record.acts if act.tag != "epoch"] == [
            (row[0], len(row)) for row in plain if row[0] != "epoch"
        ]
        found |= {type(act) for act in record.acts}
        for row in rows(FoldedRecord(seq, record, folded, state)):
            if row["kind"] == "act":
                shown[row["act"]] = tuple(row)[5:]
    assert state.digest == state.full_digest() == digest
    of_level_1 = {each for each in get_args(AnyAct) if each.LEVEL == 1}
    assert found == of_level_1, "each act is in the file"
    assert shown == SHOWN


def test_a_draft_counts_the_bytes_of_an_act() -> None:
    draft = Draft(State(), 0)
    draft.begin()
    act = acts.Limit("tenant", 3, 0, "operator ana", "w" * 150)
    draft.add(act)
    assert draft.bytes == len(msgspec.msgpack.encode(act))
    assert draft.acts == [act]


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (["from-the-future", 1], "'from-the-future'"),
        (["limit", "t", "three"], "'limit'"),
        (["gone"], "'gone'"),
        ([], "''"),
        ([7], "'7'"),
    ],
)
def test_an_act_that_cannot_be_read_stops_the_fold_and_is_no_junk(act: list[Any], says: str) -> None:
    """Junk is stepped over, but a scheduler that steps over a record has another state from then on."""
    state = State()
    payload = msgspec.msgpack.encode([FORMAT, 1, 7, 0, 1, 0, [], [], [], [], [["epoch", "L", "me", 0.0], act], [], []])
    record = decode_record(payload)
    assert (record.epoch, len(record.acts)) == (1, 2)
    with pytest.raises(FoldError, match=f"act {says}"):
        fold(state, record, 1)


@pytest.mark.parametrize("acts_of", [7, "acts", [7], None])
def test_acts_that_are_no_lists_are_junk(acts_of: object) -> None:
    fields: list[Any] = [FORMAT, 1, 7, 0, 1, 0, [], [], [], [], acts_of]
    with pytest.raises(msgspec.ValidationError):
        decode_record(msgspec.msgpack.encode(fields))
    with pytest.raises(msgspec.ValidationError):
        decode_record(msgspec.msgpack.encode(["x", *fields[1:10], [["what"]]]))


def test_a_newer_format_is_named_before_its_acts() -> None:
    payload = msgspec.msgpack.encode([FORMAT + 1, 1, 7, 0, 1, 0, [], [], [], [], [["from-the-future"]]])
    with pytest.raises(FoldError, match="use a newer release"):
        fold(State(), decode_record(payload), 1)


def test_a_record_has_the_fields_that_it_ever_had() -> None:
    assert Record.__struct_fields__[10] == "acts"

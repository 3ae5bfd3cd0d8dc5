"""Each request and order in a record has how it came, and nothing is decided by that."""

from __future__ import annotations

from typing import Any

import msgspec

from moorage.scheduler.core.events import Cancel, ChangeOrder, Order, Wake
from moorage.scheduler.core.ledger.fold import fold
from moorage.scheduler.core.ledger.record import Record, decode_record
from moorage.scheduler.core.ledger.state import State
from moorage.scheduler.core.ledger.ways import ACCEPTS, ACTS, STEPS, WIDTH, way_of
from moorage.scheduler.follower.operators_acts import OperatorsActs
from moorage.schemas.operate import ChangeAsked, act_of
from moorage.schemas.ways import OPEN
from tests.unit.scheduler.driving import Driving

ACME, BETA = "import MOORAGE_TENANT_acme UA", "import MOORAGE_TENANT_beta UB"


def submit(drive: Driving, job: str, came: str, **fields: Any) -> None:
    body = msgspec.json.encode({"job": job, "gpu": {}, "run": {"driver": "noop"}, **fields})
    drive.engine.offer(drive.engine.submitted("t", body, lambda: job, f"_INBOX.{job}", came=came))


def built(drive: Driving) -> Record:
    drive.tick()
    return decode_record(drive.records[-1])


def test_jobs_acts_and_steps_of_one_record_have_each_their_way() -> None:
    drive = Driving.with_hosts(4)
    for job, came in (("a", ACME), ("b", ACME), ("c", BETA), ("d", "")):
        submit(drive, job, came)
    record = built(drive)
    ways = [way_of(record.ways, record.notes, ACCEPTS, at) for at in range(5)]
    assert ways == [ACME, ACME, BETA, "", ""]
    assert len(record.ways) == 2 * WIDTH, "what came in one way, one behind the other, is one run"
    drive.engine.offer(Cancel("t", "a", "no more", came=BETA))
    drive.engine.offer(Order("drain", act_of("drain", {"worker": "w0"}), "", True, {}, "ana", "subject"))
    drive.engine.offer(ChangeOrder("t", msgspec.convert({"job": "b", "priority": 7}, ChangeAsked), came=ACME))
    record = built(drive)
    by_act = [way_of(record.ways, record.notes, ACTS, at) for at in range(len(record.acts))]
    assert {"subject", ACME} == set(by_act) - {""}
    assert BETA in [way_of(record.ways, record.notes, STEPS, at) for at in range(len(record.steps))]


def test_the_list_of_orders_has_how_each_came() -> None:
    drive, told, state = Driving.with_hosts(4, auto=False), OperatorsActs(), State()
    orders: list[tuple[str, dict[str, Any], str]] = [
        ("drain", {"worker": "w0"}, "subject"),
        ("limit", {"tenant": "t", "gpus": 3}, "subject, no reply"),
        ("hold", {"tenant": "t"}, ""),
    ]
    drive.submit("j", gpu={})
    drive.settle()
    for verb, arguments, came in orders:
        drive.engine.offer(Order(verb, act_of(verb, arguments), "", True, {}, "ana", came))
    drive.engine.offer(Order("requeue", act_of("requeue", {"tenant": "t", "job": "j"}), "", True, {}, "ana", OPEN))
    orders.append(("requeue", {}, OPEN))
    drive.tick()
    for seq, payload in enumerate(drive.records, 1):
        record = decode_record(payload)
        told.fold(state, record, fold(state, record, seq))
    answer = told.answer({}, drive.state.time_ms)
    assert isinstance(answer, dict)
    assert {row["verb"]: row.get("came", "") for row in answer["acts"]} == {verb: came for verb, _, came in orders}


def test_a_way_changes_no_state_and_an_older_release_folds_such_a_record() -> None:
    digests = []
    for came in ("", ACME):
        drive = Driving.with_hosts(4)
        submit(drive, "a", came)
        drive.engine.offer(Wake("t", "none", came=came))
        record = built(drive)
        drive.tick()
        digests.append(drive.state.digest)
        fields = msgspec.msgpack.decode(msgspec.msgpack.encode(record))
        older = msgspec.defstruct("Older", [(name, Any) for name in Record.__struct_fields__[:-1]], array_like=True)
        assert len(fields) == len(Record.__struct_fields__)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=older) == older(*fields[:-1])
    assert digests[0] == digests[1]


def test_a_record_with_ways_that_name_no_note_says_nothing() -> None:
    assert way_of([ACCEPTS, 0, 1, 9], ["x"], ACCEPTS, 0) == ""
    assert way_of([ACCEPTS, 0, 1, 0], ["x"], ACCEPTS, 0) == ""

"""What a release adds to the ledger waits for the feature level, which an operator raises."""

from __future__ import annotations

from typing import Any, ClassVar, get_args

import pytest

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.events import Order
from moorage.scheduler.core.ledger import fold, records
from moorage.scheduler.core.ledger.acts import AnyAct
from moorage.scheduler.core.ledger.acts.base import Act
from moorage.scheduler.core.ledger.folding import FoldError
from moorage.scheduler.core.ledger.record import decode_record, encode_record
from moorage.scheduler.core.ledger.records import FORMAT, FORMAT_MIN
from moorage.scheduler.core.ledger.state import State
from moorage.schemas.operate import act_of
from tests.levels import NEXT, know_next
from tests.unit.scheduler.driving import Driving


class New(Act, tag="new"):
    """An act that the next release might add."""

    LEVEL: ClassVar[int] = NEXT


def raised(drive: Driving, announced: dict[str, int]) -> dict[str, Any]:
    act = act_of("feature-level", {"level": NEXT, "schedulers": 2, "by": "ana"})
    drive.engine.offer(Order("feature-level", act, "raise", True, announced))
    drive.tick()
    return dict(drive.answers["raise"])


def with_a_new_act(drive: Driving) -> Draft:
    draft = Draft(drive.engine.state, drive.now)
    draft.begin()
    draft.acts.append(New())  # type: ignore[arg-type]
    return draft


def test_a_new_act_waits_until_every_scheduler_can_fold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    know_next(monkeypatch)
    drive = Driving()
    assert drive.state.level == 1, "until then its records are read by this release"
    with pytest.raises(AssertionError, match=r"\['new'\] may not stand in a record of feature level 1"):
        with_a_new_act(drive).record(1, 1)
    refused = raised(drive, {"new": NEXT, "old": 1})
    assert (refused["code"], "old cannot" in str(refused["message"])) == ("failed-precondition", True)
    refused = raised(drive, {"new": NEXT})
    assert "only new can" in str(refused["message"])
    assert drive.state.level == 1
    done = raised(drive, {"new": NEXT, "newer": NEXT})
    assert (done["changed"], done["level"], drive.state.level) == (True, NEXT, NEXT)
    assert with_a_new_act(drive).record(1, 1).format == NEXT


def test_this_release_names_the_record_that_it_cannot_fold_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "FORMAT", 1)
    with monkeypatch.context() as then:
        know_next(then)
        drive = Driving()
        raised(drive, {"new": NEXT, "newer": NEXT})
    state, (*before, last) = State(), drive.records
    for seq, payload in enumerate(before, 1):
        fold.fold(state, decode_record(payload), seq)
    with pytest.raises(FoldError, match=rf"has format {NEXT}; this release reads .*: use a newer release"):
        fold.fold(state, decode_record(last), len(drive.records))


def test_a_record_of_a_format_before_the_first_is_not_folded() -> None:
    record = decode_record(Driving().records[0])
    record.format = FORMAT_MIN - 1
    with pytest.raises(FoldError, match="use an older release"):
        fold.fold(State(), decode_record(encode_record(record)), 1)


def test_no_act_needs_a_level_behind_the_one_that_this_release_prepares() -> None:
    assert {act.LEVEL for act in get_args(AnyAct)} <= set(range(1, FORMAT + 2))

"""A ledger of the release before holds nothing that its schedulers could not follow, until the level is raised."""

from __future__ import annotations

from typing import Any, Final

import pytest

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.events import Order
from moorage.scheduler.core.records import (
    FORMAT,
    ID_IN_BODY,
    KEPT_WHILE_ENDING,
    LEVEL_OF,
    NOTICE,
    STEP_WIDTH,
    Act,
    Op,
    decode_record,
)
from moorage.schemas.frames import Unwell
from moorage.schemas.operate import act_of
from tests.scheduler.driving import Driving
from tests.scheduler.faulty_world import FaultyWorld
from tests.turns import turns

BEFORE: Final = FORMAT - 1
#: the acts that 0.2 knew
KNOWN: Final = frozenset(
    {
        Act.EPOCH, Act.WORKER, Act.JOIN, Act.GONE, Act.FLAG, Act.CURSOR, Act.TOMBSTONE, Act.UNTOMB, Act.COMPACT,
        Act.PART, Act.EXPIRE, Act.SNAPSHOT, Act.RESIGN, Act.UNQUARANTINE, Act.HOLD, Act.UNHOLD, Act.PRIORITY, Act.LIMIT,
    }
)  # fmt: skip
#: such as no scheduler of 0.2 comes to read: what it stops at, or what is in a ledger that it did not begin
STOPS: Final = frozenset({Act.LEVEL, Act.BEHIND, Act.RESTORED})
SAVES: Final[dict[str, Any]] = {"driver": "noop", "checkpoint_signal": "SIGUSR1", "checkpoint_before_s": 30}


def check(drive: Driving) -> int:
    """Every record is one that the release before reads; returns how many ended something."""
    ends = 0
    for payload in drive.records:
        record = decode_record(payload)
        assert record.format == BEFORE
        assert {act[0] for act in record.acts} <= KNOWN
        assert all(flat[0::4].count("") == 0 for _, flat in record.accepts), "it finds no id in a body"
        for at in range(0, len(record.steps), STEP_WIDTH):
            op, _, _, _, b, c = record.steps[at : at + STEP_WIDTH]
            assert op != Op.PLACE or c < 4
            assert op != Op.END or b < 256
            ends += op == Op.END
    return ends


@pytest.mark.parametrize("seed", turns(range(6), often=2))
def test_whatever_happens_the_release_before_can_follow(seed: int) -> None:
    world = FaultyWorld(seed, workers=2 + seed % 3, level=BEFORE)
    world.run(220)
    world.heal()
    assert check(world.drive)


def test_what_is_new_waits_for_the_level_and_says_so() -> None:
    drive = Driving(Config(preempt_priority=60, preempt_after=0.0), level=BEFORE)
    drive.worker("w0", gpus=2)
    drive.submit("low", gpu={"count": 2}, run=SAVES)
    drive.settle()
    drive.submit("high", gpu={"count": 2}, priority=90)
    drive.now += 5_000
    drive.settle()
    assert drive.job("low").state == "RUNNING", "nobody is preempted"
    drive.workers["w0"].unwell = [Unwell(0, "xid", "Xid 79: the GPU has fallen off the bus", True)]
    drive.renew("w0")
    drive.settle()
    assert drive.job("low").state == "RUNNING", "its device is not given up"
    refused = [drive.operate("drain", "w0", within_s=60), drive.order("share", tenant="t", weight=3, gpus=None)]
    for answer in refused:
        assert answer["code"] == "failed-precondition"
        assert answer["next"].endswith(f"moorage admin feature-level --to {FORMAT}")
    assert drive.operate("drain", "w0")["changed"], "as 0.2 drains"
    assert drive.operate("uncordon", "w0")["changed"]
    check(drive)
    drive.engine.orders.announced = {"me": FORMAT}
    drive.engine.offer(Order("feature-level", act_of("feature-level", {"level": FORMAT, "by": "ana"}), "raise", True))
    drive.tick()
    assert drive.answers["raise"]["level"] == FORMAT
    assert drive.order("share", tenant="t", weight=3, gpus=None)["changed"]
    assert drive.operate("drain", "w0", within_s=60)["changed"]


def test_each_act_is_in_the_table_and_no_record_holds_one_too_early() -> None:
    acts = {tag for name, tag in vars(Act).items() if not name.startswith("_")}
    no_acts = {NOTICE, KEPT_WHILE_ENDING, ID_IN_BODY}
    assert acts - KNOWN - STOPS == LEVEL_OF.keys() - no_acts, "a new act stands in LEVEL_OF with its level"
    assert set(LEVEL_OF.values()) <= set(range(2, FORMAT + 1))
    state = Driving(level=BEFORE).engine.state
    for tag, level in LEVEL_OF.items():
        draft = Draft(state, 0)
        assert draft.level_allows(tag) == (state.level >= level)
        if tag not in no_acts:
            draft.acts.append([tag])
            with pytest.raises(AssertionError, match=f"{tag}.* may not stand in a record of feature level {BEFORE}"):
                draft.record(1, 1)

"""A ledger of the release before holds nothing that its schedulers could not follow, until the level is raised."""

from __future__ import annotations

from typing import Any, Final, get_args

import pytest

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.events import Order
from moorage.scheduler.core.ledger import acts
from moorage.scheduler.core.ledger.acts import AnyAct
from moorage.scheduler.core.ledger.record import decode_record
from moorage.scheduler.core.ledger.records import FORMAT, STEP_WIDTH, Op
from moorage.schemas.frames import Unwell
from moorage.schemas.operate import act_of
from tests.scheduler.driving import Driving
from tests.scheduler.faulty_world import FaultyWorld
from tests.turns import turns

BEFORE: Final = FORMAT - 1
#: the acts that 0.2 knew
KNOWN: Final = frozenset(
    {
        acts.Epoch, acts.Known, acts.Join, acts.Gone, acts.Flag, acts.Cursor, acts.Tombstone, acts.Untomb, acts.Compact,
        acts.Part, acts.Expire, acts.Snapshot, acts.Resign, acts.Unquarantine, acts.Hold, acts.Unhold, acts.Priority,
        acts.Limit,
    }
)  # fmt: skip
#: acts that no scheduler of 0.2 comes to read: those at which it stops, or in ledgers that it did not begin
STOPS: Final = frozenset({acts.Level, acts.Behind, acts.Restored})
SAVES: Final[dict[str, Any]] = {"driver": "noop", "checkpoint_signal": "SIGUSR1", "checkpoint_before_s": 30}

EVERY: Final = get_args(AnyAct)


def check(drive: Driving) -> int:
    """Every record is one that the release before reads; returns how many ended something."""
    ends = 0
    for payload in drive.records:
        record = decode_record(payload)
        assert record.format == BEFORE
        assert {type(act) for act in record.acts} <= KNOWN
        assert all(flat[0::4].count("") == 0 for _, flat in record.accepts), "it finds no id in a body"
        for at in range(0, len(record.steps), STEP_WIDTH):
            op, _, _, a, b, c = record.steps[at : at + STEP_WIDTH]
            assert op not in (Op.EXIT, Op.DONE, Op.RUN) or a < 256
            assert op != Op.PLACE or c < 4
            assert op != Op.END or b < 256
            ends += op == Op.END
    return ends


@pytest.mark.parametrize("seed", turns(range(6), often=1))
def test_whatever_happens_the_release_before_can_follow(seed: int) -> None:
    world = FaultyWorld(seed, workers=2 + seed % 3, level=BEFORE)
    world.run(220)
    world.heal()
    assert check(world.drive)
    assert all(len(row) == 11 for job in world.drive.state.jobs.values() for row in job.story), "as in its snapshots"


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
    act, announced = act_of("feature-level", {"level": FORMAT, "by": "ana"}), {"me": FORMAT}
    drive.engine.offer(Order("feature-level", act, "raise", True, announced))
    drive.tick()
    assert drive.answers["raise"]["level"] == FORMAT
    assert drive.order("share", tenant="t", weight=3, gpus=None)["changed"]
    assert drive.operate("drain", "w0", within_s=60)["changed"]


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: str(kind.__struct_config__.tag))
def test_an_act_that_the_release_before_does_not_know_needs_a_level_and_is_in_no_record_before(kind: Any) -> None:
    assert kind.LEVEL in range(1, FORMAT + 1)
    assert (kind in KNOWN | STOPS) == (kind.LEVEL == 1)
    draft = Draft(Driving(level=BEFORE).engine.state, 0)
    draft.acts.append(kind(*[0] * len(kind.__struct_fields__)))
    if kind.LEVEL > BEFORE:
        with pytest.raises(AssertionError, match=f"may not stand in a record of feature level {BEFORE}"):
            draft.record(1, 1)

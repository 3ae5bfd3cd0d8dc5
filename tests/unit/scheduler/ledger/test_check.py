"""A record that `check` lets pass can be folded: real records, and each of them spoiled in one number."""

from __future__ import annotations

import random

import msgspec
import pytest

from moorage.scheduler.core.ledger import snapshot as snapshots
from moorage.scheduler.core.ledger.check import check
from moorage.scheduler.core.ledger.fold import fold
from moorage.scheduler.core.ledger.folding import FoldError
from moorage.scheduler.core.ledger.record import Record, decode_record
from moorage.scheduler.core.ledger.state import State
from tests.unit.scheduler.driving import Driving


def driven() -> list[bytes]:
    """Jobs, a gang, retries, cancels, a limit, a drain, refusals and a lost worker."""
    drive = Driving()
    for name in ("w0", "w1", "w2"):
        drive.worker(name, 2)
    drive.worker("slow", 1, model="slow", auto=False)
    for number in range(8):
        drive.submit(f"j{number}", gpu={}, retries=1)
    drive.submit("gang", replicas=2, gpu={"scheduling": "gang"})
    drive.submit("s", gpu={"model": "slow"})
    for fact in (("claimed", 0, ""), ("started", 0, ""), ("exited", 1, "exit")):
        if drive.replica("s").member is not None:
            drive.facts([(fact[0], "s", 0, fact[1], fact[2])])
    drive.settle()
    drive.order("limit", gpus=3)
    drive.cancel("j1")
    drive.cancel("never came", before=True)
    drive.run_out("w1", code=1)
    drive.operate("drain", "w0")
    drive.order("hold", job="j7")
    drive.pass_time(5_000)
    drive.pass_time(drive.config.lost_ms + 5_000, renew=False)
    return drive.records


def spoiled(record: Record, rng: random.Random) -> Record:
    """The record with one number of it changed."""
    fields = [name for name in ("steps", "facts") if getattr(record, name)]
    name = rng.choice(fields)
    flat = list(getattr(record, name))
    at = rng.randrange(len(flat))
    flat[at] = rng.choice([flat[at] + 1, flat[at] - 1, 0, 1, 3, 7, 15, 16, 10**6, -1, rng.randrange(40)])
    if rng.random() < 0.2 and name == "steps":
        at -= at % 6
        flat[at : at + 6] = [] if rng.random() < 0.5 else flat[at : at + 6] * 2
    return msgspec.structs.replace(record, **{name: flat})


def folds(before: bytes, record: Record, seq: int) -> bool:
    state = snapshots.load(before)
    try:
        fold(state, record, seq)
    except (FoldError, AssertionError):
        return False
    return True


def test_what_passes_the_check_can_be_folded() -> None:
    rng, state, spoils, caught = random.Random(7), State(), 0, 0
    for seq, payload in enumerate(driven(), 1):
        record = decode_record(payload)
        if seq > 1:
            before = snapshots.dump(state)
            check(state, record)
            for _ in range(40 if record.steps or record.facts else 0):
                broken = spoiled(record, rng)
                spoils += 1
                try:
                    check(state, broken)
                except FoldError:
                    caught += 1
                    continue
                assert folds(before, broken, seq), broken
        fold(state, record, seq)
    assert spoils > 400
    assert 0.2 < caught / spoils < 0.98


def test_a_job_that_is_accepted_twice_is_found() -> None:
    drive = Driving()
    drive.submit("a", gpu={})
    record = decode_record(drive.records[-1])
    with pytest.raises(FoldError, match="accepted twice"):
        check(drive.state, record)

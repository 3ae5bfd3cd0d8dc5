"""What jobs report of themselves: from their worker's renewals and last report to `show`, `ls` and snapshots."""

from __future__ import annotations

import json

import pytest

from moorage.scheduler.answers.views import summary
from moorage.scheduler.core.ledger.acts import LastReported
from moorage.scheduler.core.ledger.record import decode_record
from moorage.scheduler.ledger import state_bytes as snapshots
from moorage.schemas.frames import Report, Reported
from moorage.schemas.frames.reported import VALUES_BYTES_MAX, Values
from tests.levels import know_next, raise_level
from tests.unit.scheduler.driving import Driving
from tests.unit.scheduler.fleet.test_capabilities import shown


def running(**fields: object) -> Driving:
    drive = Driving()
    drive.worker("w0", 2, auto=False)
    drive.submit("a", **{"gpu": {}, "retries": 1, **fields})
    for replica in range(drive.job("a").size):
        drive.reports([("claimed", "a", replica, 0, ""), ("started", "a", replica, 0, "")])
    return drive


def tells(drive: Driving, values: Values, replica: int = 0, refused: str = "") -> None:
    """A renewal of the worker has these values."""
    attempt = next(each for each in drive.job("a").attempts if each.replica.index == replica)
    drive.workers["w0"].reported = [Reported(*attempt.name, values, refused)]
    drive.pass_time(10_000)


def ends(drive: Driving, values: Values | None, replica: int = 0) -> None:
    attempt = next(each for each in drive.job("a").attempts if each.replica.index == replica)
    drive.workers["w0"].gathered += [
        Report("exited", *attempt.name, 0, "exit"),
        Report("freed", *attempt.name, reported=values),
    ]
    drive.report_all()


def test_the_newest_values_of_a_running_job_are_in_show_and_ls_and_go_with_its_attempt() -> None:
    drive = running()
    assert shown(drive, "a").reported == {}
    tells(drive, {"step": 7, "loss": 0.5, "phase": "warm"}, refused="loss is nan")
    assert shown(drive, "a").reported == {"step": 7, "loss": 0.5, "phase": "warm"}
    assert summary(drive.engine, drive.job("a")).reported["step"] == 7
    [row] = shown(drive, "a").replica_states
    assert (row.reported["loss"], row.report_refused) == (0.5, "loss is nan")
    drive.workers["w0"].reported = []
    drive.pass_time(10_000)
    assert shown(drive, "a").reported["step"] == 7, "a renewal names others, or nobody"
    ends(drive, None)
    assert shown(drive, "a").reported == {}
    drive.pass_time(10_000)
    assert not next(iter(drive.engine.fleet.hosts.values())).reported


def test_values_beyond_their_bounds_and_of_unknown_attempts_are_dropped() -> None:
    drive = running()
    wrong: list[Values] = [{"x": "y" * 65}, {f"n{number}": 1 for number in range(17)}, {"a b": 1}, {"x": float("nan")}]
    for values in wrong:
        tells(drive, values)
        assert shown(drive, "a").reported == {}
    drive.workers["w0"].reported = [Reported("t", "b", 0, 1, 1, {"x": 1})]
    drive.pass_time(10_000)
    assert not next(iter(drive.engine.fleet.hosts.values())).reported
    ends(drive, {f"n{number}": "y" * 64 for number in range(16)})
    assert VALUES_BYTES_MAX <= 16 * 64
    assert shown(drive, "a").reported == {}


def test_of_several_replicas_the_first_speaks_and_the_last_values_stay_with_the_job() -> None:
    drive = running(replicas=2)
    tells(drive, {"loss": 2.0}, replica=1)
    assert shown(drive, "a").reported == {"loss": 2.0}
    tells(drive, {"loss": 1.0})
    assert shown(drive, "a").reported == {"loss": 1.0}
    ends(drive, {"loss": 0.9})
    ends(drive, {"loss": 1.9}, replica=1)
    assert shown(drive, "a").reported == {"loss": 0.9}


def test_at_level_1_the_leader_alone_knows_them_and_neither_record_nor_snapshot_has_them() -> None:
    with_them, without = running(), running()
    ends(with_them, {"loss": 0.9})
    ends(without, None)
    assert shown(with_them, "a").reported == {"loss": 0.9}
    assert with_them.records == without.records
    assert with_them.state.digest == without.state.digest
    found = snapshots.load(snapshots.dump(with_them.state)).job("t", "a")
    assert found is not None
    assert found.reported is None


def test_from_the_next_level_on_they_last(monkeypatch: pytest.MonkeyPatch) -> None:
    know_next(monkeypatch)
    drive = running()
    raise_level(drive)
    ends(drive, {"loss": 0.9, "step": 12})
    [act] = [act for each in map(decode_record, drive.records) for act in each.acts if isinstance(act, LastReported)]
    assert (act.replica, json.loads(act.values)) == (0, {"loss": 0.9, "step": 12})
    drive.lead()
    assert shown(drive, "a").reported == {"loss": 0.9, "step": 12}
    found = snapshots.load(snapshots.dump(drive.state)).job("t", "a")
    assert found is not None
    assert found.reported == (0, act.values)

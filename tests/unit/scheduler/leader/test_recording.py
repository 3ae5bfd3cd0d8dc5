"""A recording of a leader: its decisions come out byte for byte again, and a difference is found."""

from __future__ import annotations

import contextlib
import stat
import sys
from pathlib import Path

import pytest

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.events import Order
from moorage.scheduler.core.fleet.host import HostClass
from moorage.scheduler.core.ledger import records
from moorage.scheduler.core.ledger.records import FORMAT
from moorage.scheduler.ledger.recording import CannotReplay, RecordedEngine, Recorder, replay
from moorage.schemas.operate import act_of
from tests.levels import know_next, raise_level
from tests.unit.scheduler.driving import SUBJECTS, Driving
from tests.unit.scheduler.scheduled import offer_ask, offer_run


def recorded(path: Path, config: Config | None = None) -> Driving:
    """Jobs, a gang, a cancel, a refusal, a limit, a drain, loads and a takeover, all recorded; one worker in JSON."""
    drive = Driving(config)
    recorder = Recorder(path)

    def lead() -> None:
        drive.engine = RecordedEngine(
            recorder, drive.state, drive.config, SUBJECTS, drive.engine.leader, drive.now, None
        )

    lead()
    drive.worker("w0", 2)
    drive.json_workers = True
    drive.worker("w1", 2)
    drive.json_workers = False
    drive.load("w0", s0="ecc")  # no record says so, and the first job goes elsewhere for it
    for number in range(6):
        drive.submit(f"j{number}", gpu={})
    drive.settle()
    drive.order("limit", gpus=3)
    drive.submit("gang", replicas=2, gpu={"scheduling": "gang"})
    drive.cancel("j1")
    offer_ask(drive, "add")
    drive.tick()
    offer_run(drive, 1)
    drive.run_out("w1")
    offer_ask(drive, "pause")
    drive.operate("drain", "w0")
    drive.pass_time(5_000)
    drive.lead()
    lead()
    drive.renew()
    drive.run_out("w0")
    drive.settle()
    recorder.close()
    return drive


def test_every_decision_comes_out_byte_for_byte(tmp_path: Path) -> None:
    path = tmp_path / "leader.rec"
    drive = recorded(path)
    found = list(replay(path))
    assert all(one.same for one in found)
    assert [one.seq for one in found] == [seq for seq in range(2, len(drive.records) + 1) if seq != _epoch(drive)]
    assert found[-1].state.digest == drive.state.digest
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_order_to_raise_the_level_is_decided_by_the_levels_that_were_announced_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "FORMAT", FORMAT + 1)
    drive, recorder = Driving(), Recorder(tmp_path / "leader.rec")
    begins = drive.state, drive.config, SUBJECTS, drive.engine.leader, drive.now, None
    drive.engine = RecordedEngine(recorder, *begins)
    act = act_of("feature-level", {"level": FORMAT + 1, "by": "ana"})
    drive.engine.offer(Order("feature-level", act, "raise", True, {"me": FORMAT + 1}))
    drive.tick()
    recorder.close()
    assert drive.answers["raise"]["changed"]
    [one] = replay(tmp_path / "leader.rec")
    assert (one.same, one.state.level) == (True, FORMAT + 1)


def test_a_term_whose_settings_the_ledger_has_tells_them_no_more_when_it_is_replayed_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    know_next(monkeypatch)
    drive, recorder = Driving(Config(reserve_after=60.0)), Recorder(tmp_path / "leader.rec")
    raise_level(drive)
    drive.pass_time(2_000)
    assert drive.state.settings != ("", ())
    drive.lead()
    drive.engine = RecordedEngine(recorder, drive.state, drive.config, SUBJECTS, drive.engine.leader, drive.now, None)
    drive.submit("j", gpu={})
    recorder.close()
    found = list(replay(tmp_path / "leader.rec"))
    assert [one.same for one in found] == [True] * len(found) != []


def _epoch(drive: Driving) -> int:
    """The sequence of the second term's epoch record, which no engine builds."""
    return drive.state.epoch_seq


def test_a_recording_that_breaks_off_is_replayed_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "leader.rec"
    recorded(path)
    whole = path.read_bytes()
    count = len(list(replay(path)))
    path.write_bytes(whole[: len(whole) - 7])
    assert 0 < len(list(replay(path))) < count


@pytest.mark.slow
def test_what_a_killed_leader_left_unfinished_hides_no_later_term(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    recorded(first)
    recorded(second)
    whole = first.read_bytes()
    for lost in (*range(1, 30), 200):
        first.write_bytes(whole[: len(whole) - lost] + second.read_bytes())
        found = list(replay(first))
        assert all(one.same for one in found)
        assert found[-1].seq == list(replay(second))[-1].seq
        assert len(found) >= len(list(replay(second))) + 10, "what was whole is there, too"


def test_a_foreign_or_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "leader.rec"
    for content in (b"", b"x", b"GIF89a" + bytes(500), bytes(500), b"{}\n" * 50, Path(__file__).read_bytes()):
        path.write_bytes(content)
        with pytest.raises(CannotReplay):
            list(replay(path))


@pytest.mark.slow
def test_a_damaged_recording_ends_with_the_reason_and_no_defect(tmp_path: Path) -> None:
    path = tmp_path / "leader.rec"
    recorded(path)
    whole = path.read_bytes()
    for at in range(0, len(whole), len(whole) // 150):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        with contextlib.suppress(CannotReplay):
            list(replay(path))


def test_a_recording_does_not_say_which_code_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_to_rank.py").write_text(
        "from moorage.scheduler.core.rank.ranker import Pack\nclass Mine(Pack): name = 'mine'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "leader.rec"
    recorded(path, Config(ranker="mine_to_rank:Mine"))
    assert all(one.same for one in replay(path)), "whoever has loaded it decides again with it"
    del sys.modules["mine_to_rank"]
    with pytest.raises(CannotReplay, match="decided with the ranker mine_to_rank:Mine"):
        list(replay(path))
    assert "mine_to_rank" not in sys.modules


def test_a_recording_of_a_ranker_that_is_not_here_is_not_replayed(tmp_path: Path) -> None:
    path = tmp_path / "leader.rec"
    drive, recorder = Driving(), Recorder(path)
    RecordedEngine(recorder, drive.state, Config(ranker="fgd"), SUBJECTS, drive.engine.leader, drive.now, None)
    recorder.close()
    with pytest.raises(CannotReplay, match=r"ranker must be fragments, pack, .* found 'fgd'"):
        list(replay(path))


def test_a_decision_by_other_rules_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "leader.rec"
    recorded(path)
    monkeypatch.setattr(HostClass, "pick", lambda self, slots, shape: 1 << (slots.bit_length() - 1))
    found = list(replay(path))
    assert any(not one.same for one in found)


def test_what_is_no_recording_is_said(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes((3).to_bytes(4, "big") + b"\xc1\xc1\xc1")
    with pytest.raises(CannotReplay):
        list(replay(path))
    path.write_bytes((2).to_bytes(4, "big") + b"\x91\xc0")
    with pytest.raises(CannotReplay):
        list(replay(path))


def test_a_full_disk_ends_the_recording_with_a_warning_also_at_its_close(caplog: pytest.LogCaptureFixture) -> None:
    for last in ("commit", "offer"):  # the first is written at once, the second by `close`
        recorder = Recorder(Path("/dev/full"))
        recorder.put(last, 1)
        recorder.close()
        assert "No space left on device" in caplog.text
        caplog.clear()

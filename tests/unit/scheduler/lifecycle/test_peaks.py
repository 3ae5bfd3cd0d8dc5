"""What an attempt had of memory at most, and its CPU time: from its worker's last report to `show` and snapshots."""

from __future__ import annotations

import pytest

from moorage.cli.jobs.spent import spent_rows
from moorage.client.answers import JobInfo
from moorage.scheduler.core.ledger.acts import Peaked
from moorage.scheduler.core.ledger.record import decode_record
from moorage.scheduler.ledger import state_bytes as snapshots
from moorage.schemas.answers.jobs import JobPeaks
from moorage.schemas.codec import Decoder, encode
from moorage.schemas.frames import PEAK_MAX, Peaks, Report, ReportFrame
from tests.levels import know_next, raise_level
from tests.unit.scheduler.driving import Driving
from tests.unit.scheduler.fleet.test_capabilities import shown

_read = Decoder[ReportFrame](ReportFrame)


def running(**fields: object) -> Driving:
    drive = Driving()
    drive.worker("w0", 2, auto=False)
    drive.submit("a", **{"gpu": {}, "retries": 1, **fields})
    drive.reports([("claimed", "a", 0, 0, ""), ("started", "a", 0, 0, "")])
    return drive


def ends(drive: Driving, peaks: Peaks | None, detail: str = "", code: int = 0) -> None:
    """The attempt ends and its devices are free, after a minute; another one begins if it failed."""
    attempt, worker = drive.attempt("a"), drive.workers["w0"]
    drive.now += 60_000
    worker.gathered += [
        Report("exited", *attempt.name, code, "exit"),
        Report("freed", *attempt.name, 0, detail, peaks=peaks),
    ]
    frame = worker.report_frame()
    assert frame is not None
    drive.send("w0", frame)
    worker.report_answered(frame.no)
    drive.tick()
    if code:
        drive.pass_time(60_000, step=20_000)
        drive.reports([("claimed", "a", 0, 0, ""), ("started", "a", 0, 0, "")])


def told(drive: Driving) -> JobPeaks | None:
    return shown(drive, "a").peaks


def test_the_highest_of_all_attempts_and_the_sum_of_cpu_time_are_shown() -> None:
    drive = running()
    assert told(drive) is None
    ends(drive, Peaks(1000, 900, 8000, 5_000), "used:1000,10", code=1)
    assert told(drive) == JobPeaks(memory_mib=1000, gpu_memory_mib=8000, cpu_s=5.0)
    ends(drive, Peaks(700, 950, 9000, 2_500), "used:1000,10")
    assert told(drive) == JobPeaks(memory_mib=1000, gpu_memory_mib=9000, cpu_s=7.5)
    assert drive.job("a").used == (2_000, 20)


def test_a_job_without_gpus_has_them_and_no_use_of_gpus() -> None:
    drive = running(gpu=None)
    ends(drive, Peaks(largest_mib=300, cpu_ms=10))
    assert told(drive) == JobPeaks(largest_mib=300, cpu_s=0.01)
    assert shown(drive, "a").usage is None


def test_gpus_of_which_nothing_was_measured_stay_unknown_beside_them() -> None:
    drive = running()
    ends(drive, Peaks(memory_mib=5))
    usage = shown(drive, "a").usage
    assert usage is not None
    assert (usage.used_gpu_s, usage.used_memory_mib_s) == (None, None)


@pytest.mark.parametrize("peaks", [None, Peaks(), Peaks(memory_mib=-2), Peaks(cpu_ms=PEAK_MAX + 1)])
def test_what_says_nothing_or_cannot_be_is_no_fact(peaks: Peaks | None) -> None:
    drive = running()
    ends(drive, peaks)
    assert told(drive) is None
    assert not [act for record in map(decode_record, drive.records) for act in record.acts if isinstance(act, Peaked)]


def test_at_level_1_the_leader_alone_knows_them_and_neither_record_nor_snapshot_has_them() -> None:
    with_them, without = running(), running()
    ends(with_them, Peaks(5, 5, 5, 5), "used:7,8")
    ends(without, None, "used:7,8")
    assert told(with_them) == JobPeaks(memory_mib=5, gpu_memory_mib=5, cpu_s=0.005)
    assert with_them.state.digest == without.state.digest
    assert with_them.records == without.records
    assert kept(with_them) is None


def kept(drive: Driving) -> tuple[int, ...] | None:
    """What a snapshot of now has of them."""
    found = snapshots.load(snapshots.dump(drive.state)).job("t", "a")
    assert found is not None
    return found.peaks


def test_from_the_next_level_on_they_last(monkeypatch: pytest.MonkeyPatch) -> None:
    know_next(monkeypatch)
    drive = running()
    raise_level(drive)
    ends(drive, Peaks(5, 6, 7, 8), "used:7,8", code=1)
    ends(drive, Peaks(4, 7, 6, 8))
    assert kept(drive) == (5, 7, 7, 16)
    drive.lead()
    assert drive.job("a").peaks == (5, 7, 7, 16)
    assert told(drive) == JobPeaks(memory_mib=5, gpu_memory_mib=7, cpu_s=0.016)


def test_a_report_of_an_end_has_them_in_64_bytes_and_one_without_is_read() -> None:
    name = ("t", "a", 0, 1, 2)
    most = Peaks(PEAK_MAX, PEAK_MAX, PEAK_MAX, PEAK_MAX)
    sizes = [len(encode(ReportFrame("s", 1, [Report("freed", *name, peaks=peaks)]))) for peaks in (None, most)]
    assert sizes[1] - sizes[0] <= 64
    frame = (
        b'{"kind": "facts", "session": "s", "no": 1, "v": 1, "facts": [["freed", "t", "a", 0, 1, 2, 0, "used:1,2"]]}'
    )
    assert [report.peaks for report in _read(frame).reports] == [None]


def rows(drive: Driving) -> dict[str, str]:
    return {name: value for name, value in spent_rows(shown(drive, "a")) if value}


def test_show_says_them_beside_what_was_asked_for_with_the_times_of_the_clock() -> None:
    drive = running(resources={"memory_mib": 32768})
    began = drive.now
    assert set(rows(drive)) == {"submitted", "started", "gpu time"}
    ends(drive, Peaks(32666, 20000, 71680, 7_260_000), "used:30000,10")
    found = rows(drive)
    assert found["memory"] == "at most 31.9 GiB of 32.0 GiB"
    assert found["gpu memory"] == "at most 70.0 GiB on its GPUs"
    assert found["cpu time"] == "2h1m"
    assert found["gpu time"] == "60 GPU-seconds, 50 % used"
    info: JobInfo = shown(drive, "a")
    assert (info.started_ms, info.ended_ms) == (began, drive.state.time_ms)


def test_of_a_job_that_was_killed_before_a_look_show_says_that_its_memory_is_not_known() -> None:
    drive = running(retries=0)
    drive.workers["w0"].gathered.append(Report("exited", *drive.attempt("a").name, -9, "exit"))
    drive.report_all()
    assert rows(drive)["memory"].endswith("it is not known whether it was killed for memory")


def test_where_its_host_counts_no_more_show_says_what_is_not_known() -> None:
    drive = running(retries=0)
    attempt = drive.attempt("a")
    drive.workers["w0"].gathered += [
        Report("exited", *attempt.name, -9, "exit"),
        Report("freed", *attempt.name, peaks=Peaks(largest_mib=300, cpu_ms=1_500)),
    ]
    drive.report_all()
    assert rows(drive)["memory"] == (
        "at most 300 MiB in one process; its host, without cgroup v2, counts no more, so it is not known whether it was"
        " killed for memory"
    )
    assert rows(drive)["cpu time"] == "1.5s"

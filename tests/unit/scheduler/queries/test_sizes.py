"""Workloads that ask for more memory than they use are told so, once enough of their jobs were measured."""

from __future__ import annotations

import pytest

from moorage.cli.jobs.right_size import advice_of
from moorage.scheduler.answers.sizes import Sizes
from moorage.schemas.frames import Peaks, Report
from moorage.schemas.job import Request, Run
from moorage.schemas.sizes import SizedRow
from tests.levels import know_next, raise_level
from tests.unit.scheduler.driving import Driving

L4 = "NVIDIA L4"
A100 = "NVIDIA A100 40GB"


def fleet() -> Driving:
    drive = Driving()
    drive.worker("big", 2, auto=False)
    drive.worker("middle", 1, model=A100, gpu_memory_mib=40_960, auto=False)
    drive.worker("small", 1, model=L4, gpu_memory_mib=23_034, auto=False)
    return drive


def runs(
    drive: Driving, name: str, peaks: Peaks | None, *, code: int = 0, late: bool = False, **fields: object
) -> None:
    """A job runs on an H100 and ends; its devices are free with its end, or half a minute later."""
    drive.submit(name, **{"gpu": {"model": "H100"}, "labels": {"workload": "eval"}, **fields})
    drive.reports([("claimed", name, 0, 0, ""), ("started", name, 0, 0, "")])
    attempt = drive.attempt(name)
    worker = drive.workers[attempt.worker.id]
    ends = [Report("exited", *attempt.name, code, "exit"), Report("freed", *attempt.name, 0, "", peaks=peaks)]
    for reports in [[ends[0]], [ends[1]]] if late else [ends]:
        worker.gathered += reports
        frame = worker.report_frame()
        assert frame is not None
        drive.send(worker.id, frame)
        worker.report_answered(frame.no)
        drive.tick()
        drive.now += 30_000


def rows(drive: Driving, tenant: str | None = "t") -> list[SizedRow]:
    return drive.term_counts.sizes.answer(tenant).rows


def test_the_most_of_jobs_that_succeeded_stands_beside_the_least_that_one_had() -> None:
    drive = fleet()
    asked = {"cpu_milli": 1000, "memory_mib": 8_192}
    runs(drive, "a", Peaks(-1, 500, 9_000, 1), resources=asked)
    runs(drive, "b", Peaks(700, -1, 11_000, 1), resources=asked, late=True)
    runs(drive, "failed", Peaks(8_000, -1, 80_000, 1), code=1, resources=asked)
    runs(drive, "unknown", Peaks(cpu_ms=3), resources=asked)
    runs(drive, "other", Peaks(-1, 90, 2_000, 1), labels={"workload": "train"})
    train, row = rows(drive)
    assert (train.workload, train.memory_mib, train.gpu_used_mib) == ("train", None, 2_000)
    assert row == SizedRow(
        tenant="t", workload="eval", asks="1xH100", jobs=3, gpu_mib=81_559, gpu_used_mib=11_000, gpu_jobs=2,
        memory_mib=8_192, memory_used_mib=700, memory_jobs=2, memory_of_one=True, instead=["1xL4", "1xA100"],
    )  # fmt: skip
    assert rows(drive, "else") == []
    assert rows(drive, None) == [train, row]


def test_gpus_in_place_have_a_fifth_more_than_was_used_and_what_else_it_needs() -> None:
    drive = fleet()
    for name, used_mib, instead in (("a", 19_195, ["1xL4", "1xA100"]), ("b", 19_196, ["1xA100"]), ("c", 40_000, [])):
        runs(drive, name, Peaks(-1, -1, used_mib, 1), labels={"workload": name})
        assert rows(drive)[0].instead == instead, name
    drive.worker("labelled", 1, labels={"rack": "r1"}, auto=False)
    runs(drive, "d", Peaks(-1, -1, 10, 1), labels={"workload": "d"}, requires={"rack": ["r1"]})
    assert rows(drive)[0].instead == [], "no L4 has the label"
    runs(drive, "e", Peaks(-1, -1, 10, 1), labels={"workload": "e"}, gpu={"model": "H100", "count": 2})
    assert (rows(drive)[0].gpu_mib, rows(drive)[0].instead) == (2 * 81_559, [])


def test_a_job_of_which_no_peaks_came_is_not_counted() -> None:
    drive = fleet()
    runs(drive, "a", None)
    runs(drive, "b", Peaks(-1, -1, 10, 1))
    assert [row.jobs for row in rows(drive)] == [1]


def test_a_plan_has_what_jobs_that_ask_alike_used() -> None:
    drive = fleet()
    runs(drive, "a", Peaks(-1, -1, 9_000, 1))
    asks = Request(
        job="x",
        run=Run(driver="noop"),
        gpu=drive.engine.reader.request_of(drive.job("a")).gpu,
        labels={"workload": "eval"},
    )
    found = drive.term_counts.sizes.of("t", asks)
    assert found is not None
    assert (found.workload, found.gpu_used_mib) == ("eval", 9_000)
    assert drive.term_counts.sizes.of("else", asks) is None
    assert (
        drive.term_counts.sizes.of("t", Request(job="x", run=Run(driver="noop"), labels={"workload": "eval"})) is None
    )


def test_a_term_begins_with_the_peaks_that_the_ledger_has(monkeypatch: pytest.MonkeyPatch) -> None:
    know_next(monkeypatch)
    drive = fleet()
    raise_level(drive)
    runs(drive, "a", Peaks(-1, -1, 9_000, 1))
    sizes = Sizes(drive.engine)
    assert sizes.answer(None).rows == []
    sizes.begin()
    assert [row.gpu_used_mib for row in sizes.answer(None).rows] == [9_000]
    assert sizes.from_ms == drive.job("a").ended_ms


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, ["80.0 GiB GPU memory had, at most 11.2 GiB used in 214 of 214 jobs: --gpu 1xL4 has room"]),
        ({"gpu_jobs": 4}, []),
        ({"instead": []}, []),
        ({"memory_mib": 8_192, "memory_used_mib": 1_000, "memory_jobs": 5, "instead": []},
         ["8.0 GiB memory asked, at most 1000 MiB used in 5 of 214 jobs: --memory 2Gi has room"]),
        ({"memory_mib": 8_192, "memory_used_mib": 4_000, "memory_jobs": 5, "instead": []}, []),
        ({"memory_mib": 8_192, "memory_used_mib": 1_000, "memory_jobs": 4, "instead": []}, []),
        ({"memory_mib": 512, "memory_used_mib": 3, "memory_jobs": 9, "instead": []},
         ["512 MiB memory asked, at most 3 MiB used in 9 of 214 jobs: --memory 64Mi has room"]),
    ],
)  # fmt: skip
def test_advice_is_of_five_measured_jobs_that_used_much_less(fields: dict[str, object], told: list[str]) -> None:
    row = {"tenant": "t", "workload": "eval", "asks": "1xH100", "jobs": 214, "gpu_jobs": 214, "gpu_mib": 81_920,
           "gpu_used_mib": 11_469, "instead": ["1xL4"], **fields}  # fmt: skip
    assert advice_of(SizedRow(**row)) == [f"eval: {each}" for each in told]  # type: ignore[arg-type]

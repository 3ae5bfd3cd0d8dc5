"""`make bench-placement`: a run that was cut off goes on, and what is off a published figure gets more seeds."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.placement import run
from bench.placement.openb import Outcome

NODES = "sn,cpu_milli,memory_mib,gpu,model\n" + "".join(f"h{n},64000,65536,4,T4\n" for n in range(4))
PODS = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,creation_time,deletion_time\n" + "".join(
    f"t{n},1000,1024,1,{milli},,0,1\n" for n, milli in enumerate((1000, 460, 300, 1000))
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "openb_node_list_x.csv").write_text(NODES)
    (tmp_path / "openb_pod_list_few.csv").write_text(PODS)
    return tmp_path


@pytest.fixture
def published() -> Iterator[dict[tuple[str, str], float]]:
    run.found_published.clear()
    yield run.found_published
    run.found_published.clear()


def options(folder: Path, keep: Path | None = None) -> argparse.Namespace:
    return argparse.Namespace(
        traces=folder, seeds=2, pooled=4, policies=["best-fit"], until=100, processes=1, keep=keep
    )


def outcomes(*allocated: float) -> list[Outcome]:
    return [Outcome("best-fit", "few", seed, True, {100: value}) for seed, value in enumerate(allocated, 42)]


def test_a_run_that_was_cut_off_goes_on_with_what_is_kept(folder: Path, tmp_path: Path) -> None:
    given = options(folder, tmp_path / "keep")
    jobs = run.jobs_of(given, ["few"])
    first: run.Found = {}
    assert run.run_all(jobs[:-1], given, first) == 0
    again: run.Found = {}
    assert run.run_all(jobs, given, again) == len(jobs) - 1
    assert again["best-fit", "few", True] == first["best-fit", "few", True]
    assert [outcome.seed for outcome in again[run.OURS, "few", False]] == [42, 43]
    (folder / "openb_pod_list_few.csv").write_text(PODS.replace("300", "350"))
    assert run.run_all(jobs[:1], given, {}) == 0  # other traces, other outcomes


def test_a_cell_that_is_off_is_told_with_all_its_seeds(folder: Path, published: dict[tuple[str, str], float]) -> None:
    given = options(folder)
    published["few", "BestFit"] = 90.0
    found: run.Found = {("best-fit", "few", True): outcomes(90.1, 90.5)}
    assert run.off_published(found, ["few"], ["best-fit"]) == []
    found["best-fit", "few", True] = outcomes(90.2, 90.6)
    cells = run.off_published(found, ["few"], ["best-fit"])
    assert cells == [("few", "best-fit")]
    assert [(job[1], job[2], job[3]) for job in run.more_seeds(given, cells)] == [
        ("few", "best-fit", 44),
        ("few", "best-fit", 45),
    ]
    more: run.Found = {("best-fit", "few", True): outcomes(90.0, 89.6)}
    assert run.pooled(found, more, cells, given)[-1] == (
        "| few | best-fit | 90.40 | +0.40 | 90.10 (0.21) | +0.10 | 90.00 |"
    )

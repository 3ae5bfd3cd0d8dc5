"""`python -m bench.studies.placement.run`: tasks come as in the published runs, and a run that was cut off goes on."""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import pytest

from bench.studies.placement import page, relatives, run
from bench.studies.placement.draws import Source, drawn
from bench.studies.placement.openb import Outcome
from moorage.testing.simulate.openb import node_list, read_hosts

NODES = "sn,cpu_milli,memory_mib,gpu,model\n" + "".join(f"h{n},64000,65536,4,T4\n" for n in range(4))
PODS = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,creation_time,deletion_time\n" + "".join(
    f"t{n},1000,1024,1,{milli},,0,1\n" for n, milli in enumerate((1000, 460, 300, 1000))
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "openb_node_list_x.csv").write_text(NODES)
    (tmp_path / "openb_pod_list_few.csv").write_text(PODS)
    return tmp_path


def options(folder: Path, keep: Path | None = None) -> argparse.Namespace:
    return argparse.Namespace(traces=folder, seeds=2, policies=["best-fit"], until=100, processes=1, keep=keep)


def outcomes(*allocated: float) -> list[Outcome]:
    return [Outcome("best-fit", "few", seed, True, {100: value}) for seed, value in enumerate(allocated, 42)]


@pytest.mark.slow
def test_a_run_that_was_cut_off_goes_on_with_what_is_kept(folder: Path, tmp_path: Path) -> None:
    given = options(folder, tmp_path / "keep")
    jobs = run.jobs_of(given, ["few"])
    first: page.Found = {}
    assert run.run_all(jobs[:-1], given, first) == 0
    again: page.Found = {}
    assert run.run_all(jobs, given, again) == len(jobs) - 1
    assert again["best-fit", "few", True] == first["best-fit", "few", True]
    assert [outcome.seed for outcome in again[page.OURS, "few", False]] == [42, 43]
    (folder / "openb_pod_list_few.csv").write_text(PODS.replace("300", "350"))
    assert run.run_all(jobs[:1], given, {}) == 0  # other traces, other outcomes


def test_each_run_stands_beside_the_published_one_of_its_seed() -> None:
    published: page.Published = {("few", "BestFit"): {42: 90.0, 43: 90.5, 44: 10.0}}
    found: page.Found = {("best-fit", "few", True): outcomes(90.004, 90.7)}
    assert page.reproduced(found, published, ["few"], ["best-fit"])[-1] == "| few | 90.35 / 90.25 (1) |"


def test_numbers_are_those_of_go() -> None:
    source = Source(0)
    assert [source.int63() for _ in range(3)] == [8717895732742165505, 2259404117704393152, 6050128673802995827]


def test_tasks_come_in_the_order_of_the_published_runs() -> None:
    """A thousandth of the GPUs asked for is told apart by the mean over the first arrivals, as was published."""
    tasks = relatives.tasks_of(run.TRACES, "cpu050")
    hosts = read_hosts(node_list(run.TRACES))
    gpus = sum(host.gpus for host in hosts)
    for seed, said in ((42, [0.25, 0.99, 2.0, 2.99, 4.03]), (43, [0.24, 1.02, 1.99, 3.02, 3.99])):
        asked, by_percent = 0, dict[int, list[float]]()
        for task in drawn(hosts, tasks, seed)[1]:
            asked += task.gpu_demand_milli
            by_percent.setdefault(round(asked / gpus / 10), []).append(asked / gpus / 10)
        assert [round(statistics.fmean(by_percent[percent]), 2) for percent in range(5)] == said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("cpu050", "gpu-packing"),
        ("cpu050", "gpu-clustering"),
        ("multigpu50", "gpu-packing"),  # a list of 183 % of the GPUs, of which 130 % are asked for
        ("multigpu50", "fgd"),
    ],
)
def test_a_classic_policy_allocates_what_the_published_run_did(name: str, policy: str) -> None:
    outcome = run.one((str(run.TRACES), name, policy, 43, True, page.AT))
    said = page.read_published(run.TRACES)[name, page.PUBLISHED[policy]][43]
    assert outcome.allocated[page.AT] == pytest.approx(said, abs=page.SAME_POINTS)

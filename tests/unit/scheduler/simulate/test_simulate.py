"""The simulator: every job runs once and as long as its trace says, whatever the trace is written in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moorage.scheduler.core.config import Config
from moorage.scheduler.ledger.invariants import validate
from moorage.schemas.errors import Refused
from moorage.schemas.gpu import GpuSpec, Share
from moorage.schemas.job import Request, Run
from moorage.testing.simulate import measures, openb_jobs, philly, trace
from moorage.testing.simulate.chart import Series, chart, ticks
from moorage.testing.simulate.measures import Timeline, report_of
from moorage.testing.simulate.run import Simulated, simulate
from moorage.testing.simulate.trace import TraceJob, uniform_host
from moorage.testing.simulate.world import Moment, World

ROOT = Path(__file__).resolve().parents[4]
PHILLY = ROOT / "bench" / "traces" / "philly" / "philly_gavel_seed0.csv"
NOOP = Run(driver="noop")


def job(name: str, at_s: int, runs_s: int, gpus: int = 1, *, tenant: str = "t", replicas: int = 1) -> TraceJob:
    gpu = GpuSpec(count=gpus, scheduling="gang" if replicas > 1 else None)
    request = Request(job=name, gpu=gpu, replicas=replicas, run=NOOP)
    return TraceJob(at_s * 1000, runs_s * 1000, tenant, request)


def ran(jobs: Sequence[TraceJob], hosts: int = 1, gpus: int = 2) -> Simulated:
    fleet = [uniform_host(f"n{number}", gpus, "H100") for number in range(hosts)]
    return simulate("test", fleet, jobs, Config(), {})


def test_a_queue_of_one_gpu_starts_in_order_and_its_waits_are_exact() -> None:
    done = ran([job("a", 0, 10), job("b", 1, 10), job("c", 2, 10)], gpus=1)
    assert [(run.started_ms, run.ended_ms) for run in done.runs] == [(0, 10_000), (10_000, 20_000), (20_000, 30_000)]
    assert done.report.whole_percent == 100.0
    assert done.report.all.wait_max_h == round(18 / 3600, 4)
    assert done.report.never_started == 0
    assert done.report.cut_at_h is None


def test_a_gang_starts_whole_and_ends_whole() -> None:
    done = ran([job("a", 0, 10, 1), job("g", 1, 10, 2, replicas=2)], hosts=2)
    assert [(run.started_ms, run.ended_ms, run.state) for run in done.runs] == [
        (0, 10_000, "SUCCEEDED"),
        (10_000, 20_000, "SUCCEEDED"),
    ]


def test_a_sweep_runs_no_more_at_once_than_it_may_and_each_replica_counts_its_own_time() -> None:
    request = Request(job="sweep", gpu=GpuSpec(), indices="3-6,100-105", max_running=2, run=NOOP)
    done = ran([TraceJob(0, 3_600_000, "t", request), job("one", 1, 3_600)], gpus=8)
    assert [(run.started_ms, run.ended_ms) for run in done.runs] == [(0, 5 * 3_600_000), (1_000, 3_601_000)]
    assert done.report.all.gpu_hours == 11.0
    assert {name: row.gpu_hours for name, row in done.report.classes.items()} == {"1 GPU": 1.0, "2-7 GPUs": 10.0}


def test_what_no_host_could_hold_never_starts_and_the_clock_ends_all_the_same() -> None:
    done = ran([job("a", 0, 10), job("big", 0, 10, 3)])
    assert (done.report.never_started, done.report.ended) == (1, 1)


def test_a_time_limit_ends_an_attempt() -> None:
    request = Request(job="a", gpu=GpuSpec(), run=Run(driver="noop", timeout_s=5))
    done = ran([TraceJob(0, 60_000, "t", request)])
    assert (done.runs[0].ended_ms, done.runs[0].state) == (5_000, "TIMED_OUT")


def test_a_share_counts_as_its_part() -> None:
    request = Request(job="a", gpu=GpuSpec(sharing="mps", share=Share(compute_percent=50)), run=NOOP)
    done = ran([TraceJob(0, 10_000, "t", request)], gpus=1)
    assert done.report.whole_percent == 50.0
    assert list(done.report.classes) == ["share"]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(0, 30), st.integers(1, 2), st.integers(1, 2)), min_size=1, max_size=40
    )
)
def test_every_job_runs_once_for_its_time_and_no_gpu_is_given_out_twice(
    rows: list[tuple[int, int, int, int]],
) -> None:
    jobs = sorted(
        (job(f"j{n}", at, runs, gpus, replicas=replicas) for n, (at, runs, gpus, replicas) in enumerate(rows)),
        key=lambda one: one.at_ms,
    )
    world = World([uniform_host(f"n{number}", 2, "H100") for number in range(2)], jobs, Config())
    while world.step():
        validate(world.engine.state)
    for run in world.runs.values():
        assert run.state == "SUCCEEDED"
        assert run.attempts == 1
        assert run.ended_ms - run.started_ms == run.job.runs_ms
        assert run.started_ms >= run.job.at_ms
    changes = [(run.started_ms, run) for run in world.runs.values()]
    for at, _ in changes:
        used = sum(measures.gpus_milli(run) for run in world.runs.values() if run.started_ms <= at < run.ended_ms)
        assert used <= 4_000


def test_a_cluster_that_only_waits_costs_no_steps() -> None:
    """Twenty gangs need all five hosts each: starts, ends and what follows of them are steps, minutes are none."""
    jobs = [job(f"g{n}", n, 830, 8, replicas=5) for n in range(20)]
    world, steps = World([uniform_host(f"n{number}", 8, "H100") for number in range(5)], jobs, Config()), 0
    while world.step():
        steps += 1
    assert world.ended == 20
    assert world.now_ms == 20 * 830_000
    assert steps <= 3 * 20


@pytest.mark.slow
def test_the_same_trace_twice_is_the_same_report() -> None:
    jobs = trace.in_order(PHILLY, philly.read_philly(PHILLY, "2869ce"))[:150]
    first, second = (simulate("p", philly.hosts_of(64), jobs, Config(), {}) for _ in range(2))
    assert msgspec.json.encode(first.report) == msgspec.json.encode(second.report)
    assert first.report.jobs == 150


# ---------------------------------------------------------------------------------------------------- formats


def test_philly_asks_for_whole_hosts_beyond_eight(tmp_path: Path) -> None:
    file = tmp_path / "p.csv"
    file.write_text("vc,job,arrival_s,duration_s,num_gpu\na,a-1,0,5,16\na,a-2,1.5,5,4\nb,b-1,0,5,1\n")
    first, second = trace.in_order(file, philly.read_philly(file, "a"))
    assert (first.request.replicas, first.request.gpu) == (2, GpuSpec(count=8, scheduling="gang"))
    assert (second.request.replicas, second.at_ms, second.tenant) == (1, 1500, "a")
    with pytest.raises(Refused, match="no virtual cluster 'c'"):
        list(philly.read_philly(file, "c"))


def test_our_own_lines_and_columns_say_the_same(tmp_path: Path) -> None:
    lines, columns = tmp_path / "a.jsonl", tmp_path / "a.csv"
    lines.write_text(
        '{"at_s": 1.5, "runs_s": 60, "tenant": "x", "request": {"job": "a", "gpu": {"count": 2, "model": "H100"}}}\n'
        '\n{"at_s": 0, "runs_s": 1}\n'
    )
    columns.write_text("at_s,runs_s,tenant,job,gpu,priority\n1.5,60,x,a,2xH100,\n0,1,,,,50\n")
    of_lines, of_columns = (
        trace.in_order(lines, trace.read_own(lines)),
        trace.in_order(columns, trace.read_csv(columns)),
    )
    assert of_lines[1] == of_columns[1]
    assert (of_lines[0].tenant, of_columns[0].tenant) == ("default", "default")


# ------------------------------------------------------------------------------------------- what is measured


def test_the_mean_is_weighted_by_time_and_survives_thinning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "POINTS_MAX", 16)
    line = Timeline()
    for number in range(1000):
        line.add(Moment(number * 10, 1000 if number % 2 else 3000, number))
    assert len(line.points) <= 17
    assert line.mean_milli() == pytest.approx(2000, rel=0.01)


def test_fairness_is_one_where_all_fare_alike_and_less_where_not() -> None:
    alike = ran([job("a", 0, 100, tenant="a"), job("b", 0, 100, tenant="b")]).report
    assert alike.fairness == 1.0
    apart = ran([job("a", 0, 1000, tenant="a"), job("b", 0, 100, tenant="b")], gpus=1).report
    assert 0.5 < apart.fairness < 0.6
    assert list(apart.tenants) == ["a", "b"]


def test_a_report_of_nothing_that_ran_has_no_division_by_zero() -> None:
    report = report_of(
        "t", {}, 0, 0, ran([job("a", 0, 1, 9)]).runs, Timeline(), decisions=0, records=0, cut_at_ms=5, never={}
    )
    assert (report.allocated_percent, report.never_started, report.all.started) == (0.0, 1, 0)


def test_the_picture_is_well_formed_and_holds_every_run_and_class() -> None:
    done = ran([job("a", 0, 10), job("b", 1, 10, 2)])
    svg = chart("<trace> & co", [Series("pack", done.report, done.points), Series("other", done.report, done.points)])
    root = ElementTree.fromstring(svg)
    words = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"pack", "other", "1 GPU", "2-7 GPUs", "<trace> & co", "GPUs leased", "jobs waiting"} <= words
    assert ElementTree.fromstring(chart("nothing", [])) is not None


def test_a_fleet_without_gpus_has_a_picture_too() -> None:
    done = ran([TraceJob(0, 1000, "t", Request(job="a", run=NOOP))], gpus=0)
    assert done.report.gpus == 0
    assert ElementTree.fromstring(chart("cpu", [Series("pack", done.report, done.points)])) is not None


@given(st.floats(1e-9, 1e12) | st.just(0.0), st.integers(1, 10))
def test_ticks_are_few_round_and_within(most: float, count: int) -> None:
    found = ticks(most, count)
    assert found[0] == 0
    assert found[-1] <= most * (1 + 1e-9)
    assert len(found) <= count + 2


def test_what_is_cut_short_says_where() -> None:

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    jobs = [job(f"j{n}", n, 5) for n in range(1000)]
    done = simulate("t", [uniform_host("n", 1, "H100")], jobs, Config(), {}, progress=interrupted)
    assert done.report.cut_at_h is not None
    assert 0 < done.report.ended < 1000


OPENB = ROOT / "bench" / "traces" / "openb"


def test_openb_tasks_come_and_go_as_the_trace_says() -> None:
    jobs = trace.in_order(OPENB, openb_jobs.openb_jobs(OPENB / "openb_pod_list_gpuspec33.csv"))
    hosts = openb_jobs.openb_hosts(OPENB / "openb_node_list_gpu_node.csv")
    assert (len(jobs), sum(len(host.devices) for host in hosts)) == (8152, 6212)
    named = next(one for one in jobs if one.request.gpu is not None and one.request.gpu.model)
    assert named.request.gpu is not None
    assert all(model.startswith("=") for model in named.request.gpu.models)
    share = next(one.request.gpu for one in jobs if one.request.gpu is not None and one.request.gpu.share is not None)
    assert share.sharing == "mps"
    with pytest.raises(Refused, match="no deletion_time"):
        list(openb_jobs.openb_jobs(OPENB / "openb_pod_list_multigpu50.csv"))


def test_the_memory_of_an_openb_node_is_its_host_s_and_not_its_gpu_s(tmp_path: Path) -> None:
    path = tmp_path / "nodes.csv"
    path.write_text("sn,cpu_milli,memory_mib,gpu,model\nn,64000,786432,1,V100M32\n")
    (host,) = openb_jobs.openb_hosts(path)
    assert (host.cpu_milli, host.memory_mib) == (64000, 786432)
    assert [device.memory_mib for device in host.devices] == [0]

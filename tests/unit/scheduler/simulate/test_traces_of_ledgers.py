"""A trace from a ledger plays again as it was: each placement at the same ms, on the same host and GPUs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.ledger.acts import Epoch
from moorage.scheduler.core.ledger.fold import fold
from moorage.scheduler.core.ledger.record import Record, decode_record
from moorage.scheduler.core.ledger.records import FORMAT
from moorage.scheduler.core.ledger.state import State
from moorage.scheduler.ledger.trace_events import Batch, TraceEvents
from moorage.schemas.errors import Refused
from moorage.schemas.job import Request
from moorage.testing.simulate.from_ledger import TraceWriter
from moorage.testing.simulate.proof import edited, prove
from moorage.testing.simulate.trace import SimHost, TraceEvent, TraceJob, read_whole, uniform_host
from moorage.testing.simulate.world import BEGIN_MS, World


def host(name: str) -> SimHost:
    """A host of which two GPUs have a label."""
    found = uniform_host(name, 8, "NVIDIA V100")
    labelled = [replace(each, labels={"tier": "fast"} if each.index in (2, 7) else {}) for each in found.devices]
    return replace(found, devices=tuple(labelled))


HOSTS = [host(f"n{number}") for number in range(4)]


class Kept(World):
    """A world that keeps the bytes of its ledger."""

    payloads: list[bytes]

    def record(self) -> bool:
        if not hasattr(self, "payloads"):
            self.payloads = []
        self.payloads.append(self.engine.build(self.time_ms, self._mono_ms))
        return self.commit()


def week(seed: int, jobs: int = 150, *, labels: bool = True) -> tuple[list[TraceJob], list[TraceEvent]]:
    """Jobs of three tenants, gangs, limits and failures among them; limits, shares, cordons, cancels and hosts."""
    rng = random.Random(seed)
    found, events = list[TraceJob](), list[TraceEvent]()
    at_ms = 0
    for number in range(jobs):
        at_ms += rng.randrange(120_000)
        tenant, runs_ms = f"t{rng.randrange(3)}", rng.randrange(1_000, 3_600_000)
        run: dict[str, Any] = {"driver": "noop"}
        if rng.random() < 0.3:
            run["timeout_s"] = rng.choice((600.0, 1800.0, runs_ms / 1000 * 2))
        gpu: dict[str, Any] = {"count": rng.choice((1, 1, 2, 4, 8))}
        fields: dict[str, Any] = {"job": f"j{number}", "gpu": gpu, "run": run, "retries": rng.choice((0, 0, 2))}
        fields |= {"priority": rng.choice((50, 50, 50, 70)), "labels": {"workload": f"w{rng.randrange(5)}"}}
        if rng.random() < 0.2:
            fields["replicas"] = rng.randrange(2, 5)
            if rng.random() < 0.5:
                fields["gpu"] = {"count": 4, "scheduling": "gang"}
        if labels and number % 10 == 5 and fields["gpu"]["count"] <= 2:
            fields["requires"] = {"tier": ["fast"]}
        request = msgspec.convert(fields, Request)
        if number % 40 == 7:
            fields["hold"] = True
        attempts = {"0/1": (runs_ms // 2, 1)} if fields["retries"] and rng.random() < 0.5 else {}
        found.append(TraceJob(at_ms, runs_ms, tenant, request, attempts))
        if rng.random() < 0.05:
            events.append(TraceEvent(at_ms + rng.randrange(600_000), "cancel", {"tenant": tenant, "job": f"j{number}"}))
    late = msgspec.to_builtins(host("late"))
    events += [
        TraceEvent(1_000, "order", {"verb": "limit", "tenant": "t0", "gpus": 12}),
        TraceEvent(1_000, "order", {"verb": "share", "tenant": "t1", "weight": 3, "gpus": 8}),
        TraceEvent(at_ms // 4, "order", {"verb": "cordon", "worker": "n1"}),
        TraceEvent(at_ms // 2, "order", {"verb": "uncordon", "worker": "n1"}),
        TraceEvent(at_ms // 3, "join", late),
        TraceEvent(at_ms * 2 // 3, "leave", {"host": "late"}),
        TraceEvent(at_ms // 2, "order", {"verb": "limit", "tenant": "t0", "gpus": 20}),
        TraceEvent(at_ms // 2, "order", {"verb": "hold", "tenant": "t2"}),
        TraceEvent(at_ms // 2 + 600_000, "order", {"verb": "release", "tenant": "t2"}),
    ]
    return found, sorted(events, key=lambda event: event.at_ms)


def played(jobs: list[TraceJob], events: list[TraceEvent], hosts: list[SimHost] | None = None, **config: Any) -> Kept:
    world = Kept(HOSTS if hosts is None else hosts, jobs, Config(**config), events=events)
    while world.step():
        pass
    return world


def written(world: Kept, path: Path, *, anonymous: bool = False, cut: float = 0.0) -> TraceWriter:
    """Write the trace of a world's ledger, without the first part (`cut`) of its records."""
    state = State()
    fold(state, Record(FORMAT, 1, 1, 0, BEGIN_MS, 0, acts=[Epoch("simulated", "simulate", 0.0)]), 1)
    payloads = list(enumerate(world.payloads, 2))
    first = int(len(payloads) * cut)
    for seq, payload in payloads[:first]:
        fold(state, decode_record(payload), seq)
    events = TraceEvents(state)
    writer = TraceWriter(events.base(), anonymous=anonymous)
    for seq, payload in payloads[first:]:
        record = decode_record(payload)
        told = events.follow(record, fold(state, record, seq))
        writer.take(Batch(state.ledger_id, seq - 1, seq, state.time_ms, [(state.time_ms, told)]))
    path.write_bytes(b"".join(writer.lines()))
    return writer


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_trace_of_a_ledger_plays_again_to_the_millisecond(seed: int, tmp_path: Path) -> None:
    jobs, events = week(seed)
    world = played(jobs, events)
    writer = written(world, tmp_path / "t.jsonl")
    trace = read_whole(tmp_path / "t.jsonl")
    assert len(trace.jobs) == world.engine.state.next_num - 1 > len(jobs) * 0.9, "others were refused"
    assert writer.untold == trace.head["untold"] == {}
    again = played(trace.jobs, trace.events, hosts=[])
    proof = prove(trace.jobs, again.placed)
    assert proof.placements == sum(map(len, world.placed.values())) > len(jobs)
    assert proof.kinds == {}, proof
    assert {name: run.state for name, run in again.runs.items()} == {
        name: world.runs[name].state for name in again.runs
    }


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "cut"), [(0, 0.2), (0, 0.6), (2, 0.4), (3, 0.2), (3, 0.8)])
def test_a_trace_that_begins_in_the_middle_plays_the_rest_as_it_was(seed: int, cut: float, tmp_path: Path) -> None:
    """What ran stands where it stood, what waited has waited, and shares and run times are known."""
    jobs, events = week(seed)
    written(played(jobs, events), tmp_path / "t.jsonl", cut=cut)
    trace = read_whole(tmp_path / "t.jsonl")
    stand = [job for job in trace.jobs if job.stands]
    assert stand
    assert any(job.request.is_gang for job in stand) or seed == 3
    assert sum(job.waited_ms > 0 and not job.stands for job in trace.jobs) > 5, "many wait"
    again = played(trace.jobs, trace.events, hosts=[])
    proof = prove(trace.jobs, again.placed)
    assert proof.placements == sum(len(job.placed) for job in trace.jobs) > 20
    assert proof.kinds == {}, proof


def test_what_cannot_stand_where_it_stood_waits(tmp_path: Path) -> None:
    """Its host is left out of the trace, or it asks for something else."""
    world = played(*week(0, jobs=60))
    written(world, tmp_path / "t.jsonl", cut=0.4)
    trace = read_whole(tmp_path / "t.jsonl")
    there = [job for job in trace.jobs if any(host == "n1" for _, host, _ in job.stands.values())]
    assert there
    again = played(trace.jobs, edited(trace.events, without=["n1"]), hosts=[])
    for job in there:
        placed = again.placed[job.tenant, job.request.job or ""]
        assert placed["0/1"][0] >= 0
        assert all(host != "n1" for _, host, _ in placed.values())
    smaller = [
        replace(job, request=replace(job.request, gpu=replace(job.request.gpu, count=1)))
        if job in there and job.request.gpu is not None and job.request.gpu.count > 1
        else job
        for job in trace.jobs
    ]
    again = played(smaller, trace.events, hosts=[])
    for job in smaller:
        if job not in trace.jobs:
            assert len(again.placed[job.tenant, job.request.job or ""]["0/1"][2]) == 1


def test_a_sweep_of_which_some_have_ended_goes_on_with_the_others(tmp_path: Path) -> None:
    gpu = {"count": 8}
    fields = {"job": "sweep", "indices": "3-9", "gpu": gpu, "run": {"driver": "noop"}, "max_running": 2}
    sweep = TraceJob(1_000, 60_000, "t", msgspec.convert(fields, Request))
    written(played([sweep], []), tmp_path / "t.jsonl", cut=0.5)
    (job,) = read_whole(tmp_path / "t.jsonl").jobs
    assert job.request.indices in ("5-9", "6-9", "7-9")
    assert len(job.stands) == 2
    again = played([job], read_whole(tmp_path / "t.jsonl").events, hosts=[])
    assert prove([job], again.placed).kinds == {}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"at_s": 1, "waited_s": 5}, "before the trace"),
        ({"at_s": 1, "stands": {"0": [1, "n0", [0]]}}, "before the trace"),
        ({"at_s": 0, "waited_s": -5}, "waited_s"),
        ({"at_s": 0, "waited_s": 5, "stands": {"0": [1, "n0", [64]]}}, "<= 63"),
        ({"at_s": 0, "waited_s": 5, "stands": {"x": [1, "n0", [0]]}}, "int"),
    ],
)
def test_what_stands_is_checked(line: dict[str, Any], says: str, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_bytes(msgspec.json.encode({"runs_s": 1, **line}) + b"\n")
    with pytest.raises(Refused, match=says):
        read_whole(tmp_path / "t.jsonl")


def test_what_stands_twice_on_one_gpu_stands_once(tmp_path: Path) -> None:
    """A trace that was changed by hand may say what cannot be: the second one waits."""
    lines: list[dict[str, Any]] = [{"at_s": 0, "join": msgspec.to_builtins(HOSTS[0])}]
    lines += [
        {
            "at_s": 0, "runs_s": 60, "waited_s": 30, "stands": {"0": [20, "n0", [3]]},
            "request": {"job": name, "gpu": {"count": 1}},
        }
        for name in ("first", "second")
    ]  # fmt: skip
    (tmp_path / "t.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    trace = read_whole(tmp_path / "t.jsonl")
    again = played(trace.jobs, trace.events, hosts=[])
    assert list(again.placed) == [("default", "second")]
    assert [run.ended_ms for run in again.runs.values()] == [40_000, 60_000]


def test_a_job_that_comes_on_hold_is_on_hold_in_a_trace_of_its_ledger(tmp_path: Path) -> None:
    """Its hold came before it, and it was placed where it had waited."""
    held = TraceJob(1_000, 5_000, "t", msgspec.convert({"job": "held", "hold": True, "run": {"argv": ["x"]}}, Request))
    free = TraceJob(1_000, 5_000, "t", msgspec.convert({"job": "free", "run": {"argv": ["x"]}}, Request))
    world = played([held, free], [])
    written(world, tmp_path / "t.jsonl")
    trace = read_whole(tmp_path / "t.jsonl")
    again = played(trace.jobs, trace.events, hosts=[])
    for each in (world, again):
        assert list(each.placed) == [("t", "free")]


@pytest.mark.parametrize(
    "line",
    [
        '{"at_s": 1, "cancel": {"tenant": "t"}}',
        '{"at_s": 1, "order": {"verb": "unknown"}}',
        '{"at_s": 1, "join": {"name": 3}}',
        '{"at_s": "x", "look": {}}',
        '{"at_s": -1, "look": {}}',
        '{"at_s": 1, "leave": {}}',
    ],
)
def test_an_event_that_cannot_be_is_refused_with_its_line(line: str, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"at_s": 0, "runs_s": 1}\n' + line + "\n")
    with pytest.raises(Refused, match=r"t\.jsonl:2|line 2"):
        read_whole(tmp_path / "t.jsonl")


def test_an_anonymous_trace_names_nobody_and_plays_the_same(tmp_path: Path) -> None:
    jobs, events = week(7, jobs=30, labels=False)
    world = played(jobs, events)
    written(world, tmp_path / "t.jsonl", anonymous=True)
    text = (tmp_path / "t.jsonl").read_text()
    for name in ('"t0"', '"j1"', '"n1"', '"w1"', "late"):
        assert name not in text
    trace = read_whole(tmp_path / "t.jsonl")
    again = played(trace.jobs, trace.events, hosts=[])
    proof = prove(trace.jobs, again.placed)
    assert proof.placements == sum(map(len, world.placed.values()))
    assert proof.kinds == {}
    starts = sorted(run.started_ms for run in world.runs.values() if run.started_ms >= 0)
    assert sorted(run.started_ms for run in again.runs.values() if run.started_ms >= 0) == starts


def test_what_is_changed_changes_placements_and_nothing_changed_none(tmp_path: Path) -> None:
    jobs, events = week(3, jobs=60)
    written(played(jobs, events), tmp_path / "t.jsonl")
    trace = read_whole(tmp_path / "t.jsonl")

    def differs(jobs: list[TraceJob] | None = None, **config: Any) -> bool:
        again = played(jobs or trace.jobs, changed, hosts=[], **config)
        return bool(prove(trace.jobs, again.placed).kinds)

    def without(verb: str) -> list[TraceEvent]:
        return [event for event in trace.events if event.kind != "order" or event.data["verb"] != verb]

    changed = edited(trace.events)
    assert not differs()
    changed = edited(trace.events, add=[uniform_host("more", 8, "NVIDIA V100")])
    assert differs()
    changed = edited(trace.events, without=["n2"])
    assert differs()
    changed = edited(trace.events, quotas={"t0": (0, 4)})
    assert differs()
    changed = edited(trace.events)
    assert differs(ranker="headroom")
    assert differs(reserve_after=0.0)
    changed = without("cordon")
    assert differs()
    changed = without("share")
    assert differs()
    changed = edited(trace.events)
    like = msgspec.structs.replace
    assert differs([like(job, request=like(job.request, priority=50)) for job in trace.jobs])

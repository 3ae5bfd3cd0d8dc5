"""What a change does is told from several shaken copies of a trace, or not at all."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moorage.cli.fleet.advise import _try
from moorage.cli.main import main
from moorage.scheduler.core.config import Config
from moorage.schemas.job import Request
from moorage.schemas.sizes import SizedRow
from moorage.schemas.waited import WaitedRow
from moorage.testing.simulate.shaken import SHAKEN_MS, Effect, Side, compare, copies
from moorage.testing.simulate.trace import TraceEvent, TraceJob, uniform_host
from moorage.testing.simulate.tried import changes_for

HOUR_MS = 3_600_000


def effect(then: list[float], now: list[float]) -> str:
    return Effect(tenant=None, jobs=1, then_h=then, now_h=now).told


def test_a_percentage_needs_three_copies_that_move_the_same_way() -> None:
    assert effect([2.0, 2.0, 4.0], [1.0, 1.8, 3.0]) == "−25 % (−10 … −50)"
    assert effect([2.0, 2.0, 2.0], [2.2, 2.6, 2.4]) == "+20 % (+10 … +30)"
    assert effect([2.0, 2.0, 2.0], [1.0, 1.0, 2.2]) == "no clear effect"
    assert effect([2.0, 2.0, 2.0], [1.0, 1.0, 2.0]) == "no clear effect"
    for few in (1, 2):
        told = effect([2.0] * few, [1.0] * few)
        assert "%" not in told
        assert "2.00h to 1.00h" in told
    assert effect([2.0], [2.0]) == "no effect"
    assert effect([0.0] * 3, [0.0] * 3) == "nothing waits"
    assert effect([0.0] * 3, [1.0] * 3) == "0.00h to 1.00h"
    assert effect([1000.0] * 3, [999.0] * 3) == "less than 1 %"


def job(name: str, at_ms: int, runs_ms: int, tenant: str = "a", **fields: Any) -> TraceJob:
    asked = {"job": name, "gpu": {"count": 8}, "run": {"driver": "noop"}, **fields}
    return TraceJob(at_ms, runs_ms, tenant, msgspec.convert(asked, Request))


def join(name: str, gpus: int = 8, model: str = "NVIDIA V100") -> TraceEvent:
    return TraceEvent(0, "join", msgspec.to_builtins(uniform_host(name, gpus, model)))


def order(at_ms: int, **data: Any) -> TraceEvent:
    return TraceEvent(at_ms, "order", data)


def busy() -> Side:
    """Two hosts; tenant a may use one, and has ten jobs of an hour that all come in the first minutes; b has one."""
    jobs = [job(f"j{number}", 60_000 * (number + 1), HOUR_MS) for number in range(10)]
    jobs.append(job("other", 20 * HOUR_MS, HOUR_MS, "b"))
    events = [join("n0"), join("n1"), order(1, verb="limit", tenant="a", gpus=8)]
    return Side([], jobs, events, Config())


def as_trace(side: Side) -> bytes:
    """Return events and jobs as the lines of a trace from a ledger; each job asks for eight GPUs."""
    lines: list[dict[str, Any]] = [{"at_s": event.at_ms / 1000, event.kind: event.data} for event in side.events]
    lines += [
        {"at_s": each.at_ms / 1000, "runs_s": each.runs_ms / 1000, "tenant": each.tenant,
         "request": {"job": each.request.job, "gpu": {"count": 8}}}
        for each in side.jobs
    ]  # fmt: skip
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


def test_a_limit_that_is_lifted_shortens_waits_in_each_copy_and_nothing_changed_changes_nothing() -> None:
    side = busy()
    lifted = side._replace(events=[event for event in side.events if event.kind == "join"])
    found = compare(side, {"no limit": lifted, "nothing": side}, 3)
    everyone, of_a, of_b = found["no limit"]
    assert (everyone.tenant, of_a.tenant, of_b.tenant) == (None, "a", "b")
    assert (everyone.jobs, of_a.jobs, of_b.jobs) == (11, 10, 1)
    # one after another: they wait 0 to 9 hours, less the minute by which each comes later; by two at a time 0 to 4
    assert of_a.then_h[0] == pytest.approx(4.5 - 4.5 / 60)
    assert of_a.now_h[0] == pytest.approx(2.0 - 4 / 60)
    assert len({*of_a.then_h}) == 3, "copies differ"
    assert of_a.is_sure
    assert re.fullmatch(r"−5\d % \(−5\d … −5\d\)", of_a.told)
    assert of_b.told == "nothing waits"
    assert {each.told for each in found["nothing"]} == {"no effect", "nothing waits"}


def test_a_job_that_starts_on_one_side_alone_waits_until_the_end_of_the_other() -> None:
    side = busy()
    held = side._replace(events=[*side.events, order(2, verb="hold", tenant="b")])
    of_b = next(each for each in compare(side, {"held": held}, 1, until_ms=30 * HOUR_MS)["held"] if each.tenant == "b")
    assert (of_b.then_h, of_b.now_h) == ([0.0], [10.0])
    never = compare(held, {"held": held}, 1, until_ms=30 * HOUR_MS)["held"]
    assert [each.tenant for each in never] == [None], "b has no job that starts"


def test_a_copy_moves_jobs_by_a_minute_with_their_cancels_and_leaves_what_stood() -> None:
    jobs = [job("stood", 0, 1), *(job(f"j{number}", 100_000 + number, 1) for number in range(50))]
    events = [TraceEvent(500_000 + number, "cancel", {"tenant": "a", "job": f"j{number}"}) for number in range(50)]
    side = Side([], jobs, [join("n0"), *events], Config())
    assert copies(side, 0) == (jobs, side.events)
    moved, happened = copies(side, 1)
    assert moved[0] == jobs[0]
    assert [each.at_ms for each in moved] == sorted(each.at_ms for each in moved)
    by = {each.request.job: each.at_ms - old.at_ms for old in jobs for each in moved if each.request == old.request}
    assert max(map(abs, by.values())) <= SHAKEN_MS
    assert len(set(by.values())) > 40
    cancelled = {event.data["job"]: event.at_ms for event in happened if event.kind == "cancel"}
    assert all(at_ms == 500_000 + int(name[1:]) + by[name] for name, at_ms in cancelled.items())
    assert copies(side, 1) == (moved, happened), "a copy is always the same"
    assert copies(side, 2) != (moved, happened)


def row(cause: str, wait_s: float, tenant: str = "a", model: str = "V100") -> WaitedRow:
    return WaitedRow(cause=cause, tenant=tenant, model=model, wait_s=wait_s, gpu_s=0.0, jobs=1)


def test_each_cause_with_a_cure_has_a_change_of_its_own() -> None:
    side = busy()
    events = [*side.events, join("big", 16, "NVIDIA H100"), order(9, verb="cordon", worker="n1"),
              order(9, verb="share", tenant="a", weight=3, gpus=0)]  # fmt: skip
    causes = ("limit", "full", "reserved", "closed", "fragmented", "overtaken-priority", "overtaken-share")
    waits = [row(cause, 100 - number) for number, cause in enumerate(causes)]
    waits += [row("after", 50), row("starting", 50), row("full", 0.5, "b", "H100")]
    tried = changes_for(waits, side.jobs, events, {})
    assert [(each.cause, each.change, each.tenant) for each in tried] == [
        ("limit", "limit 16 of a", "a"),
        ("limit", "no limit of a", "a"),
        ("full", "+1 host as n0", None),
        ("full", "+2 hosts as n0", None),
        ("reserved", "reserve_after 120", None),
        ("closed", "no cordons and drains", None),
        ("fragmented", "ranker headroom", None),
        ("overtaken-priority", "all at priority 50", None),
        ("overtaken-share", "equal shares, no guarantees", None),
    ]
    limits = [[event.data["gpus"] for event in each.events if event.data.get("verb") == "limit"] for each in tried[:2]]
    assert limits == [[16], [0]]
    joined = [sum(event.kind == "join" for event in each.events) for each in tried[2:4]]
    assert joined == [4, 5]
    assert {device["name"] for device in tried[2].events[0].data["devices"]} == {"NVIDIA V100"}
    assert not any(event.data.get("verb") == "cordon" for event in tried[5].events)
    assert tried[4].settings == {"reserve_after": "120"}
    assert changes_for([row("limit", 1), row("full", 1000)], side.jobs, events, {})[0].cause == "full"
    assert len(changes_for([row("limit", 1), row("full", 1000)], side.jobs, events, {})) == 2, "less than a hundredth"


def test_advise_tells_how_much_sooner_jobs_would_have_started_on_the_smaller_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[dict[str, Any]] = [
        {"at_s": 0, "join": join("n0", 1, "NVIDIA H100").data}, {"at_s": 0, "join": join("n1", 1, "NVIDIA L4").data},
        *({"at_s": 600 * number + 60, "runs_s": 3600, "tenant": "a", "request": {
            "job": f"j{number}", "gpu": {"model": "H100"},
            "labels": {"workload": "eval" if number == 2 else "train"}}} for number in range(3)),
    ]  # fmt: skip
    file = tmp_path / "t.jsonl"
    file.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    row = SizedRow(tenant="a", workload="eval", asks="1xH100", jobs=9, gpu_jobs=9, instead=["1xL4"])
    _try([row], file, as_json=False)
    out, _ = capsys.readouterr()
    assert re.fullmatch(
        r"eval: 1xL4 in place of 1xH100: would have started 1\.6\dh sooner \(1\.6\dh … 1\.\d\dh\)\n", out
    )
    _try([msgspec.structs.replace(row, gpu_jobs=4)], file, as_json=False)
    assert capsys.readouterr().err.startswith("nothing to try")


def told(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *argv])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_simulate_compares_what_is_changed_on_copies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "t.jsonl"
    file.write_bytes(as_trace(busy()))
    code, out, err = told(capsys, str(file), "--shake", "3", "--quota", "a=none@0s")
    assert code == 0, err
    assert re.search(r"--quota a=none@0s\s+a\s+10\s+−5\d % \(", out), out
    code, out, _ = told(capsys, str(file), "--shake", "2", "--quota", "a=none@0s", "--json")
    rows = [msgspec.json.decode(line) for line in out.splitlines()]
    assert [each["tenant"] for each in rows] == [None, "a", "b"]
    assert all(len(each["then_h"]) == 2 and "%" not in each["told"] for each in rows)
    code, out, _ = told(capsys, str(file), "--shake", "1", "--set", "reserve_after=0,60")
    assert "reserve_after=60" in out
    assert "%" not in out
    for wrong in (["--add", "1x8xT4", "--prove"], [], ["--add", "1x8xT4", "--plot", str(tmp_path / "x.svg")]):
        code, _, err = told(capsys, str(file), "--shake", "3", *wrong)
        assert code != 0
        assert "--shake" in err
    for count in ("0", "-1", "101"):
        assert told(capsys, str(file), "--shake", count, "--add", "1x8xT4")[0] != 0

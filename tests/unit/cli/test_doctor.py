"""What the doctor makes of what the leader and this host say; `tests/system/cli/test_doctor.py` runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import convert, structs

from moorage.cli.doctor import checks_fleet, checks_host, checks_nats
from moorage.client.view import checks
from moorage.schemas.answers.fleet import (
    ContainedFailures,
    DeviceTrouble,
    FleetAnswer,
    SchedulerRow,
    StalledJob,
    WorkerInfo,
)
from moorage.schemas.capabilities import Capabilities


def test_what_the_leader_set_aside_is_told() -> None:
    figures = {"counts": {}, "plain_ranker": False, "refused": [], "workers": []}
    assert checks.contained_failures(convert(figures, ContainedFailures)).verdict == "ok"
    for change, words in (
        ({"counts": {"request": 2}}, "inputs on which the leader failed: 2 request; the leader goes on"),
        ({"plain_ranker": True}, "until the next term the leader ranks hosts by pack, not by the ranker"),
        ({"refused": ["submit of t"]}, "for now the leader refuses requests as those that made it fail (submit of t)"),
        ({"workers": ["w1"]}, "refuses messages of workers whose messages made it fail (w1)"),
    ):
        check = checks.contained_failures(convert({**figures, **change}, ContainedFailures))
        assert check.verdict == "warn"
        assert words in check.found


def of_fleet(**figures: object) -> list[checks.Check]:
    """The checks of a leader that tells these figures."""
    return list(checks_fleet.of_fleet(convert({"leader": "s1", "epoch": 1, "ledger": 9} | figures, FleetAnswer)))


def copies(wanted: int, *lacking: str, **more: object) -> dict[str, object]:
    return {"ledger_copies": {"wanted": wanted, "lacking": [*lacking], **more}}


def counted(behind: int, *gaps: tuple[int, int, int], **more: object) -> dict[str, object]:
    return {"follower": {"behind": behind, "gaps": [*gaps], **more}}


def queued(mib: int) -> dict[str, object]:
    return {"request_queue": {"messages": 3, "bytes": mib << 20, "bytes_max": 1000 << 20}}


def running(leads: str, **workers: str) -> dict[str, object]:
    """Schedulers, the leader with this build and a standby with 0.3.0, and workers by their builds and states."""
    rows = [(name, *f"{build} up".split()[:2]) for name, build in workers.items() if build]
    return {
        "schedulers": [{"scheduler": "s1", "release": leads, "leads": True}, {"scheduler": "s2", "release": "0.3.0"}],
        "workers": [{"worker": name, "release": build, "state": state} for name, build, state in rows]
        + [{"worker": name, "state": "up"} for name, build in workers.items() if not build],
    }


OTHERS = "other builds run: 0.3.0 on"
SEVERAL = "several builds run: 0.3.0 on s2; 0.3.1 on"
HOUR = 3_600_000


STALLED = {"trouble": "the stream has other settings"}


NO_BUCKETS: dict[str, object] = {
    "buckets": {"tenants": [*"abcd"], "trouble": "insufficient storage", "next": "make room"},
}


NOT_WRITTEN = "no history is written and no GPU time counted now: the stream has other settings"


@pytest.mark.parametrize(
    ("name", "answer", "verdict", "found", "fix"),
    [
        ("copies", {}, "", "", ""),  # an older leader tells of several copies alone
        ("copies", copies(3, seen_ms_ago=12_000), "ok", "all 3 copies of the ledger are up to date, as seen 12s", ""),
        ("copies", copies(3, "n2"), "warn", "n2", ""),
        ("copies", copies(1, holder="n1", servers=[]), "ok", "the ledger has one copy, on n1", ""),
        ("copies", copies(1, holder="", servers=[]), "ok", "the ledger has one copy", ""),
        ("copies", copies(1, holder="n2", servers=["n1", "n2"]), "warn", "on n2, of the cluster's", "--replicas 3"),
        ("follower", counted(checks.BEHIND_MAX), "ok", "history is written and GPU time counted, without a gap", ""),
        ("follower", counted(checks.BEHIND_MAX + 1), "warn", "", ""),
        ("follower", counted(0, (0, HOUR, 7)), "warn", "counted up to 1970-01-01T01:00:00Z: 7 records", ""),
        ("follower", counted(0, (0, 1, 7), (HOUR, 2 * HOUR, 1)), "warn", "Z: 1 record of the ledger", ""),
        ("follower", counted(0, (0, 1, 7), (HOUR, 2 * HOUR, 1)), "warn", "(such gaps: 2)", ""),
        ("follower", counted(9, **STALLED, next="name another"), "warn", NOT_WRITTEN, "name another"),
        ("follower", counted(9, **STALLED, next=""), "warn", NOT_WRITTEN, "the log of the scheduler says"),
        ("clocks", {"schedulers": [{"scheduler": "s2", "clock_off_s": 4.9}]}, "", "", ""),
        ("clocks", {"schedulers": [{"scheduler": "s2", "clock_off_s": -3600}]}, "warn", "s2 is 1h behind", "chrony"),
        ("builds", running("0.3.0", w1="0.3.0", w2="", w3="0.3.1 left"), "", "", ""),
        (
            "builds",
            running("0.3.1", w1="0.3.0", w2="0.3.1"),
            "warn",
            "s1 leads with 0.3.1; other builds run: 0.3.0 on s2 w1",
            "first",
        ),
        (
            "builds",
            running("", **{f"w{at}": f"0.3.{at > 0:d}" for at in range(5)}),
            "warn",
            "several builds run: 0.3.0 on s2 w0; 0.3.1 on w1 w2 w3 and 1 more",
            "workers",
        ),
        ("buckets", {}, "", "", ""),
        ("buckets", NO_BUCKETS, "warn", "can be made now for a, b, c, …: insufficient storage", "make room"),
        ("queue-room", {}, "", "", ""),
        ("queue-room", queued(799), "ok", "holds 3 messages and is 79 % full (of 1000 MiB)", ""),
        ("queue-room", queued(800), "warn", "holds 3 messages and is 80 % full (of 1000 MiB)", ""),
    ],
)
def test_the_doctor_judges_what_the_leader_answers(
    name: str, answer: dict[str, object], verdict: str, found: str, fix: str
) -> None:
    told = [check for check in of_fleet(**answer) if check.name == name]
    assert [(check.verdict, found in check.found, fix in check.fix) for check in told] == (
        [(verdict, True, True)] if verdict else []
    ), told


def test_the_doctor_finds_schedulers_with_other_settings() -> None:
    leads = SchedulerRow(scheduler="s1", leads=True, settings={"ranker": "pack"})
    assert checks._schedulers([leads]) is None
    alike = checks._schedulers(
        convert([leads, {"scheduler": "s2", "settings": {"ranker": "pack"}}], list[SchedulerRow])
    )
    assert alike is not None
    assert (alike.verdict, alike.found) == ("ok", "2 schedulers, no standby with other settings; s1 leads")
    found = checks._schedulers([leads, SchedulerRow(scheduler="s2", settings={"jobs_max": 5})])
    assert found is not None
    assert (found.verdict, found.found) == (
        "warn",
        "scheduler s1 leads; these standbys have other settings: s2 (jobs_max, ranker)",
    )


def test_the_doctor_says_where_pack_ranks() -> None:
    standby = SchedulerRow(scheduler="s2", settings={"ranker": "pack"})
    assert checks._ranking([SchedulerRow(scheduler="s1", leads=True), standby]) is None
    found = checks._ranking([structs.replace(standby, leads=True)])
    assert found is not None
    assert (found.verdict, found.found[:33]) == ("ok", "scheduler s2 ranks hosts by pack:")


def test_the_doctor_names_the_workers_that_are_not_heard() -> None:
    def row(name: str, state: str) -> WorkerInfo:
        return WorkerInfo(worker=name, state=state)

    stale = checks_fleet._workers([row("a", "up"), *(row(f"n{number}", "stale") for number in range(5))])
    assert (stale.verdict, stale.found) == ("warn", "5 stale: n0 n1 n2 and 2 more, 1 up")
    assert "worker.log" in stale.fix
    assert checks_fleet._workers([row("a", "up"), row("gone", "lost")]).verdict == "ok"
    assert checks_fleet._workers([row("gone", "lost")]).verdict == "warn"


def test_the_doctor_counts_the_jobs_that_stall() -> None:
    rows = [{"tenant": "a", "job": f"j{at}", "seconds": 60 * at, "why": "1 GPU at 0 %"} for at in (1, 3, 2)]
    check = checks_fleet._stalled(40, convert(rows, list[StalledJob]))
    assert check.verdict == "warn"
    assert check.found.startswith("40 running jobs stalled")
    assert check.found.endswith("a/j3 for 3m: 1 GPU at 0 %")


def test_the_doctor_names_the_workers_on_which_starts_fail_and_what_workers_cannot_do() -> None:
    def row(name: str, state: str, **more: Any) -> WorkerInfo:
        return convert({"worker": name, "state": state} | more, WorkerInfo)

    closed = checks_fleet._workers([row("a", "up"), row("b", "starts-fail")])
    assert (closed.verdict, closed.found) == ("warn", "1 starts-fail: b, 1 up")
    assert "moorage uncordon" in closed.fix
    rows = [
        row("a", "up", capabilities={"process": {"users": False}}),
        row("b", "up", capabilities={"process": {"users": False, "memory_limit": False}}),
        row("c", "lost", capabilities={"process": {"users": False}}),
    ]
    told = {check.name: check for check in checks_fleet._what_lacks(rows)}
    assert told["users"].found.startswith("2 workers run jobs as their own user alone")
    assert told["users"].found.endswith(": a b")
    assert told["memory-limit"].found.endswith(": b")
    assert list(checks_fleet._what_lacks([row("a", "up")])) == []
    why = {"driver": "docker", "why": "connection refused"}
    down = checks_fleet._workers([row("a", "up"), row("b", "up", drivers_down=[why])])
    assert (down.verdict, down.found) == ("warn", "2 up; the engine of the driver docker does not answer: b")
    why = {"driver": "process", "why": "disk-full: no room on the disk of /state"}
    full = checks_fleet._workers([row("a", "up"), row("b", "up", drivers_down=[why])])
    assert (full.verdict, full.found) == ("warn", "2 up; the disk is full, and nothing is started: b")
    why = {"driver": "process", "why": "agent-stopped: its jobs run on"}
    stopped = checks_fleet._workers([row("a", "up"), row("b", "agent-stopped", drivers_down=[why])])
    assert stopped.verdict == "warn"
    assert stopped.found == "1 agent-stopped: b, 1 up; their agents were stopped while jobs run on: b"
    low = checks_fleet._workers([row("a", "up", warning="disk: 96 % of the disk of /state are in use")])
    assert (low.verdict, low.found) == ("warn", "1 up; the disk is nearly full: a")
    off = checks_fleet._workers([row("a", "up"), row("b", "up", warning="clock: 3600 s behind the leader's")])
    assert (off.verdict, off.found) == ("warn", "2 up; the clock is off by more than 5 s: b")


def test_the_doctor_says_on_which_workers_the_kernel_keeps_jobs_to_their_gpus() -> None:
    def row(name: str, devices: str, gpus: int = 1) -> WorkerInfo:
        told = {"process": Capabilities(devices=devices)}
        return WorkerInfo(worker=name, state="up", gpus=gpus, capabilities=told)

    rows = [row("a", "kernel"), row("b", "variable"), row("c", "kernel"), row("no-gpu", "variable", 0), row("sim", "")]
    kernel, variable = checks_fleet._device_fences(rows)
    assert kernel.found == "on 2 workers the kernel keeps jobs to their GPUs: a c"
    assert variable.found.startswith("on 1 worker a variable alone names a job's GPUs")
    assert variable.found.endswith(": b")


def test_the_doctor_says_how_jobs_freeze_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, kernel = tmp_path / "moorage.toml", tmp_path / "enabled"
    monkeypatch.setenv("MOORAGE_SETTINGS", str(settings))
    settings.write_text("[worker]\n")
    kernel.write_text("always [madvise] never\n")
    assert checks_host.huge_pages(kernel) is None, "no job is frozen"
    settings.write_text("[worker]\nlimiter = true\nauto_freeze = true\n")
    told = checks_host.huge_pages(kernel)
    assert told is not None
    assert (told.verdict, "is madvise" in told.found, told.fix) == ("warn", True, f"as root: echo always > {kernel}")
    kernel.write_text("[always] madvise never\n")
    told = checks_host.huge_pages(kernel)
    assert told is not None
    assert told.verdict == "ok"
    assert checks_host.huge_pages(tmp_path / "none") is None


def test_the_doctor_says_that_an_mps_daemon_cannot_be_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tmp_path / "moorage.toml"
    monkeypatch.setenv("MOORAGE_SETTINGS", str(settings))
    monkeypatch.setenv("PATH", str(tmp_path))
    settings.write_text("[worker]\n")
    assert checks_host.mps(tmp_path) is None
    settings.write_text('[worker]\nmodes = ["mps"]\n')
    program = tmp_path / "nvidia-cuda-mps-control"
    found = [checks_host.mps(tmp_path)]
    program.touch(mode=0o755)
    found.append(checks_host.mps(tmp_path))
    (tmp_path / "control").touch()
    found.append(checks_host.mps(tmp_path))
    told = [(each.verdict, each.found.partition(":")[0]) for each in found if each is not None]
    assert told == [*[("warn", "mps-not-asked")] * 2, ("ok", "the MPS daemon is asked before one of its clients ends")]


@pytest.mark.parametrize(
    ("time_ms", "verdict", "found"),
    [
        (None, "ok", "not compared with the leader's"),
        (1_001_000, "ok", "is 0ms behind that of scheduler s1"),  # it answered in between
        (999_000, "ok", "is 1s ahead of that of scheduler s1"),
        (940_000, "warn", "is 1m ahead of that of scheduler s1"),
        (1_062_000, "warn", "is 1m behind that of scheduler s1"),
    ],
)
def test_the_doctor_tells_an_operator_how_far_its_clock_is_from_the_leaders(
    time_ms: int | None, verdict: str, found: str
) -> None:
    check = checks_fleet.clock_beside(FleetAnswer(leader="s1", time_ms=time_ms), 1_000.0, 1_002.0)
    assert (check.verdict, found in check.found) == (verdict, True), check


def test_the_doctor_tells_a_clock_in_words_that_one_can_read() -> None:
    jumped = checks_nats._clock(checks_nats._Told(server=checks_nats._Server("2020-01-01T00:00:00.123456789Z")))
    assert jumped.verdict == "warn"
    assert "ms" not in jumped.found
    assert jumped.found.endswith("they may differ by at most 1 s")


@pytest.mark.parametrize(
    ("controllers", "said"),
    [
        (("cpu", "memory"), "cores (--cpu) and memory (--memory) of jobs are enforced"),
        (("cpu",), "cores (--cpu) of jobs are enforced, memory (--memory) of jobs are counted, not enforced"),
        ((), "cores (--cpu) and memory (--memory) of jobs are counted, not enforced"),
    ],
)
def test_the_doctor_says_whether_cores_and_memory_are_limits(controllers: tuple[str, ...], said: str) -> None:
    assert checks_host.limits_words(controllers) == said


def test_the_doctor_says_which_devices_have_a_fault_and_what_mends_it() -> None:
    def row(name: str, *kinds: str) -> WorkerInfo:
        told = [DeviceTrouble(slot=slot, kind=kind, detail=f"about {kind}") for slot, kind in enumerate(kinds)]
        return WorkerInfo(worker=name, state="up", troubles=told)

    assert list(checks_fleet._devices([row("a")])) == []
    cdi, fabric = checks_fleet._devices([row("a", "fabric", "cdi"), row("b", "fabric")])
    assert (fabric.verdict, fabric.found) == ("warn", "fabric on 2 GPUs: a b: about fabric")
    assert "nvidia-fabricmanager" in fabric.fix
    assert (cdi.found, cdi.name) == ("cdi on 1 GPU: a: about cdi", "devices")

"""The operator's verbs against a real node, and an audit that must find what was planted."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from moorage.cli.fleet.worker_acts import _asked_for
from moorage.schemas.frames import Device, Place
from moorage.schemas.subjects import Subjects
from moorage.testing.conformance import plain_nats
from tests.system.cli.node import Lines, Node, start
from tests.system.live.scripted_worker import ScriptedWorker
from tests.waiting import until


async def test_the_fleet_is_a_table_with_what_fits_now(node: Node) -> None:
    ran = await node.run("fleet")
    assert ran.code == 0
    header, *rows = ran.rows
    workers = {row[0]: dict(zip(header, row, strict=True)) for row in rows if row[0].startswith("sim-")}
    assert sorted(workers) == ["sim-0000", "sim-0001"]
    for cells in workers.values():
        assert (cells["KIND"], cells["STATE"], cells["GPUS"], len(cells["CELLS"])) == ("sim", "up", "4", 4)
        assert "H100" in cells["MODELS"]
    assert header not in rows  # one table a pipe
    frame = (await node.run("fleet", "--json")).frame
    assert (frame["kind"], frame["verb"]) == ("answer", "fleet")
    assert {row["worker"] for row in frame["data"]["workers"]} >= set(workers)


@contextlib.asynccontextmanager
async def drifter(url: str, name: str) -> AsyncIterator[ScriptedWorker]:
    """A worker with a GPU of a model that no other one has, so that it gets no job of another test."""
    nc = await plain_nats.connect(url)
    try:
        worker = ScriptedWorker(nc, Subjects(), name, 1)
        gpu = Device(0, "nvidia", "NVIDIA Drifter", f"SIM-{name}", 1024)
        worker.hello = msgspec.structs.replace(worker.hello, gpu_pool=[gpu])
        await worker.open()
        try:
            yield worker
        finally:
            await worker.close()
            await worker.goodbye()
    finally:
        await nc.close()


@pytest.mark.slow
async def test_a_worker_shows_each_of_its_devices_with_its_ids(node: Node) -> None:
    ran = await node.run("fleet", "sim-0001")
    assert ran.code == 0
    header, *rows = ran.rows
    assert [(row[header.index("SLOT")], row[header.index("INDEX")]) for row in rows] == [
        (str(at),) * 2 for at in range(4)
    ]
    frame = (await node.run("fleet", "sim-0001", "--json")).frame
    (worker,) = frame["data"]["workers"]
    assert [row[header.index("UUID")] for row in rows] == [device["uuid"] for device in worker["devices"]]
    uuid = worker["devices"][2]["uuid"]
    assert f"lease: its jobs go on for {worker['lease_s']:g}s without an answer of a scheduler" in ran.err
    ran = await node.run("run", "--gpu-device", uuid, "--", "sh", "-c", "echo $MOORAGE_GPU_UUIDS")
    assert ran.out.strip() == uuid, "what is shown is what a job may ask for"
    for words, why in ((("no-such",), "no worker of this fleet has that id"), (("sim-0001", "--watch"), "whole fleet")):
        ran = await node.run("fleet", *words)
        assert ran.code != 0
        assert why in ran.err
    assert "devices" not in (await node.run("fleet", "--json")).frame["data"]["workers"][0]


@pytest.mark.slow
async def test_the_fleet_is_in_the_order_of_names_wherever_it_is_told(node: Node, unique: str) -> None:
    """Also of who joined last: one worker more, whose name comes before the node's own."""
    late = f"a-{unique}"
    async with drifter(node.url, late):
        table = [row[0] for row in (await node.run("fleet")).rows[1:]]
        frame = [row["worker"] for row in (await node.run("fleet", "--json")).frame["data"]["workers"]]
        assert table == frame == sorted(frame)
        assert late in frame
        watching = await start("fleet", "--watch", "--json", env=node.env())
        lines = Lines(watching.stdout)
        await lines.until(late)
        await lines.until("\n")
        watching.send_signal(signal.SIGINT)
        assert await watching.wait() == 130
    told = next(line for line in lines.text.splitlines() if late in line)
    names = [row["worker"] for row in msgspec.json.decode(told)["workers"]]
    assert names == sorted(names)


@pytest.mark.slow
async def test_a_worker_that_was_stopped_idle_is_shown_as_left(node: Node, unique: str, tmp_path: Path) -> None:
    name = f"idle-{unique}"
    words = ("worker", "--id", name, "--simulate", "1x2xT4", "--state", str(tmp_path / "idle"))
    worker = await start(*words, env=node.env())
    await Lines(worker.stderr).until(f"joined as {name}, 2 GPUs, at ")

    async def state() -> str:
        rows = {row[0]: row for row in (await node.run("fleet")).rows}
        return rows[name][2] if name in rows else ""

    assert await state() == "up"
    worker.send_signal(signal.SIGINT)
    assert await worker.wait() == 0

    async def has_left() -> bool:
        return await state() == "left"

    await until(has_left, what="its goodbye is read")


async def test_the_fleet_is_watched_by_the_leaders_frames(node: Node, unique: str) -> None:
    process = await start("fleet", "--watch", "--json", env=node.env())
    lines = Lines(process.stdout)
    await lines.until('"kind":"fleet"')
    process.send_signal(signal.SIGINT)
    assert await process.wait() == 130
    text = await start("fleet", "--watch", env=node.env())
    lines = Lines(text.stdout)
    await lines.until("\n")
    assert lines.text.startswith("sim\t")
    text.send_signal(signal.SIGINT)
    assert await text.wait() == 130


async def until_told(node: Node, events: Lines) -> None:
    """Order something until it is told: only then is it sure that the events are followed."""

    heard = asyncio.create_task(events.until("cordoned"))

    async def told() -> bool:
        await node.run("cordon", "sim-0001")
        await node.run("uncordon", "sim-0001")
        return heard.done()

    await until(told, what="an event of the fleet")
    await heard


@pytest.mark.slow
async def test_drain_cordon_and_uncordon_say_what_they_did_and_who_follows_the_fleet_is_told(node: Node) -> None:
    following = await start("events", "--fleet", env=node.env())
    events = Lines(following.stdout)
    try:
        await until_told(node, events)
        drained = await node.run("drain", "sim-0001")
        assert (drained.code, drained.rows[0][:2]) == (0, ["sim-0001", "draining"])
        assert "undo: moorage uncordon sim-0001" in drained.err
        assert (await node.run("cordon", "sim-0001", "--json")).frame["kind"] == "done"
        reasoned = await node.run("drain", "sim-0001", "--why", "new disk")
        assert reasoned.rows[0][1] == "draining: new disk"
        told = (await node.run("fleet")).err
        assert re.search(r"^sim-0001: draining for \d+m?s, no attempt on it: new disk \(by .*\)$", told, re.M), told
        await events.until(": new disk\n")
        assert re.search(r"Z\tworker sim-0001: draining by operator.*: new disk$", events.text, re.M), events.text
        following.send_signal(signal.SIGINT)
        assert await following.wait() == 130
        reasoned = await node.run("cordon", "sim-0001", "--why", "a loud fan")
        assert reasoned.rows[0][1] == "cordoned: a loud fan"
        told = (await node.run("fleet")).err
        assert re.search(r"^sim-0001: cordoned for \d+m?s, no attempt on it: a loud fan \(by .*\)$", told, re.M), told
        several = await node.run("drain", "nobody", "sim-0000,sim-0001", "sim-0000")
        assert (several.code, several.rows) == (3, [["sim-0000", "draining"], ["sim-0001", "draining"]])
        assert "no worker nobody has joined" in several.err
        assert "undo: moorage uncordon sim-0000 sim-0001\n" in several.err
        assert "sim-0001: it was cordoned: a loud fan\n" in several.err
        later = await node.run("drain", "sim-0000", "--from", "2h", "--why", "a disk")
        assert "sim-0000: it was draining\n" in later.err
        some = await node.run("cordon", "sim-0001", "--gpu", "2", "--gpu", "3")
        assert "undo: moorage uncordon sim-0001 --gpu 2 --gpu 3\n" in some.err
    finally:
        opened = await node.run("uncordon", "sim-0000", "sim-0001")
        some = await node.run("uncordon", "sim-0001", "--gpu", "2", "--gpu", "3")
    assert (opened.code, opened.rows) == (0, [["sim-0000", "open"], ["sim-0001", "open"]])
    assert re.search(r"^sim-0000: its drain of \S+ \d\d:\d\d is off: a disk$", opened.err, re.M), opened.err
    assert "still cordoned: moorage uncordon sim-0001 --gpu 2 --gpu 3\n" in opened.err
    assert (some.code, some.err) == (0, "")
    past = await node.run("events", "--fleet", "--since", "1h")
    assert past.code == 0
    assert re.search(r"Z\tworker sim-0001: draining by operator.*: new disk$", past.out, re.M), past.out
    assert re.search(r"Z\tworker sim-0001: open by operator", past.out), "who follows is told no more"
    frame = (await node.run("events", "--fleet", "--since", "1h", "--json")).frame
    assert (frame["verb"], frame["data"]["events"][-3]["what"]) == ("acts", "open")
    refused = await node.run("events", "--since", "1h")
    assert refused.code == 2
    assert "moorage events --fleet --since 12h" in refused.err
    nobody = await node.run("drain", "nobody")
    assert (nobody.code, nobody.err.startswith("error[not-found]: ")) == (3, True)
    assert "fix: " in nobody.err


@pytest.mark.slow
async def test_hosts_that_are_idle_are_drained_and_printed_until_they_are_opened_and_no_others(node: Node) -> None:
    await node.run("drain", "sim-0001", "--why", "a fan")
    try:

        async def drained() -> bool:
            return (await node.run("drain", "--idle", "1ms")).rows == [["sim-0000"]]

        await until(drained, what="the idle host is drained")
        again = await node.run("drain", "--idle", "1ms", "--json")
        assert again.frame == {"kind": "drained", "workers": ["sim-0000"]}, "again, while it is there"
        assert ": a fan (by" in (await node.run("fleet")).err, "its own reason stays"
        assert (await node.run("drain", "--idle", "1ms", "--pool", "other")).rows == []
        await node.run("uncordon", "sim-0000")
        assert (await node.run("drain", "--idle", "1ms", "--keep", "1")).rows == []
        for line in (["sim-0000", "--idle", "1ms"], ["--idle", "1ms", "--for", "1h"], ["--keep", "1"], []):
            refused = await node.run("drain", *line)
            assert (refused.code, "error[invalid-argument]: drain takes workers" in refused.err) == (2, True), line
        alive = await node.run("admin", "forget", "sim-0000", "nobody")
        assert "sim-0000 is in use: it has a session" in alive.err
        assert "no worker nobody" in alive.err
    finally:
        await node.run("uncordon", "sim-0000", "sim-0001")


@pytest.mark.slow
async def test_a_drain_that_ends_before_those_who_leave_have_left_is_refused_by_its_flags(node: Node) -> None:
    for words, said in (
        (("--for", "30m", "--within", "1h"), "--for 30m ends the drain before the time --within 1h has passed"),
        (
            ("--from", "2h", "--for", "1h", "--within", "1h"),
            "--for 1h ends the drain before the time --within 1h has passed",
        ),
        (("--for", "0s"), "--for 0s is not a length of time"),
    ):
        ran = await node.run("drain", "sim-0001", *words)
        assert (ran.code, said in ran.err) == (2, True), ran.err
    fleet = await node.run("fleet", "--json")
    assert all("drain" not in row for row in fleet.frame["data"]["workers"])


@pytest.mark.slow
async def test_a_drain_has_a_deadline_a_beginning_and_an_end(node: Node) -> None:
    try:
        drained = await node.run("drain", "sim-0001", "--from", "2h", "--for", "1h", "--why", "firmware")
        after = "empty by then, open again 1h after the drain begins: firmware"
        assert re.fullmatch(rf"draining begins (today|tomorrow) \d\d:\d\d, in 2h, {after}", drained.rows[0][1])
        told = (await node.run("fleet")).err
        assert "sim-0001: drained in 1h59m" in told or "sim-0001: drained in 2h" in told
        assert "firmware" in told
        rows = (await node.run("fleet", "--json")).frame["data"]["workers"]
        [drain] = [row["drain"] for row in rows if row["worker"] == "sim-0001"]
        assert drain["ends_in_ms"] - drain["begins_in_ms"] == 3_600_000
        for argv, named in (
            (("--from", "25:00"), "25:00"),
            (("--within", "soon"), "soon"),
        ):
            refused = await node.run("drain", "sim-0001", *argv)
            assert (refused.code, refused.err.startswith("error[invalid-argument]: ")) == (2, True), refused.err
            assert named in refused.err
    finally:
        assert (await node.run("uncordon", "sim-0001")).code == 0
    assert "firmware" not in (await node.run("fleet")).err
    alone = await node.run("admin", "release", "x", "--gpu", "1")
    assert (alone.code, "--gpu needs --worker" in alone.err) == (2, True)


async def test_an_audit_of_a_sound_fleet_finds_nothing(node: Node) -> None:
    ran = await node.run("audit")
    assert (ran.code, ran.out) == (0, "")
    assert ran.err.startswith("no drift: ")


@pytest.mark.long
@pytest.mark.slow
async def test_an_audit_finds_attempts_that_only_one_side_has(node: Node, unique: str) -> None:
    """One audit for both: it looks twice, some seconds apart."""
    async with (
        drifter(node.url, f"{unique}-w") as holds,
        drifter(node.url, f"{unique}-l") as forgets,
    ):
        ghost_place = Place("ghosts", "boo", 0, 1, 999_999_999, [0], "exclusive", False, b"{}")
        holds.held["boo", 0, ghost_place.fence] = ghost_place, "running"
        flags = ("--job", "gone", "--gpu", "1xDrifter", "--requires", f"host={unique}-l")
        assert (await node.run("submit", *flags, "--", "x", tenant=unique)).code == 0
        await forgets.step("gone", "claimed", "started")
        place = await forgets.wants("gone")
        forgets.held.clear()
        for worker in (holds, forgets):  # one renewal that differs is no drift, and one may be under way
            said = len(worker.answers)
            await until(lambda worker=worker, said=said: len(worker.answers) >= said + 3, what="three renewals")
        ran = await node.run("audit")
        assert ran.code == 10, ran.err
        assert "fix: " in ran.err
        drift = {row[0]: row[1:3] for row in ran.rows}
        assert drift[f"{unique}-w"] == ["worker-only", "ghosts/boo/0 fence 999999999"]
        assert drift[f"{unique}-l"] == ["ledger-only", f"{unique}/gone/0 fence {place.fence}"]
        quick = await node.run("audit", "--quick", "--json")
        assert quick.code == 10
        ghost = {"worker": f"{unique}-w", "kind": "worker-only", "member": drift[f"{unique}-w"][1]}
        assert ghost in quick.frame["data"]["drift"]
        watching = await start("audit", "--watch", env=node.env())
        lines = Lines(watching.stdout)
        await lines.until(f"comes\t{unique}-w\tworker-only\tghosts/boo/0 fence 999999999\n")
        holds.held.clear()
        forgets.held["gone", 0, place.fence] = place, "running"
        await forgets.finish("gone")
        healed = await node.run("audit", "--quick")
        assert healed.code == 0, healed.out
        await lines.until(f"goes\t{unique}-w\tworker-only\tghosts/boo/0 fence 999999999\n")
        watching.send_signal(signal.SIGINT)
        assert await watching.wait() == 130


def test_a_drain_for_a_time_says_when_its_jobs_have_to_be_gone() -> None:
    asked = datetime(2026, 11, 20, 12, tzinfo=UTC)
    now = ["draining", "the jobs on this worker are ended now", "open again 2h after the drain begins"]
    assert _asked_for(None, None, "2h", asked) == now
    later = ["draining begins today 14:00, in 2h", "empty by then", "open again 2h after the drain begins"]
    assert _asked_for(None, "2h", "2h", asked) == later
    assert _asked_for("30m", None, None, asked) == ["draining", "empty within 30m at the latest"]


def test_a_drain_says_when_it_begins_across_a_change_of_summer_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    try:
        asked = datetime(2027, 3, 27, 12)
        for begin, said in (
            ("2027-03-28T22:00", "draining begins tomorrow 22:00, in 1d9h"),
            ("48h", "draining begins 2027-03-29 13:00, in 2d"),
        ):
            assert _asked_for(None, begin, None, asked)[0] == said
    finally:
        monkeypatch.undo()
        time.tzset()

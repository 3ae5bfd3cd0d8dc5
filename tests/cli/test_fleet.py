"""The operator's verbs against a real node, and an audit that must find what was planted."""

from __future__ import annotations

import signal

from moorage.schemas.frames import Held
from tests.cli.node import Lines, Node, start
from tests.cli.scripted_worker import ScriptedWorker, fact
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
    assert ["FITS NOW", "FREE", "GPUS", "MODEL"] in ran.rows
    frame = (await node.run("fleet", "--json")).frame
    assert (frame["kind"], frame["verb"]) == ("answer", "fleet")
    assert {row["worker"] for row in frame["data"]["workers"]} >= set(workers)


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


async def test_drain_cordon_and_uncordon_say_what_they_did(node: Node) -> None:
    try:
        drained = await node.run("drain", "sim-0001")
        assert (drained.code, drained.rows[0][:2]) == (0, ["sim-0001", "draining"])
        assert "undo: moorage uncordon sim-0001" in drained.err
        assert (await node.run("cordon", "sim-0001", "--json")).frame["kind"] == "done"
    finally:
        opened = await node.run("uncordon", "sim-0001")
    assert (opened.code, opened.rows) == (0, [["sim-0001", "open"]])
    nobody = await node.run("drain", "nobody")
    assert (nobody.code, nobody.err.startswith("error[not-found]: ")) == (3, True)
    assert "fix: " in nobody.err


async def test_an_audit_of_a_sound_fleet_finds_nothing(node: Node) -> None:
    ran = await node.run("audit")
    assert (ran.code, ran.out) == (0, "")
    assert ran.err.startswith("no drift: ")


async def test_an_audit_finds_a_member_that_only_the_worker_holds(node: Node, unique: str) -> None:
    async with ScriptedWorker(node.url, unique) as worker:
        await worker.renew(Held("ghosts", "boo", 0, 1, 999_999_999, "running"))
        ran = await node.run("audit")
        assert ran.code == 10
        (row,) = [row for row in ran.rows if row[0] == unique]
        assert row[1:3] == ["worker-only", "ghosts/boo/0 fence 999999999"]
        assert "fix: " in ran.err
        quick = await node.run("audit", "--quick", "--json")
        assert quick.code == 10
        assert {"worker": unique, "kind": "worker-only", "member": row[2]} in quick.frame["data"]["drift"]
        await worker.renew()
        healed = await node.run("audit", "--quick")
        assert healed.code == 0, healed.out


async def test_an_audit_finds_a_member_that_only_the_ledger_has(node: Node, unique: str) -> None:
    async with ScriptedWorker(node.url, unique) as worker:
        flags = ("--job", "gone", "--gpu", "1xDrifter", "--requires", f"only={unique}")
        assert (await node.run("submit", *flags, "--", "x", tenant=unique)).code == 0
        await until(lambda: worker.placed, what="placed on the scripted worker")
        place = worker.placed[0]
        await worker.tell(fact("claimed", place), fact("started", place))
        await worker.renew()
        ran = await node.run("audit")
        assert ran.code == 10, ran.err
        (row,) = [row for row in ran.rows if row[0] == unique]
        assert row[1:3] == ["ledger-only", f"{unique}/gone/0 fence {place.fence}"]
        await worker.tell(fact("exited", place, detail="exit"), fact("freed", place))
        assert (await node.run("audit", "--quick")).code == 0

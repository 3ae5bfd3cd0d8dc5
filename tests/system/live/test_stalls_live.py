"""A hang is seen, whole: real schedulers, agents and processes, on simulated GPUs whose use the test plays."""

from __future__ import annotations

from pathlib import Path

import pytest

from moorage.bus.embedded import EmbeddedServer
from tests.system.live.stack import QUICK, caller, stack
from tests.system.live.test_device_health_live import play
from tests.waiting import until

IDLE = {"percent": 0, "power_w": 70, "power_limit_w": 700}
SPINS = {"percent": 100, "power_w": 120, "power_limit_w": 700}
WORKS = {"percent": 100, "power_w": 620, "power_limit_w": 700}


def printing(folder: Path) -> list[str]:
    """A program that writes a line in each tenth of a second while there is a file `go`."""
    return ["/bin/sh", "-c", f"while :; do [ -e {folder}/go ] && echo step; sleep 0.1; done"]


@pytest.mark.slow
async def test_a_hung_job_is_told_once_and_taken_back_by_work_and_by_output(
    nats_server: EmbeddedServer, unique: str, tmp_path: Path
) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme:
        await made.scheduler(config=QUICK)
        await acme.leader()
        play(made, "w", {"w": {"0": WORKS}})
        await made.agent("w", "1xH100", worker="w", load_s=0.2, drivers=["process"])
        await acme.workers_up("w")
        await acme.submit("train", *printing(tmp_path), run={"stall_s": 1, "grace_s": 0.5})
        await acme.reaches("train", "RUNNING")
        told = acme.stalls.setdefault("train", [])

        play(made, "w", {"w": {"0": SPINS}})
        await until(lambda: len(told) == 1, 90, "the stall")
        assert told[0]["seconds"] >= 1
        assert told[0]["why"] == "1 GPU at 100 % with at most 120 of 700 W"
        shown = await acme.show("train")
        assert [(row["replica"], row["why"]) for row in shown["stalled"]] == [(0, told[0]["why"])]
        assert (await acme.fleet())["stalled_jobs"] == 1

        play(made, "w", {"w": {"0": WORKS}})
        await until(lambda: len(told) == 2, 90, "that it moves")
        assert told[1]["seconds"] == 0
        play(made, "w", {"w": {"0": IDLE}})
        await until(lambda: len(told) == 3, 90, "another stall")
        assert told[2]["why"] == "1 GPU at 0 %"
        (tmp_path / "go").touch()
        await until(lambda: len(told) == 4, 90, "that it moves, by its output")
        assert told[3]["seconds"] == 0
        assert (await acme.fleet())["stalled_jobs"] == 0
        await acme.api("cancel", {"job": "train"})
        await acme.all_free()


@pytest.mark.slow
async def test_a_hung_gang_is_ended_and_the_rank_that_differs_is_named(
    nats_server: EmbeddedServer, unique: str, tmp_path: Path
) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme:
        await made.scheduler(config=QUICK)
        await acme.leader()
        for name in ("w0", "w1", "w2"):
            play(made, name, {name: {"0": WORKS}})
            await made.agent(name, "1xH100", worker=name, load_s=0.2, drivers=["process"])
        await acme.workers_up("w0", "w1", "w2")
        run = {"stall_s": 1.5, "on_stall": "end", "grace_s": 0.5}
        gpu = {"count": 1, "scheduling": "gang"}
        await acme.submit("ranks", *printing(tmp_path), run=run, gpu=gpu, replicas=3)
        rows = (await acme.reaches("ranks", "RUNNING"))["replica_states"]
        where = {row["replica"]: row["worker"] for row in rows}
        play(made, where[2], {where[2]: {"0": IDLE}})
        for rank in (0, 1):
            play(made, where[rank], {where[rank]: {"0": SPINS}})
        why = (await acme.reaches("ranks", "FAILED"))["why"]
        assert why == (
            f"stalled: no output and no work of its GPUs for 1.5 s; rank 2 on {where[2]} differs: 1 GPU at 0 %;"
            " the others: 2 GPUs at 100 % with at most 120 of 700 W"
        )
        await acme.all_free()

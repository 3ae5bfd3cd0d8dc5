"""GPUs that fail, jobs that hang, hosts that cannot start a job: schedulers, agents and processes are real."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from moorage.bus.embedded import EmbeddedServer
from moorage.worker.devices.readers.simulated_faults import FILE_NAME
from tests.servers import Server
from tests.system.live.stack import QUICK, Caller, Stack, caller, stack
from tests.waiting import until

IDLE = {"percent": 0, "power_w": 70, "power_limit_w": 700}
SPINS = {"percent": 100, "power_w": 120, "power_limit_w": 700}
WORKS = {"percent": 100, "power_w": 620, "power_limit_w": 700}


def saving(log: Path) -> str:
    """A script that writes what it is told, and by whom: of each attempt, on which GPU."""
    return (
        f"note() {{ echo $1 $MOORAGE_ATTEMPT $MOORAGE_GPU_INDICES >> {log}; }};"
        " trap 'note saved' USR1; trap 'note told; exit 0' TERM; note up; while :; do sleep 0.05; done"
    )


def play(made: Stack, state: str, faults: dict[str, Any]) -> None:
    (made.folder / state).mkdir(mode=0o700, exist_ok=True)
    (made.folder / state / FILE_NAME).write_bytes(msgspec.json.encode(faults))


async def troubles(acme: Caller, worker: str) -> list[dict[str, Any]]:
    return list(next(each for each in (await acme.fleet())["workers"] if each["worker"] == worker)["troubles"])


async def lines_of(path: Path, count: int) -> list[str]:
    await until(lambda: path.exists() and path.read_text().count("\n") >= count, 90, f"{count} lines in {path}")
    return path.read_text().splitlines()


@pytest.mark.slow
async def test_a_job_leaves_a_failing_gpu_and_then_a_drained_worker_with_notice(
    nats_server: EmbeddedServer, unique: str, tmp_path: Path
) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme:
        leader = await made.scheduler(config=QUICK)
        await acme.leader()
        await made.agent("a", "2xH100", worker="a", load_s=0.2, probation=1.0, drivers=["process"])
        await acme.workers_up("a")
        run = {"checkpoint_signal": "SIGUSR1", "checkpoint_before_s": 1.5, "grace_s": 5}
        log = tmp_path / "train"
        await acme.submit("train", "/bin/sh", "-c", saving(log), run=run)
        assert await lines_of(log, 1) == ["up 1 0"]
        play(made, "a", {"a": {"0": {"xid": 79}}})
        assert await lines_of(log, 4) == ["up 1 0", "saved 1 0", "told 1 0", "up 2 1"]
        [trouble] = await troubles(acme, "a")
        assert (trouble["slot"], trouble["kind"], trouble["recorded"]) == (0, "xid", True)

        await leader.kill()  # the next one knows it from the ledger
        await made.scheduler(config=QUICK)
        await acme.leader(2)
        [trouble] = await troubles(acme, "a")
        assert trouble["detail"] == "Xid 79: the GPU has fallen off the bus"
        await acme.workers_up("a")
        await acme.submit("waits", "true")
        assert (await acme.api("explain", {"job": "waits"}))["data"]["reason"] in ("busy", "sick")
        play(made, "a", {})
        answer = await acme.admin("release", {"worker": "a", "by": "ana"})
        assert (answer["changed"], answer["slots"]) == (True, [0])
        await acme.reaches("waits", "SUCCEEDED")

        await made.agent("b", "1xH100", worker="b", drivers=["process"])
        await acme.workers_up("b")
        answer = await acme.admin("drain", {"worker": "a", "within_s": 4, "for_s": 8, "by": "ana", "why": "disk"})
        assert answer["drain"]["until_ms"] - answer["drain"]["from_ms"] == 8000
        assert (await lines_of(log, 7))[4:] == ["saved 2 1", "told 2 1", "up 3 0"]
        shown = await acme.reaches("train", "RUNNING")
        assert shown["worker"] == "b"
        assert shown["replica_states"][0]["losses"] == 1, "the GPU's, and none of the drain"
        whys = {change.get("why") for change in shown["changes"]}
        assert {"GPU 0 of a: Xid 79: the GPU has fallen off the bus", "a is drained: disk"} <= whys
        await acme.workers_up("a")
        await acme.api("cancel", {"job": "train"})
        await acme.all_free()


@pytest.mark.slow
async def test_a_gpu_whose_check_fails_is_closed_for_all_to_see_until_it_is_released(
    nats_server: EmbeddedServer, unique: str
) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme:
        await made.scheduler(config=QUICK)
        await acme.leader()
        check = ["/bin/sh", "-c", "echo the product differs; test $MOORAGE_GPU_INDICES != 1"]
        more = {"check_command": check, "check_after_fault": False, "drivers": ["process"]}
        await made.agent("a", "2xH100", worker="a", load_s=0.2, **more)
        await acme.workers_up("a")

        async def closed() -> list[tuple[int, str, str, bool]]:
            keys = ("slot", "kind", "detail", "recorded")
            return [tuple(trouble[key] for key in keys) for trouble in await troubles(acme, "a")]

        async def is_closed() -> bool:
            return await closed() == [(1, "check", "the product differs", True)]

        await until(is_closed, 90, "GPU 1 is closed, and GPU 0 is not")
        await acme.submit("both", "true", gpu={"count": 2})
        assert (await acme.api("explain", {"job": "both"}))["data"]["reason"] == "sick"
        answer = await acme.admin("release", {"worker": "a", "by": "ana"})
        assert answer["slots"] == [1]
        await acme.reaches("both", "SUCCEEDED")
        assert await closed() == []


@pytest.mark.slow
async def test_a_gang_that_hangs_is_ended_and_the_rank_that_differs_is_named(
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
        await acme.submit("ranks", "/bin/sleep", "600", run=run, gpu=gpu, replicas=3)
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


@pytest.mark.slow
async def test_a_job_that_kills_its_supervisor_ends_and_its_neighbour_succeeds(
    nats_server: Server, unique: str
) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme:
        await made.scheduler()
        await acme.leader()
        await made.agent("worker", "2xH100", worker="w0")
        await acme.workers_up("w0")
        await acme.submit("neighbour", "/bin/sh", "-c", "[ $MOORAGE_ATTEMPT -gt 1 ] || sleep 600", retries_on_lost=0)
        await acme.reaches("neighbour", "RUNNING")
        await acme.submit("guilty", "/bin/sh", "-c", "kill -9 $PPID; sleep 600", retries_on_lost=1)
        await acme.reaches("guilty", "FAILED", deadline_s=150)
        shown = await acme.reaches("neighbour", "SUCCEEDED", deadline_s=150)
        assert shown["attempt"] > 1, "it was lost with the supervisor, and ran again"
        await acme.all_free()

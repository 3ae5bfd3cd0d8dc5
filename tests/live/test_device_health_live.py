"""Failing GPUs and drained workers, whole: real schedulers, agents, supervisors and processes, and played faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from moorage.bus.embedded import EmbeddedServer
from moorage.worker.devices.readers.simulated_faults import FILE_NAME
from tests.live.stack import QUICK, Caller, Stack, caller, stack
from tests.waiting import until


def saving(folder: Path, name: str) -> str:
    """A script that writes what it is told, and by whom: of each attempt, on which GPU."""
    log = folder / name
    return (
        f"note() {{ echo $1 $MOORAGE_ATTEMPT $MOORAGE_GPU_INDICES >> {log}; }};"
        " trap 'note saved' USR1; trap 'note told; exit 0' TERM; note up; while :; do sleep 0.05; done"
    )


def play(made: Stack, state: str, faults: dict[str, Any]) -> None:
    (made.folder / state).mkdir(mode=0o700, exist_ok=True)
    (made.folder / state / FILE_NAME).write_bytes(msgspec.json.encode(faults))


async def row(acme: Caller, worker: str) -> dict[str, Any]:
    return next(each for each in (await acme.fleet())["workers"] if each["worker"] == worker)


async def lines_of(path: Path, count: int) -> list[str]:
    await until(lambda: path.exists() and path.read_text().count("\n") >= count, 90, f"{count} lines in {path}")
    return path.read_text().splitlines()


@pytest.mark.slow
async def test_a_job_leaves_a_failing_gpu_with_notice_and_is_kept_from_it(
    nats_server: EmbeddedServer, unique: str, tmp_path: Path
) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme:
        leader = await made.scheduler(config=QUICK)
        await acme.leader()
        await made.agent("w", "2xH100", worker="w", load_s=0.2, probation=1.0, drivers=["process"])
        await acme.workers_up("w")
        run = {"checkpoint_signal": "SIGUSR1", "checkpoint_before_s": 0.5, "grace_s": 5}
        await acme.submit("train", "/bin/sh", "-c", saving(tmp_path, "train"), run=run)
        assert await lines_of(tmp_path / "train", 1) == ["up 1 0"]

        play(made, "w", {"w": {"0": {"xid": 79}}})
        assert await lines_of(tmp_path / "train", 4) == ["up 1 0", "saved 1 0", "told 1 0", "up 2 1"]
        shown = await acme.reaches("train", "RUNNING")
        assert "GPU 0 of w: Xid 79: the GPU has fallen off the bus" in {c.get("why") for c in shown["changes"]}
        [trouble] = (await row(acme, "w"))["troubles"]
        assert (trouble["slot"], trouble["kind"], trouble["recorded"]) == (0, "xid", True)

        await leader.kill()  # the next one knows it from the ledger
        await made.scheduler(config=QUICK)
        await acme.leader(2)
        [trouble] = (await row(acme, "w"))["troubles"]
        assert trouble["detail"] == "Xid 79: the GPU has fallen off the bus"
        await acme.workers_up("w")
        await acme.submit("waits", "true")
        assert (await acme.api("explain", {"job": "waits"}))["data"]["reason"] in ("busy", "sick")

        play(made, "w", {})
        answer = await acme.admin("release", {"worker": "w", "by": "ana"})
        assert (answer["changed"], answer["slots"]) == (True, [0])
        await acme.reaches("waits", "SUCCEEDED")
        await acme.api("cancel", {"job": "train"})
        await acme.all_free()


@pytest.mark.slow
async def test_an_operators_word_frees_a_gpu_whose_memory_does_not_come_back(
    nats_server: EmbeddedServer, unique: str
) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme:
        await made.scheduler(config=QUICK)
        await acme.leader()
        play(made, "w", {"w": {"0": {"memory_mib": 5000}}})
        await made.agent("w", "2xH100", worker="w", load_s=0.2, free_wait_s=0.2, drivers=["process"])
        await acme.workers_up("w")
        await acme.submit("first", "true")
        await acme.reaches("first", "SUCCEEDED")

        async def quarantined() -> bool:
            return bool((await row(acme, "w"))["quarantined"] == [0])

        await until(quarantined, 90, "GPU 0 in quarantine")
        await acme.submit("other", "true")
        await acme.reaches("other", "SUCCEEDED")  # the other GPU of the host goes on
        await acme.submit("both", "true", gpu={"count": 2})
        assert (await acme.api("explain", {"job": "both"}))["data"]["reason"] == "sick"
        answer = await acme.admin("release", {"worker": "w", "by": "ana", "why": "nvidia-smi shows it clean"})
        assert answer["changed"]
        await acme.reaches("both", "SUCCEEDED", "RUNNING")


@pytest.mark.slow
async def test_a_stranger_on_a_gpu_is_named_and_the_gpu_comes_back_when_it_leaves(
    nats_server: EmbeddedServer, unique: str
) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme:
        await made.scheduler(config=QUICK)
        await acme.leader()
        await made.agent("w3", "1xH100", worker="w3", load_s=0.2, drivers=["process"])
        await acme.workers_up("w3")
        stranger = {"pid": 1234, "name": "python", "user": "bob", "memory_mib": 900}
        play(made, "w3", {"w3": {"0": {"process": stranger}}})

        async def seen() -> bool:
            return bool((await row(acme, "w3"))["troubles"])

        await until(seen, 90, "the stranger in a load frame")
        await acme.submit("j", "true")
        found = (await acme.api("explain", {"job": "j"}))["data"]
        assert (found["reason"], found["held_by"]) == (
            "foreign",
            ["w3 GPU 0: used by pid 1234 python (user bob)"],
        )
        play(made, "w3", {})
        await acme.reaches("j", "SUCCEEDED")


@pytest.mark.slow
async def test_a_drain_with_a_deadline_moves_what_runs_and_a_window_opens_by_itself(
    nats_server: EmbeddedServer, unique: str, tmp_path: Path
) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme:
        await made.scheduler(config=QUICK)
        await acme.leader()
        await made.agent("a", "1xH100", worker="a", drivers=["process"])
        await acme.workers_up("a")
        run = {"checkpoint_signal": "SIGUSR1", "checkpoint_before_s": 1.5, "grace_s": 5}
        await acme.submit("train", "/bin/sh", "-c", saving(tmp_path, "train"), run=run)
        await lines_of(tmp_path / "train", 1)
        await made.agent("b", "1xH100", worker="b", drivers=["process"])
        await acme.workers_up("b")
        answer = await acme.admin("drain", {"worker": "a", "within_s": 4, "for_s": 8, "by": "ana", "why": "disk"})
        assert answer["drain"]["until_ms"] - answer["drain"]["from_ms"] == 8000
        assert await lines_of(tmp_path / "train", 4) == ["up 1 0", "saved 1 0", "told 1 0", "up 2 0"]
        shown = await acme.reaches("train", "RUNNING")
        assert shown["worker"] == "b"
        assert "a is drained: disk" in {change.get("why") for change in shown["changes"]}
        assert shown["replica_states"][0]["losses"] == 0
        await acme.workers_up("a")
        await acme.api("cancel", {"job": "train"})


async def test_what_cannot_be_is_refused_by_the_leader(nats_server: EmbeddedServer, unique: str) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme:
        await made.scheduler(config=QUICK)
        await acme.leader()
        for body, named in (
            ({"worker": "w", "within_s": -1}, "within_s"),
            ({"worker": "w", "until": 3}, "until"),
            ({}, "worker"),
            ({"worker": "nobody"}, "nobody"),
        ):
            answer = await acme.admin("drain", body)
            assert answer["kind"] == "error", answer
            assert named in f"{answer['message']} {answer.get('field')}"

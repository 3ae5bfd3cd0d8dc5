"""Failing GPUs and drained workers, whole: real schedulers, agents, supervisors and processes, and played faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from moorage.bus.embedded import EmbeddedServer
from moorage.worker.devices.readers.simulated_faults import FILE_NAME
from tests.system.live.stack import QUICK, Caller, Stack, caller, stack
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

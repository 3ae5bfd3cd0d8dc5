"""On a real NVIDIA host: a real scheduler and a real worker lease real devices to real processes.

The worker takes every device of the host; nothing else may run on them meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest

from moorage.bus.embedded import EmbeddedServer
from moorage.worker.devices.readers.nvml import open_nvml
from tests.release.gpu.nvidia_smi import asked_of_nvidia_smi
from tests.system.live.stack import Caller, Stack, caller, stack
from tests.waiting import until

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

JOB: Final = str(Path(__file__).with_name("hold_memory.py"))
HELD_MIB: Final = 1024
#: what one process has on a device without allocating: its context
CONTEXT_MIB_MAX: Final = 900
DEADLINE_S: Final = 90.0


@pytest.fixture(scope="module")
def uuids() -> list[str]:
    """The devices of this host by nvidia-smi, in its order; skips where there is none."""
    return [uuid for [uuid] in asked_of_nvidia_smi("uuid")]


@contextlib.asynccontextmanager
async def fleet(server: EmbeddedServer, prefix: str) -> AsyncIterator[tuple[Stack, Caller]]:
    """One scheduler process and one agent on this host's own devices, both up."""
    async with stack(server, prefix) as made, caller(made) as acme:
        await made.scheduler()
        await acme.leader()
        await made.agent("state", None, worker="here")
        await acme.workers_up("here")
        yield made, acme
        await acme.all_free()


def job_request(what: str, file: Path, *more: str, **fields: Any) -> dict[str, Any]:
    """The arguments of `Caller.submit` for a run of hold_memory.py."""
    # where nvidia-smi and libcuda are, on a host that keeps them in folders of its own
    env = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    return {"run": {"argv": [sys.executable, JOB, what, str(file), *more], "env": env, "grace_s": 2}, **fields}


async def seen_by(acme: Caller, job: str, file: Path, **fields: Any) -> dict[str, Any]:
    """Run `see` as a job to its end; what it saw."""
    await acme.submit(job, **job_request("see", file, **fields))
    await acme.reaches(job, "SUCCEEDED", deadline_s=DEADLINE_S)
    return dict(json.loads(file.read_text()))


async def written(file: Path) -> str:
    await until(file.exists, DEADLINE_S, f"{file.name} written by its job")
    return file.read_text()


async def leased_to(acme: Caller, job: str) -> list[str]:
    """The uuids in the job's placement, as its story tells."""
    changes = (await acme.show(job))["changes"]
    return next(list(change["gpus"]) for change in changes if change["state"] == "PLACED")


async def test_two_jobs_hold_two_devices(
    nats_server: EmbeddedServer, unique: str, tmp_path: Path, uuids: list[str]
) -> None:
    if len(uuids) < 2:
        pytest.skip("one GPU: two are needed")
    async with fleet(nats_server, unique) as (_, acme):
        files = {job: tmp_path / job for job in ("one", "two")}
        for job, file in files.items():
            await acme.submit(job, **job_request("hold", file, str(HELD_MIB)))
        for file in files.values():
            await written(file)
        first, second = [await leased_to(acme, job) for job in files]
        assert len(first) == len(second) == 1
        assert first != second
        both = await seen_by(acme, "rest", tmp_path / "rest", gpu={"count": len(uuids) - 2}) if len(uuids) > 2 else None
        assert both is None or not {*first, *second} & set(both["uuids"])
        for job in files:
            await acme.api("cancel", {"job": job})
            await acme.reaches(job, "CANCELLED", deadline_s=DEADLINE_S)


async def test_an_exclusive_device_is_not_leased_again_before_its_memory_is_back(
    nats_server: EmbeddedServer, unique: str, tmp_path: Path, uuids: list[str]
) -> None:
    inventory = await open_nvml()
    smallest_mib = min(device.memory_mib for device in inventory.devices())
    inventory.close()
    held_mib = smallest_mib // 2
    async with fleet(nats_server, unique) as (_, acme):
        everything = {"gpu": {"count": len(uuids)}}
        await acme.submit("holder", **job_request("below", tmp_path / "pid", str(held_mib), **everything))
        await written(tmp_path / "pid")
        await acme.submit("next", **job_request("see", tmp_path / "next", **everything))
        assert await acme.state("next") == "QUEUED"
        await acme.api("cancel", {"job": "holder"})
        await acme.reaches("next", "SUCCEEDED", deadline_s=DEADLINE_S)
        seen = json.loads((tmp_path / "next").read_text())
        assert sorted(seen["uuids"]) == sorted(uuids)
        # it started on devices that held nothing but its own context
        assert all(used <= CONTEXT_MIB_MAX for used in seen["used_mib"])
        assert held_mib > CONTEXT_MIB_MAX


async def test_an_audit_finds_a_process_that_took_a_device_without_a_lease(
    nats_server: EmbeddedServer, unique: str, tmp_path: Path, uuids: list[str]
) -> None:
    async with fleet(nats_server, unique) as (_, acme):
        file = tmp_path / "foreign"
        argv = [sys.executable, JOB, "hold", str(file), str(HELD_MIB)]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": uuids[0]}
        foreign = await asyncio.create_subprocess_exec(*argv, env=environment)
        try:
            await written(file)
            drift = (await acme.admin("audit"))["data"]["drift"]
            rows = [row for row in drift if row["kind"].startswith("nvml-")]
            assert [(row["kind"], row["gpu"], row["pid"]) for row in rows] == [("nvml-foreign", uuids[0], foreign.pid)]
            assert rows[0]["name"].startswith("python")
            assert rows[0]["memory_mib"] >= HELD_MIB
        finally:
            foreign.kill()
            await foreign.wait()
        # what a job of ours holds under its lease is none
        await acme.submit("job", **job_request("hold", tmp_path / "job", str(HELD_MIB)))
        await written(tmp_path / "job")

        async def sound() -> bool:
            drift = (await acme.admin("audit"))["data"]["drift"]
            return not [row for row in drift if row["kind"].startswith("nvml-")]

        await until(sound, DEADLINE_S, "no device without an explanation")
        await acme.api("cancel", {"job": "job"})
        await acme.reaches("job", "CANCELLED", deadline_s=DEADLINE_S)

"""Processes that use a GPU without the limiter: real jobs of a real worker, over NVML and CUDA as stubs in C."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from moorage.schemas.frames import End
from tests.system.worker.sharing.test_memory_guard import name_of, scene
from tests.waiting import until


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for record in caplog.records if "without the limiter" in (text := record.getMessage())]


@pytest.mark.parametrize("how", ["unset LD_PRELOAD", "env -i"])
async def test_a_job_that_starts_its_program_without_the_library_is_named_while_it_runs(
    nats_url: str, unique: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    caplog.set_level(logging.WARNING, "moorage.worker")
    async with scene(nats_url, unique, tmp_path, limiter=True) as one:
        keeps = [f"{name}={value}" for name, value in one.stub.environment.items()]
        before = ["/usr/bin/env", "-u", "LD_PRELOAD"] if how == "unset LD_PRELOAD" else ["/usr/bin/env", "-i", *keeps]
        obeys = await one.hold("obeys", 100, 2000)
        escaped = await one.hold("escapes", 100, 2000, *before)
        await until(lambda: told(caplog), what="the line about the job that escaped")
        assert told(caplog) == [
            f"job escapes of tenant acme: process {escaped} uses GPU 0 without the limiter: the memory guard alone"
            " keeps the job to its memory share, and ends it if it takes more"
        ]
        assert obeys != escaped
        for job in ("obeys", "escapes"):
            await one.leader.want("w1", End(*name_of(job), "cancelled"))
            await one.leader.await_report("w1", "freed", name_of(job))
    assert len(told(caplog)) == 1, "each job is named once"


async def test_where_no_guard_runs_the_line_says_that_nothing_enforces_the_share(
    nats_url: str, unique: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with scene(nats_url, unique, tmp_path, limiter=True, guard=False) as one:
        await one.hold("escapes", 100, 2000, "/usr/bin/env", "-u", "LD_PRELOAD")
        await until(lambda: told(caplog), what="the line about the job that escaped")
        assert told(caplog)[0].endswith("without the limiter: nothing keeps the job to its memory share")

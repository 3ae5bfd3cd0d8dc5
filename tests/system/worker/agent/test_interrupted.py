"""A machine that is to be interrupted: its jobs are told, move, and the worker joins no more until that is over."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from moorage.client import AsyncClient
from tests.leftover import ends_with_the_test
from tests.system.cli.node import COMMAND, environment, node_on
from tests.waiting import until

#: writes each signal that it gets, and ends a moment after the last one
JOB = "trap 'echo USR1 >> {0}' USR1; trap 'echo TERM >> {0}; exit' TERM; echo began >> {0}; while :; do sleep 0.1; done"


@contextlib.asynccontextmanager
async def machine(tmp_path: Path, url: str, name: str, *more: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A worker in a process of its own, with one simulated GPU."""
    words = ["worker", "--id", name, "--simulate", "1x1xH100", "--drivers", "process", "--state", str(tmp_path / name)]
    with (tmp_path / f"{name}.log").open("ab") as log:
        process = ends_with_the_test(
            await asyncio.create_subprocess_exec(
                *COMMAND, *words, *more, env=environment(NATS_URL=url), stdout=log, stderr=log
            )
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


@pytest.mark.slow
async def test_jobs_of_a_machine_that_is_interrupted_are_told_and_move_and_it_joins_again_when_that_is_over(
    tmp_path: Path,
) -> None:
    notice, told = tmp_path / "interrupted", tmp_path / "told"
    async with node_on(tmp_path / "up", simulate="1x1xT4") as node, AsyncClient(node.url) as client:

        async def states() -> dict[str, str]:
            return {row.worker: row.state for row in (await client.fleet.show()).workers}

        async def is_on(name: str) -> bool:
            job = await client.job("train").show()
            return [row.worker for row in job.replica_states] == [name] and job.state == "RUNNING" and told.exists()

        async with machine(tmp_path, node.url, "spot", "--notice", str(notice)) as spot:
            await client.submit(
                ["sh", "-c", JOB.format(told)], job="train", gpu="1xH100", on_no_match="wait",
                checkpoint_signal="SIGUSR1", checkpoint_before_s=3, grace_s=5,
            )  # fmt: skip
            await until(lambda: is_on("spot"), what="it runs on the spot machine")
            async with machine(tmp_path, node.url, "spare", "--leave", "1s"):
                await until(lambda: _is(states, "spare", "up"), what="another machine")
                notice.touch()
                assert await asyncio.wait_for(spot.wait(), 60) == 0, (tmp_path / "spot.log").read_text()
                await until(lambda: is_on("spare"), what="it has moved")
                assert told.read_text().split() == ["began", "USR1", "TERM", "began"]
                assert (await states())["spot"] == "left"
                assert [row.retries for row in (await client.job("train").show()).replica_states] == [0]
                log = (tmp_path / "spot.log").read_text()
                assert "this machine is to be interrupted in 30 s" in log, log
                async with machine(tmp_path, node.url, "spot", "--notice", str(notice)):
                    waits = "it joins once that is over"
                    await until(lambda: waits in (tmp_path / "spot.log").read_text(), what="it waits")
                    assert (await states())["spot"] == "left"
                    notice.unlink()
                    await until(lambda: _is(states, "spot", "up"), what="it joins again")
                await client.job("train").cancel()


async def _is(states: Callable[[], Awaitable[dict[str, str]]], name: str, state: str) -> bool:
    return (await states()).get(name) == state

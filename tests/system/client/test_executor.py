"""Functions run by an executor: values, exceptions, cancels and bounds, on a real node."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest

from moorage.client import (
    AsyncClient,
    AsyncExecutor,
    CallFailed,
    CallRefused,
    Client,
    Executor,
    ItemFailed,
    JobFailed,
    Rejected,
)
from moorage.schemas.job import CANCELLED, RUNNING, SUCCEEDED, TERMINAL
from tests.system.cli.node import Node

WAIT_S = 100.0


@dataclass
class Point:
    x: float


class Unmade(Exception):
    """One that pickle writes, and cannot make again."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


def scaled(point: Point, by: float = 1) -> tuple[Point, Any]:
    return Point(point.x * by), numpy.full(3, point.x)


def fails(kind: str) -> None:
    if kind == "value":
        raise ValueError("no such kind")
    if kind == "unmade":
        raise Unmade(1, 2)
    os._exit(9)


def opened(gate: str) -> str:
    """Return once someone writes into the gate, a named pipe."""
    return Path(gate).read_text()


@pytest.fixture(name="gate")
def _gate(tmp_path: Path) -> str:
    os.mkfifo(tmp_path / "gate")
    return str(tmp_path / "gate")


def test_values_and_exceptions_are_those_of_the_function(node: Node, unique: str) -> None:
    with Executor(gpu=1, target=node.url, tenant=unique) as ex:
        one = ex.submit(scaled, Point(2), by=5)
        point, array = one.result(WAIT_S)
        assert (point, type(point)) == (Point(10), Point)  # of this module, which no other process imports
        assert array.tolist() == [2, 2, 2]
        assert isinstance(one, concurrent.futures.Future)
        others = [ex.submit(fails, kind) for kind in ("value", "unmade", "exit")]
        asked = ex.submit(lambda: os.environ["CUDA_VISIBLE_DEVICES"])
        concurrent.futures.wait(others, WAIT_S)
        raised, unmade, died = [future.exception() for future in others]
        assert (type(raised), str(raised)) == (ValueError, "no such kind")
        assert raised is not None
        assert "in fails" in str(raised.__cause__)
        assert isinstance(unmade, ItemFailed)
        assert (unmade.kind, unmade.exit_code) == ("Unmade", 1)
        assert isinstance(died, ItemFailed)
        assert (died.kind, died.exit_code, died.job) == ("", 9, others[2].job)
        assert asked.result(WAIT_S).isdigit()
        with pytest.raises(Rejected, match="cannot pickle the arguments"):
            ex.submit(scaled, threading.Lock())
    with pytest.raises(RuntimeError, match="after shutdown"):
        ex.submit(scaled, Point(1))
    with Client(node.url, tenant=unique) as client:
        request = client.job(one.job).show().asked
        assert (request["labels"], request.get("replicas", 1)) == ({"function": "scaled"}, 1)


def test_a_map_is_one_job_whose_values_come_in_order(node: Node, unique: str) -> None:
    with Executor(target=node.url, tenant=unique, max_workers=3, retries=0) as ex:
        large = "x" * 20_000  # does not fit into the request
        assert list(ex.map(lambda number, text: number + len(text), range(6), [large] * 6)) == [
            20_000, 20_001, 20_002, 20_003, 20_004, 20_005,
        ]  # fmt: skip
        assert list(ex.map(pow, range(7), [2] * 7, chunksize=3)) == [0, 1, 4, 9, 16, 25, 36]
        with pytest.raises(ZeroDivisionError):
            list(ex.map(lambda number: 1 // number, [1, 0]))
        assert len(ex.jobs) == 3
        with pytest.raises(TypeError, match="replicas"):
            Executor(target=node.url, replicas=3)
        for few in (0, -1, "4", 1.5):
            with pytest.raises(Rejected, match="max_workers is a whole number of at least 1"):
                Executor(target=node.url, max_workers=few)  # type: ignore[arg-type]
    with Client(node.url, tenant=unique) as client:
        first, second, _ = (client.job(job).show().asked for job in ex.jobs)
        assert (first["replicas"], first["max_running"]) == (6, 3)
        assert second["replicas"] == 3  # three numbers, three, and one


def test_a_future_that_is_cancelled_ends_its_call_and_max_workers_bounds_those_that_are_sent(
    node: Node, unique: str, gate: str
) -> None:
    seen = threading.Event()
    with Client(node.url, tenant=unique) as client, Executor(client=client, max_workers=1) as ex:
        runs, waits, later = (ex.submit(opened, gate) for _ in range(3))
        for event in client.events():
            if any(change.state == RUNNING for change in event.changes):
                break
        assert (runs.job, waits.job) == (ex.jobs[0], "")
        later.add_done_callback(lambda _: seen.set())
        assert waits.cancel()
        assert runs.cancel()
        assert later.cancel()
        assert seen.wait(WAIT_S)
        done, _ = concurrent.futures.wait([runs, waits, later], WAIT_S)
        assert done == {runs, waits, later}
        last = ex.submit(int, "3")
        assert last.result(WAIT_S) == 3  # its turn came once the first had ended
        assert client.job(ex.jobs[0]).show().state == CANCELLED
        assert len(ex.jobs) == 2
        assert client.ls().counts  # a client that was given stays open


def test_a_block_that_an_exception_leaves_cancels_what_has_not_ended(node: Node, unique: str, gate: str) -> None:
    futures: list[concurrent.futures.Future[str]] = []

    def stopped() -> None:
        with Executor(target=node.url, tenant=unique) as ex:
            futures.append(ex.submit(opened, gate))
            raise KeyError

    with pytest.raises(KeyError):
        stopped()
    assert futures[0].cancelled()
    with Client(node.url, tenant=unique) as client:
        assert {row.state for row in client.ls().jobs} <= {CANCELLED}


def test_a_program_that_ends_without_shutdown_waits_as_those_of_the_standard_library_do(
    node: Node, unique: str, tmp_path: Path
) -> None:
    (tmp_path / "helper.py").write_text("def triple(number):\n    return 3 * number\n")
    (tmp_path / "script.py").write_text(
        "import helper\n"
        "from moorage.client import Executor\n"
        f"ex = Executor(target={node.url!r}, tenant={unique!r})\n"
        "ex.submit(helper.triple, 7).add_done_callback(lambda future: print(future.result(), flush=True))\n"
    )
    ran = subprocess.run([sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True, timeout=WAIT_S)
    assert (ran.stdout, ran.returncode) == ("21\n", 0), ran.stderr


async def test_an_async_executor_is_awaited_and_cancelled_by_the_loop(node: Node, unique: str, gate: str) -> None:
    async with AsyncClient(node.url, tenant=unique) as client, AsyncExecutor(client=client) as ex:

        async def later(number: int) -> int:
            await asyncio.sleep(0)
            return number + 1

        both: list[Any] = [ex.submit(later, number) for number in (1, 2)]
        assert await asyncio.gather(*both) == [2, 3]
        assert [value async for value in ex.map(abs, [-1, -2])] == [1, 2]
        with pytest.raises(ValueError, match="invalid literal"):
            await ex.submit(int, "x")
        stays = ex.submit(opened, gate)
        async for event in client.events():
            if any(change.state == RUNNING for change in event.changes):
                break
        stays.cancel()
        async for event in client.job(ex.jobs[-1]).events():
            last = event.state
        assert last == CANCELLED
    assert all(row.state in TERMINAL for row in (await _list(node, unique)))


def counted(number: int) -> tuple[int, int]:
    """Return its process and how many calls that has had."""
    seen = vars(sys).setdefault("_seen", [])
    seen.append(number)
    return os.getpid(), len(seen)


def test_a_warm_executor_keeps_its_process_and_has_another_one_if_that_dies(
    node: Node, unique: str, tmp_path: Path
) -> None:
    with Executor(target=node.url, tenant=unique, warm=True) as ex:
        first, _ = ex.submit(counted, 1).result(WAIT_S)
        assert list(ex.map(counted, range(3))) == [(first, 2), (first, 3), (first, 4)]
        with pytest.raises(ValueError, match="no such kind") as raised:
            ex.submit(fails, "value").result(WAIT_S)
        assert "in fails" in str(raised.value.__cause__)
        with pytest.raises(CallFailed, match="ended during the call"):
            ex.submit(fails, "exit").result(WAIT_S)
        other, count = ex.submit(counted, 1).result(WAIT_S)
        assert (other != first, count) == (True, 1)
        [job] = ex.jobs
    with Client(node.url, tenant=unique) as client, pytest.raises(JobFailed, match="its executor was shut down"):
        client.job(job).result(WAIT_S)
    with pytest.raises(TypeError, match="limit"):
        Executor(target=node.url, warm=True, limit="1m")
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    with (
        Executor(target=node.url, tenant=unique, warm=True, python=str(bare)) as ex,
        pytest.raises(CallRefused, match="FAILED"),
    ):
        ex.submit(counted, 1).result(WAIT_S)


def test_processes_without_calls_end_and_the_next_call_starts_others(node: Node, unique: str) -> None:
    with (
        Client(node.url, tenant=unique) as client,
        Executor(client=client, warm=True, idle=0.01) as ex,
    ):
        first, _ = ex.submit(counted, 1).result(WAIT_S)
        assert client.job(ex.jobs[0]).result(WAIT_S).state == SUCCEEDED
        assert ex.submit(counted, 1).result(WAIT_S)[0] != first
        assert len(ex.jobs) == 2


async def _list(node: Node, tenant: str) -> list[Any]:
    async with AsyncClient(node.url, tenant=tenant) as client:
        return list((await client.ls()).jobs)

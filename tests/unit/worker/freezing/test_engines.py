"""Members that sleep by a request: what their worker asks, and what memory it counts as free."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from moorage.schemas.frames import Device
from moorage.schemas.http_service import SLEEP_SOCKET
from moorage.worker.devices.readers.base import HeldUnknown, Inventory, SlotReading
from moorage.worker.freezing.engines import Engines
from moorage.worker.session.attempt_messages import FreezeAnswered

NAME = ("t", "chat", 0, 1, 7)


class OneGpu(Inventory):
    """A GPU of 80,000 MiB; `uses` by pid."""

    def __init__(self, uses: dict[int, int], used_mib: int) -> None:
        self.uses, self.used_mib = uses, used_mib

    def devices(self) -> list[Device]:
        return [Device(0, "nvidia", "NVIDIA H100", "GPU-0", 80_000)]

    async def sample(self) -> list[SlotReading]:
        return [SlotReading(memory_used_mib=self.used_mib)]

    async def memory_is_free(self, slot: int) -> bool:
        return self.used_mib < 64

    async def held(self, slot: int) -> dict[int, int]:
        if not self.uses:
            raise HeldUnknown("it does not say")
        return self.uses


def engines(
    folder: Path | str, inventory: Inventory, *, frozen: bool = True
) -> tuple[Engines, Any, asyncio.Queue[Any]]:
    attempt: Any = SimpleNamespace(name=NAME, driver="process", sleeps_itself=True, frozen=frozen, slots=(0,))
    driver: Any = SimpleNamespace(
        folder_of=lambda name: str(folder), attempts_of=lambda pids: {pid: NAME for pid in pids if pid == 11}
    )
    told: asyncio.Queue[Any] = asyncio.Queue()
    tasks: list[Any] = []
    shell: Any = SimpleNamespace(
        enqueue=told.put_nowait, spawn=lambda work: tasks.append(asyncio.get_running_loop().create_task(work))
    )
    return Engines(shell, {NAME: attempt}, {"process": driver}, inventory), attempt, told


@pytest.mark.parametrize(
    ("uses", "used_mib", "frozen", "is_free"),
    [
        ({11: 1_500}, 1_520, True, True),
        ({11: 1_500}, 1_520, False, False),  # it is awake
        ({11: 9_000}, 9_020, True, False),  # its weights are still there
        ({11: 1_500, 12: 400}, 1_920, True, False),  # of another process
        ({11: 1_500}, 3_000, True, False),  # of nobody knows whom
        ({}, 1_520, True, False),
        ({}, 20, True, True),
    ],
)
async def test_what_a_program_keeps_while_it_sleeps_counts_as_free(
    uses: dict[int, int], used_mib: int, frozen: bool, is_free: bool
) -> None:
    made, _, _ = engines("", OneGpu(uses, used_mib), frozen=frozen)
    assert await made.memory_is_free(0) is is_free


@pytest.mark.parametrize(
    ("uses", "by_request", "has_left"),
    [
        ({11: 1_500, 12: 30_000}, True, True),  # 12 is a neighbour
        ({11: 9_000, 12: 30_000}, True, False),
        ({12: 30_000}, False, True),
        ({11: 1_500, 12: 30_000}, False, False),  # the driver said that it is frozen, and its memory is there
        ({}, True, False),
    ],
)
async def test_one_that_sleeps_on_a_shared_gpu_has_left_once_it_holds_no_more_than_it_may(
    uses: dict[int, int], by_request: bool, has_left: bool
) -> None:
    made, attempt, _ = engines("", OneGpu(uses, 33_000))
    attempt.sleeps_itself = by_request
    assert await made.has_left(attempt, 0) is has_left


@contextlib.asynccontextmanager
async def member(folder: Path, says: bytes) -> AsyncIterator[list[bytes]]:
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        writer.write(says)
        writer.close()

    async with await asyncio.start_unix_server(answer, folder / SLEEP_SOCKET):
        yield asked


async def answered(made: Engines, attempt: Any, told: asyncio.Queue[Any], *, on: bool) -> tuple[str, str]:
    made.ask(attempt, on=on)
    [(name, outcome, why)] = cast(FreezeAnswered, await asyncio.wait_for(told.get(), 10)).items
    assert name == NAME
    return outcome, why


@pytest.mark.parametrize(
    ("on", "says", "outcome", "why"),
    [
        (True, b"frozen\n", "frozen", ""),
        (True, b"running 3 calls still run in it\n", "running", "3 calls still run in it"),
        (False, b"running\n", "running", ""),
        (False, b"broken /wake_up is answered with 500\n", "broken", "/wake_up is answered with 500"),
        (True, b"", "running", "its member broke off"),
        (False, b"", "broken", "its member broke off"),
        (True, b"yes\n", "broken", "its member answers 'yes'"),
    ],
)
async def test_a_members_answer_is_what_became_of_it(
    tmp_path: Path, on: bool, says: bytes, outcome: str, why: str
) -> None:
    made, attempt, told = engines(tmp_path, OneGpu({}, 0))
    async with member(tmp_path, says) as asked:
        assert await answered(made, attempt, told, on=on) == (outcome, why)
    assert asked == [b"sleep\n" if on else b"wake\n"]


async def test_no_link_of_a_job_leads_to_another_socket(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "other").mkdir()
    made, attempt, told = engines(tmp_path / "job", OneGpu({}, 0))
    async with member(tmp_path / "other", b"frozen\n") as asked:
        os.symlink(tmp_path / "other" / SLEEP_SOCKET, tmp_path / "job" / SLEEP_SOCKET)
        outcome, why = await answered(made, attempt, told, on=True)
    assert (outcome, asked) == ("running", [])
    assert "it is no socket" in why


async def test_a_member_without_a_socket_runs_on_and_one_that_cannot_be_woken_is_lost(tmp_path: Path) -> None:
    made, attempt, told = engines(tmp_path, OneGpu({}, 0))
    assert (await answered(made, attempt, told, on=True))[0] == "running"
    assert (await answered(made, attempt, told, on=False))[0] == "broken"

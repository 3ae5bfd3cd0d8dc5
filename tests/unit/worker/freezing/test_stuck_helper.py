"""A helper program that the kernel does not let go, as in a call of a driver that hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from moorage.worker.freezing import freezer
from moorage.worker.freezing.freezer import Freezer


class Stuck:
    """A process that neither answers nor ends, whatever signal it gets."""

    returncode = None

    async def communicate(self, data: bytes) -> tuple[bytes, bytes]:
        await asyncio.Event().wait()
        raise AssertionError

    async def wait(self) -> int:
        await asyncio.Event().wait()
        raise AssertionError

    def kill(self) -> None:
        pass


async def held(slot: int) -> Mapping[int, int]:
    return {}


async def test_a_helper_that_cannot_be_killed_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def begin(*words: str, **fields: object) -> Stuck:
        return Stuck()

    monkeypatch.setattr(asyncio, "create_subprocess_exec", begin)
    monkeypatch.setattr(freezer, "KILLED_S", 0.01)
    made = Freezer(tmp_path / "frozen.json", held)
    async with asyncio.timeout(30):
        outcome, why = await made._help("freeze", [(1, 1)], 0.01)
    assert (outcome, why) == ("broken", "the driver did not freeze it; nor can it be resumed")

"""The attempts of a driver that freezes: a restart waits for no GPU, and what is done with one is done in turn."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import AsyncIterator, Collection

from moorage.schemas.attempt import AttemptName
from moorage.worker.freezing import cuda
from moorage.worker.freezing.attempts import FreezableAttempts
from moorage.worker.session.attempt_messages import FreezeAnswered, ResumeDue
from tests.system.worker.freezing.test_freezing import NAME, Scene, scene
from tests.waiting import until

__all__ = ["scene"]


class Driver:
    """The attempts of a scene's process, and what they reported."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.said: list[FreezeAnswered | ResumeDue] = []
        self.attempts = self.another()

    def another(self) -> FreezableAttempts:
        return FreezableAttempts(self.scene.another(), None, self.said.append, self.scene.attempts_of)

    async def restart(self) -> set[object]:
        """Have the next agent take over; return what it takes for frozen."""
        await self.attempts.close()
        self.said.clear()
        self.attempts = self.another()
        return set(self.attempts.begin([NAME]))

    def answers(self) -> list[str]:
        return [item[1] for event in self.said if isinstance(event, FreezeAnswered) for item in event.items]

    async def freeze(self) -> int:
        """Freeze the attempt; return the pid of its process once that is reported."""
        self.attempts.freeze(NAME, [0])
        await self.answered("frozen")
        (child,) = self.scene.children
        return child.pid

    async def answered(self, *outcomes: str) -> None:
        await until(lambda: self.answers() == list(outcomes), what=f"{outcomes}, said is {self.said}")


@contextlib.asynccontextmanager
async def driver_of(scene: Scene) -> AsyncIterator[Driver]:
    scene.hold()
    made = Driver(scene)
    try:
        assert made.attempts.begin([NAME]) == set()
        yield made
    finally:
        await made.attempts.close()


async def test_an_attempt_is_frozen_and_resumed_and_each_order_is_answered(scene: Scene) -> None:
    async with driver_of(scene) as driver:
        await driver.freeze()
        driver.attempts.resume(NAME)
        await driver.answered("frozen", "running")
        assert driver.scene.states() == [cuda.RUNNING]


async def test_an_attempt_whose_processes_cannot_be_read_runs_on_and_its_order_is_answered(scene: Scene) -> None:
    def attempts_of(pids: Collection[int]) -> dict[int, AttemptName | None]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async with driver_of(scene) as driver:
        driver.attempts = FreezableAttempts(scene.another(), None, driver.said.append, attempts_of)
        driver.attempts.freeze(NAME, [0])
        await driver.answered("running")


async def test_a_restart_waits_for_no_gpu_and_an_order_comes_behind_the_look(scene: Scene) -> None:
    """Each frozen job kept its host from joining for a minute; then the jobs of the host ended by its fence."""
    async with driver_of(scene) as driver:
        pid = await driver.freeze()
        before = driver.scene.asked(pid)
        driver.scene.put(pid, cuda.CHECKPOINTING)  # the driver does not say yet what becomes of it
        assert await driver.restart() == {NAME}
        driver.attempts.resume(NAME)
        await until(lambda: driver.scene.asked(pid) > before + 1, what="the look asks")
        assert driver.answers() == []
        driver.scene.put(pid, cuda.CHECKPOINTED)
        await driver.answered("running")
        assert driver.scene.states() == [cuda.RUNNING]


async def test_what_the_record_says_is_not_reported_and_what_differs_is(scene: Scene) -> None:
    async with driver_of(scene) as driver:
        pid = await driver.freeze()
        before = driver.scene.asked(pid)
        assert await driver.restart() == {NAME}
        await until(lambda: driver.scene.asked(pid) > before, what="the look asks")
        driver.attempts.resume(NAME)
        await driver.answered("running")  # the answer to the order, and no other
        driver.attempts.freeze(NAME, [0])
        await driver.answered("running", "frozen")
        driver.scene.put(pid, cuda.RUNNING)  # it was resumed, and the record could not say so
        assert await driver.restart() == {NAME}
        await driver.answered("running")
        await asyncio.sleep(0)
        assert driver.answers() == ["running"]

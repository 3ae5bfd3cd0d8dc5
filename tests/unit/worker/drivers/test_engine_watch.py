"""The watch of a container engine: down with its first failure, back after two good answers."""

from __future__ import annotations

import asyncio

from moorage.system.proctree import boottime_s
from moorage.worker.drivers.container.engine import EngineDown, EngineError
from moorage.worker.drivers.engine_watch import EngineWatch


class Script:
    """An engine that answers as it is told to, one question at a time."""

    def __init__(self) -> None:
        self.answers: asyncio.Queue[Exception | None] = asyncio.Queue()
        self.asked: asyncio.Queue[None] = asyncio.Queue()

    async def ask(self) -> None:
        self.asked.put_nowait(None)
        answer = await self.answers.get()
        if answer is not None:
            raise answer

    async def say(self, answer: Exception | None) -> None:
        """Answer one question, and return once the next is asked."""
        self.answers.put_nowait(answer)
        await self.asked.get()


async def test_an_engine_is_down_at_once_and_back_after_two_good_answers() -> None:
    script = Script()
    watch = EngineWatch(script.ask, (EngineDown, EngineError), "w1: docker", every_s=0)
    watching = asyncio.get_running_loop().create_task(watch.run())
    await script.asked.get()
    assert watch.why == ""
    await script.say(EngineDown("connection refused"))
    assert watch.why == "connection refused"
    since_s = watch.since_s
    assert 0 <= boottime_s() - since_s < 60
    for answer in (None, EngineError(500, "no space left"), None):
        await script.say(answer)
        assert (bool(watch.why), watch.since_s) == (True, since_s)
    await script.say(None)
    assert watch.why == ""
    watching.cancel()

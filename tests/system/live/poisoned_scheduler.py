"""A scheduler with a defect on purpose, as a process: `-m tests.system.live.poisoned_scheduler PLACE URL PREFIX
CONFIG`.

Whatever asks for the model `poison`, or is called so, makes the core raise at PLACE.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from typing import Any, Final

import msgspec

from moorage.bus.connection import connect
from moorage.ranking.fragments import Fragments
from moorage.scheduler.core.config import Config
from moorage.scheduler.core.fleet.shape import Shape, Shapes
from moorage.scheduler.core.lifecycle.admission import Admission
from moorage.scheduler.core.queue.queue import Queue
from moorage.scheduler.core.schedule.placing import Placing
from moorage.scheduler.leader.copies import Copies
from moorage.scheduler.leader.fleet_frames import FleetFrames
from moorage.scheduler.leader.service import Scheduler
from moorage.scheduler.questions.foresight import Foresight
from moorage.scheduler.questions.inspection import Inspection
from moorage.scheduler.settings import ledger_url
from moorage.schemas.job import Request
from moorage.schemas.subjects import Subjects

POISON: Final = "poison"


class Poisoned(Exception):
    """What the defect raises."""


def is_poison(*given: Any) -> bool:
    for each in given:
        if isinstance(each, Shape) and each.models == (POISON,):
            return True
        if isinstance(each, tuple) and is_poison(*each):
            return True
        if isinstance(each, Request) and (each.labels or {}).get(POISON):
            return True
        if str(getattr(each, "name", "") or getattr(each, "job", "")).startswith(POISON):
            return True
    return False


def raising(owner: Any, name: str) -> Callable[[], None]:
    def spoil() -> None:
        does = getattr(owner, name)

        def broken(*given: Any, **named: Any) -> Any:
            if is_poison(*given):
                raise Poisoned(name)
            return does(*given, **named)

        setattr(owner, name, broken)

    return spoil


def every_task() -> None:
    """What a leader does beside its records raises, whatever it is about."""

    def broken(*given: Any, **named: Any) -> Any:
        raise Poisoned("task")

    for owner, name in ((FleetFrames, "frame"), (Foresight, "_news"), (Copies, "watch"), (Inspection, "_look")):
        setattr(owner, name, broken)


PLACES: Final[dict[str, Callable[[], None]]] = {
    "read": raising(Shapes, "of"),
    "admission": raising(Admission, "submit"),
    "queue": raising(Queue, "enter"),
    "placing": raising(Placing, "_place_one"),
    "ranking": raising(Fragments, "choose"),
    "tasks": every_task,
    "none": lambda: None,
}


async def main(url: str, prefix: str, config: dict[str, Any]) -> None:
    world, ledger = await connect(url, "scheduler"), await connect(ledger_url(), "ledger")
    await Scheduler(world, ledger, config=msgspec.convert(config, Config), subjects=Subjects(prefix)).run()


if __name__ == "__main__":
    _, place, server, prefix, numbers = sys.argv
    PLACES[place]()
    settings = msgspec.json.decode(numbers)
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)-7s %(name)s %(message)s")
    asyncio.run(main(server, prefix, settings))

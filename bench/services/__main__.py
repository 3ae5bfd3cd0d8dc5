"""What services cost and do: meters, the waiting room, doors, the NATS you have, models in turns on one GPU.

    python -m bench.services --rounds 3            # all chapters: writes the book
    python -m bench.services rooms --dry           # one of them, printed

Each round of a chapter has both sides of a comparison, in turns, so a ratio is of one time on one machine.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Final

from bench.book import busy_percent, keep
from bench.kept import number
from bench.services import doors, meters, rooms, sites, turns
from moorage.system.loops import loop_factory

Figures = dict[str, float]
CHAPTERS: Final[dict[str, Callable[[], Awaitable[Figures]]]] = {
    "meters": meters.measure,
    "rooms": rooms.measure,
    "doors": doors.measure,
    "sites": sites.measure,
    "turns": turns.measure,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chapters", nargs="*", metavar="CHAPTER", help=f"of {', '.join(CHAPTERS)}; all without any")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--dry", action="store_true", help="print, write nothing")
    asked = parser.parse_args()
    if unknown := set(asked.chapters) - set(CHAPTERS):
        parser.error(f"no chapter {', '.join(sorted(unknown))}: there are {', '.join(CHAPTERS)}")
    busy = busy_percent()
    print(f"machine {busy:.0f} % busy before")
    for chapter in asked.chapters or CHAPTERS:
        found: dict[str, list[float]] = {}
        for _ in range(asked.rounds):
            gc.collect()
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                for name, value in runner.run(_measured(chapter)).items():
                    found.setdefault(name, []).append(value)
        for name, values in found.items():
            print(f"{name:64}", *(f"{number(value):>8}" for value in values), flush=True)
        if not asked.dry:
            keep("services", "python -m bench.services", {chapter: found}, busy)
    return 0


async def _measured(chapter: str) -> Figures:
    return await CHAPTERS[chapter]()


if __name__ == "__main__":
    raise SystemExit(main())

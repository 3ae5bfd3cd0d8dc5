"""What the scheduler writes and says, to be compared between a compiled installation and the sources: `test_compiled`.

`python -m tests.scheduler.compiled_and_not write FOLDER` lives some seeded worlds, writes a recording into the folder,
and prints a hash of all records and messages; `read FOLDER` prints whether each decision of that recording comes out
again.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from moorage.scheduler.compiled import is_compiled
from moorage.scheduler.core.effects.outputs import Outputs
from moorage.scheduler.recording import replay
from tests.scheduler.driving import Driving
from tests.scheduler.faulty_world import FaultyWorld
from tests.scheduler.test_recording import recorded

SEEDS = range(8)
STEPS = 250


class Heard(Driving):
    """Takes note of all that is sent."""

    said = hashlib.sha256()

    def tick(self, ms: int = 1, *, obey: bool = True) -> Outputs:
        out = super().tick(ms, obey=obey)
        for what in (*out.messages, *out.answers):
            self.said.update(repr(what).encode())
        return out


def write(folder: Path) -> str:
    written = hashlib.sha256()
    for seed in SEEDS:
        world = FaultyWorld(seed, workers=2 + seed % 3, driving=Heard)
        world.run(STEPS)
        world.heal()
        for payload in world.drive.records:
            written.update(payload)
    recorded(folder / "leader.rec")
    return f"{written.hexdigest()} {Heard.said.hexdigest()}"


def read(folder: Path) -> list[bool]:
    return [one.same for one in replay(folder / "leader.rec")]


if __name__ == "__main__":
    verb, folder = sys.argv[1], Path(sys.argv[2])
    print(json.dumps([is_compiled(), write(folder) if verb == "write" else read(folder)]))

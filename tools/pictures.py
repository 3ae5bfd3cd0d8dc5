"""The pictures of docs/scheduling.md, drawn by `moorage simulate`: `python -m tools.pictures`.

One is of a published trace, one of jobs that are made here, the same ones each time.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDER: Final = ROOT / "docs" / "pictures"
PHILLY: Final = ROOT / "bench" / "traces" / "philly" / "philly_gavel_seed0.csv"
#: jobs of the made-up trace, and how often one comes
JOBS: Final = 2_000
EVERY_S: Final = 44.0


def mixed() -> str:
    """Many small jobs that run anywhere, some that must have a T4, few large ones for whole hosts of 8."""
    chance = random.Random(1)
    lines, at_s = ["at_s,runs_s,tenant,gpu"], 0.0
    for _ in range(JOBS):
        at_s += chance.expovariate(1 / EVERY_S)
        gpu = chance.choices(("1", "2", "1xT4", "2xT4", "4xA100", "8xA100"), (35, 15, 20, 10, 10, 10))[0]
        runs_s = min(4 * 3600.0, chance.lognormvariate(7.2, 1.0))
        lines.append(f"{at_s:.0f},{max(60.0, runs_s):.0f},all,{gpu}")
    return "\n".join(lines) + "\n"


def draw(name: str, trace: Path, *flags: str) -> None:
    command = [sys.executable, "-m", "moorage.cli", "simulate", str(trace), *flags, "--plot", str(FOLDER / name)]
    subprocess.run(command, check=True)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "mixed.csv").write_text(mixed())
    draw("order.svg", PHILLY, "--cluster", "2869ce", "--fleet", "8x8xA100")
    draw("rankers.svg", FOLDER / "mixed.csv", "--fleet", "12x8xA100+12x4xT4", "--ranker", "headroom,pack,fragments")


if __name__ == "__main__":
    main()

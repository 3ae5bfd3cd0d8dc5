"""Processor time of one-shot commands over that of bare Python, beside a server and a scheduler: `python -m bench.cli`.

Processor time (user and system, of the process alone, wait4(2)) and not wall time: other work on the machine moves it
less. Every command is run once a round, in turn, so that all of them see the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import sysconfig
from pathlib import Path
from typing import Final

from bench.stack import stack

ROUNDS: Final = 25
#: CPU ms over bare Python (median); `--check` fails above
BOUND_MS: Final = {"moorage --version": 80.0, "": 130.0}
MOORAGE: Final = str(Path(sysconfig.get_path("scripts")) / "moorage")
#: bare Python, and what a one-shot command cannot do without: NATS itself (asyncio is in it) and the frames
STICKS: Final = ("pass", "import asyncio", "import nats.aio.client, msgspec")
LINES: Final = (
    "--version",
    "--help",
    "ls --json",
    "ls --limit 3 --state RUNNING",
    "submit -- true",
    "submit --gpu 1xH100 --cpu 0.5 --env A=1 -- true",
    "fleet --json",
)


def cpu_ms(argv: list[str], env: dict[str, str]) -> float:
    """Run it to its end, its output thrown away. Raises RuntimeError when it fails."""
    null = os.open(os.devnull, os.O_RDWR)
    try:
        actions = [(os.POSIX_SPAWN_DUP2, null, descriptor) for descriptor in (0, 1, 2)]
        pid = os.posix_spawn(argv[0], argv, env, file_actions=actions)
    finally:
        os.close(null)
    _, status, usage = os.wait4(pid, 0)
    if status:
        raise RuntimeError(f"{' '.join(argv)} ended with {os.waitstatus_to_exitcode(status)}")
    return (usage.ru_utime + usage.ru_stime) * 1000


def measure(url: str, rounds: int) -> dict[str, list[float]]:
    """CPU ms of each line, by round; those of bare Python under its own name."""
    env = {"PATH": os.environ.get("PATH", ""), "HOME": os.environ.get("HOME", "/"), "NATS_URL": url}
    commands = {f"python -c {line!r}": [sys.executable, "-c", line] for line in STICKS}
    commands |= {f"moorage {line}": [MOORAGE, *line.split()] for line in LINES}
    for argv in commands.values():  # compiled files and pages of the disk are there before the first round
        cpu_ms(argv, env)
    found: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, argv in commands.items():
            found[name].append(cpu_ms(argv, env))
    return found


async def run(rounds: int) -> dict[str, list[float]]:
    async with stack("1x8xH100") as made:
        return await asyncio.to_thread(measure, made.url, rounds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--check", action="store_true", help="exit code 1 when a bound is broken")
    arguments = parser.parse_args()
    found = asyncio.run(run(arguments.rounds))
    bare = statistics.median(found[f"python -c {STICKS[0]!r}"])
    print(f"| CPU ms, {arguments.rounds} runs | min | median | max | over bare Python |")
    print("| --- | ---: | ---: | ---: | ---: |")
    broken = 0
    for name, times in found.items():
        over = statistics.median(times) - bare
        broken += name.startswith("moorage") and over > BOUND_MS.get(name, BOUND_MS[""])
        print(f"| `{name}` | {min(times):.0f} | {statistics.median(times):.0f} | {max(times):.0f} | {over:.0f} |")
    return 1 if arguments.check and broken else 0


if __name__ == "__main__":
    sys.exit(main())

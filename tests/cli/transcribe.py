"""What a person sees in a first session at a real terminal, as text. `python -m tests.cli.transcribe` writes it down.

`test_transcripts` plays the session again and compares, but for what differs from run to run: process ids, ports, ages,
ledger records.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any, Final

from moorage.bus.target import read_up
from moorage.client.client import AsyncClient
from tests.cli.terminal import Terminal, terminal
from tests.waiting import until

SESSION: Final = Path(__file__).resolve().parent / "first-session.txt"
HOME: Final = "/home/ana/gpu"

#: what is never twice the same, and what stands for it in a comparison
_VARYING: Final = (
    (re.compile(r"\^C"), ""),
    (re.compile(r"\bpid \d+"), "pid N"),
    (re.compile(r"127\.0\.0\.1:\d+"), "127.0.0.1:PORT"),
    (re.compile(r"\bledger( record)? \d+"), r"ledger\1 N"),
    (re.compile(r"\b\d+(ms|s|m\d*s?)(?= |$)", re.MULTILINE), "AGE"),
    (re.compile(r" {2,}"), "  "),
    (re.compile(r"(?<=  AGE  )(-|0%)(?=  )"), "USE"),  # a renewal brings it within two seconds
)


def comparable(text: str) -> str:
    """The text without what differs from run to run."""
    for pattern, instead in _VARYING:
        text = pattern.sub(instead, text)
    return "\n".join(line.rstrip() for line in text.splitlines())


async def first_session() -> str:
    """Somebody without a GPU starts everything on one machine, runs a job, waits, detaches, attaches, and looks."""
    async with terminal() as screen:
        told = _Told(screen)
        screen.type("moorage up --simulate 1x8xH100", window=0)
        told.note(
            "One command starts the server, a scheduler and a worker.",
            await screen.shows("Ctrl-C ends the server, the scheduler, the worker and its jobs", window=0),
        )
        screen.window()
        screen.type("moorage run --gpu 2xH100 --job hello -- sh -c 'echo Hello from $MOORAGE_JOB'")
        await screen.shows("SUCCEEDED")
        told.note("In a second terminal: a job, followed to its end.", await screen.ended())
        screen.type("moorage submit --gpu 8xH100 --job big -- sleep 600")
        told.note("A job that is not followed.", await screen.ended())
        await _reaches(screen, "big", "RUNNING")
        screen.type("moorage fleet")
        told.note("What there is.", await screen.ended())
        screen.type("moorage run --gpu 2xH100 --job train -- sh -c 'echo epoch 1; sleep 600'")
        told.note("Nothing is free: it waits, and says for what.", await screen.shows("needs 2 more H100"))
        screen.interrupt()
        told.note("Ctrl-C detaches.", await screen.ended())
        screen.type("moorage explain train")
        told.note("Why does it wait?", await screen.ended())
        screen.type("moorage ls --watch")
        told.note("All jobs, as they change.", await screen.shows("1 QUEUED", "1 RUNNING"))
        await _client(screen, lambda client: client.job("big").cancel())
        told.note("The big one is cancelled elsewhere.", await screen.shows("1 CANCELLED", "1 RUNNING"))
        screen.interrupt()
        await screen.ended()
        screen.type("moorage logs train")
        told.note("Attached again, from the beginning of its output.", await screen.shows("epoch 1"))
        screen.interrupt()
        await screen.ended()
        screen.type("moorage cancel train --reason enough; moorage wait train; echo code $?")
        told.note("Its end.", await screen.ended())
        screen.type("moorage submit --gpu 1xH10O --on-no-match reject -- true")
        told.note("A slip of the finger.", await screen.ended())
        screen.interrupt(window=0)
        await screen.shows("ended", window=0)
        told.note("And in the first terminal, Ctrl-C.", await screen.ended(window=0))
        return told.text


async def _reaches(screen: Terminal, job: str, state: str) -> None:
    async def there(client: AsyncClient) -> None:
        async def is_there() -> bool:
            return bool((await client.job(job).show()).state == state)

        await until(is_there, 30.0, f"{job} {state}")

    await _client(screen, there)


async def _client(screen: Terminal, act: Any) -> None:
    up = read_up(screen.folder / ".moorage")
    assert up is not None
    async with AsyncClient(up.url) as client:
        await act(client)


class _Told:
    """Screens under their headings."""

    def __init__(self, screen: Terminal) -> None:
        self._screen = screen
        self._folder = str(screen.folder)
        self._parts: list[str] = []

    def note(self, heading: str, screen: str) -> None:
        """A screen, below the line that made it where that is new."""
        typed, self._screen.typed = self._screen.typed, ""
        text = screen.replace(self._folder, HOME)
        self._parts.append(f"# {heading}\n\n" + (f"$ {typed}\n" if typed else "") + text + "\n")

    @property
    def text(self) -> str:
        return "\n".join(self._parts)


if __name__ == "__main__":
    SESSION.write_text(asyncio.run(first_session()))

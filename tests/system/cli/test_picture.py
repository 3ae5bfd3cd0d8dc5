"""The picture on the first page shows what a person sees at a real terminal."""

from __future__ import annotations

import difflib
import re
from typing import Final

import pytest

from tests.system.cli.picture import PICTURE, first_screen, svg, text_of
from tests.system.cli.terminal import need_tmux

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

AGAIN = "look at it, and if it is meant: python -m tests.system.cli.picture"


def comparable(text: str) -> str:
    """The text without what differs from run to run."""
    for pattern, instead in _VARYING:
        text = pattern.sub(instead, text)
    return "\n".join(line.rstrip() for line in text.splitlines())


def plain(text: str) -> str:
    """Return the text without what differs from run to run: made-up ids of jobs and devices, and which host it was."""
    text = re.sub(r"\b(SIM-[0-9a-f-]+(?:,\S*)?|j[0-9a-z]{14}|sim-\d{4})", "ID", text)
    return comparable(text)


def test_a_picture_shows_the_characters_and_the_colours_of_the_screen() -> None:
    drawn = svg("$ a <b> & \x1b[1m\x1b[32mgreen\x1b[0m end\n\n  indented")
    assert text_of(drawn) == "$ a <b> & green end\n\n  indented"
    assert '<tspan font-weight="bold" fill="#7ee787">green</tspan> end' in drawn


@pytest.mark.slow
async def test_the_picture_of_the_first_page_is_what_a_terminal_shows() -> None:
    need_tmux()
    before, now = plain(text_of(PICTURE.read_text())), plain(text_of(svg(await first_screen())))
    changed = "\n".join(difflib.unified_diff(before.splitlines(), now.splitlines(), "drawn", "seen", lineterm=""))
    assert not changed, f"{changed}\n{AGAIN}"

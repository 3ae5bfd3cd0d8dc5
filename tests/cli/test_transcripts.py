"""What a person sees in a first session at a real terminal is what `first-session.txt` says."""

from __future__ import annotations

import difflib

import pytest

from tests.cli.terminal import need_tmux
from tests.cli.transcribe import SESSION, comparable, first_session

AGAIN = "look at it, and if it is meant: python -m tests.cli.transcribe"


def test_what_differs_from_run_to_run_is_not_compared_and_all_else_is() -> None:
    one = "  server     nats://127.0.0.1:41189  pid 25373\nbig    RUNNING    1s\nepoch 1  ledger 12  1 live"
    other = "  server     nats://127.0.0.1:4222  pid 7\nbig    RUNNING  1m12s\nepoch 1  ledger 9  1 live"
    assert comparable(one) == comparable(other)
    for wrong in (other.replace("RUNNING", "QUEUED"), other.replace("1 live", "2 live"), other.replace("big", "bug")):
        assert comparable(one) != comparable(wrong)


@pytest.mark.slow
async def test_a_first_session_at_a_terminal() -> None:
    need_tmux()
    before, now = comparable(SESSION.read_text()), comparable(await first_session())
    changed = "\n".join(
        difflib.unified_diff(before.splitlines(), now.splitlines(), "written down", "seen", lineterm="")
    )
    assert not changed, f"{changed}\n{AGAIN}"

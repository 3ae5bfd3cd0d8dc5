"""The words on leaving a job's terminal hold nothing that is shown escaped."""

from __future__ import annotations

import pytest

from moorage.cli.jobs.exec import print_left


def test_leaving_a_terminal_begins_a_line_and_prints_no_escaped_character(capsys: pytest.CaptureFixture[str]) -> None:
    print_left("it", 3)
    said = capsys.readouterr().err
    assert said.startswith("\nthis command has left the terminal of job it, which goes on\n")
    assert "moorage attach it/3" in said
    assert "\\" not in said

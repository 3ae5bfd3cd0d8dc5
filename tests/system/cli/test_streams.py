"""The command on streams that a caller chose badly: closed, full, without a reader, of a small encoding."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.system.cli.node import COMMAND, environment

SHELL_S_MAX = 30.0
ASCII = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}


def _shell(redirected: str, *words: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    line = f'"$@" {redirected}'
    return subprocess.run(
        ["sh", "-c", line, "sh", *COMMAND, *words],
        capture_output=True,
        timeout=SHELL_S_MAX,
        env={**environment(), **env},
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_cost_no_verb_its_end(closed: str) -> None:
    ran = _shell(closed, "help", "run")
    assert ran.returncode == 0, ran.stderr
    assert b"Traceback" not in ran.stderr


def test_no_file_of_ours_gets_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    """Else a warning on stderr would stand in a file that the verb writes."""
    request = tmp_path / "requests.json"
    request.write_text("[1]")
    for closed in ("2>&-", "<&- >&- 2>&-"):
        assert _shell(closed, "submit", "-f", str(request)).returncode == 2
    assert request.read_text() == "[1]"


def test_an_encoding_without_our_letters_gets_escapes() -> None:
    ran = _shell("", "help", "run", **ASCII)
    assert ran.returncode == 0, ran.stderr
    assert b"COMMAND\\u2026" in ran.stdout
    assert _shell("", "show", "a", "--wäch", **ASCII).returncode == 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_behind_stdout_is_told_without_a_traceback() -> None:
    ran = _shell("> /dev/full", "help")
    assert ran.returncode == 1
    assert ran.stderr == b"error: the output cannot be written: No space left on device\n"


def test_a_reader_that_has_gone_ends_it_quietly() -> None:
    ran = _shell("| true; exit 0", "help")
    assert ran.stderr == b""

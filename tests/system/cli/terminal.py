"""A real terminal of 80 columns and 24 rows, with a shell in it: tmux, driven by its keys and read by its screen."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest

import moorage
from moorage.bus.target import HOME_DEFAULT, read_up, started_ticks
from tests.waiting import until

COLUMNS: Final = 80
ROWS: Final = 24
SCREEN_S_MAX: Final = 120.0
PROMPT: Final = "$"
_ROOTS: Final = os.pathsep.join(str(Path(path).parent) for path in moorage.__path__)
_SHELL: Final = """\
PS1='$ ' HISTFILE=
PROMPT_COMMAND='printf . >> "$HOME/prompts$TMUX_PANE"'
moorage() {{ {python} -m moorage.cli "$@"; }}
"""


class Terminal:
    """Windows of one tmux session, each with a shell in the same folder. Window 0 is there from the start."""

    def __init__(self, folder: Path, rows: int = ROWS) -> None:
        self.folder = folder
        self._rows = rows
        self.typed = ""
        self._asked: dict[int, int] = {}
        self._socket = folder / "tmux"
        self._shell = folder / "shell"
        self._shell.write_text(_SHELL.format(python=shlex.quote(sys.executable)))

    def open(self) -> None:
        self._tmux("new-session", "-d", "-x", str(COLUMNS), "-y", str(self._rows), "-s", "s", *self._bash())

    def window(self) -> None:
        """One more, with the next number."""
        self._tmux("new-window", "-t", "s", *self._bash())

    def _bash(self) -> list[str]:
        return ["bash", "--noprofile", "--rcfile", str(self._shell)]

    def close(self) -> None:
        subprocess.run(self._command("kill-server"), check=False, capture_output=True)

    def _command(self, *words: str) -> list[str]:
        return ["tmux", "-u", "-S", str(self._socket), "-f", "/dev/null", *words]

    def _tmux(self, *words: str) -> str:
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            "TERM": "screen",
            "PYTHONUTF8": "1",
            "PYTHONPATH": _ROOTS,
        }
        done = subprocess.run(
            self._command(*words), cwd=self.folder, env=environment, check=True, capture_output=True, text=True
        )
        return done.stdout

    def type(self, line: str, window: int = 1, clear: bool = True) -> None:
        """Clear the screen, unless `clear` is false, and enter a line; `typed` has it then."""
        self.typed = line
        self._asked[window] = self._prompts(window)
        if clear:
            self._tmux("send-keys", "-R", "-t", f"s:{window}")  # what stands there is never taken for what comes
        self._tmux("send-keys", "-t", f"s:{window}", "-l", f"clear; {line}" if clear else line)
        self._tmux("send-keys", "-t", f"s:{window}", "Enter")

    def _prompts(self, window: int) -> int:
        """How often the shell has asked for a line."""
        file = self.folder / f"prompts%{window}"
        return file.stat().st_size if file.exists() else 0

    def interrupt(self, window: int = 1) -> None:
        self._tmux("send-keys", "-t", f"s:{window}", "C-c")

    def key(self, key: str, window: int = 1) -> None:
        """Press one key, by tmux's name for it."""
        self._tmux("send-keys", "-t", f"s:{window}", key)

    def screen(self, window: int = 1) -> str:
        """What stands there, without the empty end."""
        return self._tmux("capture-pane", "-p", "-t", f"s:{window}").rstrip()

    def coloured(self, window: int = 1) -> str:
        """Return what `screen` returns, with the escape sequences for colours."""
        return self._tmux("capture-pane", "-e", "-p", "-t", f"s:{window}").rstrip()

    async def shows(self, *wanted: str, window: int = 1) -> str:
        """Wait until all of this stands there; the screen then."""
        found = ""

        def there() -> bool:
            nonlocal found
            found = self.screen(window)
            return all(text in found for text in wanted)

        try:
            await until(there, SCREEN_S_MAX, f"{wanted} on the screen")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{found}") from None
        return found

    async def ended(self, window: int = 1) -> str:
        """Wait until the shell asks for the next line; the screen then, without that."""

        def asks() -> bool:
            again = self._prompts(window) > self._asked[window]
            return again and self.screen(window).splitlines()[-1:] == [PROMPT]

        await until(asks, SCREEN_S_MAX, "the prompt")
        return self.screen(window).removesuffix(PROMPT).rstrip()


@contextlib.asynccontextmanager
async def terminal(rows: int = ROWS) -> AsyncIterator[Terminal]:
    """A terminal in a folder of its own; what runs in it ends with it."""
    with tempfile.TemporaryDirectory(prefix="moorage-screen-", ignore_cleanup_errors=True) as folder:
        made = Terminal(Path(folder), rows)
        made.open()
        try:
            yield made
        finally:
            if (up := read_up(made.folder / HOME_DEFAULT)) is not None:  # a test that failed in the middle of it
                os.kill(up.pid, signal.SIGTERM)
                await until(lambda: started_ticks(up.pid) != up.started_ticks, SCREEN_S_MAX, "the end of moorage up")
            made.close()


def need_tmux() -> None:
    """Skip without tmux; in CI, which installs it, that is a failure."""
    if shutil.which("tmux") is not None:
        return
    if os.environ.get("CI", "").lower() in ("true", "1"):
        pytest.fail("tmux is missing, and .ci/run should have installed it")
    pytest.skip("tmux is not installed: apt-get install tmux")

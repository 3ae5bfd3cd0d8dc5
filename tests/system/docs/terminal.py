"""A terminal with a shell, as the reader of a page has one: what is typed runs, what it writes is kept."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

BLOCK_S_MAX: Final = 90.0
_ROWS_AND_COLUMNS: Final = struct.pack("HHHH", 50, 160, 0, 0)
_END: Final = re.compile(r"\x1eend (\d+) of ([^\x1e]*)\x1e")


class Terminal:
    """bash on a pseudo-terminal, in `folder` with `env` alone; its state lasts from block to block."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self.written = ""
        self.busy = False
        self._read_to = 0
        self._folder = folder
        self._number = 0
        self._fd, tty = pty.openpty()
        fcntl.ioctl(tty, termios.TIOCSWINSZ, _ROWS_AND_COLUMNS)
        local = termios.tcgetattr(tty)
        local[3] &= ~termios.ECHO
        termios.tcsetattr(tty, termios.TCSANOW, local)
        self._shell = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "--noediting", "-i"],
            stdin=tty,
            stdout=tty,
            stderr=tty,
            cwd=folder,
            env={**env, "PS1": "", "PS2": "", "TERM": "xterm"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(tty)

    def type(self, text: str) -> None:
        """Begin a block; nothing waits for it."""
        assert not self.busy, f"a command runs there already: {self.written[-2000:]}"
        self.busy = True
        self._number += 1
        self._read_to = len(self.written)
        script = self._folder / f".block-{self._number}-{os.getpid()}-{self._fd}.sh"
        script.write_text(text)
        # sourced, so that variables and folders stay; every command that fails is told, not the last one alone
        line = (
            f"FAILED=; trap 'FAILED=\"$BASH_COMMAND\"' ERR; . '{script}'; trap - ERR; "
            f'printf "\\036end %d of %s\\036" "${{#FAILED}}" "$FAILED"\n'
        )
        os.write(self._fd, line.encode())

    @property
    def output(self) -> str:
        """What the last block has written."""
        return _END.sub("", self.written[self._read_to :])

    def skip(self) -> None:
        """What was written so far is not the answer to what comes."""
        self._read()
        self._read_to = len(self.written)

    def until(self, happened: Callable[[str], bool], what: str, seconds: float = BLOCK_S_MAX) -> None:
        """Read on until the block's output is as wanted. Raises AssertionError."""
        ends = time.monotonic() + seconds
        while not happened(self.output):
            left = ends - time.monotonic()
            assert left > 0, f"{what}: not within {seconds:g} s, found\n{self.output}"
            assert self._read(left) or happened(self.output), f"the shell ended: {self.output}"

    def finish(self, seconds: float = BLOCK_S_MAX) -> str:
        """Until the block is over: the command of it that failed, "" if none did."""
        ends = time.monotonic() + seconds
        while (end := _END.search(self.written, self._read_to)) is None:
            left = ends - time.monotonic()
            assert left > 0, f"not over within {seconds:g} s:\n{self.output}"
            assert self._read(left), f"the shell ended: {self.output}"
        self.busy = False
        return end[2]

    def interrupt(self) -> None:
        """Ctrl-C, until the command has heard it: what the shell is just starting loses it.

        A command that dies of it takes the rest of its line along, so the end is told once more.
        """
        ends = time.monotonic() + BLOCK_S_MAX
        sent = heard = False
        while not heard and not _END.search(self.written, self._read_to) and time.monotonic() < ends:
            front = os.tcgetpgrp(self._fd)
            if front != self._shell.pid:
                heard = _catches_interrupts(front)
                os.write(self._fd, b"\x03")
                sent = True
            elif sent:
                break
            self._read(0.2)
        os.write(self._fd, b"printf '\\036end 0 of \\036'\n")

    def close(self) -> None:
        """End the shell and whatever it still runs."""
        for number in (signal.SIGHUP, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._shell.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._shell.wait(5)
                break
        os.close(self._fd)

    def _read(self, seconds: float = 0.0) -> bool:
        if not select.select([self._fd], [], [], seconds)[0]:
            return True
        try:
            piece = os.read(self._fd, 65536)
        except OSError:
            return False
        self.written += piece.decode(errors="replace")
        return bool(piece)


def _catches_interrupts(pid: int) -> bool:
    """Whether a command, and no shell before exec, has a handler for SIGINT (proc(5): SigCgt, bit n-1 for signal n)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    if status.startswith("Name:\tbash\n"):
        return False
    [caught] = re.findall(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return bool(int(caught, 16) >> (signal.SIGINT - 1) & 1)

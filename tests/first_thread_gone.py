"""A process whose first thread has ended, and another goes on: Linux shows it as a zombie, and it lives."""

import contextlib
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

#: it prints its pid once Linux shows it so; exit(2) ends one thread, and has no function in C
_PROGRAM: Final = """
import ctypes, os, platform, threading, time
def go_on():
    while open("/proc/self/stat").read().rpartition(") ")[2][0] != "Z":
        time.sleep(0.01)
    print(os.getpid(), flush=True)
    time.sleep(1000)
threading.Thread(target=go_on).start()
ctypes.CDLL(None).syscall(60 if platform.machine() == "x86_64" else 93, 0)
"""
ARGV: Final = (sys.executable, "-c", _PROGRAM)
IN_SHELL: Final = shlex.join(ARGV)


@contextlib.contextmanager
def running(argv: Sequence[str] = ARGV, env: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Start such a process, yield it once its first thread has ended, and kill it at the end."""
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert int(process.stdout.readline()) == process.pid
            yield process
        finally:
            process.kill()

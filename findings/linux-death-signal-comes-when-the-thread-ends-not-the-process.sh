#!/usr/bin/env bash
# Behaviour: PR_SET_PDEATHSIG is sent when the thread that forked ends, though its process lives on.
# Versions: Linux 6.18 (prctl(2)), CPython 3.11 to 3.13
# Guess: 'Parent death signal': it is sent when the parent process ends.
# Seen: A child forked by a thread is killed as soon as that thread ends; one forked by the main thread lives.
# Date: 2026-11-28
. "$(dirname "$0")/common.sh"

packages
bounded 60 <<'EOF'
import ctypes
import os
import select
import signal
import threading

from findings.verdict import verdict

PR_SET_PDEATHSIG = 1
LOOKED_MS = 3000
prctl = ctypes.CDLL(None).prctl


def fork() -> int:
    """Fork a child that asks for SIGKILL at its parent's death and then waits; return its pid once it has asked."""
    ready, asked = os.pipe()
    pid = os.fork()
    if pid == 0:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.write(asked, b"x")
        signal.pause()
    os.read(ready, 1)
    return pid


def ended(pid: int) -> bool:
    """Look for some seconds whether the child ends."""
    poll = select.poll()
    poll.register(os.pidfd_open(pid), select.POLLIN)
    return bool(poll.poll(LOOKED_MS))


forked: list[int] = []
thread = threading.Thread(target=lambda: forked.append(fork()))
thread.start()
thread.join()
main = fork()
by_thread, by_main = ended(forked[0]), ended(main)
os.kill(main, signal.SIGKILL)
verdict((by_thread, by_main) == (True, False), {"of an ended thread: killed": by_thread, "of the main thread": by_main})
EOF

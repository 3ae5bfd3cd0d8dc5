"""The controller's process, which keeper.py starts: `python -m moorage.worker.sharing.limiter FOLDER TOKEN SETTINGS`.

The process writes an empty line to its output about each second, and a line for each thing that an operator should
know. It ends when another controller is started, which writes itself into the file TOKEN. When its input ends, its
agent is gone: then it also ends once it has seen no process of an attempt for `LINGER_S` seconds.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from pathlib import Path
from typing import Final

import msgspec

from moorage.worker.devices.readers.nvml import import_pynvml
from moorage.worker.sharing.limiter.control import STEP_S, Control
from moorage.worker.sharing.limiter.controller import ControllerSettings
from moorage.worker.sharing.limiter.meter import Meter
from moorage.worker.sharing.limiter.owners import Owners

#: jobs come first, but for the few that have raised themselves
NICE: Final = 5
SIGN_S: Final = 1.0
#: how long it runs on without an agent and without a process of an attempt
LINGER_S: Final = 10.0


def main(folder: Path, token: Path, settings: ControllerSettings) -> None:
    """Refill the segments until another process has the token, or no agent and no process of an attempt is left."""
    with contextlib.suppress(OSError):
        os.setsid()  # what ends the agent's terminal or group does not end it
    os.nice(NICE)
    os.set_blocking(1, False)
    owners = Owners()
    serve(Control(folder, settings, Meter(import_pynvml(), owners.sees_all_pids), owners, _say), token, 0)


def serve(control: Control, token: Path, agent: int) -> None:
    """Write this process into the file `token`, then do what `main` says.

    The agent is gone when a read of the descriptor `agent` finds its end.
    """
    own = f"{os.getpid()} {time.monotonic_ns()}"
    fresh = token.with_suffix(".new")
    fresh.write_text(own)
    fresh.rename(token)
    has_agent, said_s, orphaned_s = True, 0.0, 0.0
    while _is_ours(token, own):
        now_s = time.monotonic()
        if now_s >= said_s + SIGN_S:
            said_s = now_s
            _say("")
        control.step(now_s)
        if not has_agent:
            if now_s > max(control.lived_s, orphaned_s) + LINGER_S:
                return
            time.sleep(STEP_S)
        elif select.select([agent], [], [], STEP_S)[0] and not os.read(agent, 1024):
            has_agent, orphaned_s = False, now_s


def _is_ours(token: Path, own: str) -> bool:
    """Return whether this process has the token. It keeps the token while the file cannot be read."""
    try:
        return token.read_text() == own
    except FileNotFoundError:
        return False
    except OSError:  # out of descriptors
        return True


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # an agent that does not read, or is gone
        os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), msgspec.json.decode(sys.argv[3], type=ControllerSettings))

"""Announce the end of a program to its MPS daemon, for the commands that end programs of their own."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from pathlib import Path

from moorage.cli.framework.console import report
from moorage.schemas.errors import MPS_NOT_ASKED
from moorage.schemas.reserved_variables import MPS_DIRECTORIES


async def announce_end(pid: int, environment: Mapping[str, str], within_s: float) -> None:
    """Stop the work of a program and its children that are clients of an MPS daemon: else its other clients fail, too.

    `environment` names the daemon's directories; without a daemon there this does nothing. It takes `NOTICE_S` or
    `within_s` at most. A failure is printed, and the end goes on.
    """
    from moorage.system.proctree import descendants
    from moorage.worker.sharing.mps.control import PROGRAM, MpsControl, MpsFault
    from moorage.worker.supervisor.mps_notice import NOTICE_S

    pipe, log = (environment.get(name, "") for name in MPS_DIRECTORIES)
    if not pipe or not Path(pipe, "control").exists():
        return
    control = MpsControl(shutil.which(PROGRAM) or PROGRAM, Path(pipe), Path(log))
    within_s = min(NOTICE_S, within_s)
    try:
        async with asyncio.timeout(within_s):
            await control.terminate(descendants([pid]))
    except (MpsFault, TimeoutError) as fault:
        report(f"{MPS_NOT_ASKED}: {str(fault) or f'no answer within {within_s:g} s'}")

"""A freezer of simulated devices: nothing is frozen, and each swap takes as long as that of a small model.

Members of services that sleep begin no calls while they rest, so turns are as on a GPU. Other jobs run on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from moorage.schemas.attempt import AttemptName
from moorage.worker.freezing.cuda import Outcome
from moorage.worker.freezing.freezer import AttemptsOf, Freezer

#: what a swap takes: of 2 GiB out, and of 3 GiB back, as on an H200
SWAP_S: Final = {"freeze": 1.0, "resume": 0.5}


class PlayedFreezer(Freezer):
    """Notes what is frozen as a real one does, for the next agent."""

    async def freeze(self, name: AttemptName, slots: Sequence[int], attempts_of: AttemptsOf) -> tuple[Outcome, str]:
        """Freeze an attempt, whatever it does."""
        return await self._freeze(name, [])

    async def _run(self, act: str, processes: Sequence[tuple[int, int]], seconds: float) -> tuple[Outcome, str]:
        await asyncio.sleep(SWAP_S.get(act, 0.0))
        return ("frozen" if act in ("freeze", "look") else "running"), ""

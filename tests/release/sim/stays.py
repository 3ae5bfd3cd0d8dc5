"""What a caller whose job stays counts on, told record by record by the judge: by the words of its request.

A replica whose attempt has ended starts again after 1 s, then twice as long each time, at most 5 min, as often as
`max_restarts` says and no oftener. It is told READY only if its worker saw that, and NOT_READY only if it saw that.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

from moorage.scheduler.core.ledger.state import AT_MS, BY, FENCE, NOT_READY, READY, REPLICA, REV, STATE, Job, State
from moorage.schemas.job import STATES
from moorage.schemas.staying import Ready
from moorage.worker.agent.ready_watch import ReadyWatch
from moorage.worker.session.attempt_messages import Attempt
from tests.unit.scheduler.restarts_judge import RestartsJudge

#: of the requests those that stay, and of them those that are looked at
STAYS: Final = 0.25
LOOKED_AT: Final = 0.6
#: how often a look finds another answer than the one before, which began with "not ready"
BECOMES_READY: Final = 0.6
CEASES: Final = 0.1


def let_stay(chance: random.Random, body: dict[str, Any]) -> None:
    """Some jobs that are no gang stay, as often as they may: else a world would have no end."""
    if (body.get("gpu") or {}).get("scheduling") == "gang" or chance.random() > STAYS:
        return
    body["retries"] = 0
    body["run"] |= {"restart": chance.choice(("on-failure", "always")), "max_restarts": chance.choice((1, 2, 3))}
    if chance.random() < LOOKED_AT:
        body["run"]["ready"] = {"tcp": 80, "within_s": chance.choice((1, 30)), "every_s": chance.choice((1, 5))}


class Stays:
    """`after` each record, on the judge's own state; `look` when a worker looks. `violated` is the judge's."""

    def __init__(self, violated: Callable[[str], None]) -> None:
        self._violated = violated
        self._restarts = RestartsJudge()
        self._revs: dict[int, int] = {}  # by job number: through which revision its changes were told to the judge
        self._looks: dict[int, list[bool]] = {}  # by fence: what looks have found
        self.told = 0

    @property
    def restarts(self) -> int:
        return self._restarts.restarts

    def restored(self) -> None:
        self._restarts.forget()
        self._revs.clear()

    async def look(self, watch: ReadyWatch, attempt: Attempt, ready: Ready) -> str:
        """In place of `ReadyWatch._look`: nothing listens in a simulated machine, so chance says what is found."""
        looks = self._looks.setdefault(attempt.fence, [])
        chance = random.Random(f"{attempt.fence} {len(looks)}").random()
        is_ready = chance >= CEASES if looks and looks[-1] else chance < BECOMES_READY
        looks.append(is_ready)
        return "" if is_ready else "nothing listens"

    def after(self, state: State) -> None:
        staying = [job for job in state.jobs.values() if self._restarts.run_of(job).stays]
        try:
            for job in staying:
                self._tell(job)
            self._restarts.look(state)
        except AssertionError as error:
            self._violated(str(error))
        for job in staying:
            self._check_readiness(state, job)

    def _tell(self, job: Job) -> None:
        """Tell the judge of restarts when attempts began: one that ran for long starts the row of waits anew."""
        through, self._revs[job.num] = self._revs.get(job.num, 0), job.rev
        changes = [
            {"replica": row[REPLICA], "state": STATES[row[STATE]], "time_ms": row[AT_MS], "by": row[BY]}
            for row in job.history
            if row[REV] > through and row[STATE] >= 0
        ]
        self._restarts.told(job.tenant, job.name, self._restarts.run_of(job), changes)

    def _check_readiness(self, state: State, job: Job) -> None:
        for row in reversed(job.history):
            if row[AT_MS] != state.time_ms:
                return
            if row[STATE] in (READY, NOT_READY):
                self.told += 1
                if (row[STATE] == READY) not in self._looks.get(row[FENCE], ()):
                    self._violated(f"{job.tenant}/{job.name}: revision {row[REV]} tells what no worker saw")

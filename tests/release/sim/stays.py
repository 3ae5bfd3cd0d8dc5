"""What a caller whose job stays counts on, told record by record by the judge: by the words of its request.

A replica whose attempt has ended starts again after 1 s, then twice as long each time, at most 5 min, as often as
`max_restarts` says and no oftener. It is told READY only if its worker saw that, and NOT_READY only if it saw that.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from moorage.scheduler.core.ledger.state import AT_MS, FENCE, NOT_READY, READY, REV, STATE, Job, State
from moorage.schemas.codec import decode_request
from moorage.schemas.job import Run
from moorage.schemas.staying import Ready
from moorage.worker.agent.ready_watch import ReadyWatch
from moorage.worker.session.member_messages import Member

#: of the requests those that stay, and of them those that are looked at
STAYS: Final = 0.25
LOOKED_AT: Final = 0.6
SECOND_MS: Final = 1_000
LONGEST_MS: Final = 300_000
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


@dataclass
class _Seen:
    restarts: int = 0
    attempt: int = 0
    short: int = 0
    may_start_ms: int = 0


class Stays:
    """`after` each record, on the judge's own state; `look` when a worker looks. `violated` is the judge's."""

    def __init__(self, violated: Callable[[str], None]) -> None:
        self._violated = violated
        self._runs: dict[int, tuple[Job, Run | None]] = {}
        self._seen: dict[tuple[int, int], _Seen] = {}
        self._looks: dict[int, list[bool]] = {}  # by fence: what looks have found
        self.restarts = 0
        self.told = 0

    def restored(self) -> None:
        self._runs.clear()
        self._seen.clear()

    async def look(self, watch: ReadyWatch, member: Member, ready: Ready) -> str:
        """In place of `ReadyWatch._look`: nothing listens in a simulated machine, so chance says what is found."""
        looks = self._looks.setdefault(member.fence, [])
        chance = random.Random(f"{member.fence} {len(looks)}").random()
        is_ready = chance >= CEASES if looks and looks[-1] else chance < BECOMES_READY
        looks.append(is_ready)
        return "" if is_ready else "nothing listens"

    def after(self, state: State) -> None:
        for num, job in state.jobs.items():
            known, run = self._runs.get(num, (None, None))
            if known is not job:
                found = decode_request(job.body).workload
                run = found if found.stays else None
                self._runs[num] = job, run
            if run is not None:
                self._check(state, job, run)

    def _check(self, state: State, job: Job, run: Run) -> None:
        for index, replica in job.rows.items():
            seen = self._seen.setdefault((job.num, index), _Seen(replica.restarts, replica.attempt))
            name = f"{job.tenant}/{job.name}/{index}"
            if run.max_restarts is not None and replica.restarts > run.max_restarts:
                self._violated(f"{name} started again {replica.restarts} times of {run.max_restarts}")
            if replica.attempt > seen.attempt and state.time_ms < seen.may_start_ms:
                self._violated(f"{name} started again {seen.may_start_ms - state.time_ms} ms too early")
            if replica.restarts > seen.restarts:
                self.restarts += 1
                seen.may_start_ms = state.time_ms + min(SECOND_MS << seen.short, LONGEST_MS)
                seen.short += 1
            seen.restarts, seen.attempt = replica.restarts, replica.attempt
        for row in reversed(job.story):
            if row[AT_MS] != state.time_ms:
                return
            if row[STATE] in (READY, NOT_READY):
                self.told += 1
                if (row[STATE] == READY) not in self._looks.get(row[FENCE], ()):
                    self._violated(f"{job.tenant}/{job.name}: revision {row[REV]} tells what no worker saw")

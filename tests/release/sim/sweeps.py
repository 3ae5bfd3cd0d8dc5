"""What a caller of a sweep counts on, told record by record by the judge: how many run, and what `again` says.

No record places more of a job than its `max_running` has room for. What is answered to `again` is what has ended
without success by then, under the numbers that it had.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

from moorage.scheduler.core.ledger.state import State
from moorage.schemas.codec import decode_request
from moorage.schemas.job import STATES, TERMINAL
from moorage.schemas.ranges import numbers_in, parse_ranges

#: of the requests of one replica, those that become sweeps; and of the submits, those after which one is run again
ASKED: Final = 0.3
AGAIN: Final = 0.25


def numbered(chance: random.Random, body: dict[str, Any]) -> None:
    """Give a request replicas under numbers of their own, and bounds of how many run and fail."""
    if (body.get("gpu") or {}).get("scheduling") == "gang" or chance.random() > ASKED:
        return
    body.pop("replicas", None)
    body["indices"] = chance.choice(("0-5", "3,7-9,40", "999998-999999", "5"))
    if chance.random() < 0.6:
        body["max_running"] = chance.choice((1, 2, 3))
    body["max_failed"] = chance.choice((1, 2, None, 0))


class Sweeps:
    """`after` each record, on the judge's own state; `violated` is the judge's."""

    def __init__(self, violated: Callable[[str], None]) -> None:
        self._violated = violated
        self.bounded = 0  # placements of jobs with a bound
        self.agains = 0  # answers that were confirmed

    def after(self, state: State) -> None:
        placed = {
            attempt.replica.job
            for worker in state.workers.values()
            for attempt in worker.attempts.values()
            if attempt.fence == state.seq
        }
        for job in placed:
            most = decode_request(job.body).max_running
            if most is None:
                continue
            self.bounded += 1
            on = [row.index for row in job.rows.values() if STATES[row.state] != "QUEUED"]
            if len(on) > most:
                self._violated(f"{job.tenant}/{job.name} has {sorted(on)} on workers, and may have {most}")

    def bad(self, state: State, tenant: str, name: str) -> set[int] | None:
        """The replicas of a job that have ended without success; None of one that is not in memory."""
        job = state.job(tenant, name)
        if job is None:
            return None
        states = {replica.index: STATES[replica.state] for replica in job.replicas}
        return {index for index, state in states.items() if state in TERMINAL and state != "SUCCEEDED"}

    def confirm(self, asked: str, body: dict[str, Any], before: set[int] | None, after: set[int] | None) -> None:
        """Confirm an answer: `before` and `after` are what had ended badly when it was asked, and when it came."""
        if before is None or after is None or (body.get("gpu") or {}).get("scheduling") == "gang":
            return
        self.agains += 1
        told = set(numbers_in(parse_ranges(body["indices"]))) if "indices" in body else None
        if told is None:  # all of it
            told = set(range(body.get("replicas", 1)))
        if not before <= told <= after:
            self._violated(f"{asked} is run again as {sorted(told)}; it ended badly: {sorted(before)}, {sorted(after)}")

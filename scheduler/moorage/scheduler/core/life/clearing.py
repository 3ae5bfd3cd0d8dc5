"""What leaves the leader's memory: ended jobs for a row of the finished table, and rows that are kept no longer."""

from __future__ import annotations

from typing import Any, Final

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.finished import request_digest
from moorage.scheduler.core.records import Act
from moorage.scheduler.core.state import State
from moorage.schemas.alike import Requests

#: ended jobs that one record compacts at most, as they count: some 3 µs each
COMPACT_MAX: Final = 512
#: none are compacted before a part so small of `ended_max` is too many: most records of one job in flight do without
COMPACT_PARTS: Final = 256
#: ended jobs beyond `ended_max` (and at least so many again) that wait for the history; then they go without it
ENDED_SPARE: Final = 1_000


class Clearing:
    """`dropped` counts jobs that left memory though their history could not be written."""

    def __init__(self, state: State, requests: Requests, config: Config) -> None:
        self.dropped = 0
        self.rows_looked = False  # for such as are to go, in this second
        self._state = state
        self._requests = requests
        self._config = config
        # a row says where a history stands, too
        self._through = 0  # the number of an ended job that is to leave memory for its name; 0 for none
        self._rows_ms = max(config.finished_keep_ms, int(config.history_keep * 1000))

    def holds_up(self, draft: Draft, tenant: str, name: str) -> bool:
        """Whether a submit waits for its name: that of a job which ended longer ago than names are remembered.

        That one leaves memory with this record or the next ones, behind all that ended before it. Where the history
        cannot be written none of them may go, and nobody waits for it: the name is taken as long as that.
        """
        known = self._state.tenants.get(tenant)
        job = known.jobs.get(name) if known is not None else None
        if job is None or not job.over or not job.story:
            return False
        if draft.time_ms - job.story[-1][1] < self._config.finished_keep_ms:
            return False
        if not self._state.jobs[self._state.ended[0]].kept:
            return False
        self._through = job.num
        return True

    def compact(self, draft: Draft) -> int:
        """The oldest ended jobs leave memory once their history stands; their digest stays for idempotence. How many.

        Where the history cannot be written they wait for it, but not without bound: scheduling goes on.
        """
        state, most = self._state, self._config.ended_max
        ended = state.ended
        surplus = min(len(ended) + state.extra_ended - most, COMPACT_MAX)
        if self._through in state.jobs:
            surplus = COMPACT_MAX
        elif surplus <= 0 or surplus < most // COMPACT_PARTS:
            return 0
        must = len(ended) + state.extra_ended - most - max(most, ENDED_SPARE)
        flat: list[Any] = []
        kept: list[int] = []
        gone = 0
        while gone < surplus:
            job = state.jobs[ended[len(kept)]]
            if not job.kept:
                if gone >= must:
                    break
                self.dropped += 1
            name, asked = self._requests.read(job.body)
            flat += (job.num, request_digest(asked.identity(name)))
            kept.append(job.kept)
            gone += 1 + job.extra
            if job.num == self._through:
                break
        if flat:
            draft.acts.append([Act.COMPACT, flat, kept])
            draft.bytes += len(kept) * 30
        return len(kept)

    def forget(self, draft: Draft, added: int) -> None:
        """Rows of finished jobs go by age and by number: each second, and as fast as this record adds some."""
        if self.rows_looked and not added:
            return
        self.rows_looked = True
        finished, most = self._state.finished, max(COMPACT_MAX, 2 * added)
        old = finished.older_than(draft.time_ms - self._rows_ms, most)
        old = max(old, min(len(finished) + added - self._config.finished_rows, most))
        if old > 0:
            draft.acts.append([Act.EXPIRE, old])

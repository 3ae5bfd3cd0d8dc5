"""Retention of finished jobs: ended jobs are compacted to rows of the finished table, and old rows expire."""

from __future__ import annotations

from collections.abc import Container
from typing import Any, Final

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.ledger.acts import Compact, Expire
from moorage.scheduler.core.ledger.finished import request_digest
from moorage.scheduler.core.ledger.state import Job, State
from moorage.schemas.request_cache import RequestCache

#: compaction waits until `ended_max` is exceeded by one part in this many, so that most records compact nothing
COMPACT_PARTS: Final = 256


class Retention:
    """Decides which ended jobs leave memory, and which rows of finished jobs expire.

    `telling` are numbers of jobs whose end is still to be written for others: these stay in memory.
    """

    def __init__(self, state: State, requests: RequestCache, config: Config, telling: Container[int] = ()) -> None:
        self.rows_looked = False  # whether `forget` ran in this second
        self._state = state
        self._requests = requests
        self._config = config
        self._telling = telling
        self._through = 0  # compact up to this ended job, whose id is wanted again; 0 for none
        # rows are kept longer than ids if the history is: they also locate the history
        self._rows_ms = max(config.finished_keep_ms, int(config.history_keep * 1000))

    def holds_up(self, job: Job) -> bool:
        """Return whether a submit must wait, because an ended job in memory has its id longer than `finished_keep`.

        Then that job is compacted with this record or the next ones, after all that ended before it.
        """
        if not job.over:
            return False
        if self._state.time_ms - job.ended_ms < self._config.finished_keep_ms:
            return False
        self._through = job.num
        return True

    def compact(self, draft: Draft) -> int:
        """Compact the oldest ended jobs beyond `ended_max`; their digests stay for idempotence. Return their number.

        If a submit waits for an id (`holds_up`), jobs are compacted up to the one that has it.
        """
        state, most = self._state, self._config.ended_max
        surplus = min(len(state.ended) + state.extra_ended - most, state.ceilings.compacts)
        if self._through in state.jobs:
            surplus = state.ceilings.compacts
        elif surplus <= 0 or surplus < most // COMPACT_PARTS:
            return 0
        flat: list[Any] = []
        gone, jobs, read = 0, state.jobs, self._requests.read_accepted
        for num in state.ended:
            if gone >= surplus or num in self._telling:
                break
            job = jobs[num]
            name, asked = read(job.body)
            flat += (num, request_digest(asked.identity(name)))
            gone += 1 + job.extra
            if num == self._through:
                break
        if flat:
            draft.add(Compact(flat))
        return len(flat) // 2

    def forget(self, draft: Draft, added: int) -> None:
        """Expire rows of finished jobs by age and number: once a second, and whenever this record adds rows.

        `added` is how many rows it adds.
        """
        if self.rows_looked and not added:
            return
        self.rows_looked = True
        finished, most = self._state.finished, max(self._state.ceilings.compacts, 2 * added)
        old = finished.older_than(draft.time_ms - self._rows_ms, most)
        old = max(old, min(len(finished) + added - self._config.finished_rows, most))
        if old > 0:
            draft.add(Expire(old))

"""Retention of finished jobs: ended jobs are compacted to rows of the finished table, and old rows expire."""

from __future__ import annotations

from typing import Any, Final

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.ledger.acts import Compact, Expire, Part
from moorage.scheduler.core.ledger.finished import request_digest
from moorage.scheduler.core.ledger.state import AT_MS, Job, State
from moorage.schemas.request_cache import RequestCache

#: the most ended jobs that one record compacts (big ones count more)
COMPACT_MAX: Final = 512
#: compaction waits until `ended_max` is exceeded by one part in this many, so that most records compact nothing
COMPACT_PARTS: Final = 256
#: ended jobs beyond `ended_max` wait for the history, but at most `ended_max` more, or this many; further ones are
#: compacted without it
ENDED_SPARE: Final = 1_000


class Retention:
    """Decides which ended jobs leave memory, and which rows of finished jobs expire.

    `dropped` counts jobs that left memory although their history could not be written, and such transitions of jobs
    with long stories.
    """

    def __init__(self, state: State, requests: RequestCache, config: Config) -> None:
        self.dropped = 0
        self.rows_looked = False  # whether `forget` ran in this second
        self._state = state
        self._requests = requests
        self._config = config
        self._through = 0  # compact up to this ended job, whose id is wanted again; 0 for none
        # rows are kept longer than ids if the history is: they also locate the history
        self._rows_ms = max(config.finished_keep_ms, int(config.history_keep * 1000))

    def holds_up(self, draft: Draft, job: Job) -> bool:
        """Return whether a submit must wait, because an ended job in memory has its id longer than `finished_keep`.

        Then that job is compacted with this record or the next ones, after all that ended before it. While the history
        lacks the job that ended first, the submit does not wait, and the id is taken.
        """
        if not job.over or not job.story:
            return False
        if draft.time_ms - job.story[-1][AT_MS] < self._config.finished_keep_ms:
            return False
        if not self._state.jobs[self._state.ended[0]].kept:
            return False
        self._through = job.num
        return True

    def compact(self, draft: Draft) -> int:
        """Compact the oldest ended jobs beyond `ended_max`; their digests stay for idempotence. Return their number.

        Jobs that the history lacks wait for it; beyond a bound they are compacted without it, so that scheduling
        continues. If a submit waits for an id (`holds_up`), jobs are compacted up to the one that has it.
        """
        parted = {act.job for act in draft.acts if isinstance(act, Part)}
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
        gone, jobs, read = 0, state.jobs, self._requests.read
        for num in ended:
            if gone >= surplus or num in parted:
                break
            job = jobs[num]
            if not job.kept:
                if gone >= must:
                    break
                self.dropped += 1
            name, asked = read(job.body)
            flat += (num, request_digest(asked.identity(name)))
            kept.append(job.kept)
            gone += 1 + job.extra
            if num == self._through:
                break
        if flat:
            draft.add(Compact(flat, kept))
        return len(kept)

    def forget(self, draft: Draft, added: int) -> None:
        """Expire rows of finished jobs by age and number: once a second, and whenever this record adds rows.

        `added` is how many rows it adds.
        """
        if self.rows_looked and not added:
            return
        self.rows_looked = True
        finished, most = self._state.finished, max(COMPACT_MAX, 2 * added)
        old = finished.older_than(draft.time_ms - self._rows_ms, most)
        old = max(old, min(len(finished) + added - self._config.finished_rows, most))
        if old > 0:
            draft.add(Expire(old))

"""Guards against leading an older backup of the ledger: then workers know of records that the ledger lacks."""

from __future__ import annotations

from typing import Final

from moorage.scheduler.core.config import Config
from moorage.scheduler.core.ledger.state import State
from moorage.scheduler.core.lifecycle.sessions import Sessions

#: renewal intervals after which a worker not heard from in this term is no longer waited for
BEHIND_RENEWALS: Final = 1.5


class StaleLedgerGuard:
    """Decides whether a leader's ledger may be, or is, an older backup.

    `mono_ms` is the leader's monotonic time at which its term began.
    """

    def __init__(self, state: State, sessions: Sessions, config: Config, mono_ms: int) -> None:
        self._state = state
        self._sessions = sessions
        self._config = config
        self._began_mono_ms = mono_ms
        self._lost_ms = max(
            # a worker that joined after the backup may have asked for the longest
            config.lost_most_ms,
            *(worker.lost_ms for worker in state.workers.values()),
            0,
        )

    def may_place(self, time_ms: int, mono_ms: int) -> bool:
        """Return whether jobs may be placed: not while the ledger may be an older backup, nor soon after a restore.

        Jobs that were placed after the backup may still run, unknown to the restored ledger. Nothing is placed beside
        them: after a restore, for as long as it takes a silent worker to count as lost; with a ledger that some workers
        are ahead of, until all have reported or had time to, and most of them are not ahead (ledger-rules H7).
        """
        state, lost_ms = self._state, self._lost_ms
        if self._sessions.ahead and self._sessions.behind(waited=self.waited(mono_ms)) is not False:
            return False
        if state.restored_ms < 0:
            return True
        if state.epoch == state.restored_epoch + 1:  # its first term counts by its own clock
            return mono_ms - self._began_mono_ms >= lost_ms
        return time_ms >= state.restored_ms + lost_ms

    def waits_for(self, time_ms: int, mono_ms: int) -> tuple[str, int]:
        """Return why nothing is placed now, and for how many ms at most. To be called only if `may_place` is False."""
        state, lost_ms = self._state, self._lost_ms
        left_ms = lost_ms - (mono_ms - self._began_mono_ms)
        if state.restored_ms >= 0 and state.epoch != state.restored_epoch + 1:
            left_ms = state.restored_ms + lost_ms - time_ms
        if state.restored_ms >= 0 and left_ms > 0:
            return "jobs that were placed after the backup may still run on workers that have not reported yet", left_ms
        left_ms = int(BEHIND_RENEWALS * self._config.renew_s * 1000) - (mono_ms - self._began_mono_ms)
        return f"{len(self._sessions.ahead)} of its workers know of records that the ledger lacks", max(0, left_ms)

    def behind(self, mono_ms: int) -> str:
        """Return why this ledger is an older backup; empty if it is not, or too few workers have reported to say so.

        To be called after an acknowledgement, which proves that the workers do not merely know a newer leader.
        """
        if not self._sessions.ahead or not self._sessions.behind(waited=self.waited(mono_ms)):
            return ""
        state = self._state
        num, knows = min(self._sessions.ahead.items())
        return (
            f"ledger {state.ledger_id} ends at record {state.seq} in epoch {state.epoch}, and"
            f" {len(self._sessions.ahead)} of its workers know more ({state.worker_by_num[num].id} knows {knows}): this"
            " ledger is an older backup"
        )

    def waited(self, mono_ms: int) -> bool:
        """Return whether every live worker has had time to renew in this term, at monotonic time `mono_ms`."""
        return mono_ms - self._began_mono_ms > BEHIND_RENEWALS * self._config.renew_s * 1000

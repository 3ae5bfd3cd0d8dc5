"""Drains with a deadline and maintenance windows: when a worker closes, when its jobs leave, when it reopens.

A window is in the ledger, in ledger time: it survives takeovers of the scheduler and reboots of the worker. It is
checked once a second, so that a moment that passed during a takeover is caught up.

By the deadline the worker is empty: each job on it is asked to end its grace earlier, and waits for a new attempt that
does not count as a retry. A job with a checkpoint signal gets it `checkpoint_before_s` before that. Where the time is
too short for both, at most half of it is for the signal. Then the worker may be empty later, by part of the grace. It
is `Relocating` that asks them.

Before the window begins, a job is placed there only if its time limit (`timeout_s`, or its own deadline), with its
grace, is over by the deadline. A job without a limit is placed until `SETTLE_MS` before the deadline, and asked to
leave like the others. Once the window has begun, nothing is placed there.
"""

from __future__ import annotations

from typing import Final

from moorage.scheduler.core.draft import Draft
from moorage.scheduler.core.fleet.fleet import Fleet
from moorage.scheduler.core.ledger import acts
from moorage.scheduler.core.ledger.state import State, Window, Worker
from moorage.scheduler.core.lifecycle.flags import set_flag
from moorage.schemas import actors
from moorage.schemas.operate import Drain, DrainAct
from moorage.schemas.reasons import STARTS_FAIL

#: a job without a time limit is not placed on a worker that it would have to leave sooner than this
SETTLE_MS: Final = 10 * 60 * 1000
#: a longer grace counts as this one, in seconds: for a drain, who has it is asked so early to end
GRACE_S_MAX: Final = 3_600


class Windows:
    """The windows of all workers, over one state and fleet."""

    def __init__(self, state: State, fleet: Fleet) -> None:
        self.state = state
        self.fleet = fleet

    # ------------------------------------------------------------------------------------------- operators' acts

    def drain(self, draft: Draft, worker: Worker, act: DrainAct, by: str) -> bool:
        """Write a drain into the draft; return False if nothing changes. It replaces an earlier drain of the worker.

        If it begins now it closes the worker; if it begins later, a worker that an earlier drain closed reopens.
        """
        window = window_of(act, draft.time_ms, by)
        begins_now = window is None or window.from_ms <= draft.time_ms
        flag, before = worker.flag, worker.window
        if window is None and before is None:
            return self.order(draft, worker, "draining", by, act.why)
        if begins_now:
            self.flag(draft, worker, "draining", by, act.why)
        elif flag == "draining":  # this drain replaces an earlier one
            self.flag(draft, worker, "open", by, act.why)
        self._write(draft, worker, window)
        return True

    def is_idle(self, worker: Worker) -> bool:
        """Return whether a worker has a session and nothing to do: no attempt, and no process of its host on its GPUs.

        What this record has placed there counts."""
        host = self.fleet.hosts.get(worker.num)
        return host is not None and host.heard and not (worker.attempts or host.busy or host.waiting)

    def order(self, draft: Draft, worker: Worker, flag: str, by: str, why: str) -> bool:
        """Give a worker a flag if it has another one, or a closed one another reason; return whether that was so."""
        if worker.flag == flag and (flag == "open" or why in ("", worker.why)):
            return False
        self.flag(draft, worker, flag, by, why)
        return True

    def clear(self, draft: Draft, worker: Worker, by: str, why: str) -> bool:
        """Remove a worker's window, and leave its flag as it is; return False if there was no window."""
        if worker.window is None:
            return False
        draft.add(acts.Window(worker.num, by=by, why=why))
        return True

    # ----------------------------------------------------------------------------------------------- as time passes

    def pass_time(self, draft: Draft) -> None:
        """Close and reopen the workers that are due by the draft's time."""
        now = draft.time_ms
        for worker in list(self.state.windows.values()):
            window, flag = worker.window, worker.flag
            if window is None:
                continue
            if draft.full:
                draft.is_short = True
                return
            if window.until_ms and now >= window.until_ms:
                if flag == "draining":
                    self.flag(draft, worker, "open", window.by, window.why)
                self._write(draft, worker, None)
                continue
            if now >= window.from_ms and flag in ("open", STARTS_FAIL.name):
                self.flag(draft, worker, "draining", window.by, window.why)

    # -------------------------------------------------------------------------------------------------- placement

    def left_too_soon(
        self, timeout_s: float | None, deadline_ms: int | None, grace_s: float, now: int
    ) -> frozenset[int]:
        """Return the numbers of workers to be left before a job with these limits, started now, would have ended.

        `deadline_ms` and `now` are in ledger ms. A job without limits is taken to run for `SETTLE_MS`. The grace
        comes after that.
        """
        if not self.state.windows:
            return frozenset()
        ends = [now + int(timeout_s * 1000)] if timeout_s is not None else []
        if deadline_ms is not None:
            ends.append(deadline_ms)
        ends_ms = min(ends, default=now + SETTLE_MS) + int(min(grace_s, GRACE_S_MAX) * 1000)
        return frozenset(
            num
            for num, worker in self.state.windows.items()
            if worker.window is not None and now <= worker.window.leave_ms < ends_ms
        )

    # ------------------------------------------------------------------------------------------------------ inside

    def flag(self, draft: Draft, worker: Worker, flag: str, by: str, why: str) -> None:
        """Make a worker open, cordoned or draining from the draft's record on."""
        set_flag(draft, self.fleet, worker, acts.Flag(worker.num, flag, by, why))

    @staticmethod
    def _write(draft: Draft, worker: Worker, window: Window | None) -> None:
        draft.add(acts.Window(worker.num, *(window or ())))


def window_of(act: DrainAct, now_ms: int, by: str) -> Window | None:
    """Return the window that a drain asks for at this ledger time; None if it begins now without a deadline."""
    if not act.has_window:
        return None
    from_ms = now_ms + int((act.from_s or 0) * 1000)
    leave_ms = from_ms + int((act.within_s or 0) * 1000)
    return Window(from_ms, leave_ms, from_ms + int(act.for_s * 1000) if act.for_s is not None else 0, by, act.why)


def as_drain(window: Window | None) -> Drain | None:
    if window is None:
        return None
    return Drain(window.from_ms, window.leave_ms, window.until_ms, *actors.split(window.by), window.why)

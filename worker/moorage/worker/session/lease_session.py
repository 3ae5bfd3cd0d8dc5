"""Decide when a worker renews its lease, until when the lease holds, and when it is over. Without I/O.

The lease is counted from the moment at which the answered renewal was *sent*, on CLOCK_BOOTTIME (H26, H27, H29), so
that it always ends at the worker before it ends at the scheduler. In its second half no new claim is made.
"""

from __future__ import annotations

from typing import Final, Literal

from moorage.schemas.frames import Joined

#: least time between two joins: a leader that ends each session at once must not be asked in a busy loop
JOIN_SPACING_S: Final = 0.5
RENEWALS_UNANSWERED_MAX: Final = 256
JOIN_RETRY_S_FIRST: Final = 0.5
JOIN_RETRY_S_MAX: Final = 5.0
#: after this time a join is sent under a new number, because its lease would count from the first sending
JOIN_FRESH_S: Final = 4.0
#: the log says once that this many joins in a row got no answer
JOINS_UNANSWERED_TOLD: Final = 2
#: a person must act before these can succeed, so they are retried slowly
JOIN_REFUSED_RETRY_S_FIRST: Final = 2.0
JOIN_REFUSED_RETRY_S_MAX: Final = 30.0
NEVER_S: Final = float("inf")

SessionPhase = Literal["restoring", "clearing", "joining", "live", "left"]


class LeaseSession:
    """The session's state: restoring -> clearing -> joining -> live -> clearing; `left` after a goodbye.

    The answer to a join sets its durations.
    """

    __slots__ = (
        "base_s",
        "epoch",
        "grace_s",
        "join_at_s",
        "join_n",
        "join_refused_s",
        "join_retry_s",
        "join_sent_s",
        "joins_unanswered",
        "kept_until_s",
        "lease_s",
        "ledger",
        "phase",
        "renew_at_s",
        "renew_n",
        "renew_s",
        "sent_s",
        "session",
    )

    def __init__(self, join_n: int, ledger: str = "") -> None:
        self.phase: SessionPhase = "restoring"
        self.join_n = join_n
        self.ledger = ledger
        self.epoch = 0
        self.session = ""
        self.renew_s = self.lease_s = self.grace_s = 0.0
        self.base_s = 0.0
        self.renew_n = 0
        self.renew_at_s = NEVER_S
        self.sent_s: dict[int, float] = {}
        self.join_sent_s = -JOIN_SPACING_S
        self.join_at_s = NEVER_S
        self.join_retry_s = JOIN_RETRY_S_FIRST
        self.join_refused_s = 0.0
        self.kept_until_s = NEVER_S
        self.joins_unanswered = 0

    @property
    def over_at_s(self) -> float:
        return self.base_s + self.lease_s if self.phase == "live" else self.kept_until_s

    def accepts_claims(self, now: float) -> bool:
        """Return whether new claims may be made: in the first half of the lease only.

        A leader that has not answered for longer may have been replaced.
        """
        return self.phase == "live" and now < self.base_s + self.lease_s / 2

    def may_join(self, now: float) -> bool:
        """Return whether a join may be sent now; if not, set the timer for when it may."""
        if now >= self.join_sent_s + JOIN_SPACING_S:
            return True
        self.join_at_s = self.join_sent_s + JOIN_SPACING_S
        return False

    def join_sent(self, now: float) -> bool:
        """Record a join that is sent now. Return True if it repeats the pending join, False if it has a new number."""
        again = self.phase == "joining" and now < self.join_sent_s + JOIN_FRESH_S
        if not again:
            if self.phase != "joining":
                self.join_retry_s = JOIN_RETRY_S_FIRST
                self.joins_unanswered = 0
            else:
                self.joins_unanswered += 1
            self.join_n += 1
            self.phase = "joining"
            self.join_sent_s = now
        self.join_at_s = now + self.join_retry_s
        self.join_retry_s = min(self.join_retry_s * 2, JOIN_RETRY_S_MAX)
        return again

    def join_refused(self, now: float) -> None:
        """Record that the pending join was refused: the next one has a new number, and waits longer each time."""
        self.joins_unanswered = -1  # this join was answered; the next one raises the count to 0
        self.join_refused_s = min(max(self.join_refused_s * 2, JOIN_REFUSED_RETRY_S_FIRST), JOIN_REFUSED_RETRY_S_MAX)
        self.join_at_s = now + self.join_refused_s
        self.join_sent_s = now - JOIN_FRESH_S

    def joined(self, frame: Joined) -> None:
        """Begin the session.

        Its lease lasts from the *first* sending of this join, the earliest that the frame can answer.
        """
        self.phase = "live"
        self.session = frame.session
        self.epoch = frame.epoch
        self.renew_s, self.lease_s, self.grace_s = frame.renew_s, frame.lease_s, frame.grace_s
        self.base_s = self.join_sent_s
        self.renew_n = 0
        self.sent_s = {}
        self.renew_at_s = 0.0
        self.kept_until_s = NEVER_S
        self.join_at_s = NEVER_S
        self.join_refused_s = 0.0

    def renewal(self, now: float) -> int:
        """Record a renewal that is sent now, and return its number. The next one is due in `renew_s` seconds."""
        self.renew_n += 1
        self.sent_s[self.renew_n] = now
        if len(self.sent_s) > RENEWALS_UNANSWERED_MAX:
            del self.sent_s[next(iter(self.sent_s))]
        self.renew_at_s = now + self.renew_s
        return self.renew_n

    def awaits_renewal(self, n: int) -> bool:
        """Return whether the renewal `n` was sent in this session, and neither it nor a later one was answered."""
        return n in self.sent_s

    def renewed(self, n: int) -> None:
        """Record the answer to the pending renewal `n`: it moves the lease's end. Earlier renewals are dropped.

        Raises KeyError unless `awaits_renewal(n)`.
        """
        sent_s = self.sent_s.pop(n)
        for older in [number for number in self.sent_s if number < n]:
            del self.sent_s[older]
        self.base_s = max(self.base_s, sent_s)

    def slept(self, seconds: float) -> None:
        """Move the deadlines by time that was skipped: the live session would have been renewed in it as before."""
        self.base_s += seconds
        self.renew_at_s += seconds
        self.sent_s = {n: sent_s + seconds for n, sent_s in self.sent_s.items()}

    def lost(self, *, keeps: bool = False) -> None:
        """End the session here; its attempts must be cleared before the next join.

        With `keeps` the next join takes over the attempts that run on; they may run until the lease of this session is
        over.
        """
        self.kept_until_s = self.over_at_s if keeps else NEVER_S
        self.phase = "clearing"
        self.session = ""
        self.renew_at_s = NEVER_S
        self.join_at_s = NEVER_S
        self.sent_s = {}

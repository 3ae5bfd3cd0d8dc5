"""The worker's side of a lease session: when to renew, until when it holds, when it is over. Pure.

The lease is counted from the moment the renewal that was answered was *sent*, on CLOCK_BOOTTIME (H26, H27, H29), so
that the worker's end of it always comes before the scheduler's. From half of it on, no new claim is made.
"""

from __future__ import annotations

from typing import Final, Literal

from moorage.schemas.frames import Joined

#: between two joins: a leader that takes a session back at once must not be asked in a busy loop
JOIN_SPACING_S: Final = 0.5
RENEWALS_UNANSWERED_MAX: Final = 256
JOIN_RETRY_S_FIRST: Final = 0.5
JOIN_RETRY_S_MAX: Final = 5.0
#: after that a join is asked again under a new number, since its lease would count from the first sending
JOIN_FRESH_S: Final = 4.0
#: so many joins in a row without an answer are reported in the log, once
JOINS_UNANSWERED_TOLD: Final = 2
#: somebody must act before these can succeed, so there is no hurry
JOIN_REFUSED_RETRY_S_FIRST: Final = 2.0
JOIN_REFUSED_RETRY_S_MAX: Final = 30.0
NEVER_S: Final = float("inf")

SessionPhase = Literal["restoring", "clearing", "joining", "live", "left"]


class LeaseSession:
    """restoring -> clearing -> joining -> live -> clearing; `left` after a goodbye.

    Numbers come with the answer to the join.
    """

    __slots__ = (
        "base_s",
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
        "level",
        "phase",
        "reign",
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
        self.reign = 0
        self.level = 1  # the ledger's feature level, by the newest answer of the leader
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
        """New claims only in the first half of the lease: a leader that cannot answer may not rule any more."""
        return self.phase == "live" and now < self.base_s + self.lease_s / 2

    def may_join(self, now: float) -> bool:
        """Whether a join may leave now; if not, the timer is set for when it may."""
        if now >= self.join_sent_s + JOIN_SPACING_S:
            return True
        self.join_at_s = self.join_sent_s + JOIN_SPACING_S
        return False

    def join_sent(self, now: float) -> bool:
        """Note a join that leaves now; True if it is the standing one again, False if it has a new number."""
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
        """Wait longer, and ask under a new number then."""
        self.joins_unanswered = -1  # this one was answered; the next one will not have been asked in vain
        self.join_refused_s = min(max(self.join_refused_s * 2, JOIN_REFUSED_RETRY_S_FIRST), JOIN_REFUSED_RETRY_S_MAX)
        self.join_at_s = now + self.join_refused_s
        self.join_sent_s = now - JOIN_FRESH_S

    def joined(self, frame: Joined) -> None:
        """The session begins. Its lease counts from the *first* sending of this join: the earliest it can answer."""
        self.phase = "live"
        self.session = frame.session
        self.reign = frame.reign
        self.level = frame.level
        self.renew_s, self.lease_s, self.grace_s = frame.renew_s, frame.lease_s, frame.grace_s
        self.base_s = self.join_sent_s
        self.renew_n = 0
        self.sent_s = {}
        self.renew_at_s = 0.0
        self.kept_until_s = NEVER_S
        self.join_at_s = NEVER_S
        self.join_refused_s = 0.0

    def renewal(self, now: float) -> int:
        """Number of the renewal that leaves now."""
        self.renew_n += 1
        self.sent_s[self.renew_n] = now
        if len(self.sent_s) > RENEWALS_UNANSWERED_MAX:
            del self.sent_s[next(iter(self.sent_s))]
        self.renew_at_s = now + self.renew_s
        return self.renew_n

    def awaits_renewal(self, n: int) -> bool:
        """Whether the renewal `n` has not been answered yet."""
        return n in self.sent_s

    def renewed(self, n: int) -> None:
        """Note the answer to the renewal `n`, which is awaited: it moves the lease's end."""
        sent_s = self.sent_s.pop(n)
        for older in [number for number in self.sent_s if number < n]:
            del self.sent_s[older]
        self.base_s = max(self.base_s, sent_s)

    def slept(self, seconds: float) -> None:
        """Time was skipped, in which the live session would have been renewed as before."""
        self.base_s += seconds
        self.renew_at_s += seconds
        self.sent_s = {n: sent_s + seconds for n, sent_s in self.sent_s.items()}

    def lost(self, *, keeps: bool = False) -> None:
        """The session is over here; what it held must be cleared before the next join.

        With `keeps` the next join takes over what runs on, which may run until the lease of this session is over.
        """
        self.kept_until_s = self.over_at_s if keeps else NEVER_S
        self.phase = "clearing"
        self.session = ""
        self.renew_at_s = NEVER_S
        self.join_at_s = NEVER_S
        self.sent_s = {}

"""What is remembered of members that are over: whoever asks for one again hears how it ended (H8, H10, H11). Pure."""

from __future__ import annotations

from typing import Final, NamedTuple

from moorage.schemas.frames import Fact, FactKind
from moorage.worker.fact_outbox import FactOutbox
from moorage.worker.member_messages import MemberName

#: remembered ends, some 500 bytes each; beyond it the oldest answered ones become the floor below which everything is
#: over. A frame that is late by so many ends of one worker says nothing that anybody waits for.
TOMBSTONES_MAX: Final = 8_192

_Base = tuple[str, str, int]


class Tombstone(NamedTuple):
    """What is left of the newest member over here of one replica: fences up to `fence` are dead."""

    fence: int
    attempt: int
    kind: FactKind
    code: int
    detail: str
    #: the fact frame that says so
    no: int


class Tombstones:
    """The ends of one lease session, the newest of each replica. What it says again goes into `outbox`."""

    __slots__ = ("_floor_fence", "_most", "_outbox", "_tombstones")

    def __init__(self, outbox: FactOutbox, most: int = TOMBSTONES_MAX) -> None:
        self._outbox = outbox
        self._most = most
        self._tombstones: dict[_Base, Tombstone] = {}
        self._floor_fence = -1

    def __len__(self) -> int:
        return len(self._tombstones)

    def of(self, name: MemberName) -> Tombstone | None:
        """The end that covers this member: its own, or that of a later member of its replica."""
        tombstone = self._tombstones.get(name[:3])
        return tombstone if tombstone is not None and name[4] <= tombstone.fence else None

    def holds(self, name: MemberName) -> bool:
        """Whether it is the end of this very member that is remembered."""
        tombstone = self._tombstones.get(name[:3])
        return tombstone is not None and tombstone.fence == name[4]

    def is_forgotten(self, name: MemberName) -> bool:
        """Whether it is over for certain, though its own end is remembered no longer."""
        return name[4] <= self._floor_fence

    def bury(self, name: MemberName, kind: FactKind, code: int, detail: str) -> None:
        """Say that a member is over and remember it."""
        self._outbox.gathered.append(Fact(kind, *name, code, detail))
        self.remember(name, kind, code, detail)

    def remember(self, name: MemberName, kind: FactKind, code: int, detail: str) -> None:
        """Remember an end that the next frame of facts tells."""
        base, fence = name[:3], name[4]
        tombstones = self._tombstones
        if base in tombstones:
            if tombstones[base].fence > fence:
                return
            del tombstones[base]  # to the young end
        tombstones[base] = Tombstone(fence, name[3], kind, code, detail, self._outbox.next_no)
        if len(tombstones) > self._most:
            oldest = next(iter(tombstones))
            if tombstones[oldest].no <= self._outbox.answered_no:
                # safe at the bound: a placement up to this fence that is not held is answered `withdrawn`, which
                # is true for ever in this session and costs the leader no retry
                self._floor_fence = max(self._floor_fence, tombstones.pop(oldest).fence)

    def say_again(self, name: MemberName, tombstone: Tombstone) -> None:
        """Answer for what is over, unless that answer is on its way."""
        gathered = self._outbox.gathered
        if tombstone.fence != name[4]:
            gathered.append(Fact("withdrawn", *name))
            return
        if tombstone.no > self._outbox.answered_no:
            return
        gathered.append(Fact(tombstone.kind, *name, tombstone.code, tombstone.detail))
        if tombstone.kind == "exited":
            gathered.append(Fact("freed", *name))
        self._tombstones[name[:3]] = tombstone._replace(no=self._outbox.next_no)

    def clear(self) -> None:
        """A join tells all of it: the next session begins with nothing."""
        self._tombstones.clear()
        self._floor_fence = -1

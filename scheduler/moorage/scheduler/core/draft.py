"""A record while it is being built: steps so far, and what the state will be once they are folded.

Memory changes only by folding after the acknowledgement (ledger-rules H4), yet one tick may decide several things
about one replica; so the draft remembers what its own steps will do, beside the untouched state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

from moorage.scheduler.core.records import FORMAT, RECORD_BYTES_MAX, Act, Op, Record, packed
from moorage.scheduler.core.state import (
    AT_CLAIMED,
    AT_EXITED,
    AT_RUNNING,
    CLAIMED,
    LOST_KEPT,
    PLACED,
    QUEUED,
    RUNNING,
    Job,
    Member,
    Replica,
    State,
)

#: an upper estimate of a step's encoded bytes: op, number, replica and three arguments
STEP_BYTES: Final = 30
NOTE_CHARS_MAX: Final = 200
#: room left for acts, evidence and the record's own fields
SLACK_BYTES: Final = 96 * 1024


class Draft:
    """The record of this tick."""

    __slots__ = (
        "_gang",
        "_held",
        "_note_numbers",
        "_phase",
        "_state",
        "accepts",
        "actors",
        "acts",
        "bytes",
        "evidence",
        "facts",
        "gone",
        "left",
        "left_queue",
        "next_num",
        "notes",
        "started",
        "state",
        "steps",
        "time_ms",
        "tombstones",
    )

    def __init__(self, state: State, time_ms: int) -> None:
        self.state = state
        self.time_ms = time_ms
        self.accepts: dict[str, list[Any]] = {}
        self.next_num = state.next_num
        self.steps: list[int] = []
        self.facts: list[int] = []
        self.notes: list[str] = []
        self.acts: list[list[Any]] = []
        self.evidence: list[int] = []
        self.actors: list[int] = []
        self.bytes = 0
        self.gone: set[Member] = set()
        self.left: set[int] = set()  # workers whose session ends with this record
        self.started: set[Job] = set()  # jobs of which some replica runs first with this record
        self.left_queue = 0  # replicas that this record ends while they stand in the queue
        self.tombstones: dict[str, set[str]] = {}  # by tenant: cancels of unknown jobs that this record remembers
        self._note_numbers: dict[str, int] = {}
        self._state: dict[Replica, int] = {}
        self._held: dict[Replica, Member | None] = {}
        self._phase: dict[Member, int] = {}
        self._gang: dict[Job, tuple[int, int, int]] = {}

    # ------------------------------------------------------------------------- what will be, once folded

    def state_of(self, replica: Replica) -> int:
        return self._state.get(replica, replica.state)

    def held_by(self, replica: Replica) -> Member | None:
        if replica in self._held:
            return self._held[replica]
        return replica.member

    def phase_of(self, member: Member) -> int:
        return self._phase.get(member, member.phase)

    def gang_of(self, job: Job) -> tuple[int, int, int]:
        """(phase, what the replicas become, which count grows)."""
        return self._gang.get(job) or (job.gang, job.after, job.count)

    @property
    def empty(self) -> bool:
        return not (self.accepts or self.steps or self.facts or self.acts)

    @property
    def full(self) -> bool:
        """No more may be gathered: the record would come near its bound (ledger-rules H5)."""
        return self.bytes > RECORD_BYTES_MAX - SLACK_BYTES

    # ------------------------------------------------------------------------------------------ steps

    def note(self, text: str, *, always: bool = False) -> int:
        """The 1-based number of a note; 0 stands for none. One text is written once, however many steps name it.

        Beyond the record's bound a new text is left out unless `always`: the transition counts, not its story.
        """
        if not text:
            return 0
        text = text[:NOTE_CHARS_MAX]
        known = self._note_numbers.get(text)
        if known is not None:
            return known
        if self.full and not always:
            return 0
        self.notes.append(text)
        self.bytes += len(text.encode()) + 3
        number = self._note_numbers[text] = len(self.notes)
        return number

    @contextlib.contextmanager
    def by(self, actor: str) -> Iterator[None]:
        """Every step made inside is this actor's doing (see `records.actor`; "" is nobody's), and the story says so."""
        first = len(self.steps)
        yield
        if actor and len(self.steps) > first:
            self.actors += (first, len(self.steps), self.note(actor, always=True))
            self.bytes += 2 * STEP_BYTES

    def step(self, op: int, num: int, index: int, a: int = 0, b: int = 0, c: int = 0) -> None:
        self.steps += (op, num, index, a, b, c)
        self.bytes += STEP_BYTES

    def accept(self, tenant: str, name: str, body: bytes, replicas: int, traceparent: str) -> int:
        """A new job; returns the number that fold will give it."""
        flat = self.accepts.get(tenant)
        if flat is None:
            flat = self.accepts[tenant] = []
        flat += (name, body, replicas, traceparent)
        self.bytes += len(body) + len(name) + len(traceparent) + 12
        self.next_num += 1
        return self.next_num - 1

    def end_session(self, worker_num: int, why: str) -> None:
        """GONE: facts of the old session are folded, but their numbers must not reach into the next one."""
        self.acts.append([Act.GONE, worker_num, why])
        self.left.add(worker_num)
        facts = self.facts
        self.facts = [x for at in range(0, len(facts), 2) if facts[at] != worker_num for x in facts[at : at + 2]]

    def tombstone(self, tenant: str, job: str, sequence: int) -> None:
        self.acts.append([Act.TOMBSTONE, tenant, job, sequence])
        self.bytes += 128
        self.tombstones.setdefault(tenant, set()).add(job)

    def claim(self, replica: Replica, member: Member, master: str) -> None:
        self.step(Op.CLAIM, replica.job.num, replica.index, 0, 0, self.note(master, always=True))
        self._phase[member] = AT_CLAIMED
        self._state[replica] = CLAIMED

    def start(self, replica: Replica, member: Member) -> None:
        self.step(Op.START, replica.job.num, replica.index)
        self.started.add(replica.job)
        self._phase[member] = AT_RUNNING
        self._state[replica] = RUNNING

    def exit(self, replica: Replica, member: Member, to: int, code: int, why: str) -> None:
        """The attempt is over, its tree gone; the member lingers until its devices are seen free."""
        self.step(Op.EXIT, replica.job.num, replica.index, to, code, self.note(why))
        self._phase[member] = AT_EXITED
        self._state[replica] = to
        self._held[replica] = None

    def over(self, op: int, replica: Replica, member: Member, to: int, why: str) -> None:
        """REFUSE, WITHDRAW or LOSE: the attempt is over and holds nothing any more."""
        self.step(op, replica.job.num, replica.index, to, 0, self.note(why))
        self._state[replica] = to
        self._held[replica] = None
        self.gone.add(member)

    def keep_lost(self, replica: Replica, why: str) -> None:
        """LOSE under on_partition keep: the member stays where it is."""
        self.step(Op.LOSE, replica.job.num, replica.index, LOST_KEPT, 0, self.note(why))
        self._state[replica] = LOST_KEPT

    def free(self, member: Member) -> None:
        replica = member.replica
        self.step(Op.FREE, replica.job.num, replica.index, packed(member.fence, member.worker.num))
        self.gone.add(member)

    def quarantine(self, member: Member, mask: int) -> None:
        replica = member.replica
        self.step(Op.QUARANTINE, replica.job.num, replica.index, packed(member.fence, member.worker.num), mask)

    def end(self, replica: Replica, to: int, becomes: int, why: str) -> None:
        """Ask the member to end; `to` is ENDING or CANCELLING."""
        self.step(Op.END, replica.job.num, replica.index, to, becomes, self.note(why))
        self._state[replica] = to

    def move(self, replica: Replica, to: int, why: str) -> None:
        if self.state_of(replica) == QUEUED:
            self.left_queue += 1
        self.step(Op.MOVE, replica.job.num, replica.index, to, 0, self.note(why))
        self._state[replica] = to

    def backoff(self, replica: Replica, not_before: int, count: int) -> None:
        self.step(Op.BACKOFF, replica.job.num, replica.index, not_before, count)

    def gang(self, job: Job, phase: int, after: int = 0, count: int = 0) -> None:
        self.step(Op.GANG, job.num, 0, phase, after, count)
        self._gang[job] = (phase, after, count)

    def step_gang(self, num: int, phase: int) -> None:
        """GANG for a job that this draft may just have accepted."""
        job = self.state.jobs.get(num)
        if job is not None:
            self.gang(job, phase)
        else:
            self.step(Op.GANG, num, 0, phase)

    def placed(self, num: int, index: int, worker_num: int, mask: int, mode: int) -> None:
        """Place a replica; one accepted in this very draft has no object yet."""
        self.step(Op.PLACE, num, index, worker_num, mask, mode)
        job = self.state.jobs.get(num)
        if job is not None:
            self._state[job.replicas[index]] = PLACED

    # ----------------------------------------------------------------------------------------- record

    def record(self, leader: int, rid: int) -> Record:
        state = self.state
        return Record(
            FORMAT,
            state.epoch,
            leader,
            rid,
            self.time_ms,
            state.digest,
            list(self.accepts.items()),
            self.steps,
            self.facts,
            self.notes,
            self.acts,
            self.evidence,
            self.actors,
        )

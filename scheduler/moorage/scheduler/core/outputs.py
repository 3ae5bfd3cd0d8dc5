"""What leaves after the acknowledgement: answers, wanted frames, events. Built from folded state alone."""

from __future__ import annotations

from typing import Final

from moorage.scheduler.core.records import MODE_NAMES, GangPhase, by_tenant
from moorage.scheduler.core.sessions import MISSED_MAX
from moorage.scheduler.core.state import (
    AT_CLAIMED,
    AT_EXITED,
    CANCELLING,
    CLAIMED,
    ENDING,
    PLACED,
    RUNNING,
    Job,
    Member,
    State,
    Worker,
)
from moorage.schemas.codec import encode
from moorage.schemas.frames import Change, End, Held, Place, Start, Wanted
from moorage.schemas.job import STATES
from moorage.schemas.subjects import Subjects

#: bodies in one wanted frame; more go in the next, so that no frame nears the server's bound
WANTED_BYTES_MAX: Final = 400 * 1024

Message = tuple[str, bytes, str]  # subject, payload, reply


class Outputs:
    """All that one record lets out. `answers` are (reply subject, payload)."""

    __slots__ = ("answers", "events", "messages")

    def __init__(self) -> None:
        self.answers: list[tuple[str, bytes]] = []
        self.messages: list[Message] = []
        self.events: list[tuple[str, str, bytes, bool]] = []  # tenant, job, event as JSON, on its own subject too


class WantedFrames:
    """Gathers place, start and end by worker; what is wanted follows from the member's state alone."""

    def __init__(self, state: State, subjects: Subjects) -> None:
        self._state = state
        self._subjects = subjects
        self._frames: dict[int, list[Wanted]] = {}
        self._bytes: dict[int, int] = {}

    def _frame(self, worker: Worker, size: int) -> Wanted:
        frames = self._frames.get(worker.num)
        if frames is None:
            frames = self._frames[worker.num] = []
        if not frames or self._bytes[worker.num] + size > WANTED_BYTES_MAX:
            frames.append(Wanted(worker.id, worker.session, self._state.epoch, place=[], start=[], end=[]))
            self._bytes[worker.num] = 0
        self._bytes[worker.num] += size
        return frames[-1]

    def placed(self, members: list[Member]) -> None:
        """`add` for those that a record has just placed."""
        bytes_of, frames_of = self._bytes, self._frames
        for member in members:
            worker, replica = member.worker, member.replica
            job, num = replica.job, worker.num
            if replica.state != PLACED or not worker.session:  # the same record went on with it
                self.add(member)
                continue
            size = bytes_of.get(num, WANTED_BYTES_MAX) + len(job.body) + 200
            frame = self._frame(worker, len(job.body) + 200) if size > WANTED_BYTES_MAX else frames_of[num][-1]
            if size <= WANTED_BYTES_MAX:
                bytes_of[num] = size
            frame.place.append(
                Place(
                    job.tenant,
                    job.name,
                    replica.index,
                    member.attempt,
                    member.fence,
                    slots_of(member.mask),
                    MODE_NAMES[member.mode],
                    job.gang == GangPhase.HOLDING,
                    job.body,
                    job.traceparent,
                )
            )

    def add(self, member: Member) -> None:
        """wanted(state, worker) for one member."""
        worker, replica, job = member.worker, member.replica, member.replica.job
        if not worker.session:
            return
        if member.phase == AT_EXITED:
            return
        state = replica.state
        name = (job.tenant, job.name, replica.index, member.attempt, member.fence)
        if state in (CANCELLING, ENDING):
            self._frame(worker, 200).end.append(End(*name, why=STATES[state].lower()))
        elif state == PLACED:
            self.placed([member])
        elif job.gang == GangPhase.STARTED and member.phase == AT_CLAIMED:
            address, _, port = job.master.rpartition(":")
            self._frame(worker, 200).start.append(Start(*name, address, int(port or 0), len(job.replicas)))
        elif state in (CLAIMED, RUNNING) and member.missed >= MISSED_MAX:
            self._frame(worker, 200).end.append(End(*name, why="account for it: not in your renewals"))

    def end_unknown(self, worker: Worker, held: Held) -> None:
        """The worker holds what the ledger does not know: it ends (ledger-rules H11)."""
        if not all(0 <= number < 2**63 for number in (held.replica, held.attempt, held.fence)):
            return  # no member was ever called so, and msgpack could not say it
        self._frame(worker, 200).end.append(
            End(held.tenant, held.job, held.replica, held.attempt, held.fence, why="unknown to the ledger")
        )

    def messages(self) -> list[Message]:
        workers = self._state.worker_by_num
        return [
            (self._subjects.worker(workers[num].id, "wanted"), encode(frame, json=False), "")
            for num, frames in self._frames.items()
            for frame in frames
        ]


_SLOTS: Final = [[bit for bit in range(8) if mask >> bit & 1] for mask in range(256)]


def slots_of(mask: int) -> list[int]:
    """The slot positions of a mask, lowest first."""
    if mask < 256:
        return _SLOTS[mask]
    return [bit for bit in range(mask.bit_length()) if mask >> bit & 1]


def gpu_names(worker: Worker, mask: int) -> list[str]:
    """The uuids of a mask in this session's inventory."""
    pool = worker.hello.get("gpu_pool", ())
    return [pool[slot]["uuid"] for slot in slots_of(mask) if slot < len(pool)]


def changes_since(state: State, job: Job, rev: int) -> list[Change]:
    """A job's transitions after a revision, as far as memory holds them."""
    changes = []
    if rev < 1:
        changes.append(Change(1, job.accepted_ms, -1, 0, "ACCEPTED", by=by_tenant(job.tenant)))
    workers = state.worker_by_num
    for number, time, index, attempt, to, worker_num, mask, code, why, fence, actor in job.story:
        if number > rev:
            by, _, said = actor.partition(" ") if actor else ("", "", "")
            if worker_num >= 0:
                worker = workers[worker_num]
                over = to not in (PLACED, CLAIMED, RUNNING)
                changes.append(
                    Change(
                        number,
                        time,
                        index,
                        attempt,
                        STATES[to],
                        worker.id,
                        gpu_names(worker, mask) if to == PLACED else [],
                        code if over else None,
                        why,
                        fence,
                        by,
                        said,
                    )
                )
            else:
                changes.append(Change(number, time, index, attempt, STATES[to], why=why, by=by, said=said))
    return changes

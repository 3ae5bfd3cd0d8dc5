"""What is sent after a record is acknowledged: answers, `Wanted` frames and events, made from folded state alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from moorage.scheduler.core.fleet.slots import slots_of
from moorage.scheduler.core.ledger.gang_sets import set_of
from moorage.scheduler.core.ledger.records import MODE_NAMES, GangPhase, Mode, by_tenant, start_of
from moorage.scheduler.core.ledger.state import (
    AT_CLAIMED,
    CLAIMED,
    ENDING,
    FENCE,
    FROZEN,
    HISTORY_WORDS,
    IS_TERMINAL,
    LEAVING,
    MAY_END,
    ON_WORKER,
    PLACED,
    RANGE,
    RESULT,
    RUNNING,
    STATE,
    SUCCEEDED,
    WORKER,
    Attempt,
    Job,
    State,
    Transition,
    Worker,
    code_of,
)
from moorage.scheduler.core.lifecycle.group_addresses import addresses_in
from moorage.scheduler.core.lifecycle.sessions import MISSED_MAX
from moorage.schemas import actors
from moorage.schemas.attempt import name_in
from moorage.schemas.capabilities import Capabilities, Enforced, level_number, mode_enforced, mode_resizes
from moorage.schemas.codec import decode_request, encode, is_json
from moorage.schemas.frames import (
    Change,
    End,
    Event,
    Exec,
    FleetEvent,
    Freeze,
    Held,
    Place,
    Replicas,
    Signal,
    Start,
    Wanted,
)
from moorage.schemas.job import STATES, Request
from moorage.schemas.request_cache import RequestCache
from moorage.schemas.signed import person_in, unsigned
from moorage.schemas.subjects import Subjects

#: bytes of request bodies in one `Wanted` frame; more go into the next frame, so that none nears the server's limit
WANTED_BYTES_MAX: Final = 400 * 1024

#: this many changes always fit one event, and are not measured
CHANGES_SURE: Final = 64
#: bytes of the changes in one event, and in one answer of `show`, which also has the request and replicas
CHANGES_BYTES_MAX: Final = 700 * 1024
SHOWN_BYTES_MAX: Final = 200 * 1024
#: the last transitions of a job of very many replicas that tell whether its devices are simulated
SIMULATED_LOOKS: Final = 64
#: upper bounds: bytes of one change as JSON without its GPUs and reason, and of one escaped character
CHANGE_BYTES: Final = 330
CHAR_BYTES_MAX: Final = 6
ACCEPTED: Final = "ACCEPTED"

_read_request: Final = RequestCache().read_accepted

Message = tuple[str, bytes, str]  # subject, payload, reply


@dataclass(slots=True, eq=False, repr=False)
class Outputs:
    """Everything sent for one record. `answers` are (reply subject, payload)."""

    answers: list[tuple[str, bytes]] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    turns: list[Message] = field(default_factory=list)  # for members that sleep
    started: list[Job] = field(default_factory=list)  # jobs of which a replica runs with this record for the first time
    ended: list[Job] = field(default_factory=list)  # jobs that ended with this record
    woken: list[tuple[str, str]] = field(default_factory=list)  # tenant and service whose first member it starts
    fleet: list[FleetEvent] = field(default_factory=list)  # what it did to the fleet
    # tenant, job, event as JSON, whether also on its own subject
    events: list[tuple[str, str, bytes, bool]] = field(default_factory=list)


class WantedFrames:
    """Collects what the ledger wants of each worker: placements, starts, ends, freezes, resizes, devices declared well.

    All follows from the state, and from what the worker's own renewals report. `failed` is called for a worker of which
    a frame cannot be made; if it returns, the others have theirs.
    """

    def __init__(self, state: State, subjects: Subjects, failed: Callable[[Worker, Exception], None]) -> None:
        self._failed = failed
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

    def placed(self, attempts: list[Attempt]) -> None:
        """Add attempts that a record has just placed."""
        bytes_of, frames_of = self._bytes, self._frames
        for attempt in attempts:
            worker, replica = attempt.worker, attempt.replica
            num = worker.num
            if replica.state != PLACED or not worker.session:  # the same record moved it on
                self.add(attempt)
                continue
            try:
                body = _body_for(attempt)
                place = self._place(attempt, body)
            except Exception as raised:
                self._failed(worker, raised)
                continue
            size = bytes_of.get(num, WANTED_BYTES_MAX) + len(body) + 200
            if size <= WANTED_BYTES_MAX:
                frame = frames_of[num][-1]
                bytes_of[num] = size
            else:
                frame = self._frame(worker, len(body) + 200)
            frame.place.append(place)

    def _place(self, attempt: Attempt, body: bytes) -> Place:
        replica = attempt.replica
        job = replica.job
        return Place(
            job.tenant,
            job.name,
            replica.index,
            attempt.no,
            attempt.fence,
            slots_of(attempt.mask),
            MODE_NAMES[attempt.mode],
            job.gang == GangPhase.HOLDING,
            body,
            job.traceparent,
            None if job.deadline_ms is None else max(0, job.deadline_ms - self._state.time_ms) / 1000,
            job.changed_seq if job.resizes or job.relimit is not None else 0,
            job.accepted_ms,
            set_of(replica, attempt.begun) if job.gang else list(replica.stored),
            (None if attempt.begun is None else 0) if job.gang else replica.untold,
        )

    def add(self, attempt: Attempt, *, is_frozen: bool = False) -> None:
        """Add what the ledger wants of an attempt now, if anything; `is_frozen` is what its worker last reported."""
        try:
            self._add(attempt, is_frozen)
        except Exception as raised:
            self._failed(attempt.worker, raised)

    def _add(self, attempt: Attempt, is_frozen: bool) -> None:
        worker, replica, job = attempt.worker, attempt.replica, attempt.replica.job
        if not worker.session or replica.attempt is not attempt:
            return  # it is over: the state is that of the replica's next attempt, which may be elsewhere
        state = replica.state
        if job.changed_seq and state in (CLAIMED, RUNNING, FROZEN) and learns(attempt):
            body = _body_for(attempt)
            self._frame(worker, len(body) + 200).resize.append(self._place(attempt, body))
        if state in LEAVING:
            notice_s = float(attempt.notice_s) if state == ENDING else 0.0
            self._frame(worker, 200).end.append(End(*attempt.name, why=STATES[state].lower(), notice_s=notice_s))
        elif state == PLACED:
            self.placed([attempt])
        elif job.gang == GangPhase.STARTED and attempt.phase == AT_CLAIMED:
            self._frame(worker, 200).start.append(_start(attempt))
        elif state in MAY_END and attempt.missed >= MISSED_MAX:
            self._frame(worker, 200).end.append(End(*attempt.name, why="account for it: not in your renewals"))
        elif state == FROZEN:
            if attempt.mask:
                self._frame(worker, 200).freeze.append(Freeze(*attempt.name, on=False, n=attempt.leased))
        elif state == RUNNING and (attempt.freeze or is_frozen):
            self._frame(worker, 200).freeze.append(Freeze(*attempt.name, on=attempt.freeze))

    def execs(self, worker: Worker, order: Exec | Signal) -> None:
        """Add a command to run, or a signal to send, once: a caller that hears nothing of it asks again."""
        if worker.session and isinstance(order, Signal):
            self._frame(worker, 200).signals.append(order)
        elif worker.session:
            assert isinstance(order, Exec)
            size = 300 + sum(map(len, order.argv)) * CHAR_BYTES_MAX
            self._frame(worker, size).execs.append(order)

    def well(self, worker: Worker) -> None:
        """Add an operator's order that devices are healthy; repeated until the worker confirms it."""
        slots, epoch = slots_of(worker.well), self._state.epoch
        frame = Wanted(worker.id, worker.session, epoch, place=[], start=[], end=[], well=slots, well_n=worker.well_n)
        self._frames.setdefault(worker.num, []).insert(0, frame)
        self._bytes.setdefault(worker.num, 400)

    def end_unknown(self, worker: Worker, held: Held) -> None:
        """Ask a worker to end an attempt that it has and the ledger does not know (ledger-rules H11)."""
        if not all(0 <= number < 2**63 for number in (held.replica, held.attempt, held.fence)):
            return  # no attempt can have such numbers, and msgpack cannot encode them
        self._frame(worker, 200).end.append(End(*name_in(held), why="unknown to the ledger"))

    def messages(self) -> list[Message]:
        found, workers = list[Message](), self._state.worker_by_num
        for num, frames in self._frames.items():
            try:
                found += [wanted_message(self._subjects, workers[num], frame) for frame in frames]
            except Exception as raised:
                self._failed(workers[num], raised)
        return found


def wanted_message(subjects: Subjects, worker: Worker, frame: Wanted) -> Message:
    """Return the message with this frame, in the encoding of the worker's join."""
    return subjects.worker(worker.id, "wanted"), encode(frame, json=worker.inventory.json), ""


def takes_parts(attempt: Attempt) -> str:
    """Return how a worker can change a running attempt's share of its devices; "" if it cannot."""
    driver = _read_request(attempt.replica.job.body)[1].request.workload.driver
    return mode_resizes(attempt.worker.inventory.capabilities, driver, MODE_NAMES[attempt.mode])


def learns(attempt: Attempt) -> bool:
    """Return whether a worker can change what a running attempt has: its share of its devices, or its time limit."""
    driver = _read_request(attempt.replica.job.body)[1].request.workload.driver
    return bool(takes_parts(attempt)) or attempt.worker.can(driver).relimits


def _may_have_groups(job: Job) -> bool:
    """Return whether a gang may have groups: if not, it has none."""
    return job.body.find(b"groups") >= 0


def _start(attempt: Attempt) -> Start:
    """Return the order to start a rank: with the address of its gang, or of its group and of the others."""
    job, rank = attempt.replica.job, attempt.replica.index
    if _may_have_groups(job) and (groups := (request := _read_request(job.body)[1].request).groups):
        known, firsts = addresses_in(job.master), accumulate((group.replicas for group in groups), initial=0)
        others = {group.name: known.get(first, "") for group, first in zip(groups, firsts, strict=False)}
        at = request.group_of(rank)[0]
        address, _, port = others[groups[at].name].rpartition(":")
        return Start(*attempt.name, address, int(port or 0), groups[at].replicas, others)
    address, _, port = job.master.rpartition(":")
    return Start(*attempt.name, address, int(port or 0), job.size)


def _body_for(attempt: Attempt) -> bytes:
    """Return a job's request as its worker reads it, with its current share of a device and the attempt's limit."""
    job, worker = attempt.replica.job, attempt.worker
    if job.resizes or job.bounds or (job.gang and (job.wants is not None or _may_have_groups(job))):
        request = decode_request(unsigned(job.body)).with_part(job.part)
        request = request.with_ranks(job.wants.most) if job.gang and job.wants is not None else request
        request = request.of_rank(attempt.replica.index)
        return encode(request.with_bounds(*job.bounds_at(attempt.fence)), json=worker.inventory.json)
    body = unsigned(job.body)
    return json_body(body) if worker.inventory.json else body


def json_body(body: bytes) -> bytes:
    """Return a request's body as JSON, for a worker that reads only JSON."""
    return body if is_json(body) else encode(decode_request(body))


def gpu_names(worker: Worker, mask: int, fence: int) -> list[str]:
    """Return the uuids of the devices of an attempt, by its slots and its fence; [] if they are forgotten."""
    pool = worker.pool_at(fence).devices
    if mask.bit_count() == 1:  # most attempts
        slot = mask.bit_length() - 1
        return [pool[slot].uuid] if slot < len(pool) else []
    return [pool[slot].uuid for slot in slots_of(mask) if slot < len(pool)]


def enforced_on(capabilities: Mapping[str, Capabilities], request: Request) -> Enforced | None:
    """Return how a worker with these capabilities enforces a job's share of a device; None for a job without GPUs."""
    gpu = request.effective_gpu
    if gpu is None:
        return None
    return gpu.enforced(mode_enforced(capabilities, request.workload.driver, gpu.effective_sharing))


def enforced_of(job: Job) -> Enforced | None:
    """Return the weakest enforcement of a job's shares over its present workers; None without shared devices."""
    sharing = [
        replica.attempt.worker
        for replica in job.rows.values()
        if replica.attempt is not None and replica.attempt.mode > Mode.EXCLUSIVE
    ]
    if not sharing:
        return None
    request = _read_request(job.body)[1].request.with_part(job.part)
    found = [each for worker in sharing if (each := enforced_on(worker.inventory.capabilities, request)) is not None]
    return Enforced(
        min((each.memory for each in found), key=level_number), min((each.compute for each in found), key=level_number)
    )


def accepted(tenant: str, accepted_ms: int, body: bytes) -> Change:
    """Return the first transition of every job. Who sent a request that is not kept any more is not known."""
    return Change(1, accepted_ms, -1, 0, ACCEPTED, by=by_tenant(tenant, person_in(body)))


def is_exception(row: Transition) -> bool:
    """Return whether a transition of one of very many replicas is told by itself: an end without success, or an act."""
    return row[STATE] < 0 or row[WORKER] == RANGE or (IS_TERMINAL[row[STATE]] and row[STATE] != SUCCEEDED)


def is_end(row: Transition) -> bool:
    """Return whether a transition of one of very many replicas is in the history: the end of an attempt, or an act."""
    return row[STATE] < 0 or row[WORKER] == RANGE or row[STATE] not in ON_WORKER


def changes_since(
    state: State, job: Job, rev: int, of_many: Callable[[Transition], bool] = is_exception
) -> list[Change]:
    """Return a job's transitions after a revision, as far as they are in memory; `of_many` chooses among very many."""
    count, rows = job.rev - rev, job.history
    if count <= 0:
        return []
    if count < len(rows):
        rows = rows[-count:]  # revisions are consecutive, and only the oldest rows leave memory
    if not job.is_listed:
        rows = list(filter(of_many, rows))
    changes = [accepted(job.tenant, job.accepted_ms, job.body)] if rev < 1 else []
    workers = state.worker_by_num
    for row in rows:
        number, time, index, attempt, to, worker_num, mask, code, why, fence, actor = row[:RESULT]
        by, said = actors.split(actor) if " " in actor else (actor, "")
        if worker_num >= 0:
            worker = workers[worker_num]
            address, why = start_of(why) if why and to == RUNNING else ("", why)
            changes.append(
                Change(
                    number,
                    time,
                    index,
                    attempt,
                    STATES[to],
                    worker.id,
                    gpu_names(worker, mask, fence) if to == PLACED else [],
                    code_of(to, code),
                    why,
                    fence,
                    by,
                    said,
                    row[RESULT:][0] if len(row) > RESULT else None,
                    address=address,
                )
            )
        else:
            changes.append(
                Change(
                    number, time, index, attempt, HISTORY_WORDS[to],
                    code=code or None, why=why, fence=fence, by=by, said=said,
                    through=mask if worker_num == RANGE else None,
                )
            )  # fmt: skip
    return changes


def fitting(changes: Sequence[Change], bytes_max: int = CHANGES_BYTES_MAX) -> int:
    """Return how many of the first changes fit into one frame; at least one, if there is any."""
    size = 0
    for count, change in enumerate(changes):
        size += CHANGE_BYTES + sum(len(gpu) + 3 for gpu in change.gpus) + CHAR_BYTES_MAX * len(change.why)
        if size > bytes_max and count:
            return count
    return len(changes)


def event_of(state: State, job: Job) -> Event:
    """Return an event with a job's unsent changes, and mark them as sent. What does not fit is left to `history`."""
    after, changes = job.told, changes_since(state, job, job.told)
    new, all_of_it = job.rev - after, len(changes)
    if all_of_it > CHANGES_SURE:
        del changes[fitting(changes) :]
    job.told = job.rev
    if not job.is_listed:
        simulated = were_simulated(state, job.history[-min(new, SIMULATED_LOOKS) :])
        replicas = Replicas(job.copies, job.counts, after if len(changes) == all_of_it else job.rev)
        name = job.tenant, job.name, job.rev, job.state, state.seq
        return Event(*name, changes, _why(changes), simulated, replicas=replicas)
    simulated = were_simulated(state, job.history[-len(changes) :])
    is_placed = job.rows and "PLACED" in [change.state for change in changes]
    enforced = enforced_of(job) if is_placed else None
    return Event(
        job.tenant, job.name, job.rev, job.state, state.seq, changes, _why(changes), simulated, enforced=enforced
    )


def were_simulated(state: State, rows: Iterable[Transition]) -> bool:
    """Return whether any of these transitions was on simulated devices."""
    workers, last, fence = state.worker_by_num, -1, 0
    for row in rows:
        if row[WORKER] >= 0 and (row[WORKER] != last or row[FENCE] != fence):  # most rows are of one attempt
            last, fence = row[WORKER], row[FENCE]
            if workers[last].pool_at(fence).simulated:
                return True
    return False


def _why(changes: list[Change]) -> str:
    for change in reversed(changes):
        if change.why:
            return change.why
    return ""

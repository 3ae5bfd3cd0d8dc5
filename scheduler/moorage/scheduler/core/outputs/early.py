"""Builds the frames for plain placements while their record is being appended, so that they can be sent at once.

Nothing is sent before the acknowledgement. But then GPUs need not wait for the fold, since its result for a few plain
placements is known in advance. For other records nothing is prepared. `Engine.commit` builds all frames from the folded
state, and the sender sends these too unless they are the same; a placement sent twice does no harm at the worker.
"""

from __future__ import annotations

from typing import Final

from moorage.scheduler.core.ledger.ids_in_bodies import id_of
from moorage.scheduler.core.ledger.records import MODE_BITS, MODE_NAMES, PREEMPTIBLE, STEP_WIDTH, Op
from moorage.scheduler.core.ledger.state import State
from moorage.scheduler.core.outputs.in_flight import InFlight
from moorage.scheduler.core.outputs.outputs import Message, json_body, slots_of, wanted_message
from moorage.schemas.frames import Place, Wanted
from moorage.schemas.subjects import Subjects

#: with more steps than this, a few microseconds do not matter
STEPS_MAX: Final = 64
#: bound for all accepted jobs together, so that the placements for one worker surely fit one frame
BODY_BYTES_MAX: Final = 64 * 1024
#: steps for workers' reports; they cause no placements
_QUIET: Final = frozenset(map(int, (Op.CLAIM, Op.START, Op.EXIT, Op.FREE, Op.RAN)))
_MODE_MASK: Final = (1 << MODE_BITS) - 1


def early_frames(state: State, flight: InFlight, subjects: Subjects) -> list[Message]:
    """Return the messages with the placements that the record in flight will cause in `state`; [] if not certain.

    It is certain if the record only places new jobs without a deadline, and contains reports about other jobs.
    """
    record = flight.record
    if record is None or record.acts or flight.renewed or flight.joined or len(record.steps) > STEPS_MAX * STEP_WIDTH:
        return []
    new: dict[int, tuple[str, str, bytes, str]] = {}
    num, seq, size = state.next_num, state.seq + 1, 0
    for tenant, flat in record.accepts:
        for at in range(0, len(flat), 4):
            written, body, _, traceparent = flat[at : at + 4]
            name = id_of(written, body)
            size += len(body)
            if size <= BODY_BYTES_MAX and flight.new[(tenant, name)].submit.request.deadline_s is None:
                new[num] = (tenant, name, body, traceparent)
            num += 1
    frames: dict[int, Wanted] = {}
    workers = state.worker_by_num
    steps = iter(record.steps)
    for op, job, index, a, mask, c in zip(steps, steps, steps, steps, steps, steps, strict=True):
        if op == Op.ACCEPT or (op in _QUIET and job < state.next_num):
            continue
        worker = workers[a] if op == Op.PLACE else None
        if worker is None or job not in new or not worker.session:
            return []
        tenant, name, body, traceparent = new[job]
        if worker.in_json:
            body = json_body(body)
        slots, mode = slots_of(mask), MODE_NAMES[c & _MODE_MASK & ~PREEMPTIBLE]
        if worker.num not in frames:
            frames[worker.num] = Wanted(worker.id, worker.session, state.epoch, place=[], start=[], end=[])
        frames[worker.num].place.append(
            Place(tenant, name, index, 1, seq, slots, mode, False, body, traceparent, accepted_ms=record.time)
        )
    return [wanted_message(subjects, workers[num], frame) for num, frame in frames.items()]

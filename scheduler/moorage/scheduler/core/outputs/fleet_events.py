"""What a record does to the fleet, for operators: workers that come and go, orders on them, GPUs that go out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from moorage.scheduler.core.fleet.slots import slots_of
from moorage.scheduler.core.ledger import acts
from moorage.scheduler.core.ledger.acts import AnyAct
from moorage.scheduler.core.ledger.records import GOODBYE
from moorage.scheduler.core.ledger.state import State, Worker, told_flag
from moorage.scheduler.core.outputs.outputs import gpu_names
from moorage.schemas import actors
from moorage.schemas.frames import FleetEvent
from moorage.schemas.units import many


def fleet_events(
    state: State, of_record: Sequence[AnyAct], jobs: Mapping[int, int] | None, was_out: Mapping[Worker, int]
) -> list[FleetEvent]:
    """Return the events of a record that has just been folded; `jobs` is how many each worker had whose session it
    ended; None where that is not known.

    `was_out` has what was `Worker.out` before it, of each worker that it changed.
    """
    found: list[FleetEvent] = []
    joined = {act.worker for act in of_record if isinstance(act, acts.Join)}
    for act in of_record:
        worker = state.worker_by_num.get(getattr(act, "worker", -1))
        if worker is not None and not (isinstance(act, acts.Gone) and act.worker in joined):
            found += _of_act(state, act, worker, None if jobs is None else jobs.get(worker.num, 0))
    for worker, before in was_out.items():
        if worker.out != before:
            found += _of_gpus(state, of_record, worker, before)
    return found


def _of_act(state: State, act: AnyAct, worker: Worker, jobs: int | None) -> Iterator[FleetEvent]:
    at = state.time_ms, state.seq, worker.id
    match act:
        case acts.Join():
            yield FleetEvent("joined", *at, why=many(len(worker.inventory.gpu_pool), "GPU"))
        case acts.Gone():
            yield FleetEvent("left" if act.why == GOODBYE else "lost", *at, jobs=jobs)
        case acts.Flag():
            by, said = actors.split(act.by)
            flag, why = told_flag(act.flag, act.why)
            yield FleetEvent(flag, *at, by=by, said=said, why=why)
        case acts.Window() if act.leave_ms and act.from_ms > state.time_ms:
            by, said = actors.split(act.by)
            yield FleetEvent("planned", *at, by=by, said=said, why=act.why)
        case acts.Shut():
            yield FleetEvent("closed", *at, why=act.why)


def _of_gpus(state: State, of_record: Sequence[AnyAct], worker: Worker, before: int) -> Iterator[FleetEvent]:
    """Yield which GPUs went out or came back. It is told once, though a GPU may be out for several reasons."""
    at = state.time_ms, state.seq, worker.id
    for slot in slots_of(worker.out & ~before):
        kind, detail, *_ = worker.unwell.get(slot, ("quarantined", ""))
        for uuid in gpu_names(worker, 1 << slot, state.seq):
            yield FleetEvent("gpu-out", *at, uuid, why=f"{kind}: {detail}" if detail else kind)
    back = before & ~worker.out
    former = gpu_names(worker, back, state.seq - 1)  # a join may have brought others, of which nothing was told
    released = [act for act in of_record if isinstance(act, acts.Unquarantine) and act.worker == worker.num]
    for slot in slots_of(back):
        by, why = next(((act.by, act.why) for act in released if act.slots >> slot & 1), ("", ""))
        name, said = actors.split(by)
        for uuid in gpu_names(worker, 1 << slot, state.seq):
            if uuid in former:
                yield FleetEvent("gpu-back", *at, uuid, by=name, said=said, why=why)

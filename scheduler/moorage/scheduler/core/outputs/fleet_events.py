"""What a record does to the fleet, for operators: workers that come and go, orders on them, GPUs that go out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from moorage.scheduler.core.ledger import acts
from moorage.scheduler.core.ledger.acts import AnyAct
from moorage.scheduler.core.ledger.records import GOODBYE
from moorage.scheduler.core.ledger.state import AT_EXITED, State, Worker
from moorage.scheduler.core.outputs.outputs import gpu_names
from moorage.schemas import actors
from moorage.schemas.frames import FleetEvent
from moorage.schemas.units import many


def jobs_on(state: State, of_record: Sequence[AnyAct]) -> dict[int, int]:
    """Return how many jobs each worker has whose session this record ends; to be called before it is folded."""
    found: dict[int, int] = {}
    for act in of_record:
        if isinstance(act, acts.Gone) and (worker := state.worker_by_num.get(act.worker)) is not None:
            jobs = {each.replica.job.num for each in worker.members.values() if each.phase != AT_EXITED}
            found[act.worker] = len(jobs)
    return found


def fleet_events(state: State, of_record: Sequence[AnyAct], jobs: Mapping[int, int]) -> list[FleetEvent]:
    """Return the events of a record that has just been folded; `jobs` as `jobs_on` has found them before."""
    found: list[FleetEvent] = []
    joined = {act.worker for act in of_record if isinstance(act, acts.Join)}
    for act in of_record:
        worker = state.worker_by_num.get(getattr(act, "worker", -1))
        if worker is not None and not (isinstance(act, acts.Gone) and act.worker in joined):
            found += _of_act(state, act, worker, jobs.get(worker.num, 0))
    return found


def _of_act(state: State, act: AnyAct, worker: Worker, jobs: int) -> Iterator[FleetEvent]:
    at = state.time_ms, state.seq, worker.id
    match act:
        case acts.Join():
            yield FleetEvent("joined", *at, why=many(len(worker.hello.get("gpu_pool", [])), "GPU"))
        case acts.Gone():
            yield FleetEvent("left" if act.why == GOODBYE else "lost", *at, jobs=jobs)
        case acts.Flag():
            by, said = actors.split(act.by)
            yield FleetEvent(act.flag, *at, by=by, said=said, why=act.why)
        case acts.Window() if act.leave_ms and act.from_ms > state.time_ms:
            by, said = actors.split(act.by)
            yield FleetEvent("planned", *at, by=by, said=said, why=act.why)
        case acts.Shut():
            yield FleetEvent("closed", *at, why=act.why)
        case acts.Health():
            why = f"{act.ailment}: {act.detail}" if act.detail else act.ailment
            for uuid in gpu_names(worker, 1 << act.slot, state.seq):
                yield FleetEvent("gpu-out" if act.ailment else "gpu-back", *at, uuid, why=why)
        case acts.Unquarantine():
            by, said = actors.split(act.by)
            for uuid in gpu_names(worker, act.slots, state.seq):
                yield FleetEvent("gpu-back", *at, uuid, by=by, said=said, why=act.why)

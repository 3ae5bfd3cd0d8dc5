"""Confirms each placement: worker and devices are what the request asks for, and have room beside what runs there."""

from __future__ import annotations

from moorage.scheduler.core.ledger.state import Attempt
from tests.release.workloads.reference import Room, World, attempt_name, request_of, slots_of


def confirm(world: World) -> None:
    """The placements of the record that was just folded, whose number is their fence."""
    for attempt in world.drive.state.attempts():
        if attempt.fence == world.drive.state.seq:
            wrong = _wrong(world, attempt)
            assert not wrong, f"{attempt_name(attempt)}, devices {sorted(slots_of(attempt.mask))}: {wrong}"


def _wrong(world: World, attempt: Attempt) -> str:
    job = attempt.replica.job
    request, slots = request_of(job), slots_of(attempt.mask)
    room, gpu = Room(world, attempt.worker.num, [attempt]), request.effective_gpu
    if not room.may(job, request):
        return "its worker does not take such jobs, or has no room for it"
    if len(slots) != (gpu.count if gpu is not None else 0) or not slots <= set(room.lent):
        return "so many devices it did not ask for, or not these"
    avoids = dict(job.avoid).get(attempt.worker.num, 0)
    if slots & slots_of(avoids):
        return "it avoids one of the devices"
    if not all(room.takes(slot, job, request) for slot in slots):
        return "a device is not what it asks for, or has no room beside what runs there"
    if request.device_ids and slots != set(room.named(request)):
        return f"it asks for {request.device_ids}"
    return ""

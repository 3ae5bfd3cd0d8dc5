"""Confirms what is frozen: who has the devices of a frozen job, who comes to rest, and that no device stays kept."""

from __future__ import annotations

from moorage.schemas.job import STATES
from tests.release.workloads.reference import Room, World, as_waiting, attempt_name, may_run_on, over_limit, slots_of


def confirm(world: World) -> None:
    """After each record no worker has two jobs on one device."""
    for worker in world.drive.workers.values():
        worker.validate()


def restless(world: World) -> list[str]:
    """In rest each job is as it is wanted to be, frozen or not; one that is to run on waits for a device or its tenant.

    No preemptible job that came later is on such a device.
    """
    wrong = []
    for attempt in world.drive.state.attempts():
        state, job = STATES[attempt.replica.state], attempt.replica.job
        if not attempt.worker.session or attempt.replica.attempt is not attempt or state not in ("RUNNING", "FROZEN"):
            continue
        if state == "RUNNING" and attempt.freeze:
            wrong.append(f"{attempt_name(attempt)} is {state} for ever, and is to be frozen")
        if state == "RUNNING" or attempt.freeze:
            continue
        if attempt.mask:
            wrong.append(f"{attempt_name(attempt)} has its devices, and is not resumed")
            continue
        room, home = Room(world, attempt.worker.num, [attempt]), slots_of(attempt.home)
        others = [m for m in attempt.worker.attempts.values() if m.mask & attempt.home]
        if may_run_on(world, attempt) and any(m.preemptible and m.fence > attempt.fence for m in others):
            wrong.append(f"{attempt_name(attempt)} waits for a preemptible job that came later")
        tenant = world.drive.state.tenants[job.tenant]
        is_held = job.hold is not None or tenant.hold is not None or over_limit(world, as_waiting(job))
        is_open = home <= set(room.slots) and not any(room.users[slot] for slot in home)
        if is_open and not is_held and attempt.worker.id not in world.silent and not tenant.gpus_max:
            wrong.append(f"{attempt_name(attempt)} waits for ever, and its devices are free")
    return wrong


def confirm_over(world: World) -> None:
    """Once all jobs have ended no device is kept for one."""
    fleet = world.drive.engine.fleet
    kept = [host.worker.id for host in fleet.hosts.values() if host.frozen or host.awaited]
    assert not kept, f"all jobs are over, and devices of {kept} are kept for frozen ones"
    assert not fleet.with_frozen, f"all jobs are over, and {sorted(fleet.with_frozen)} are looked at for frozen ones"

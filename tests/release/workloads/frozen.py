"""Confirms what is frozen: who has the devices of a frozen job, who comes to rest, and that no device stays kept."""

from __future__ import annotations

from moorage.schemas.job import STATES
from tests.release.workloads.reference import Room, World, as_waiting, may_run_on, member_name, over_limit, slots_of


def confirm(world: World) -> None:
    """After each record no worker has two jobs on one device."""
    for worker in world.drive.workers.values():
        worker.validate()


def restless(world: World) -> list[str]:
    """In rest each job is as it is wanted to be, frozen or not; one that is to run on waits for a device or its tenant.

    No preemptible job that came later is on such a device.
    """
    wrong = []
    for member in world.drive.state.members():
        state, job = STATES[member.replica.state], member.replica.job
        if not member.worker.session or member.replica.member is not member or state not in ("RUNNING", "FROZEN"):
            continue
        if state == "RUNNING" and member.freeze:
            wrong.append(f"{member_name(member)} is {state} for ever, and is to be frozen")
        if state == "RUNNING" or member.freeze:
            continue
        if member.mask:
            wrong.append(f"{member_name(member)} has its devices, and is not resumed")
            continue
        room, home = Room(world, member.worker.num, [member]), slots_of(member.home)
        others = [m for m in member.worker.members.values() if m.mask & member.home]
        if may_run_on(world, member) and any(m.preemptible and m.fence > member.fence for m in others):
            wrong.append(f"{member_name(member)} waits for a preemptible job that came later")
        tenant = world.drive.state.tenants[job.tenant]
        is_held = job.hold is not None or tenant.hold is not None or over_limit(world, as_waiting(job))
        is_open = home <= set(room.slots) and not any(room.users[slot] for slot in home)
        if is_open and not is_held and member.worker.id not in world.silent and not tenant.gpus_max:
            wrong.append(f"{member_name(member)} waits for ever, and its devices are free")
    return wrong


def confirm_over(world: World) -> None:
    """Once all jobs have ended no device is kept for one."""
    fleet = world.drive.engine.fleet
    kept = [host.worker.id for host in fleet.hosts.values() if host.frozen or host.awaited]
    assert not kept, f"all jobs are over, and devices of {kept} are kept for frozen ones"
    assert not fleet.with_frozen, f"all jobs are over, and {sorted(fleet.with_frozen)} are looked at for frozen ones"

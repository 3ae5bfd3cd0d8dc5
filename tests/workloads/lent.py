"""Confirms what is lent: who has a device of a frozen job, who comes to rest, and that nothing stays lent."""

from __future__ import annotations

from moorage.scheduler.core.ledger.beside import beside
from moorage.schemas.job import STATES
from tests.workloads.reference import World, member_name


def confirm(world: World) -> None:
    """After each record: workers have nobody beside a job that runs, and are not asked to have."""
    for worker in world.drive.workers.values():
        worker.validate()
        early = getattr(worker, "early", "")
        assert not early, f"{worker.id} was asked to resume {early} beside its guest"


def restless(world: World) -> list[str]:
    """In rest each job is as it is wanted to be: frozen or not, and alone if it runs."""
    wrong = []
    for member in world.drive.state.members():
        state = STATES[member.replica.state]
        if not member.worker.session or member.replica.member is not member or state not in ("RUNNING", "FROZEN"):
            continue
        if member.freeze != (state == "FROZEN"):
            wrong.append(f"{member_name(member)} is {state} for ever, wanted is {member.freeze=}")
        if state == "RUNNING" and not member.guest and beside(member):
            wrong.append(f"{member_name(member)} runs beside a guest")
    return wrong


def confirm_over(world: World) -> None:
    """Once all jobs have ended nothing is lent, and the workers hold nothing."""
    fleet = world.drive.engine.fleet
    lent = [host.worker.id for host in fleet.hosts.values() if host.frozen or host.guests]
    assert not lent, f"all jobs are over, and devices of {lent} are lent"
    kept = {host.worker.id for host in fleet.lending.values()}
    assert not kept, f"all jobs are over, and {sorted(kept)} are looked at for guests"

"""Confirms preemptions: none of lower priority would have done, and in rest none that may end others waits for them."""

from __future__ import annotations

from typing import Final

from moorage.scheduler.core.ledger import acts
from moorage.scheduler.core.ledger.state import Attempt
from moorage.schemas.job import STATES
from tests.release.workloads.reference import (
    Waiting,
    World,
    as_waiting,
    left_too_soon,
    marked,
    startable,
    starts,
    taken_back,
)

RUNNING: Final = "RUNNING"
FROZEN: Final = "FROZEN"


def confirm(world: World) -> None:
    """The preemptions of the record that was just folded ended the least of those that might end."""
    found = [act for act in world.drive.acts if isinstance(act, acts.Preempt) and act.workers]
    if not found:
        return
    ended = {num for act in found for num in act.victims}
    for act in found:
        job = world.drive.state.jobs[act.job]
        who = as_waiting(job)
        if is_reclaim(world, who):
            continue
        victims = set(act.victims)
        most = max(defended(world, attempt) for num in victims for attempt in attempts_of(world, num))
        least = [each for each in endable(world, who, but=ended - victims) if defended(world, each) < most]
        others = [other for other in found if other is not act]
        least = [each for each in least if not any(_ends_for(each, other) for other in others)]
        excluded = (
            taken_back(world, who)
            | marked(world, who)
            | left_too_soon(world.drive.state, who)
            | reserved_for_others(world, who)
        )
        excluded |= unheard(world) | world.drive.held_before
        excluded |= {each.worker for each in world.drive.acts if isinstance(each, acts.Join)}
        # another replica of the same victim may end for another job: that host is freed for that one
        excluded |= {num for other in others for num in other.workers}
        excluded -= set(act.workers)
        wanted = who.together if job.gang else max(1, job.waits)
        gone = [attempt for num in victims for attempt in attempts_of(world, num)]
        made = max(who.together, startable(world, who, wanted, excluded, without=gone))
        assert startable(world, who, wanted, excluded, without=least) < made, (
            f"for {who.name} of priority {who.priority} a job of priority {most} ended, though"
            f" {sorted({m.replica.job.name for m in least})} of lower priority would have done"
        )


def _ends_for(attempt: Attempt, other: acts.Preempt) -> bool:
    """Whether an attempt may end for another job that ends its job, too: of several replicas nobody knows which."""
    return attempt.replica.job.num in other.victims and attempt.worker.num in other.workers


def unheard(world: World) -> set[int]:
    """The workers that are silent, or have not renewed since this scheduler leads: nothing is placed on them (H34).

    It waits for them before it ends anybody, but no longer than a renewal takes: a worker may be silent for longer.
    A worker of which nothing comes through gets no job either, once its last load frame is too old.
    """
    workers = world.drive.state.workers.values()
    return {worker.num for worker in workers if worker.id not in world.renewed or worker.id in world.silent}


def is_reclaim(world: World, who: Waiting) -> bool:
    """Whether it may take back what its tenant is guaranteed; else it goes by priority alone."""
    tenant = world.drive.state.tenants[who.job.tenant]
    return world.drive.config.reclaim and tenant.guaranteed > 0


def attempts_of(world: World, num: int) -> list[Attempt]:
    """Those of a job that are asked to end: other replicas of it may run on, or have just been placed."""
    attempts = [attempt for attempt in world.drive.state.attempts() if attempt.replica.job.num == num]
    return [attempt for attempt in attempts if STATES[attempt.replica.state] == "ENDING"]


def began_ms(world: World, attempt: Attempt) -> int:
    """When it was started first, also if it has been frozen since; else when it was placed."""
    key = (attempt.replica.job.num, attempt.replica.index, attempt.fence)
    return world.drive.started.get(key, world.drive.placed[key])


def defended(world: World, attempt: Attempt) -> int:
    """The priority of a running job; with its age as it was when it began, where jobs age."""
    job = attempt.replica.job
    if attempt.preemptible:
        return -1
    priority = as_waiting(job).priority
    ages = world.drive.config.ages
    if ages is None:
        return priority
    peers = [each.attempt for each in job.replicas if each.attempt is not None] if job.gang else [attempt]
    began = min(began_ms(world, peer) for peer in peers)
    return ages.of(priority, began - job.may_start_ms)


def endable(world: World, who: Waiting, but: set[int]) -> list[Attempt]:
    """What runs, may be ended for it and shares no device; of the jobs `but`, by number, nothing.

    Of another tenant with a guarantee nothing counts where it would borrow: how much of that is borrowed is left out.
    """
    state, config = world.drive.state, world.drive.config
    found: list[Attempt] = []
    for attempt in state.attempts() if not who.request.preemptible else ():
        job = attempt.replica.job
        if attempt.preemptible and job.num not in but and job is not who.job and _runs(world, attempt):
            found.append(attempt)
            continue
        peers = [each.attempt for each in job.replicas] if job.gang else [attempt]
        if job is who.job or job.num in but or any(peer is None for peer in peers):
            continue
        if config.reclaim and job.tenant != who.job.tenant and state.tenants[job.tenant].guaranteed:
            continue
        if any(peer is None or not _runs(world, peer) for peer in peers) or attempt.mode > 1:
            continue
        began = max(began_ms(world, peer) for peer in peers if peer is not None)
        if state.time_ms - began < config.preempt_after * 1000 or defended(world, attempt) >= who.priority:
            continue
        found.append(attempt)
    return found


def _runs(world: World, attempt: Attempt) -> bool:
    """It runs or is frozen, or this very record asks it to end."""
    state = STATES[attempt.replica.state]
    runs = state in (RUNNING, FROZEN) or (state == "ENDING" and _ends_now(world, attempt))
    return runs and attempt.replica.attempt is attempt


def _ends_now(world: World, attempt: Attempt) -> bool:
    named = {num for act in world.drive.acts if isinstance(act, acts.Preempt) for num in act.victims}
    return attempt.replica.job.num in named


def reserved_for_others(world: World, who: Waiting) -> set[int]:
    """The hosts that a reservation closes to a job that may end others."""
    held = world.drive.engine.planner.verdicts.reservation
    if held is None or held.num == who.job.num:
        return set()
    return set(held.hosts)


def hidden(world: World, full: list[Waiting]) -> list[str]:
    """In rest, of what finds no room: the first of each line that may end others, where enough would go for it."""
    engine, config = world.drive.engine, world.drive.config
    firsts = {(who.priority, engine.reader.shape_of(who.job)): who for who in reversed(full)}
    wrong: list[str] = []
    for who in firsts.values():
        gpu = who.request.effective_gpu
        if gpu is not None and gpu.effective_sharing != "exclusive":
            continue
        excluded = left_too_soon(world.drive.state, who) | taken_back(world, who) | reserved_for_others(world, who)
        excluded |= marked(world, who)
        least = endable(world, who, but=set())
        if who.priority < config.preempt_priority:
            least = [attempt for attempt in least if attempt.preemptible]
        if least and starts(world, who, excluded, without=least):
            names = sorted({attempt.replica.job.name for attempt in least})
            wrong.append(f"{who.name} of priority {who.priority} waits, though it may end others: {names}")
    return wrong

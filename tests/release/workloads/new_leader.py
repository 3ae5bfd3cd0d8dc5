"""Old leader against new leader: what a new one places at once, the old one has left waiting.

In rest a new engine is built from a copy of the state, hears all workers, and plans; nothing that it does reaches them.
Then once more with some of the waiting jobs on hold, which must start no other job: those that the fleet could not run
even if it were empty, and, beside a reservation, those whose end nobody knows.

Three differences are rules:

- *Hosts that cannot hold their job are kept for it for a minute*, by the leader that reserved them.
- *Of more than 64 of a tenant's jobs that ask for the same some are tried in turn beside a reservation.* So the hold of
  some lets others be tried.
- *A plan is made once a second*: what outlives all that is known may have made the start a little later since, and
  more may be owed to another tenant than to that of the reservation.

A plan searches hosts for eight kinds of overdue jobs, some of them in turn; that of the new leader searches for all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from copy import copy, deepcopy
from typing import Any, Final
from unittest import mock

from moorage.scheduler.core.engine import Engine
from moorage.scheduler.core.schedule import plan
from moorage.schemas.job import STATES
from tests.release.workloads.reference import Waiting, World, could_ever, is_kept_back, is_tried, waiting_in, why
from tests.unit.scheduler.driving import Driving

#: records in which the new leader places what it can
RECORDS: Final = 3
#: by how much later a reservation may be expected to start after these records, in ms
NOTICED_MS: Final = 5_000


def confirm(world: World) -> list[str]:
    """What a new leader starts that the old one has left waiting, and no rule explains it."""
    every = waiting_in(world.drive.state)
    if not every:
        return []
    wrong, aside = _differences(world, every, ()), _aside(world, every)
    if aside:
        wrong += [f"{found} with {len(aside)} jobs on hold" for found in _differences(world, every, aside)]
    return wrong


def _aside(world: World, every: list[Waiting]) -> list[tuple[str, str]]:
    """The jobs, by tenant and id, whose hold must start no other job."""
    drive, state = world.drive, world.drive.state
    found = [who for who in every if not could_ever(world, who)]
    held = drive.engine.planner.verdicts.reservation
    if held is not None and not state.preempting:
        found += [who for who in every if who.job.num != held.num and _is_endless(world, who)]
    return sorted({(who.job.tenant, who.job.name) for who in found if who.job.hold is None})


def _is_endless(world: World, who: Waiting) -> bool:
    """Whether nobody knows how long it will run, and it does not wait for a limit, which others would wait for too."""
    state, tenant = world.drive.state, who.job.tenant
    return world.ran.longest_ms(state, who) is None and not state.tenants[tenant].gpus_max


def _differences(world: World, every: list[Waiting], aside: Iterable[tuple[str, str]]) -> list[str]:
    new = _lead(world)
    for tenant, job in aside:
        new.offer_order("hold", tenant=tenant, job=job)
    left, wrong = every, []
    for _ in range(RECORDS):
        with mock.patch.object(plan, "SEARCHES_MAX", len(every)):
            new.tick(obey=False)
        started = [who for who in left if _is_placed(new, who)]
        left = [who for who in left if who not in started]
        wrong += [
            f"{who.name} waits ({why(world, who, every) or 'and could start'}), and a new leader starts it"
            for who in started
            if not _is_kept(world, new, who, every)
        ]
    return wrong


def _lead(world: World) -> Driving:
    """A new leader that has heard every worker, and knows of the same runs, also those of jobs that are forgotten."""
    new = world.drive.another()
    new.engine.durations._runs = _learned(world.drive.engine, new.engine)
    for name, worker in new.workers.items():
        if worker.session:
            new.send(name, worker.renew_frame())
            if name in world.ill:
                new.load(name, **world.ill[name])
    return new


def _learned(old: Engine, new: Engine) -> OrderedDict[tuple[str, str, int], Any]:
    """The runs that an old leader has learned, for a new one: each leader numbers the shapes as it meets them."""
    numbers = {}
    for shape in list(old.reader.shapes._by_key.values()):
        known = new.reader.shapes._by_key.get(shape.key)
        if known is None:
            known = copy(shape)
            known.index = new.reader.shapes._next
            new.reader.shapes._kept(known)
        numbers[shape.index] = known.index
    found = OrderedDict[tuple[str, str, int], Any]()
    for (tenant, workload, number), runs in old.durations._runs.items():
        # of a tenant's runs of any workload the number is that of GPUs
        found[tenant, workload, numbers[number] if workload and number >= 0 else number] = deepcopy(runs)
    return found


def _is_placed(new: Driving, who: Waiting) -> bool:
    replica = next(each for each in new.state.jobs[who.job.num].replicas if each.index == who.replica.index)
    return STATES[replica.state] in ("PLACED", "CLAIMED", "RUNNING")


def _is_kept(world: World, new: Driving, who: Waiting, every: list[Waiting]) -> bool:
    """Whether it waits for the reservation of the old leader by one of the rules, or for a host that a new one does not
    know to be bad: below the level of what stands in rows of workers."""
    if why(world, who, every) == "marked":
        return True
    old, other = (drive.engine.planner.verdicts.reservation for drive in (world.drive, new))
    # beside hosts that leave or are taken back, too, it may be the reservation alone that it waits for
    if old is None or not (is_kept_back(world, who, every, set()) or why(world, who, every) == "reserved"):
        return False
    if old.short_ms or not is_tried(who, every):
        return True
    if old.tenant != who.job.tenant:
        return True  # time alone lets in a tenant to which more is owed: the old leader's next record, too
    return other is not None and old.start_ms < other.start_ms <= old.start_ms + NOTICED_MS

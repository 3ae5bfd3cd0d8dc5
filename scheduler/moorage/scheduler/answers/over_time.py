"""What hosts, pools, jobs and services do at this moment, for the follower, which keeps it over time."""

from __future__ import annotations

from collections.abc import Iterable

from moorage.scheduler.answers.call_totals import CallTotals
from moorage.scheduler.answers.use import used_now
from moorage.scheduler.core.engine import Engine
from moorage.scheduler.follower.series import JOBS_MAX, REPORTED_MAX
from moorage.scheduler.follower.told import Told
from moorage.schemas.frames import UsedJob

_Job = tuple[str, str]


def told_now(engine: Engine, used: Iterable[UsedJob], calls: CallTotals) -> Told:
    """Return what is done now; `used` are the jobs whose use was read last. The jobs that came first are told, if there
    are very many."""
    reported = _reported(engine)
    of = {(row.tenant, row.job): (float(row.percent), float(row.memory_mib), float(row.devices)) for row in used}
    jobs = []
    for key in {**of, **reported}:
        job = engine.state.job(*key)
        if job is not None:
            jobs.append((job.num, (*key, of.get(key, (None, None, None)), reported.get(key, {}))))
    jobs.sort(key=lambda row: row[0])
    return Told(
        hosts=_by_host(engine),
        pools={row.model: row.at_work for row in used_now(engine)},
        jobs=[row for _, row in jobs[:JOBS_MAX]],
        services=calls.over_time(engine.built_ms),
    )


def _by_host(engine: Engine) -> dict[str, tuple[float | None, ...]]:
    """Return what the devices of hosts do whose load is fresh, by worker."""
    found: dict[str, tuple[float | None, ...]] = {}
    for host in engine.fleet.hosts.values():
        if host.heard and not host.stale:
            devices = [use for each in host.use.values() for use in each.devices]
            percent = sum((use.percent or 0) / (use.shared_by or 1) for use in devices)
            mib = sum(use.memory_mib or 0 for use in devices)
            heat = None if host.temperature_c is None else float(host.temperature_c)
            found[host.worker.id] = round(percent / 100, 3), float(mib), heat
    return found


def _reported(engine: Engine) -> dict[_Job, dict[str, float]]:
    """Return the newest numbers that jobs have reported, of each job's first replica that runs and reports."""
    found: dict[_Job, tuple[int, dict[str, float]]] = {}
    for host in engine.fleet.hosts.values():
        for told in host.reported.values():
            key = told.tenant, told.job
            if key in found and found[key][0] <= told.replica:
                continue
            numbers = {name: float(value) for name, value in told.values.items() if _is_number(value)}
            if numbers:
                found[key] = told.replica, dict(list(numbers.items())[:REPORTED_MAX])
    return {key: numbers for key, (_, numbers) in found.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

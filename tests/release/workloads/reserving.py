"""Small fleets that are nearly full, large jobs that wait, and small ones behind them: what reservations are about.

Hosts are alike, and some GPUs idle most of the time. Jobs have time limits, or none; some are runs of workloads that
have run before. Workers refuse some. After each of some rounds the world rests, and what waits is confirmed.
"""

from __future__ import annotations

from typing import Any, Final

from moorage.schemas.frames import NOT_PERMITTED
from tests.release.workloads.plan import H100, TENANTS, Draw, Plan

#: seeds from here on are of this kind
RESERVING_FROM: Final = 400_000
THEME: Final = "reservations"
ROUNDS: Final = 6
#: a tenant whose jobs hardly ever end before their time limits: hosts are reserved for after those
LONG: Final = "w"
#: how many jobs come at once where a tenant submits a crowd
CROWD: Final = 70


def made(seed: int) -> Plan:
    """The plan of a seed."""
    draw = Draw(seed, {})
    chance = draw.random.random
    hosts, gpus = draw.pick(1, 1, 2, 3), draw.pick(2, 4, 8)
    for _ in range(hosts):
        draw.worker(models=[H100] * gpus, cpu_milli=0, memory_mib=0, drivers=["noop"])
    settings: dict[str, Any] = {
        "reserve_after": min(draw.pick(30, 30, 30, 0), draw.pick(1, 1, 2, 30)),
        "ageing": draw.pick(0, 0, 0, 36_000), "ended_max": draw.pick(4, 20, 200), "fair_share_half_life": 3_600,
        "ranker": draw.pick("fragments", "fragments", "pack"),
    }  # fmt: skip
    if chance() < 0.15:
        settings |= {"preempt_priority": 80, "preempt_after": draw.pick(0.0, 3.0)}
    if chance() < 0.2:
        draw.add("order", verb="share", tenant=draw.pick("t", "u"), weight=draw.pick(1, 3), gpus=draw.pick(0, 0, 2))
    if chance() < 0.25:
        draw.add("order", verb="limit", tenant=draw.pick("t", "u"), gpus=draw.pick(1, 2, 4))
    for _ in range(hosts * draw.pick(1, 1, 2)):
        count = draw.pick(1, 1, max(1, gpus // 2))
        _add(
            draw,
            draw.pick(LONG, LONG, *TENANTS),
            _fields(draw, {"count": count}, draw.pick(None, 3_600, 36_000, 36_000)),
        )
    draw.add("tick", ms=400)
    for _ in range(ROUNDS):
        _round(draw, gpus)
        draw.add("rest")
    draw.add("end all")
    return Plan(seed, THEME, settings, False, draw.steps)


def _round(draw: Draw, gpus: int) -> None:
    chance = draw.random.random
    if chance() < 0.15:
        draw.add("refuse", salt=draw.salt(), percent=draw.pick(50, 100), why=NOT_PERMITTED + "this may not run here")
    if chance() < 0.5:
        draw.add("work", salt=draw.salt(), percent=draw.pick(20, 50, 100), code=0, but=draw.pick(LONG, LONG, ""))
    if chance() < 0.1:
        tenant, fields = draw.pick(*TENANTS), _fields(draw, {"count": 1}, None)
        for _ in range(CROWD):
            _add(draw, tenant, fields)
        draw.add("tick", ms=draw.pick(50, 1_000))
    if chance() < 0.7:
        large = draw.pick({"count": gpus}, {"count": gpus}, {"count": gpus // 2, "scheduling": "gang"})
        _submit(draw, large, draw.pick(None, 600))
        draw.add("tick", ms=draw.pick(400, 1_000, 1_001, 1_500))
    for _ in range(draw.pick(0, 1, 2, 3)):
        _small(draw, gpus, draw.pick(None, 5, 30, 600, 86_400))
        if chance() < 0.6:
            draw.add("tick", ms=draw.pick(50, 1_000, 1_000))
    if chance() < 0.4:
        draw.add("work", salt=draw.salt(), percent=draw.pick(10, 50), code=0, but=LONG)
    if chance() < 0.1:
        draw.add("cancel", job=draw.salt())
    if chance() < 0.1:
        draw.order()
    if chance() < 0.05:
        draw.add("lead")
    draw.add("tick", ms=draw.pick(50, 1_000))


def _small(draw: Draw, gpus: int, limit_s: int | None) -> None:
    _submit(draw, {"count": draw.pick(1, 1, max(1, gpus // 2))}, limit_s)


def _submit(draw: Draw, gpu: dict[str, Any], limit_s: int | None) -> None:
    _add(draw, draw.pick(*TENANTS), _fields(draw, gpu, limit_s))


def _add(draw: Draw, tenant: str, fields: dict[str, Any]) -> None:
    draw.jobs += 1
    draw.add("submit", tenant=tenant, job=f"j{draw.jobs}", fields=fields)


def _fields(draw: Draw, gpu: dict[str, Any], limit_s: int | None) -> dict[str, Any]:
    run: dict[str, Any] = {"driver": "noop", "argv": [draw.pick("a", "b", "c")], "grace_s": draw.pick(0, 1)}
    if limit_s is not None:
        run["timeout_s"] = limit_s
    replicas = 2 if gpu.get("scheduling") == "gang" else draw.pick(1, 1, 1, 2)
    priority = draw.pick(50, 50, 50, 50, 10, 60, 90)
    return {"gpu": gpu, "run": run, "replicas": replicas, "priority": priority}

"""Make the arguments of `plan`, and choose among requests by its answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from moorage.client.errors import rejected
from moorage.schemas import reasons
from moorage.schemas.job import Request
from moorage.schemas.plan import Plan

#: most hosts that the leader lets one plan add
ADDED_MAX: Final = 1_024
#: most GPUs of the client's own tenant, or of tenants by name
Quota = int | Mapping[str, int]
#: by tenant: its weight, or its weight and its guaranteed GPUs
Share = Mapping[str, int | tuple[int, int]]

#: as `AsyncClient.plan` with a request
Plans = Callable[[Request], Awaitable[Plan]]
#: reasons for waiting for ever that another driver may not have
_NOT_OFFERED: Final = tuple(
    each.name for each in (reasons.NO_WORKER, reasons.DRIVER, reasons.RULES, reasons.GPU_DRIVER)
)


async def first_possible(plan: Plans, requests: Sequence[Request]) -> Request:
    """Return the first of these that some worker could run, now or later, and that no limit of the tenant refuses.

    If there is none: the first whose driver a worker offers, since workers may come; else the first. One that is
    refused for anything but its GPUs is returned, too: its submit says why. Raises what `plan` raises.
    """
    offered = None
    for request in requests:
        # a refusal, also for a job id that is taken, would not say whether another request could run
        planned = await plan(msgspec.structs.replace(request, job=None, on_no_match="wait"))
        if planned.starts != "never" and not _asks_too_much(planned):
            return request
        is_offered = planned.waiting is None or planned.waiting.reason not in _NOT_OFFERED
        if planned.starts == "never" and offered is None and is_offered:
            offered = request
    return offered or requests[0]


def _asks_too_much(planned: Plan) -> bool:
    """Return whether a plan says that a limit of the tenant refuses the request's GPUs: fewer may be allowed."""
    problem = planned.problem
    return problem is not None and problem.code == "failed-precondition" and problem.field.startswith("$.gpu")


def plan_arguments(
    request: bytes | None,
    drain: Sequence[str],
    add: str | None,
    quota: Quota | None,
    share: Share | None,
) -> dict[str, Any]:
    """Return the arguments of `plan`. `request` is the body of a submit; `add` names hosts, as `2x8xA100`.

    Raises `Rejected`.
    """
    drained = [drain] if isinstance(drain, str) else list(drain)
    arguments: dict[str, Any] = {"drain": drained, "add": _added(add)}
    if quota is not None:
        arguments["quota"] = quota if isinstance(quota, int) else dict(quota)
    if share:
        arguments["share"] = {
            tenant: {"weight": of} if isinstance(of, int) else {"weight": of[0], "gpus": of[1]}
            for tenant, of in share.items()
        }
    if request is not None:
        arguments["request"] = msgspec.json.decode(request)
    elif not drain and add is None and quota is None and not share:
        raise rejected(
            "invalid-argument", "nothing to plan", next="name a request, hosts to drain or to add, a quota or a share"
        )
    return arguments


def _added(add: str | None) -> list[dict[str, Any]]:
    """Return the hosts to add: one entry for each kind of host, with their number."""
    if add is None:
        return []
    from moorage.system.simulated_hosts import simulated_hosts

    try:
        hosts = simulated_hosts(add, "add", ADDED_MAX)
    except ValueError as error:
        raise rejected("invalid-argument", str(error), found=add, next="write it as 2x8xA100+1x4xL40S") from None
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for host in hosts:
        key = (tuple((one.vendor, one.name, one.memory_mib) for one in host.devices), host.cpu_milli, host.memory_mib)
        entry = found.setdefault(
            key,
            {
                "count": 0,
                "devices": msgspec.to_builtins(list(host.devices)),
                "cpu_milli": host.cpu_milli,
                "memory_mib": host.memory_mib,
            },
        )
        entry["count"] += 1
    return list(found.values())

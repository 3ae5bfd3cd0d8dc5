"""What the leader tells its follower each ten seconds: what is in no record, as workers and members say it."""

from __future__ import annotations

import msgspec


class Told(msgspec.Struct, array_like=True):
    """What is done now. A number that is not known is None.

    - `hosts`, by worker: GPUs' worth at work, MiB of their memory that are used, heat of the hottest in degrees.
    - `pools`, by model: GPUs' worth at work.
    - `jobs`: tenant, job, and mean use of its GPUs in percent, MiB used, number of GPUs; newest numbers it reported.
    - `services`: tenant, service, and the numbers that `CallTotals.over_time` explains.
    """

    hosts: dict[str, tuple[float | None, ...]] = {}
    pools: dict[str, float] = {}
    jobs: list[tuple[str, str, tuple[float | None, ...], dict[str, float]]] = []
    services: list[tuple[str, str, tuple[float | None, ...]]] = []

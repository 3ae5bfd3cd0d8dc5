"""What workloads ask for beside what they use: the answer of `usage` with `sizes`, and a part of a plan."""

from __future__ import annotations

import msgspec

from moorage.schemas.always import always


class SizedRow(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What the attempts of a workload had, and what they used at most; of jobs that succeeded.

    MiB of one attempt, of all its GPUs together. Null: it was not asked for, or no worker has measured it.
    """

    tenant: str
    workload: str
    asks: str  # the GPUs that it asks for, as a token; empty: none
    jobs: int = always(int)
    gpu_mib: int | None = None  # the least that one had
    gpu_used_mib: int | None = None  # the most that one used
    gpu_jobs: int = 0  # of how many jobs that is known
    memory_mib: int | None = None  # host memory that it asks for
    memory_used_mib: int | None = None
    memory_jobs: int = 0
    memory_of_one: bool = False  # whether it may be of the largest process alone: some host counts no more
    instead: list[str] = []  # smaller GPUs of the fleet that have a fifth more than was used, the smallest first


class SizesAnswer(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What workloads use of what they ask for, the newest first; counted from the begin of the leader's term."""

    rows: list[SizedRow] = always(list[SizedRow])
    from_ms: int = always(int)
    until_ms: int = always(int)
    left_out: int = 0  # rows beyond those of one answer

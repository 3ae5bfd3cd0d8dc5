"""What the limiter costs on a real GPU: nanoseconds of a kernel launch, and of an allocation with its free.

`python -m tests.release.gpu` runs it with its checks. The same program runs in a job with the library and in one
without it, in turns; the least of the rounds counts, since other work of the host only adds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tests.release.gpu.rig import Rig

ROUNDS: Final = 3
SHARE_MIB: Final = 4096
WITHOUT: Final = ("/usr/bin/env", "-u", "LD_PRELOAD")


async def measured(rig: Rig, count: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return nanoseconds by call, with the library and without it."""
    found: list[list[dict[str, float]]] = [[], []]
    from tests.release.gpu.rig import part

    for _ in range(ROUNDS):
        for at, before in enumerate(((), WITHOUT)):
            told, job = await rig.answer("cost", str(count), gpu=part("time-slice", SHARE_MIB), before=before)
            found[at].append(told)
            await rig.ended(job)
    with_it, without = ({name: min(each[name] for each in rounds) for name in rounds[0]} for rounds in found)
    return with_it, without

"""How many open files this process and its supervisor may have, and how many the jobs of a host need."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Mapping
from typing import Final

from moorage.schemas.gpu import SHARERS_MAX

#: what a supervisor may have at most: room for the pipes of some 16,000 jobs
DESCRIPTORS_WANTED: Final = 65536
#: what a supervisor needs without a job: its sockets, its journal, its launcher, and one start
DESCRIPTORS_BASE: Final = 128
#: what one job needs there: the read ends of two pipes, that of a third until its exec, and files for its output
DESCRIPTORS_PER_JOB: Final = 4


def raise_descriptor_limit() -> tuple[int, int]:
    """Raise the soft limit of this process towards the hard one; returns both as they were, for its children."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_WANTED if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return soft, hard


def trouble_with_descriptors(slots: int, modes: tuple[str, ...], sharers_max: Mapping[str, int]) -> str:
    """Why the jobs of so many slots may find no descriptor in the supervisor, which may raise its limit to the hard
    one; "" where all of them can run at once."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    sharers = max((sharers_max.get(mode, SHARERS_MAX.get(mode, 1)) for mode in modes), default=1)
    jobs = max(1, slots * max(1, sharers))
    needed = DESCRIPTORS_BASE + DESCRIPTORS_PER_JOB * jobs
    if hard == resource.RLIM_INFINITY or hard >= needed:
        return ""
    return (
        f"the limit of open files is {hard}; the {jobs} jobs that {slots} GPUs may get need {needed}. Jobs that find"
        " none left are refused here and go elsewhere. Raise it: LimitNOFILE, or ulimit -Hn"
    )

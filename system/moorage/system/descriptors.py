"""Raise the limit of open files of this process, and compute how many the jobs of a host need."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Mapping
from typing import Final

from moorage.schemas.gpu import SHARERS_MAX

#: the limit for a supervisor: room for the pipes of some 16,000 jobs
DESCRIPTORS_WANTED: Final = 65536
#: descriptors of a supervisor without a job: its sockets, its journal, its launcher, and one start
DESCRIPTORS_BASE: Final = 128
#: descriptors of a supervisor for one job: the read ends of two pipes, a third until its exec, and its output files
DESCRIPTORS_PER_JOB: Final = 4


def raise_descriptor_limit() -> tuple[int, int]:
    """Raise the soft limit of open files to `DESCRIPTORS_WANTED`, or to the hard limit if that is lower.

    Does nothing if it is higher already, or if that fails. Return the former limits (soft, hard), for its children.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_WANTED if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return soft, hard


def trouble_with_descriptors(slots: int, modes: tuple[str, ...], sharers_max: Mapping[str, int]) -> str:
    """Return why the supervisor may run out of descriptors for the jobs of `slots` slots; "" if all can run at once.

    The supervisor can raise its limit up to the hard one, so that is compared.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    sharers = max((sharers_max.get(mode, SHARERS_MAX.get(mode, 1)) for mode in modes), default=1)
    jobs = max(1, slots * max(1, sharers))
    needed = DESCRIPTORS_BASE + DESCRIPTORS_PER_JOB * jobs
    if hard == resource.RLIM_INFINITY or hard >= needed:
        return ""
    return (
        f"the limit of open files is {hard}; the {jobs} jobs that {slots} GPUs may get need {needed}. Jobs that find"
        " none left are refused here and placed on other hosts. Raise it: LimitNOFILE, or ulimit -Hn"
    )

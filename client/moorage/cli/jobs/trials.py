"""Trials of several hosts: a gang for each item of a file, each a job of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from moorage.cli.jobs.job_flags import JobFlags
from moorage.client.errors import rejected
from moorage.schemas.names import JOB_CHARS_MAX

if TYPE_CHECKING:
    from moorage.client.sweeps import Sweep
    from moorage.schemas.job import Request

#: trials of one submit. A trial is a gang, and a job: a tenant has fewer of these waiting than of replicas.
TRIALS_MAX: Final = 1000
#: the label that the trials of one submit have in common; its value is their --job
LABEL: Final = "sweep"
#: bytes of items: they stand in the requests, each in its trial's
_ITEMS_BYTES_MAX: Final = TRIALS_MAX * 32 * 1024


def has_trials(flags: JobFlags) -> bool:
    """Return whether the flags ask for a gang for each item of a file."""
    return flags.hosts is not None and (flags.each is not None or flags.each_line is not None)


def of_one_trial(flags: JobFlags) -> JobFlags:
    """Return the flags that each trial has, but for its id, its label and its item. Raises `Rejected` if one says what
    only replicas of one job could keep to."""
    for option, given in (("--array", flags.array), ("--max-running", flags.max_running)):
        if given is not None:
            raise rejected(
                "invalid-argument", f"{option} is for the replicas of one job, and each trial is a job of its own",
                found=given, next=f"leave out {option}: trials wait for room, and --priority says which go first",
            )  # fmt: skip
    return replace(flags, each=None, each_line=None)


def items_of_trials(flags: JobFlags, command: Sequence[str]) -> Sweep:
    """Read the items of the trials, all of them as values. Raises `Rejected`, with the line at fault."""
    from moorage.cli.jobs.sweep_flags import sweep_of

    sweep = sweep_of(flags, command, _ITEMS_BYTES_MAX)
    assert sweep is not None
    if sweep.values is None or sweep.size > TRIALS_MAX:
        raise rejected(
            "invalid-argument", f"{flags.each or flags.each_line} has too many trials", found=sweep.size,
            allowed=f"{TRIALS_MAX} trials", next="divide the file, and submit each part",
        )  # fmt: skip
    return sweep


def trials_of(request: Request, sweep: Sweep) -> list[Request]:
    """Return a request for each item: that of one trial, its id with the item's number behind it, and a label that all
    of them share. Each replica has its trial's item. Raises `Rejected`."""
    from moorage.client.request_builder import build_request

    labels = {LABEL: request.job, **request.labels}
    most = JOB_CHARS_MAX - len(f"-{sweep.size - 1}")
    if len(request.job or "") > most:
        raise rejected(
            "invalid-argument", f"--job: an id of {len(request.job or '')} characters, behind which the number of each"
            " trial stands, is too long", found=request.job, allowed=f"1..{most} characters", next="shorten it",
        )  # fmt: skip
    trials = []
    for at, value in enumerate(sweep.values or ()):
        fields = {"labels": labels, "items": [value] * request.copies}
        trials.append(build_request(request, None, f"{request.job}-{at}", fields))
    return trials

"""Check the keyword arguments of the SDK's methods that take fields of a request, and explain unknown ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from moorage.schemas.nearest import nearest

#: names that a thing has elsewhere (on the wire, at the command line, in other tools), and how it is given here
_HERE: Final = {
    "key": "a job's id is job='…'",
    "id": "a job's id is job='…'",
    "name": "a job's id is job='…'",
    "gpus": "GPUs are gpu='2xH100'",
    "count": "a number of GPUs is gpu='2xH100', a number of copies is replicas=2",
    "gang": "a gang is gpu=GpuSpec(count=2, scheduling='gang'), with replicas=…",
    "hosts": "replicas on a host each are gpu=GpuSpec(scheduling='gang', distinct_hosts=True), with replicas=…",
    "scheduling": "it is part of the GPUs: gpu=GpuSpec(count=2, scheduling='gang')",
    "run": "what to run is the first argument, a list of words",
    "argv": "what to run is the first argument, a list of words",
    "command": "what to run is the first argument, a list of words",
    "timeout": "how long the job may run is limit='10m', how long run and result wait is wait='10m'",
    "timeout_s": "how long the job may run is limit='10m'",
    "time_limit": "how long the job may run is limit='10m'",
    "wait": "a submit does not wait: it is an argument of run, and of the job's result",
    "deadline": "it is deadline_s=…, in seconds",
    "start_within": "it is start_within_s=…, in seconds",
    "at": "it is start_after_s=…, in seconds from now",
    "cpu": "processors are resources=Resources(cpu_milli=4000)",
    "memory": "host memory is resources=Resources(memory_mib=16384), a GPU's own is gpu='1xH100:80G'",
    "errors": "it is an argument of the job's answers: job.answers(errors='return')",
    "environment": "it is env={'NAME': 'value'}",
}


def check_keywords(given: Iterable[str], known: Collection[str], beside: str = "") -> None:
    """Raise TypeError for the first unknown keyword, with the right one or the nearest name.

    `beside` says why this method takes fewer keywords than others.
    """
    for name in given:
        if name in known:
            continue
        if name in _HERE and not beside:
            raise TypeError(f"no keyword {name!r} here: {_HERE[name]}")
        near = nearest(name, known)
        there = f"the nearest is {near!r}" if near else f"there are {', '.join(sorted(known))}"
        raise TypeError(f"no keyword {name!r} here{beside and f', {beside}'}: {there}")

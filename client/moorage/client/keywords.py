"""Explain unknown keyword arguments of the SDK's methods that take fields of a request, and unknown attributes."""

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
    "array": "copies are replicas=10, and a replica for each value is map(command, values)",
}
#: how much of an unknown keyword has to be that of a known one (difflib's ratio) to be told as the nearest
_NEAR: Final = 0.7
#: what people look for on a job, and what has it here
_OF_JOB: Final = {
    **dict.fromkeys(("id", "name", "job_id"), "its id is job.job"),
    **dict.fromkeys(("status", "done", "finished"), "job.show().state says how it is"),
    **dict.fromkeys(("wait", "get", "join", "value"), "job.result() waits for its end"),
    **dict.fromkeys(("stop", "kill", "terminate", "delete"), "job.cancel() ends it"),
    **dict.fromkeys(("log", "output", "stdout", "stderr", "tail"), "job.logs() has its output"),
    **dict.fromkeys(("code", "exit_code", "returncode"), "job.result().code is its exit code"),
    **dict.fromkeys(("retry", "rerun", "restart"), "job.again() runs it again"),
}
#: methods of a job
_JOBS_OWN: Final = ("cancel", "logs", "events", "show", "result", "explain", "exec", "forward", "files", "again")
#: and on a client
_OF_CLIENT: Final = {
    **dict.fromkeys(("jobs", "list", "list_jobs"), "client.ls() lists the jobs"),
    **dict.fromkeys(("get", "get_job"), "client.job('ID') is a handle on a job"),
    **dict.fromkeys(("nodes", "workers", "hosts", "gpus"), "client.fleet.show() has the workers"),
    "schedule": "client.schedules.add(…) makes one",
}


class Misused(TypeError):
    """A method of the SDK was called with what it does not take: the text says it, and no frame below the call does."""


def check_keywords(given: Iterable[str], known: Collection[str], beside: str = "") -> None:
    """Raise TypeError for the first unknown keyword, with the right one or the nearest name.

    `beside` says why this method takes fewer keywords than others.
    """
    for name in given:
        if name in known:
            continue
        if name in _HERE and not beside:
            raise Misused(f"no keyword {name!r} here: {_HERE[name]}")
        near = nearest(name, known, _NEAR)
        there = f"the nearest is {near!r}" if near else f"there are {', '.join(sorted(known))}"
        raise Misused(f"no keyword {name!r} here{beside and f', {beside}'}: {there}")


def no_attribute(of: object, name: str) -> AttributeError:
    """Return the error for an attribute that a job, a client or another object of the SDK lacks, with what has it."""
    kind = type(of).__name__
    told = ""
    if kind in ("AsyncJob", "Job"):
        told = _OF_JOB.get(name, "")
    elif kind in ("AsyncClient", "Client") and not name.startswith("_"):
        told = _OF_CLIENT.get(name, "")
        if not told and (name in _OF_JOB or name in _JOBS_OWN):
            told = f"with job = client.job('ID'), {_OF_JOB.get(name, f'it is job.{name}(…)')}"
    return AttributeError(f"{kind!r} object has no attribute {name!r}{told and f': {told}'}", name=name, obj=of)

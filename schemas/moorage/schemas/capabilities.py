"""What a driver can do, as its worker reports it in its hello. Outside of a driver's own file, this is all that is
known of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import msgspec

#: the driver of a job that names none
DRIVER_DEFAULT: Final = "process"
#: what may stand in `Capabilities.fence`
FENCES: Final = ("agent", "supervisor", "none")

#: how a job is kept to its part of a device. hard: it cannot take more, whatever it does; guarded: the worker ends it
#: within seconds if it takes more; advisory: its part is counted when it is placed, and that is all
Level = Literal["hard", "guarded", "advisory"]
#: weakest first
LEVELS: Final[tuple[Level, ...]] = ("advisory", "guarded", "hard")


class Enforced(msgspec.Struct, frozen=True, gc=False):
    """How strictly a job is kept to its part of a device. A level that this release does not know counts as
    advisory."""

    memory: str = "advisory"  # how memory is enforced: hard, guarded or advisory
    compute: str = "advisory"  # how compute time is enforced: hard, guarded or advisory


ADVISORY: Final = Enforced()
#: of a device that the job has alone, so that all of it is its part
WHOLE: Final = Enforced("hard", "hard")


#: what keeps a job to the devices of its lease: the kernel refuses to open others; or a variable names its own, which
#: a program may ignore
KERNEL: Final = "kernel"
VARIABLE: Final = "variable"

#: how an attempt takes another part of its device, see `Capabilities.resizes`
LIVE: Final = "live"
NEXT_ATTEMPT: Final = "next-attempt"
COUNTED: Final = "counted"
#: memory, then compute, where they differ
LIVE_MEMORY: Final = f"{LIVE} {NEXT_ATTEMPT}"


class Capabilities(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """What a driver can do. A capability that a worker does not report has the default here.

    `fence` says what ends the driver's attempts when the worker's lease runs out: `agent`, `supervisor` (also if the
    agent is dead), or `none`.
    """

    needs_argv: bool = False  # a job without `argv` is refused
    keeps_output: bool = False  # output can be asked for after it was written, also when the job is over
    ends_streams: bool = False  # the last frame of each stream of output says that it is the last
    returns_value: bool = False  # a job may leave a value in its tenant's bucket of results
    uses_devices: bool = True  # the memory of an attempt's GPUs must be seen free before they are used again
    answers_calls: bool = False  # a job may answer the calls of a service: it gets a key, and reaches the server
    #: a job may have ports of its worker (`run.ports`), which can look whether it is ready (`run.ready`)
    reaches: bool = False
    brings_files: bool = False  # a job may bring files, and keep what it writes into its folder
    sets_up: bool = False  # a job may have a command that prepares the host before its first attempt (`run.setup`)
    outlives_agent: bool = False  # attempts run on without the agent, and their ends are kept until it reports them
    freezes: bool = False  # attempts can be frozen, with the memory of their GPUs in the host's RAM, and resumed
    sleeps_engines: bool = False  # members of services over HTTP are put to sleep by a request of their own program
    execs: bool = False  # a command can be run in a running attempt, with its user, folder, environment and devices
    relimits: bool = False  # a running attempt can be given another time limit
    signals: bool = False  # a signal can be sent to the processes of a running attempt that handle it
    holds_stdin: bool = False  # a job may have a terminal that a caller holds (`run.stdin`)
    exec_instead: str = ""  # where `execs` is false: how else a user gets into a running attempt
    simulated_only: bool = False  # nothing really runs: only simulated workers may offer it
    fence: str = "agent"
    gpu_enabled: bool = True  # its jobs may have GPUs
    users: bool = True  # its jobs may run as any user; else only as the agent's own
    memory_limit: bool = True  # the host ends a job that takes more memory than it asked for
    devices: str = ""  # what keeps its jobs to the devices of their leases: kernel or variable; empty: not known
    #: the keys that it reads of `driver_config.<its name>`, others are refused; null: the driver checks them itself
    config: list[str] | None = None
    #: how an attempt takes another part of its device while it runs, by sharing mode: live, next-attempt or counted;
    #: two such words if memory and compute differ. A worker that does not report a mode cannot change what an attempt
    #: has
    resizes: dict[str, str] = {}
    #: how its jobs are kept to their part of a device, by sharing mode. For a mode that is not listed: exclusive is
    #: hard, since all of the device is the job's; the others are advisory, or refused to jobs of this driver
    enforced: dict[str, Enforced] = {}


#: a driver of which nothing is known
UNKNOWN: Final = Capabilities()

#: the drivers of which a client knows what they can do without asking; what a worker reports holds over it
KNOWN: Final[Mapping[str, Capabilities]] = {
    DRIVER_DEFAULT: Capabilities(
        needs_argv=True,
        keeps_output=True,
        ends_streams=True,
        answers_calls=True,
        reaches=True,
        brings_files=True,
        sets_up=True,
        outlives_agent=True,
        sleeps_engines=True,
        execs=True,
        relimits=True,
        signals=True,
        holds_stdin=True,
        fence="supervisor",
    ),
    "noop": Capabilities(
        keeps_output=True, reaches=True, brings_files=True, uses_devices=False, relimits=True, simulated_only=True
    ),
    "handler": Capabilities(
        ends_streams=True, returns_value=True, uses_devices=False, relimits=True, memory_limit=False
    ),
}


def level_number(word: str) -> int:
    """Return the position of a level in `LEVELS`; 0 for one that this release does not know."""
    return LEVELS.index(word) if word in LEVELS else 0


def mode_enforced(capabilities: Mapping[str, Capabilities], driver: str, mode: str) -> Enforced:
    """Return how strictly a worker with these capabilities keeps a driver's jobs to their part in a sharing mode."""
    usual = WHOLE if mode == "exclusive" else ADVISORY
    return capabilities.get(driver, UNKNOWN).enforced.get(mode, usual)


def mode_resizes(capabilities: Mapping[str, Capabilities], driver: str, mode: str) -> str:
    """Return how running attempts of a driver take another part of a device in a sharing mode; "" if they cannot."""
    return capabilities.get(driver, UNKNOWN).resizes.get(mode, "")


def memory_and_compute(resizes: str) -> tuple[str, str]:
    """Return how attempts take another part of memory and of compute, by the words of `mode_resizes`."""
    memory, _, compute = resizes.partition(" ")
    return memory, compute or memory


def job_enforced(by_mode: Enforced, mode: str, *, has_memory: bool, has_compute: bool) -> Enforced:
    """Return how strictly one job is kept to its part of memory and of compute: `by_mode` in the mode `exclusive`.

    In a shared mode, memory or compute of which the job names no part is `advisory`, because there is no part to keep
    it to.
    """
    if mode == "exclusive":
        return by_mode
    return Enforced(
        by_mode.memory if has_memory else ADVISORY.memory, by_mode.compute if has_compute else ADVISORY.compute
    )

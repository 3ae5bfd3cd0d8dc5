"""Make the variables of a job: those for its GPUs, its gang and itself, laid over the request's own.

A job inherits nothing of the agent's environment. Moorage alone decides which devices a job can see: a request's own
value for such a variable is dropped, even if moorage sets none.
"""

from __future__ import annotations

import pwd
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from moorage.schemas.errors import MoorageError, Refused, problem
from moorage.schemas.frames import ABOUT_THE_JOB, NOT_HERE, SETUP_FAILED, START_FAILED, Device
from moorage.schemas.gpu import Distributed, GpuSpec, Sharing
from moorage.schemas.reserved_variables import GANG_DEFAULTS, MPS_DIRECTORIES, is_reserved
from moorage.system.device_environment import JobEnvironment, apply_tf_paths, device_environment

PATH_DEFAULT: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

#: Every driver of processes and containers sets it unless the request does: Python's prints are seen as they come, and
#: those of a program that is killed are not lost.
UNBUFFERED: Final = {"PYTHONUNBUFFERED": "1"}

#: the variable that names the network interface, by backend of the gang; other backends have none
_INTERFACE_NAMES: Final = {"nccl": "NCCL_SOCKET_IFNAME", "gloo": "GLOO_SOCKET_IFNAME"}


def start_failed(why: str) -> str:
    """Return why an attempt did not start, with the prefix of such reasons, unless it says whose fault it is."""
    return why if why.startswith((START_FAILED, *ABOUT_THE_JOB)) else f"{START_FAILED}: {why}"


def without_prefix(error: MoorageError) -> str:
    """Return why an attempt did not start, without the prefix of such reasons."""
    return error.problem.message.removeprefix(f"{START_FAILED}: ")


class LacksHere(Refused):
    """This host lacks something that an attempt needs: a secret, user, folder, program or image.

    The job goes to another host, at no cost, and ends if enough hosts lack it.
    """

    def __init__(self, why: str, *, found: object = None, next_step: str = "") -> None:
        super().__init__(problem("failed-precondition", why, found=found, next=next_step))


class SetupFailed(Refused):
    """The setup of a job failed, and would fail on every host. `exit_code` is what the job ends with."""

    def __init__(self, exit_code: int, why: str) -> None:
        super().__init__(problem("failed-precondition", f"{SETUP_FAILED}{why}"))
        self.exit_code = exit_code


def not_here(error: MoorageError) -> str:
    """Return the reason of a refusal with which the job goes to another host; "" if the job itself is at fault.

    This host lacks what the job needs, or its own rules do not let the job have it.
    """
    if isinstance(error, LacksHere) or error.problem.code == "not-permitted":
        return f"{NOT_HERE}{error.problem.message}"
    return ""


@dataclass(frozen=True, slots=True)
class Gang:
    """How the ranks of a gang meet, from START. `interface` is set only if hello names one.

    `least` is with how many it might have started; 0 if it has a fixed size. `rank` is None where the replica is it.
    """

    world_size: int
    master_addr: str
    master_port: int
    interface: str | None = None
    least: int = 0
    rank: int | None = None


# ------------------------------------------------------------------------------------------------ what we set


def gpu_environment(
    devices: Sequence[Device],
    *,
    tenant: str,
    job: str,
    replica: int,
    attempt: int,
    fence: int,
    mode: Sharing = "exclusive",
    gpu_spec: GpuSpec | None = None,
    gang: Gang | None = None,
    traceparent: str = "",
    worker: str = "",
    simulated: bool = False,
    has_own_mps: bool = False,
    by_uuid: bool = False,
    sees_only_its_own: bool = False,
) -> JobEnvironment:
    """Return the variables of one attempt: those of `device_environment`, its name, and how it meets its gang.

    Raises SharingUnavailable as `device_environment` does.
    """
    spec = gpu_spec or GpuSpec()
    environment = device_environment(
        devices, mode, spec,
        simulated=simulated, has_own_mps=has_own_mps, by_uuid=by_uuid, sees_only_its_own=sees_only_its_own,
    )  # fmt: skip
    environment |= {
        "MOORAGE_JOB": job,
        "MOORAGE_TENANT": tenant,
        "MOORAGE_REPLICA": str(replica),
        "MOORAGE_INDEX": str(replica),
        "MOORAGE_ATTEMPT": str(attempt),
        "MOORAGE_FENCE": str(fence),
        "MOORAGE_WORKER": worker,
    }
    if gang is not None:
        environment.update(
            _gang_variables(
                gang, replica if gang.rank is None else gang.rank, (spec.distributed or Distributed()).backend
            )
        )
    if traceparent:
        environment["TRACEPARENT"] = traceparent
    return environment


def _gang_variables(gang: Gang, rank: int, backend: str) -> dict[str, str]:
    """Return the variables for one rank per replica: an attempt sees only its devices, so its local world size is 1."""
    variables = {
        "WORLD_SIZE": str(gang.world_size),
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": gang.master_addr,
        "MASTER_PORT": str(gang.master_port),
        # Lightning takes its node from this alone, and torchrun its arguments from PET_* (`GANG_DEFAULTS`)
        "NODE_RANK": str(rank),
        "PET_NNODES": f"{gang.least}:{gang.world_size}" if 0 < gang.least < gang.world_size else str(gang.world_size),
        "PET_NODE_RANK": str(rank),
        "PET_MASTER_ADDR": gang.master_addr,
        "PET_MASTER_PORT": str(gang.master_port),
    }
    name = _INTERFACE_NAMES.get(backend)
    if name and gang.interface:
        variables[name] = gang.interface
    return variables


# ------------------------------------------------------------------------------------- the request's, and ours over it


def lay_over(requested: Mapping[str, str], ours: Mapping[str, str]) -> JobEnvironment:
    """Return the request's variables with ours over them, without the request's reserved names, even if we set none.

    Of ours, `GANG_DEFAULTS` alone give way to the request's, and the directory that `apart_from_mps` names: only for a
    client of MPS do we set the directory of logs, too.
    """
    free = () if MPS_DIRECTORIES[1] in ours else MPS_DIRECTORIES
    kept = {name: value for name, value in requested.items() if not is_reserved(name) or name in free}
    given = {name: value for name, value in ours.items() if name not in (*GANG_DEFAULTS, *free) or name not in kept}
    return JobEnvironment({**kept, **given})


def process_environment(
    requested: Mapping[str, str],
    ours: Mapping[str, str],
    *,
    user: str | None = None,
    cwd: str | None = None,
    folder: str = "",
) -> JobEnvironment:
    """Return the whole environment of a plain process: a small base, the request's over it, ours over both, paths
    applied.

    `HOME` is the attempt's own `folder`; without one the job user's home, or `cwd`, or `/`. Secrets in `requested` are
    resolved already.
    """
    base = {"PATH": PATH_DEFAULT, "HOME": folder or _home(user) or cwd or "/", "LANG": "C.UTF-8", **UNBUFFERED}
    return JobEnvironment(apply_tf_paths({**base, **lay_over(requested, ours)}))


def _home(user: str | None) -> str:
    if user is None:
        return ""
    try:
        entry = pwd.getpwuid(int(user)) if user.isdigit() else pwd.getpwnam(user)
    except (KeyError, ValueError, OverflowError):  # an unknown user, or an invalid name: it may contain a NUL
        return ""  # the start of the process refuses such a user with a better error
    return entry.pw_dir

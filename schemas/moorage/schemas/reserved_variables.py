"""The variables of a job that moorage sets itself. A request's own value for one of them is dropped."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Final

#: the variables that tell an MPS client the daemon's directories
MPS_DIRECTORIES: Final = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
#: code of the warning about a job that would join an MPS daemon of its own choice
JOINS_MPS: Final = "joins-mps"
#: names that decide which devices a job sees or shares
RESERVED: Final = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "NVIDIA_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "GPU_DEVICE_ORDINAL",
        "ZE_AFFINITY_MASK",
        "ZE_ENABLE_PCI_ID_DEVICE_ORDER",
        "ZE_FLAT_DEVICE_HIERARCHY",
        *MPS_DIRECTORIES,
    }
)
#: `NVIDIA_`: NVIDIA's container toolkit mounts more devices by some of them (NVIDIA_IMEX_CHANNELS, NVIDIA_GDS)
RESERVED_PREFIXES: Final = ("MOORAGE_", "NVIDIA_")
#: CUDA's libraries read it, the toolkit does not: it says how numbers are rounded
NOT_RESERVED: Final = frozenset({"NVIDIA_TF32_OVERRIDE"})
#: names that a gang's replicas get, so that they find each other
OF_GANGS: Final = frozenset({"WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})
#: names by which frameworks find their node in a gang; a request's own value goes before
GANG_DEFAULTS: Final = frozenset({"NODE_RANK", "PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"})
#: a part of a variable's name, between underscores, with which its value is likely to be a secret
_SECRET: Final = re.compile(r"(^|[_-])[A-Z0-9]*(KEY|TOKEN|SECRET|PASSWORD)S?\d*([_-]|$)", re.IGNORECASE)
#: what trainers call the tokens of a text
_NO_SECRET: Final = re.compile(r"(MAX|MIN|NUM|PAD|BOS|EOS|UNK)_(\w+_)?TOKENS?(_\w+)?|MONKEY|TURKEY", re.IGNORECASE)
#: code of the warning about a variable whose value looks like a secret
SHOWS_SECRET: Final = "secret"
#: code of the warning about reserved ones
WARNING: Final = "reserved-variable"
_NAMED_MAX: Final = 8


def is_reserved(name: str) -> bool:
    """Return whether a request cannot set this variable, whatever else it asks for."""
    return name in RESERVED or (name.startswith(RESERVED_PREFIXES) and name not in NOT_RESERVED)


def is_secret_name(name: str) -> bool:
    """Return whether the value of a variable with this name is likely to be a secret."""
    return _SECRET.search(name) is not None and _NO_SECRET.fullmatch(name) is None


def stored_as(name: str) -> str:
    """Return the usual name of a worker's secret for a variable: `hf-token` of HF_TOKEN."""
    return name.lower().replace("_", "-")


def shown_secrets(names: Iterable[str]) -> list[str]:
    """Return the warning about variables whose values stand in a request and look like secrets."""
    if not (found := [name for name in names if is_secret_name(name)]):
        return []
    told = ", ".join(found[:_NAMED_MAX]) + (f" and {len(found) - _NAMED_MAX} more" if len(found) > _NAMED_MAX else "")
    return [
        f"{SHOWS_SECRET}: the value of {told} is in the request, the ledger and moorage show; if it is a secret: "
        f"--secret {found[0]}={stored_as(found[0])}"
    ]


def warnings_of(names: Collection[str], *, gang: bool, mps: bool) -> list[str]:
    """Return the warnings about those of a request's variables that are dropped, and about a daemon that it names.

    A job that shares by mps cannot name another daemon; others may, by its pipe directory.
    """
    own = () if mps else MPS_DIRECTORIES
    found = [dropped] if (dropped := _dropped([name for name in names if name not in own], gang=gang)) else []
    if not mps and (pipe := MPS_DIRECTORIES[0]) in names:
        found.append(
            f"{JOINS_MPS}: the request sets {pipe}: the job joins the MPS daemon there, if one runs; it shares that"
            " daemon's faults then, and cannot be frozen"
        )
    return found


def _dropped(names: Iterable[str], *, gang: bool) -> str:
    dropped = sorted(name for name in names if is_reserved(name) or (gang and name in OF_GANGS))
    if not dropped:
        return ""
    more = f" and {len(dropped) - _NAMED_MAX} more" if len(dropped) > _NAMED_MAX else ""
    named = ", ".join(dropped[:_NAMED_MAX]) + more
    if len(dropped) == 1:
        return f"{WARNING}: {named} is set by moorage; the request's value is dropped"
    return f"{WARNING}: {named} are set by moorage; the request's values are dropped"

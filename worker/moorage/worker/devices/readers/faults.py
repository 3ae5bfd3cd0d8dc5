"""Classify faults of a device: how grave each is, and which of NVIDIA's Xid events the job or the device has caused.

Sources: NVIDIA's Xid catalogue (docs.nvidia.com/deploy/xid-errors, "Analyzing Xid Errors with the Xid Catalog") with
its resolution buckets, the NVML reference for remapped rows and the GPU recovery action, NVIDIA's Kubernetes device
plugin for the list of application errors. A recovery action from the driver overrides the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Literal

Health = Literal[
    "ok",
    "thermal",
    "ecc",
    "xid",
    "remap",
    "reset-needed",
    "missing",
    "unresponsive",
    "fabric",
    "probation",
    "mig",
    "cdi",
    "check",
]

DETAIL_CHARS_MAX: Final = 120


class Gravity(IntEnum):
    """What follows from a fault. Of several faults the gravest decides."""

    #: nothing: the job caused it, or the driver has handled it; while it lasts, load frames have it as a warning
    NOTE = 0
    #: nothing new is placed on the device while the fault lasts; running jobs go on
    CLOSED = 1
    #: jobs leave the device; once it is clean it is on probation, then open again
    FAILED = 2
    #: as FAILED, but only a reset helps: a reboot of the machine, or an operator's order
    RESET = 3


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault. `detail` is one readable line, at most `DETAIL_CHARS_MAX`, that stays the same while the fault lasts."""

    kind: Health
    gravity: Gravity
    detail: str


#: Caused by the job: the driver has ended its context, the device is well (bucket RESTART_APP or IGNORE).
XIDS_OF_APPLICATIONS: Final = frozenset({8, 11, 13, 31, 32, 37, 43, 45, 68, 69, 94, 109, 126})
#: Recorded and handled by the driver; a pending remapping shows in the remapped rows.
XIDS_DEALT_WITH: Final = frozenset({63, 92, 154})
#: Only a reset (bucket RESET_GPU) or a reboot (RESTART_BM) helps.
XIDS_RESET: Final = frozenset({46, 48, 62, 64, 74, 79, 95, 110, 119, 120, 136, 140, 142, 143, 151, 155, 156, 158})

_MEANINGS: Final = {
    46: "the GPU stopped processing",
    48: "an uncorrectable (double-bit) memory error",
    62: "the GPU's own microcontroller halted",
    64: "a row of memory could not be remapped",
    74: "an NVLink error",
    79: "the GPU has fallen off the bus",
    95: "an uncontained memory error",
    110: "a security fault",
    119: "the GPU's system processor (GSP) does not answer",
    120: "an error of the GPU's system processor (GSP)",
    140: "an unrecovered memory error",
    143: "the GPU could not be initialised",
}

#: nvml.h: what the driver recommends, by NVML_FI_DEV_GET_GPU_RECOVERY_ACTION; with other values the table decides.
RECOVERY_ACTIONS: Final = {
    1: "the driver asks for a reset of the GPU",
    2: "the driver asks for a reboot of the machine",
    4: "the driver asks to drain the GPU, then to reset it",
    6: "the driver asks for a reset of the bus",
    7: "the driver asks for a reboot of the system",
}

#: nvml.h: NVML_GPU_FABRIC_STATE_*, and where NVML_GPU_FABRIC_HEALTH_MASK has its word on routes
_FABRIC_WAITS: Final = {1: "not started", 2: "in progress"}
_FABRIC_COMPLETED: Final = 3
_ROUTE_UNHEALTHY: Final = 4
_HEALTH_TRUE: Final = 1
_FABRIC_NEXT: Final = "is nvidia-fabricmanager running?"


def of_xid(xid: int) -> Fault:
    """Return the fault of an Xid event. An unknown event fails the device: it comes back after its probation."""
    if xid in XIDS_OF_APPLICATIONS or xid in XIDS_DEALT_WITH:
        gravity = Gravity.NOTE
    else:
        gravity = Gravity.RESET if xid in XIDS_RESET else Gravity.FAILED
    meaning = _MEANINGS.get(xid, "")
    return Fault("xid", gravity, f"Xid {xid}: {meaning}" if meaning else f"Xid {xid}")


def of_rows(pending: bool, failed: bool) -> Fault | None:
    """Return the fault of row remapping (Ampere and newer), None without one.

    A failed remapping is permanent, a pending one lasts until the GPU is reset.
    """
    if failed:
        return Fault("remap", Gravity.RESET, "a row of memory could not be remapped: the GPU is to be replaced")
    if pending:
        return Fault("reset-needed", Gravity.CLOSED, "a row of memory waits for a reset of the GPU to be remapped")
    return None


def of_recovery_action(action: int) -> Fault | None:
    text = RECOVERY_ACTIONS.get(action)
    return Fault("reset-needed", Gravity.RESET, text) if text is not None else None


def of_fabric(state: int, status: int, health: int) -> Fault | None:
    """Return the fault of the NVLink fabric of a GPU, None without one or if it is ready.

    `state`, `status` and `health` are nvml.h's `nvmlGpuFabricInfo_v2_t`; `health` is 0 if the driver reports none.
    NVML answers for such a GPU as for a well one, and every CUDA program on it fails (802, system not yet initialized).
    """
    if state in _FABRIC_WAITS:
        return Fault(
            "fabric", Gravity.CLOSED, f"the NVLink fabric is not ready ({_FABRIC_WAITS[state]}): {_FABRIC_NEXT}"
        )
    if state == _FABRIC_COMPLETED and status != 0:
        return Fault("fabric", Gravity.CLOSED, f"the GPU could not join the NVLink fabric (NVML error {status})")
    if health >> _ROUTE_UNHEALTHY & 3 == _HEALTH_TRUE:
        return Fault("fabric", Gravity.CLOSED, "a route of the NVLink fabric is broken")
    return None


GPU_LOST: Final = Fault("missing", Gravity.RESET, "the GPU is lost: it has fallen off the bus")
RESET_REQUIRED: Final = Fault("reset-needed", Gravity.RESET, "the driver says that the GPU needs a reset")
UNRESPONSIVE: Final = Fault("unresponsive", Gravity.CLOSED, "the GPU does not answer")
SLOWED_DOWN: Final = Fault("thermal", Gravity.CLOSED, "the GPU slows itself down against heat")


def gravest(faults: tuple[Fault, ...]) -> Fault | None:
    """Return the gravest fault, of several equal ones the first; None without faults."""
    return max(faults, key=lambda fault: fault.gravity, default=None)

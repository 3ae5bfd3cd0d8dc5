"""The parts of a worker for a driver of processes in a test."""

from __future__ import annotations

from typing import Any, Literal

from moorage.worker.drivers.kit import Kit
from moorage.worker.drivers.policy import Policy
from moorage.worker.drivers.supervisor_link import SupervisorLink
from moorage.worker.settings import WorkerSettings


def kit_of(
    link: SupervisorLink,
    *,
    simulated: bool = False,
    device_fence: Literal["auto", "require", "off"] = "auto",
    **parts: Any,
) -> Kit:
    """Return the kit of the worker `w1`, with its state in its supervisor's folder."""
    settings = WorkerSettings(link.state, "w1", device_fence=device_fence)
    return Kit("w1", settings, Policy.of(settings), link, 0, simulated, **parts)

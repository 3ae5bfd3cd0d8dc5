"""Read from a pod's status whether its attempt waits, runs or is over, and what is at fault. Without I/O.

An attempt is over when the kubelet reports it: its container is terminated, or the kubelet refused the pod and made no
container. A deleted pod, or one that another part of the cluster marked as failed, proves nothing about the node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, Literal, NamedTuple

from moorage.schemas.frames import CANNOT_RUN, NOT_HERE, START_FAILED
from moorage.schemas.printable import shortened
from moorage.worker.driver import CODE_LOST
from moorage.worker.drivers.container.engine import EngineError
from moorage.worker.drivers.container.faults import NO_IMAGE, start_fault
from moorage.worker.drivers.container.verdict import out_of_memory
from moorage.worker.drivers.kubernetes.pod import CONTAINER, ENDS
from moorage.worker.start_codes import CODE_CANNOT_START

#: a kubelet's reasons for a container whose program it could not start
_NOT_STARTED: Final = ("StartError", "ContainerCannotRun", "RunContainerError")
#: the reason for an image whose name is invalid, and reasons for one that the node will not get
_NO_NAME: Final = "InvalidImageName"
_BAD_IMAGE: Final = (_NO_NAME, "ErrImageNeverPull")
_PULLING: Final = ("ErrImagePull", "ImagePullBackOff", "RegistryUnavailable", "ImageInspectError")
_TEXT_CHARS_MAX: Final = 300


class Seen(NamedTuple):
    """The state of an attempt by its pod's status.

    `waiting`: its container has not begun, for the reason `why`. `ended`: its container has run and is over, with
    `code`, or the pod's time ran out before the container began. `refused` and `failed`: its container has not run, by
    a fault of the node, or of the job, with `code`. A `failed` pod without `is_over` must still be removed. `began` is
    set if its container is known to have begun. `mark` is a word of `ABOUT_THE_JOB` if it says what is at fault.
    """

    kind: Literal["waiting", "running", "ended", "refused", "failed"]
    why: str = ""
    code: int = 0
    is_over: bool = False
    began: bool = False
    mark: str = ""

    @property
    def reason(self) -> str:
        """The reason of a start that failed, with the prefix that says whose fault it is."""
        return f"{self.mark or f'{START_FAILED}: '}{self.why}"


def read(pod: Mapping[str, Any]) -> Seen:
    """Return the state of an attempt by its pod's status."""
    status = pod.get("status", {})
    container = _own(status.get("containerStatuses"))
    state = container.get("state") or {}
    if (terminated := state.get("terminated")) is not None:
        return _terminated(pod, terminated)
    if status.get("phase") == "Failed" and not container.get("containerID") and not _is_forgotten(status):
        if status.get("reason") == "DeadlineExceeded":
            return Seen("ended", "timeout", CODE_LOST, is_over=True)
        return Seen("refused", f"the node refused the pod: {_text(status)}", is_over=True)
    if "running" in state:
        return Seen("running", began=True)
    waiting = state.get("waiting") or {}
    reason, text = waiting.get("reason", ""), _text(waiting)
    if reason in _BAD_IMAGE or (reason in _PULLING and NO_IMAGE.search(waiting.get("message", ""))):
        mark = CANNOT_RUN if reason == _NO_NAME else NOT_HERE
        return Seen("failed", f"image {_image(pod)} cannot be pulled: {text}", CODE_CANNOT_START, mark=mark)
    return Seen("waiting", f"image {_image(pod)} cannot be pulled: {text}" if reason in _PULLING else text)


def _terminated(pod: Mapping[str, Any], terminated: Mapping[str, Any]) -> Seen:
    status, reason = pod["status"], terminated.get("reason", "")
    if reason in _NOT_STARTED:
        fault = start_fault(EngineError(500, terminated.get("message") or reason), is_created=True)
        if fault.code is None:
            return Seen("refused", str(fault), is_over=True)
        return Seen("failed", str(fault), fault.code, is_over=True)
    code, began = int(terminated.get("exitCode", CODE_LOST)), bool(terminated.get("startedAt"))
    if reason == "OOMKilled" and code != 0:
        code, why = out_of_memory(code)
        return Seen("ended", why, code, is_over=True, began=True)
    why = "exit"
    if status.get("reason") == "DeadlineExceeded":
        why = "timeout"
    elif status.get("reason") or reason == "ContainerStatusUnknown":  # Evicted, Preempting, Terminated, NodeLost
        why = "lost"
    if (asked := asked_at(pod)) is not None and not _was_before(terminated, asked):
        why = pod["metadata"].get("annotations", {}).get(ENDS, "lost" if why == "exit" else why)
    if why != "exit" and code in (137, 143):
        code = 128 - code  # ended by the kubelet's signal
    return Seen("ended", why, code, is_over=True, began=began)


def asked_at(pod: Mapping[str, Any]) -> datetime | None:
    """Return when the pod was asked to end; None if it was not."""
    metadata = pod["metadata"]
    if "deletionTimestamp" not in metadata:
        return None
    until = datetime.fromisoformat(metadata["deletionTimestamp"])
    return until - timedelta(seconds=metadata.get("deletionGracePeriodSeconds") or 0)


def waited_s(pod: Mapping[str, Any]) -> float:
    """Return how many seconds the kubelet had the pod before its running container began; 0 if unknown."""
    status = pod.get("status", {})
    container = _own(status.get("containerStatuses"))
    began = ((container.get("state") or {}).get("running") or {}).get("startedAt")
    if began is None or "startTime" not in status:
        return 0.0
    return max(0.0, (datetime.fromisoformat(began) - datetime.fromisoformat(status["startTime"])).total_seconds())


def _was_before(terminated: Mapping[str, Any], moment: datetime) -> bool:
    ended = terminated.get("finishedAt")
    return ended is not None and datetime.fromisoformat(ended) < moment


def _is_forgotten(status: Mapping[str, Any]) -> bool:
    """Return whether the cluster, not the kubelet, marked the pod as failed, because its node is gone."""
    return any(
        each.get("type") == "DisruptionTarget" and each.get("reason") == "DeletionByPodGC"
        for each in status.get("conditions") or ()
    )


def _own(containers: Sequence[Mapping[str, Any]] | None) -> Mapping[str, Any]:
    """Return the attempt's own container, or its status: a cluster may add others, as a service mesh does."""
    return next((each for each in containers or () if each.get("name") == CONTAINER), {})


def _image(pod: Mapping[str, Any]) -> str:
    return str(_own(pod["spec"]["containers"]).get("image", ""))


def _text(said: Mapping[str, Any]) -> str:
    words = [str(said[key]) for key in ("reason", "message") if said.get(key)]
    return shortened(": ".join(words), _TEXT_CHARS_MAX)

"""Make the pod of an attempt, by the operator's settings. Without I/O.

An attempt is one pod with one container, bound to the worker's node. The pod itself has what the driver needs to know
again: labels to find the worker's pods, and the attempt's name as an annotation.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from moorage.schemas.attempt import AttemptName
from moorage.schemas.errors import refuse
from moorage.schemas.job import Request, Secret
from moorage.system.device_environment import JobEnvironment, apply_tf_paths_over
from moorage.worker.attempt.environment import PATH_DEFAULT, UNBUFFERED, lay_over
from moorage.worker.driver import Assignment
from moorage.worker.drivers.container.config import FOLDER_AT, ImageSettings, ids_of

#: the one container of a pod
CONTAINER: Final = "job"
#: label by which a worker finds its pods: a digest of the deployment and the worker's id
LABEL: Final = "moorage/worker"
#: the attempt's name, as JSON
ATTEMPT: Final = "moorage/member"
#: the devices' slots, separated by commas; used to count what other pods use
SLOTS: Final = "moorage/slots"
#: why moorage asked the pod to end: written before the pod is deleted, so that the next agent knows it, too
ENDS: Final = "moorage/ends"
#: `run.timeout_s`
TIMEOUT: Final = "moorage/timeout"
#: keeps a deleted pod in the cluster until its end is in the ledger
FINALIZER: Final = "moorage/ended"
#: variables that a device plugin sets instead of moorage
_OF_DEVICES: Final = (
    "MOORAGE_GPU_UUIDS", "MOORAGE_GPU_INDICES", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER",
    "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "ZE_ENABLE_PCI_ID_DEVICE_ORDER",
    "ZE_FLAT_DEVICE_HIERARCHY",
)  # fmt: skip
_PULL: Final = {"missing": "IfNotPresent", "always": "Always", "never": "Never"}
_DIGEST_CHARS: Final = 40


def owner_label(prefix: str, worker: str) -> str:
    """Return the value of `LABEL` for the pods of a worker; `prefix` is that of the deployment's subjects."""
    return _digest(prefix, worker)


def pod_name(owner: str, name: AttemptName) -> str:
    """Return the name of an attempt's pod. It is the same for the same attempt, so a second pod cannot be created."""
    return f"moorage-{_digest(owner, *map(str, name))}"


def _digest(*words: str) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:_DIGEST_CHARS]


def attempt_of(pod: Mapping[str, Any]) -> AttemptName | None:
    """Return the attempt of a pod; None if its annotation names none."""
    text = pod["metadata"].get("annotations", {}).get(ATTEMPT, "")
    try:
        name: AttemptName = msgspec.json.decode(text, type=AttemptName)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return name


def check_request(request: Request) -> None:
    """Raise Refused for what no pod can offer: `invalid-argument` if no other worker could run it either."""
    run, gpu = request.workload, request.gpu
    if run.checkpoint_signal is not None:
        raise refuse(
            "invalid-argument",
            "a pod gets no checkpoint signal: Kubernetes sends SIGTERM, and grace_s later SIGKILL",
            field="$.run.checkpoint_signal",
            found=run.checkpoint_signal,
            allowed="none, with a grace_s in which the job can save its work",
        )
    if gpu is not None and (gpu.scheduling == "gang" or gpu.distributed is not None):
        raise refuse(
            "failed-precondition",
            "the driver kubernetes runs no gang: a rank lost with its node is kept, and would block the others",
            field="$.gpu.scheduling",
            found="gang",
        )
    if gpu is not None and gpu.effective_sharing != "exclusive":
        raise refuse(
            "failed-precondition",
            "the driver kubernetes leases whole units of its resource: the cluster decides whether a unit is a share",
            field="$.gpu.sharing",
            found=gpu.effective_sharing,
            allowed="exclusive, on a worker whose resource is one of shares",
        )


def secret_of(owner: str, name: AttemptName, resolved: Mapping[str, str]) -> dict[str, Any]:
    """Return the Secret of an attempt's pod, with these variables' values, resolved already."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": pod_name(owner, name), "labels": {LABEL: owner}},
        "type": "Opaque",
        "stringData": dict(resolved),
    }


def pod_of(
    assignment: Assignment,
    settings: ImageSettings,
    *,
    owner: str,
    node: str,
    resource: str,
    start_within_s: float,
    slots: tuple[int, ...] = (),
    folder_bytes: int = 0,
    pull_secrets: tuple[str, ...] = (),
    runtime_class: str = "",
    user: str | None = None,
    simulated: bool = False,
) -> dict[str, Any]:
    """Return the pod of an attempt. Raises SharingUnavailable, and Refused for a user without a number.

    `user` is from the worker's policy or the request. `start_within_s` is how long the pod may wait for its container;
    it does not count towards the job's time-out. Values of secrets are not in the pod but in `secret_of`.
    """
    name, request, run = assignment.name, assignment.request, assignment.run
    ours: dict[str, str] = assignment.environment(simulated=simulated)
    limits: dict[str, str] = {}
    if (resources := request.resources) is not None:
        if resources.cpu_milli:
            limits["cpu"] = f"{resources.cpu_milli}m"
        if resources.memory_mib:
            limits["memory"] = f"{resources.memory_mib}Mi"
    if assignment.devices and not simulated:
        assert request.effective_gpu is not None
        limits |= {resource: str(request.effective_gpu.count)}
        ours = {key: value for key, value in ours.items() if key not in _OF_DEVICES}
        ours["NVIDIA_DRIVER_CAPABILITIES"] = settings.nvidia_capabilities
    base = UNBUFFERED | {"HOME": FOLDER_AT}
    plain = lay_over(base | {key: value for key, value in run.env.items() if isinstance(value, str)}, ours)
    plain = JobEnvironment(apply_tf_paths_over({"PATH": PATH_DEFAULT}, plain))  # what the image has is not known here
    hidden = lay_over({key: value.secret for key, value in run.env.items() if isinstance(value, Secret)}, {})
    env: list[dict[str, Any]] = [{"name": key, "value": literal(value)} for key, value in plain.items()]
    env += [
        {"name": key, "valueFrom": {"secretKeyRef": {"name": pod_name(owner, name), "key": key}}}
        for key in hidden
        if key not in ours
    ]
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": request.image,
        "imagePullPolicy": _PULL[settings.pull],
        "env": env,
        "resources": {"limits": limits, "requests": limits},
        "securityContext": {"allowPrivilegeEscalation": False, "privileged": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "work", "mountPath": FOLDER_AT}, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    if run.argv:
        container["args"] = [literal(word) for word in run.argv]
    if run.cwd or run.argv:  # an image's own command starts in the image's own folder
        cwd = run.cwd or ""
        container["workingDir"] = cwd if cwd.startswith("/") else f"{FOLDER_AT}/{cwd}".rstrip("/")
    spec: dict[str, Any] = {
        "nodeName": node,
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "hostNetwork": False,
        "terminationGracePeriodSeconds": grace_s_of(run.grace_s),
        # a cluster evicts pods from a node that does not answer, and forgets them: this pod ends only when moorage ends
        # it
        "tolerations": [{"operator": "Exists"}],
        "containers": [container],
        "volumes": [
            {"name": "work", "emptyDir": {"sizeLimit": str(folder_bytes)} if folder_bytes else {}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": str(settings.shm)}},
        ],
    }
    if (context := _user_of(user, settings)) is not None:
        spec["securityContext"] = context
    if (limit_s := active_deadline_s(assignment, start_within_s)) is not None:
        spec["activeDeadlineSeconds"] = limit_s
    if pull_secrets:
        spec["imagePullSecrets"] = [{"name": each} for each in pull_secrets]
    if runtime_class:
        spec["runtimeClassName"] = runtime_class
    annotations = {ATTEMPT: msgspec.json.encode(name).decode(), SLOTS: ",".join(map(str, slots))}
    if run.timeout_s is not None:
        annotations[TIMEOUT] = str(run.timeout_s)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": pod_name(owner, name),
            "labels": {LABEL: owner, "app.kubernetes.io/managed-by": "moorage"},
            "annotations": annotations,
            "finalizers": [FINALIZER],
        },
        "spec": spec,
    }


def literal(text: str) -> str:
    """Return text that the kubelet's expansion of `$(NAME)` turns back into this text: there `$$` is one `$`."""
    return text.replace("$", "$$")


def grace_s_of(grace_s: float) -> int:
    """Return a grace in whole seconds, at least 1: with 0 a cluster forgets the pod, even if it still runs."""
    return max(1, math.ceil(grace_s))


def active_deadline_s(assignment: Assignment, start_within_s: float) -> int | None:
    """Return after how many seconds the kubelet ends the pod, counted from when it takes the pod; None for never.

    The pod ends at its time-out or its deadline, whichever is first. The time-out begins with the container, which may
    take `start_within_s`: once the container runs, the driver sets the exact end (`exact_deadline_s`).
    """
    timeout_s = assignment.run.timeout_s
    ends = [] if timeout_s is None else [timeout_s + start_within_s]
    if assignment.ends_in_s is not None:
        ends.append(assignment.ends_in_s)
    return max(1, math.ceil(min(ends))) if ends else None


def exact_deadline_s(pod: Mapping[str, Any], waited_s: float) -> int | None:
    """Return the new `activeDeadlineSeconds` of a pod whose container began `waited_s` after the kubelet took the pod.

    Return None if it need not change. A cluster only lets it become less.
    """
    timeout = pod["metadata"].get("annotations", {}).get(TIMEOUT)
    before = pod["spec"].get("activeDeadlineSeconds")
    if timeout is None or before is None:
        return None
    exact = max(1, math.ceil(float(timeout) + waited_s))
    return exact if exact < before else None


def _user_of(user: str | None, settings: ImageSettings) -> dict[str, Any] | None:
    if user is None and settings.user == "image":
        return None
    ids = ids_of(settings.user if user is None else f"{user}:{user}")
    if ids is None:
        raise refuse(
            "invalid-argument", "the user of a pod must be a number", field="$.run.user", found=user, allowed="a number"
        )
    uid, gid = ids
    return {"runAsUser": uid, "runAsGroup": gid, "fsGroup": gid}

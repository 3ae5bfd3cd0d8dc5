"""What the driver kubernetes makes of a request, and of a pod's status, without a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec
import pytest

from moorage.schemas.attempt import AttemptName
from moorage.schemas.errors import Refused
from moorage.schemas.frames import Device
from moorage.schemas.gpu import GpuSpec
from moorage.schemas.job import Request, Resources, Run, Secret
from moorage.worker.attempt.environment import PATH_DEFAULT
from moorage.worker.driver import Assignment
from moorage.worker.drivers.container.config import FOLDER_AT
from moorage.worker.drivers.container.engine import lines_of
from moorage.worker.drivers.kubernetes.devices import devices_of, is_ready, taken_slots, units
from moorage.worker.drivers.kubernetes.pod import (
    ATTEMPT,
    ENDS,
    FINALIZER,
    LABEL,
    SLOTS,
    attempt_of,
    check_request,
    exact_deadline_s,
    grace_s_of,
    owner_label,
    pod_name,
    pod_of,
    secret_of,
)
from moorage.worker.drivers.kubernetes.settings import KubernetesSettings
from moorage.worker.drivers.kubernetes.verdict import Seen, read, waited_s

NAME: Final[AttemptName] = ("acme", "Train_1", 0, 2, 77)
OWNER: Final = owner_label("moorage", "w1")
GPUS: Final = [Device(index=slot, vendor="nvidia", name="H100", uuid=f"K8S-node-{slot}") for slot in (1, 3)]


def made(run: dict[str, Any] | None = None, settings: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """The pod of a request, as msgspec would send it."""
    own = KubernetesSettings(node="n1", **settings or {})
    known: dict[str, Any] = {"devices": [], "ends_in_s": None} | {
        key: fields.pop(key) for key in ("devices", "ends_in_s") if key in fields
    }
    request = Request(
        run=Run(**{"driver": "kubernetes", "image": "trainer:1", "argv": ["train"]} | (run or {})), **fields
    )
    pod = pod_of(
        Assignment(NAME, request, known["devices"], "exclusive", ends_in_s=known["ends_in_s"]), own,
        owner=OWNER, node=own.node, resource=own.resource, start_within_s=own.start_within,
        slots=tuple(device.index for device in known["devices"]), folder_bytes=own.folder, user=request.workload.user,
    )  # fmt: skip
    return dict(msgspec.json.decode(msgspec.json.encode(pod)))


def container(pod: dict[str, Any]) -> dict[str, Any]:
    return dict(pod["spec"]["containers"][0])


def variables(pod: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container(pod)["env"]}


def test_a_pod_is_bound_to_its_node_and_says_whose_it_is() -> None:
    pod = made()
    assert pod["spec"]["nodeName"] == "n1"
    assert pod["metadata"]["labels"][LABEL] == OWNER
    assert attempt_of(pod) == NAME
    assert pod["metadata"]["name"] == pod_name(OWNER, NAME)
    assert pod["metadata"]["finalizers"] == [FINALIZER]
    assert pod["spec"]["restartPolicy"] == "Never"
    assert not pod["spec"]["automountServiceAccountToken"]
    again = {pod_name(OWNER, (*NAME[:3], attempt, 77)) for attempt in range(3)}
    assert len(again) == 3, "each attempt has a pod of its own"
    assert all(len(name) <= 63 and name.replace("-", "").isalnum() and name.islower() for name in again)
    assert pod_name(owner_label("other", "w1"), NAME) != pod_name(OWNER, NAME)
    del pod["metadata"]["annotations"][ATTEMPT]
    assert attempt_of(pod) is None


def test_the_paths_that_a_pod_adds_are_behind_its_own_or_the_usual_ones() -> None:
    assert "PATH" not in variables(made())
    assert variables(made({"env": {"TF_PATH": "/more"}}))["PATH"] == f"{PATH_DEFAULT}:/more"
    assert variables(made({"env": {"PATH": "/own", "TF_PREPEND_PATH": "/more"}}))["PATH"] == "/more:/own"


def test_fact_17_a_pod_asks_for_a_count_of_the_resource_as_text_and_for_what_the_request_says_of_the_host() -> None:
    pod = made(devices=GPUS, gpu=GpuSpec(count=2), resources=Resources(cpu_milli=1500, memory_mib=512))
    wanted = {"cpu": "1500m", "memory": "512Mi", "nvidia.com/gpu": "2"}
    assert container(pod)["resources"] == {"limits": wanted, "requests": wanted}
    assert pod["metadata"]["annotations"][SLOTS] == "1,3"
    shown = variables(pod)
    assert {"CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "MOORAGE_GPU_UUIDS"}.isdisjoint(shown), "the plugin's"
    assert (shown["MOORAGE_ATTEMPT"], shown["NVIDIA_DRIVER_CAPABILITIES"]) == ("2", "compute,utility")
    assert variables(made())["NVIDIA_VISIBLE_DEVICES"] == "void", "an image may say all"
    amd = made(settings={"resource": "amd.com/gpu"}, devices=GPUS[:1], gpu=GpuSpec(vendor="amd"))
    assert container(amd)["resources"]["limits"] == {"amd.com/gpu": "1"}


def test_words_reach_the_program_as_they_are() -> None:
    """A kubelet replaces $(NAME) in arguments and variables, and makes one $ of two."""
    pod = made(run={"argv": ["sh", "-c", "echo $(date) $$ $HOME"], "env": {"A": "$(PATH)"}})
    assert container(pod)["args"] == ["sh", "-c", "echo $$(date) $$$$ $$HOME"]
    assert variables(pod)["A"] == "$$(PATH)"
    assert "command" not in container(pod), "the image's entry point stands before a job's words"


@pytest.mark.parametrize(
    ("argv", "cwd", "wanted"),
    [
        (["a"], None, FOLDER_AT),
        (["a"], "src", f"{FOLDER_AT}/src"),
        (["a"], "/opt", "/opt"),
        ([], None, None),
        ([], "b", f"{FOLDER_AT}/b"),
    ],
)
def test_a_command_starts_in_the_attempts_folder(argv: list[str], cwd: str | None, wanted: str | None) -> None:
    assert container(made(run={"argv": argv, "cwd": cwd})).get("workingDir") == wanted


def test_secrets_are_in_no_pod() -> None:
    pod = made(run={"env": {"TOKEN": Secret("token-file"), "CUDA_VISIBLE_DEVICES": Secret("x"), "SEED": "7"}})
    assert variables(pod)["TOKEN"] == {"secretKeyRef": {"name": pod["metadata"]["name"], "key": "TOKEN"}}
    assert variables(pod)["CUDA_VISIBLE_DEVICES"] == "", "what says which devices there are is moorage's"
    secret = secret_of(OWNER, NAME, {"TOKEN": "hush"})
    assert (secret["metadata"]["name"], secret["stringData"]) == (pod["metadata"]["name"], {"TOKEN": "hush"})
    assert secret["metadata"]["labels"] == {LABEL: OWNER}


@pytest.mark.parametrize(
    ("timeout_s", "ends_in_s", "wanted"),
    [(None, None, None), (60.0, None, 660), (None, 30.2, 31), (60.0, 30.0, 30), (None, 0.0, 1)],
)
def test_the_kubelet_ends_it_at_what_is_left(timeout_s: float | None, ends_in_s: float | None, wanted: Any) -> None:
    assert made(run={"timeout_s": timeout_s}, ends_in_s=ends_in_s)["spec"].get("activeDeadlineSeconds") == wanted


def test_once_it_runs_its_time_out_is_exact() -> None:
    pod = made(run={"timeout_s": 60.0})
    began = {
        "startTime": "2026-11-23T10:00:00Z",
        "containerStatuses": [{"name": "job", "state": {"running": {"startedAt": "2026-11-23T10:00:07Z"}}}],
    }
    pod["status"] = began
    assert waited_s(pod) == 7.0
    assert exact_deadline_s(pod, waited_s(pod)) == 67
    pod["spec"]["activeDeadlineSeconds"] = 67
    assert exact_deadline_s(pod, waited_s(pod)) is None, "it is so already"
    assert exact_deadline_s(made(run={"timeout_s": 60.0}, ends_in_s=30.0), 7.0) is None, "the deadline comes first"
    assert exact_deadline_s(made(), 7.0) is None


def test_a_grace_is_never_the_word_that_forgets_a_pod() -> None:
    assert [grace_s_of(each) for each in (0.0, 0.2, 1.0, 2.5)] == [1, 1, 1, 3]


def test_its_user_is_a_number() -> None:
    assert made()["spec"]["securityContext"] == {"runAsUser": 65534, "runAsGroup": 65534, "fsGroup": 65534}
    assert made(run={"user": "1000"})["spec"]["securityContext"]["runAsUser"] == 1000
    assert "securityContext" not in made(settings={"user": "image"})["spec"]
    with pytest.raises(Refused, match="the user of a pod must be a number"):
        made(run={"user": "bob"})
    limited = container(made())["securityContext"]
    assert limited == {"allowPrivilegeEscalation": False, "privileged": False, "capabilities": {"drop": ["ALL"]}}


@pytest.mark.parametrize(
    ("fields", "message", "code"),
    [
        ({"run": {"checkpoint_signal": "SIGUSR1"}}, "gets no checkpoint signal", "invalid-argument"),
        ({"replicas": 2, "gpu": {"scheduling": "gang"}}, "runs no gang", "failed-precondition"),
        ({"gpu": {"distributed": {}}}, "runs no gang", "failed-precondition"),
        ({"gpu": {"sharing": "time-slice"}}, "the cluster decides whether a unit is a share", "failed-precondition"),
    ],
)
def test_what_no_pod_gives_is_refused(fields: dict[str, Any], message: str, code: str) -> None:
    run = {"driver": "kubernetes", "image": "a", "argv": ["a"]} | fields.pop("run", {})
    with pytest.raises(Refused, match=message) as refused:
        check_request(msgspec.convert({"run": run} | fields, Request))
    assert refused.value.code == code


# --------------------------------------------------------------------------------------- what a status says

ENDED: Final = {
    "exitCode": 0,
    "reason": "Completed",
    "startedAt": "2026-11-23T10:00:00Z",
    "finishedAt": "2026-11-23T10:01:00Z",
}


NO_PROGRAM: Final = 'exec: "nope": executable file not found in $PATH'


def seen(state: dict[str, Any] | None, *, made_it: bool = True, **words: Any) -> Seen:
    """What is read of a pod with a container in this state; `words` are those of the status, but for `metadata`."""
    metadata = words.pop("metadata", {})
    statuses = [] if state is None else [{"name": "job", "state": state, "containerID": "c://1" if made_it else ""}]
    spec = {"containers": [{"name": "job", "image": "trainer:1"}]}
    return read({"metadata": metadata, "spec": spec, "status": {"containerStatuses": statuses} | words})


def terminated(**words: Any) -> dict[str, Any]:
    return {"terminated": ENDED | words}


def deleted(at: str, grace_s: int = 0, ends: str | None = None) -> dict[str, Any]:
    notes = {} if ends is None else {"annotations": {ENDS: ends}}
    return {"metadata": {"deletionTimestamp": at, "deletionGracePeriodSeconds": grace_s} | notes}


@pytest.mark.parametrize(
    ("found", "kind", "code", "why"),
    [
        (seen(terminated()), "ended", 0, "exit"),
        (seen(terminated(exitCode=137)), "ended", 137, "exit"),
        (seen(terminated(exitCode=3), phase="Failed"), "ended", 3, "exit"),
        (seen(terminated(exitCode=137, reason="OOMKilled")), "ended", -9, "out of memory: it was killed at its limit"),
        (seen(terminated(exitCode=0, reason="OOMKilled")), "ended", 0, "exit"),  # a child of it was killed
        (
            seen(terminated(exitCode=3, reason="OOMKilled")),
            "ended", 3, "out of memory: a process of it was killed at its limit",
        ),
        (seen(terminated(exitCode=143), phase="Failed", reason="DeadlineExceeded"), "ended", -15, "timeout"),
        (seen(terminated(exitCode=137), phase="Failed", reason="Evicted"), "ended", -9, "lost"),
        (seen(terminated(exitCode=137, reason="ContainerStatusUnknown")), "ended", -9, "lost"),
        (seen(terminated(exitCode=143), **deleted("2026-11-23T10:01:00Z", ends="end")), "ended", -15, "end"),
        (seen(terminated(exitCode=0), **deleted("2026-11-23T10:01:00Z", ends="fence")), "ended", 0, "fence"),
        (seen(terminated(exitCode=143), **deleted("2026-11-23T10:01:00Z")), "ended", -15, "lost"),
        (seen(terminated(), **deleted("2026-11-23T10:01:31Z", 30)), "ended", 0, "exit"),  # it was over before
        (
            seen(terminated(exitCode=128, reason="StartError", message=NO_PROGRAM)), "failed", 127, NO_PROGRAM,
        ),
        (seen(terminated(exitCode=128, reason="StartError", message="no space left")), "refused", 0, "no space left"),
        (
            seen(None, phase="Failed", reason="OutOfnvidia.com/gpu", message="Node has none"),
            "refused", 0, "the node refused the pod: OutOfnvidia.com/gpu: Node has none",
        ),
        (seen(None, phase="Failed", reason="DeadlineExceeded"), "ended", -9, "timeout"),
    ],
)  # fmt: skip
def test_a_pod_that_is_over(found: Seen, kind: str, code: int, why: str) -> None:
    assert (found.kind, found.code, found.why, found.is_over) == (kind, code, why, True)


def test_a_container_that_the_cluster_added_is_not_the_jobs() -> None:
    """A service mesh adds its own to each pod, and a cluster sorts them by name."""
    mesh = {"name": "istio-proxy", "image": "mesh:1"}

    def seen_with(own: dict[str, Any], its: dict[str, Any]) -> Seen:
        statuses = [{"name": "istio-proxy", "containerID": "c://2", "state": its}, {"name": "job", "state": own}]
        spec = {"containers": [mesh, {"name": "job", "image": "trainer:1"}]}
        return read({"metadata": {}, "spec": spec, "status": {"containerStatuses": statuses}})

    assert seen_with(terminated(exitCode=3), {"running": {}}).code == 3
    assert seen_with({"running": {}}, terminated()).kind == "running"
    found = seen_with({"waiting": {"reason": "ErrImagePull", "message": "manifest unknown"}}, {"running": {}})
    assert (found.kind, "image trainer:1 cannot be pulled" in found.why) == ("failed", True)


FORGOTTEN: Final = [{"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC"}]


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        (seen(None, phase="Pending"), "waiting"),
        (seen({"waiting": {"reason": "ContainerCreating"}}), "waiting"),
        (seen({"running": {}}), "running"),
        (seen({"running": {}}, **deleted("2026-11-23T10:00:00Z")), "running"),
        # said by what watches nodes, of a node whose kubelet does not answer
        (seen({"running": {}}, phase="Failed", reason="NodeLost"), "running"),
        (seen({"running": {}}, phase="Failed", reason="DeadlineExceeded"), "running"),
        (seen({"running": {}}, phase="Failed", conditions=FORGOTTEN), "running"),
        (seen(None, phase="Failed", conditions=FORGOTTEN), "waiting"),
        (seen({"waiting": {}}, phase="Failed", reason="Evicted"), "waiting"),
    ],
)
def test_only_the_kubelet_says_that_a_pod_is_over(found: Seen, kind: str) -> None:
    assert (found.kind, found.is_over) == (kind, False)


@pytest.mark.parametrize(
    ("reason", "message", "kind"),
    [
        ("ErrImagePull", "manifest unknown", "failed"),
        ("ErrImagePull", 'failed to resolve reference "trainer:1": trainer:1: not found', "failed"),
        ("ErrImagePull", "dial tcp: connection refused", "waiting"),
        ("ImagePullBackOff", 'Back-off pulling image "trainer:1"', "waiting"),
        ("InvalidImageName", "", "failed"),
        ("ErrImageNeverPull", "", "failed"),
        ("CreateContainerConfigError", 'secret "x" not found', "waiting"),
    ],
)
def test_whose_fault_an_image_is(reason: str, message: str, kind: str) -> None:
    found = seen({"waiting": {"reason": reason, "message": message}}, made_it=False)
    assert (found.kind, found.is_over) == (kind, False)
    assert ("image trainer:1 cannot be pulled" in found.why) == (reason != "CreateContainerConfigError")
    assert message in found.why


# --------------------------------------------------------------------------------------- a node's devices


def node(capacity: str = "4", allocatable: str = "4", ready: str = "True", **labels: str) -> dict[str, Any]:
    return {
        "metadata": {"name": "n1", "uid": "0a1b2c3d-0000-4000-8000-000000000001", "labels": labels},
        "status": {
            "capacity": {"nvidia.com/gpu": capacity},
            "allocatable": {"nvidia.com/gpu": allocatable},
            "conditions": [{"type": "Ready", "status": ready}],
        },
    }


def other(name: str, *counts: str, phase: str = "Running", **words: Any) -> dict[str, Any]:
    containers = [{"resources": {"limits": {"nvidia.com/gpu": count}}} for count in counts]
    metadata = {"name": name, "namespace": "default"} | words
    return {"metadata": metadata, "spec": {"containers": containers}, "status": {"phase": phase}}


def ours(slots: str, phase: str = "Running", owner: str = OWNER) -> dict[str, Any]:
    return other("mine", "1", phase=phase, labels={LABEL: owner}, annotations={SLOTS: slots})


def test_a_node_has_a_slot_for_each_unit_of_its_resource() -> None:
    labels = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "nvidia.com/gpu.memory": "81559"}
    found = devices_of(node(**labels), "nvidia.com/gpu")
    assert [device.index for device in found] == [0, 1, 2, 3]
    assert (found[0].vendor, found[0].name, found[0].memory_mib) == ("nvidia", "NVIDIA H100 80GB HBM3", 81559)
    assert len({device.uuid for device in found}) == 4
    assert len(devices_of(node("100"), "nvidia.com/gpu")) == 64
    assert devices_of(node("none"), "nvidia.com/gpu") == devices_of(node(), "amd.com/gpu") == []


@pytest.mark.parametrize(
    ("quantity", "number"),
    [
        ("8", 8), ("1k", 1000), ("2M", 2_000_000), ("1Ki", 1024), ("1Mi", 1 << 20), ("1.5k", 1500), (".5Ki", 512),
        ("2000m", 2), ("1500m", 2), ("3000000u", 3), ("4000000000n", 4), ("1e3", 1000), ("12E2", 1200), ("1E", 10**18),
        ("5.", 5), ("+4", 4), (4, 4), ("0", 0), ("50e-1", 5),
        ("-4", 0), ("none", 0), ("", 0), ("4K", 0), ("4ki", 0), ("1e", 0), ("4 ", 0), ("1e999999999", 0), ("٤", 0),
    ],
)  # fmt: skip
def test_a_quantity_is_read_as_kubernetes_reads_it(quantity: object, number: int) -> None:
    assert units({"nvidia.com/gpu": quantity}, "nvidia.com/gpu") == number
    assert units({}, "nvidia.com/gpu") == 0


def test_what_other_pods_have_is_no_slot_of_ours() -> None:
    def taken(pods: list[dict[str, Any]], found: dict[str, Any] | None = None) -> dict[int, str]:
        return taken_slots(found or node(), pods, OWNER, "nvidia.com/gpu", 4)

    assert taken([]) == {}
    assert taken([other("a", "2"), other("done", "4", phase="Succeeded")]) == {
        3: "the pod default/a", 2: "the pod default/a",
    }  # fmt: skip
    assert taken([other("a", "1"), ours("3"), ours("2", phase="Failed")]) == {2: "the pod default/a"}
    assert taken([ours("3", owner="another worker")]) == {3: "the pod default/mine"}
    assert taken([], node(allocatable="3")) == {3: "the node, which does not offer it now"}
    prepares = other("b", "1")
    prepares["spec"]["initContainers"] = [{"resources": {"limits": {"nvidia.com/gpu": "2"}}}, {}]
    assert len(taken([prepares])) == 2
    assert len(taken([other("asks-for-more-than-any-node-has", "1E")])) == 4
    assert len(taken([], node(capacity="1k", allocatable="999"))) == 1
    assert is_ready(node())
    assert not is_ready(node(ready="Unknown"))


def test_a_stream_is_cut_at_its_lines_and_no_line_without_an_end_is_waited_for() -> None:
    async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    async def lines(*parts: bytes) -> list[bytes]:
        return [line async for line in lines_of(chunks(*parts), 4)]

    assert asyncio.run(lines(b"a\nb", b"c\n", b"\nd")) == [b"a\n", b"bc\n", b"\n", b"d"]
    assert asyncio.run(lines(b"abcdef", b"ghij\nk\n")) == [b"abcd", b"efgh", b"ij\n", b"k\n"]
    assert asyncio.run(lines(b"")) == []

"""The driver kubernetes on a real API server, with a kubelet that is played, and with the rights of the how-to page."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from moorage.schemas.attempt import AttemptName
from moorage.schemas.codec import decode_request
from moorage.schemas.errors import Refused
from moorage.schemas.frames import Device, ReadLog
from moorage.schemas.job import Request, Run, Secret
from moorage.worker.driver import Assignment, DriverEvent, Living
from moorage.worker.drivers.kit import Kit
from moorage.worker.drivers.kubernetes import api as kubernetes_api
from moorage.worker.drivers.kubernetes.api import Cluster, ClusterDown, ClusterError
from moorage.worker.drivers.kubernetes.driver import KubernetesDriver
from moorage.worker.drivers.kubernetes.pod import FINALIZER, pod_name
from moorage.worker.drivers.kubernetes.settings import KubernetesSettings
from moorage.worker.drivers.policy import Policy
from moorage.worker.drivers.supervisor_link import SupervisorLink
from moorage.worker.session.attempt_messages import Ended, NotStarted, Started, StartFailed, Stuck
from moorage.worker.settings import WorkerSettings
from tests.clusters import ADMIN, IMAGE, NAMESPACE, NODE, STRANGER, WORKER, ApiServer, Kubelet, cluster, why_no_cluster
from tests.unit.docs.markdown import DOCS, page
from tests.waiting import until

NO_RULES: Final = Policy({}, {}, {}, None, {})
SECRET: Final = "hush-of-the-test"
#: for what takes the cluster a moment, on a busy machine
SLACK_S: Final = 60.0


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[ApiServer, Kubelet]]:
    if why := why_no_cluster():
        pytest.skip(why)
    with cluster() as both:
        yield both


class Rig:
    """A driver, what it reports, and the cluster as an administrator sees it."""

    def __init__(self, made: KubernetesDriver, admin: Cluster) -> None:
        self.driver = made
        self.admin = admin
        self.events: list[DriverEvent] = []
        self.said: list[bytes] = []
        self.living: list[Living] = []
        made.attach(self.events.append, lambda name, payload: self.said.append(payload))

    def start(self, job: str, *argv: str, **run: Any) -> AttemptName:
        name: AttemptName = ("acme", job, 0, 1, 7)
        fields: dict[str, Any] = {"driver": "kubernetes", "image": IMAGE, "argv": list(argv), "grace_s": 1.0} | run
        request = Request(run=Run(**fields))
        self.driver.start([Assignment(name, request, [], "none")])
        return name

    async def heard(self, kind: type, name: AttemptName) -> Any:
        """Return what was reported of an attempt by an event of this kind, once it was."""

        def found() -> Any:
            for event in self.events:
                for item in event.names if isinstance(event, Started | Stuck) else getattr(event, "items", ()):
                    if isinstance(event, kind) and (item == name or item[0] == name):
                        return (item,)
            return None

        return (await until(found, SLACK_S, f"{kind.__name__} of {name[1]}"))[0]

    async def pod(self, name: AttemptName) -> dict[str, Any] | None:
        return await self.admin.get("pods", pod_name(self.driver._owner, name))

    async def forgotten(self, *names: AttemptName) -> None:
        """Wait until nothing of these attempts is left in the cluster."""
        self.driver.forget(list(names))
        for name in names:
            await until(lambda name=name: self._is_gone(name), SLACK_S, f"the pod of {name[1]} is gone")

    async def _is_gone(self, name: AttemptName) -> bool:
        return await self.pod(name) is None


@contextlib.asynccontextmanager
async def rig(tmp_path: Path, server: ApiServer, token: str = WORKER, **own: Any) -> AsyncIterator[Rig]:
    """Give a driver with the rights of the how-to page."""
    secrets = tmp_path / "secrets"
    if not secrets.exists():
        secrets.mkdir(mode=0o700)
        (secrets / "token").touch(mode=0o600)
        (secrets / "token").write_text(SECRET)
    settings = WorkerSettings(tmp_path / "w", "w1", prefix=tmp_path.name.replace("_", "-"), secrets_dir=secrets)
    kept = KubernetesSettings(node=NODE, kubeconfig=server.kubeconfig(token), **own)
    kit = Kit("w1", settings, NO_RULES, SupervisorLink(tmp_path / "s"), 0, False, kept)
    made, admin = KubernetesDriver.from_kit(kit), Cluster(server.kubeconfig(ADMIN))
    rigged = Rig(made, admin)
    try:
        rigged.living = await made.open()
        yield rigged
    finally:
        await made.close()
        await admin.close()


Both = tuple[ApiServer, Kubelet]
pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(400)]


async def test_a_pod_from_its_start_to_its_end(shared: Both, tmp_path: Path) -> None:
    server, _ = shared
    async with rig(tmp_path, server) as rigged:
        env: dict[str, str | Secret] = {"TOKEN": Secret("token"), "WORD": "a $(b) $$ c"}
        name = rigged.start("whole", "sh", "-c", 'echo "$TOKEN $WORD"; exit 3', env=env)
        assert await rigged.heard(Ended, name) == (name, 3, "exit")
        kinds = [type(event) for event in rigged.events]
        assert kinds == [Started, Ended]
        text = "".join(msgspec.json.decode(each)["text"] for each in rigged.said)
        assert text == f"{SECRET} a $(b) $$ c\n"
        page = await rigged.driver.read_log(ReadLog("s", *name, "kubernetes", "out", 0, 1000, ended_ms=1))
        assert page.text == text
        pod = await rigged.pod(name)
        assert pod is not None, "it stays until its end is in the ledger"
        assert SECRET not in msgspec.json.encode(pod).decode()
        await until(lambda: no_secret(rigged, name), SLACK_S, "the Secret is gone")
        await rigged.forgotten(name)


async def test_the_request_of_the_page_runs_and_the_cluster_has_its_limits(shared: Both, tmp_path: Path) -> None:
    """Fact 17 of the source systems on a real API server: a count of GPUs is a limit, as text."""
    server, _ = shared
    [block] = [each.body for each in page(DOCS / "how-to/run-in-kubernetes.md").blocks if each.title == "request"]
    request = decode_request(block.encode())
    run = msgspec.structs.replace(request.workload, image=IMAGE)  # the only one that the played kubelet has
    request = msgspec.structs.replace(request, run=run)
    async with rig(tmp_path, server) as rigged:
        name: AttemptName = ("acme", "page", 0, 1, 7)
        rigged.driver.check(request)
        devices = [Device(at, "nvidia", "made up", f"K8S-{at}") for at in range(2)]
        rigged.driver.start([Assignment(name, request, devices, "exclusive")])
        assert await rigged.heard(Ended, name) == (name, 0, "exit")
        assert "".join(msgspec.json.decode(each)["text"] for each in rigged.said) == "hello from a pod\n"
        pod = await rigged.pod(name)
        assert pod is not None
        [container] = pod["spec"]["containers"]
        assert container["resources"]["limits"] == {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "2"}
        await rigged.forgotten(name)


async def no_secret(rigged: Rig, name: AttemptName) -> bool:
    return await rigged.admin.get("secrets", pod_name(rigged.driver._owner, name)) is None


async def test_a_start_that_comes_again_finds_its_pod_and_another_ones_is_left_alone(
    shared: Both, tmp_path: Path
) -> None:
    server, _ = shared
    async with rig(tmp_path, server) as rigged:
        name = rigged.start("twice", "sleep", "600")
        await rigged.heard(Started, name)
        before = await rigged.pod(name)
        assert before is not None
    async with rig(tmp_path, server) as rigged:
        assert rigged.living == [Living(name, "running")]
        pod, _ = rigged.driver._made(Assignment(name, Request(run=Run("kubernetes", ["a"], image=IMAGE)), [], "none"))
        again = await rigged.driver._put("pods", pod)
        assert again["metadata"]["uid"] == before["metadata"]["uid"]
        pod["metadata"]["annotations"] |= {"moorage/member": "[]"}
        with pytest.raises(Exception, match="another object of pods has the name"):
            await rigged.driver._put("pods", pod)
        rigged.driver.end(name, 1.0, "cancelled")
        assert (await rigged.heard(Ended, name))[1:] == (-15, "end")
        await rigged.forgotten(name)


async def test_a_kubelet_that_does_not_answer_keeps_what_it_may_run(
    shared: Both, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the pod is deleted by force, which a cluster grants at once."""
    server, kubelet = shared
    monkeypatch.setattr("moorage.worker.drivers.kubernetes.driver.STUCK_S", 0.5)
    async with rig(tmp_path, server) as rigged:
        name = rigged.start("silent", "sleep", "600")
        await rigged.heard(Started, name)
        kubelet.answers = False
        try:
            rigged.driver.end(name, 1.0, "cancelled")
            await rigged.heard(Stuck, name)
            await rigged.admin.delete("pods", pod_name(rigged.driver._owner, name), 0)
            pod = await rigged.pod(name)
            assert pod is not None
            assert pod["metadata"]["finalizers"] == [FINALIZER]
            assert not any(isinstance(event, Ended) for event in rigged.events)
        finally:
            kubelet.answers = True
        assert (await rigged.heard(Ended, name))[1:] == (-15, "end")
        await rigged.forgotten(name)


async def test_a_pod_that_is_taken_out_of_the_cluster_is_not_over(shared: Both, tmp_path: Path) -> None:
    server, kubelet = shared
    async with rig(tmp_path, server) as rigged:
        name = rigged.start("stripped", "sleep", "600")
        await rigged.heard(Started, name)
        kubelet.answers = False
        try:
            at = pod_name(rigged.driver._owner, name)
            await rigged.admin.patch("pods", at, {"metadata": {"finalizers": None}})
            await rigged.admin.delete("pods", at, 0)
            await rigged.heard(Stuck, name)
            assert not any(isinstance(event, Ended) for event in rigged.events)
        finally:
            kubelet.answers = True


async def test_the_api_server_goes_away_and_the_watch_goes_on(shared: Both, tmp_path: Path) -> None:
    server, _ = shared
    marker = tmp_path / "go"
    async with rig(tmp_path, server) as rigged:
        name = rigged.start("across", "sh", "-c", f"until test -e {marker}; do sleep 0.2; done; echo done")
        await rigged.heard(Started, name)
        await asyncio.to_thread(server.stop)
        with pytest.raises(ClusterDown):
            await rigged.admin.get("pods", "any")
        down = await until(rigged.driver.engine_down, SLACK_S, "a driver whose API server does not answer")
        assert "lost the API server" in down[0]
        late = rigged.start("late", "true")
        await asyncio.to_thread(server.start)
        await until(lambda: rigged.driver.engine_down() is None, SLACK_S, "an API server that answers again")
        marker.touch()
        assert await rigged.heard(Ended, name) == (name, 0, "exit")
        assert await rigged.heard(Ended, late) == (late, 0, "exit")
        assert [type(each) for each in rigged.events].count(Ended) == 2
        await rigged.forgotten(name, late)


async def test_a_pod_whose_state_cannot_be_read_is_not_late(shared: Both, tmp_path: Path) -> None:
    """The time for its start is over while the API server is away: the pod runs, and goes on."""
    server, kubelet = shared
    async with rig(tmp_path, server, start_within=4.0) as rigged:
        kubelet.answers = False
        name = rigged.start("unread", "true")
        await until(lambda: is_there(rigged, name), SLACK_S, "its pod")
        over_s = asyncio.get_running_loop().time() + 4.5
        await asyncio.to_thread(server.stop)
        await until(rigged.driver.engine_down, SLACK_S, "a driver whose API server does not answer")
        await until(lambda: asyncio.get_running_loop().time() > over_s, SLACK_S, "the time for its start is over")
        kubelet.answers = True
        await asyncio.to_thread(server.start)
        assert await rigged.heard(Ended, name) == (name, 0, "exit")
        await rigged.forgotten(name)


async def is_there(rigged: Rig, name: AttemptName) -> bool:
    return await rigged.pod(name) is not None


async def test_whose_fault_it_is(shared: Both, tmp_path: Path) -> None:
    server, kubelet = shared
    async with rig(tmp_path, server) as rigged:
        no_image = rigged.start("no-image", "true", image="nowhere:1")
        told = (await rigged.heard(NotStarted, no_image))[1]
        assert told.startswith("not-here: image nowhere:1 cannot be pulled")
        no_program = rigged.start("no-program", "no-such-program-here")
        assert (await rigged.heard(StartFailed, no_program))[1] == 127
        others = rigged.start("others", "sleep", "600")
        await rigged.heard(Started, others)
        await rigged.admin.delete("pods", pod_name(rigged.driver._owner, others))
        assert (await rigged.heard(Ended, others))[2] == "lost", "somebody else has deleted it"
        late = rigged.start("late", "sleep", "600", timeout_s=0.5)
        assert (await rigged.heard(Ended, late))[2] == "timeout"
        await rigged.forgotten(no_image, no_program, others, late)
    kubelet.pull = "dial tcp: connection refused"
    async with rig(tmp_path, server, start_within=2.0) as rigged:
        no_registry = rigged.start("no-registry", "true", image="nowhere:1")
        assert "did not start within 2 s" in (await rigged.heard(NotStarted, no_registry))[1]
        await rigged.forgotten(no_registry)


async def test_who_may_do_nothing_does_not_begin_and_says_why(shared: Both, tmp_path: Path) -> None:
    server, _ = shared
    with pytest.raises(Refused, match=r"cannot use its cluster: .*stranger.* cannot get resource"):
        async with rig(tmp_path, server, token=STRANGER):
            pass
    with pytest.raises(Refused, match="does not know its node"):
        await KubernetesDriver.open_inventory(
            "w1", WorkerSettings(tmp_path, "w1"), KubernetesSettings(kubeconfig=server.kubeconfig(WORKER))
        )


async def test_in_a_pod_a_worker_is_the_service_account_of_the_pod(
    shared: Both, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = shared
    for name, text in (("token", WORKER), ("namespace", NAMESPACE)):
        (tmp_path / name).write_text(text)
    (tmp_path / "ca.crt").write_bytes((server.folder / "certificates/apiserver.crt").read_bytes())
    monkeypatch.setattr(kubernetes_api, "SERVICE_ACCOUNT", tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    inside = Cluster()
    try:
        assert inside.namespace == NAMESPACE
        assert (await inside.node(NODE))["metadata"]["name"] == NODE
        with pytest.raises(ClusterError, match="cannot"):  # the rights of the page, and no others
            await inside._ask("GET", "/api/v1/secrets")
    finally:
        await inside.close()


async def test_a_nodes_units_less_those_of_other_pods(shared: Both, tmp_path: Path) -> None:
    server, kubelet = shared
    own = KubernetesSettings(node=NODE, kubeconfig=server.kubeconfig(WORKER))
    inventory = await KubernetesDriver.open_inventory("w1", WorkerSettings(tmp_path, "w1"), own)
    assert [device.index for device in inventory.devices()] == [0, 1, 2, 3]
    assert [bool(each.processes) for each in await inventory.sample()] == [False] * 4
    admin = Cluster(server.kubeconfig(ADMIN))
    kubelet.answers = False
    limits = {"limits": {"nvidia.com/gpu": "1"}}
    container = {"name": "a", "image": "other:1", "resources": limits}
    spec = {"nodeName": NODE, "containers": [container], "terminationGracePeriodSeconds": 1}
    try:
        await admin.create("pods", {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "other"}, "spec": spec})
        fresh = await KubernetesDriver.open_inventory("w1", WorkerSettings(tmp_path, "w1"), own)
        readings = await fresh.sample()
        assert [each.foreign(()) for each in readings] == ["", "", "", "the pod moorage/other"]
    finally:
        kubelet.answers = True
        await admin.delete("pods", "other", 0)
        await admin.close()

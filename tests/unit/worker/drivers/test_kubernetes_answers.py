"""What the driver kubernetes makes of answers that a good API server seldom gives: late, cut short, or of a proxy."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import yaml
from aiohttp import web

from moorage.schemas.attempt import AttemptName
from moorage.schemas.errors import refuse
from moorage.schemas.job import Request, Run
from moorage.worker.devices.readers.base import SlotReading
from moorage.worker.driver import Assignment, DriverEvent
from moorage.worker.drivers.kit import Kit
from moorage.worker.drivers.kubernetes import driver as kubernetes_driver
from moorage.worker.drivers.kubernetes.api import Cluster, ClusterDown
from moorage.worker.drivers.kubernetes.devices import ClusterInventory
from moorage.worker.drivers.kubernetes.driver import KubernetesDriver
from moorage.worker.drivers.kubernetes.pod import ATTEMPT, FINALIZER, pod_name
from moorage.worker.drivers.kubernetes.settings import KubernetesSettings
from moorage.worker.drivers.policy import Policy
from moorage.worker.drivers.supervisor_link import SupervisorLink
from moorage.worker.session.attempt_messages import Stuck
from moorage.worker.settings import WorkerSettings
from tests.waiting import until

NAME: Final[AttemptName] = ("acme", "train", 0, 1, 7)
NO_RULES: Final = Policy({}, {}, {}, None, {})
NODE: Final[dict[str, Any]] = {
    "metadata": {"name": "n1", "uid": "0a1b2c3d"},
    "status": {"capacity": {"nvidia.com/gpu": "1"}, "conditions": [{"type": "Ready", "status": "True"}]},
}


class BadServer:
    """An API server with one namespace of pods; each attribute is a fault that a test may choose."""

    def __init__(self, *, ends_watches: bool = False) -> None:
        self.pods: dict[str, Any] = {}
        self.asked: list[str] = []
        self.url = ""
        #: a pod that is created exists once this is set; its creator gets no answer
        self.late: asyncio.Event | None = None
        self.posted = asyncio.Event()
        self.cut = asyncio.Event()
        #: the answer to each list, in place of the pods
        self.listed: bytes | None = None
        self.ends_watches = ends_watches
        #: how far its store is
        self.version = "1"
        #: pods that the next watch tells of; None ends it
        self.added: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[BadServer]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            self.added.put_nowait(None)
            for held in (self.cut, self.late):
                if held is not None:
                    held.set()
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        words = request.path.strip("/").split("/")
        is_watch = "watch" in request.query
        self.asked.append("WATCH" if is_watch else f"{request.method} {'/'.join(words[4:])}")
        if words[2] == "nodes":
            return web.json_response(NODE)
        if is_watch:
            return await self._watched(request)
        if len(words) == 5 and request.method == "POST":
            return await self._create(request)
        if len(words) == 5:
            listed = {"items": list(self.pods.values()), "metadata": {"resourceVersion": self.version}}
            return web.Response(body=msgspec.json.encode(listed) if self.listed is None else self.listed)
        found = self.pods.get(words[5])
        return web.json_response(found or {"message": "not found"}, status=200 if found else 404)

    async def _watched(self, request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse()
        await stream.prepare(request)
        while not self.ends_watches and (pod := await self.added.get()) is not None:
            self.pods[pod["metadata"]["name"]] = pod
            await stream.write(msgspec.json.encode({"type": "ADDED", "object": pod}) + b"\n")
        return stream

    async def _create(self, request: web.Request) -> web.StreamResponse:
        made = msgspec.json.decode(await request.read())
        made["metadata"]["uid"] = "1"
        self.posted.set()
        if self.late is not None:
            await self.cut.wait()
            assert request.transport is not None
            request.transport.close()
            await self.late.wait()
        self.pods[made["metadata"]["name"]] = made
        return web.json_response(made)

    def kubeconfig(self, folder: Path, **user: str) -> Path:
        content = {
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "moorage"}}],
            "clusters": [{"name": "c", "cluster": {"server": self.url}}],
            "users": [{"name": "u", "user": user or {"token": "t"}}],
        }
        path = folder / "kubeconfig"
        path.write_text(yaml.safe_dump(content))
        return path


@contextlib.asynccontextmanager
async def opened(
    tmp_path: Path, server: BadServer, secrets_dir: Path | None = None
) -> AsyncIterator[tuple[KubernetesDriver, list[DriverEvent]]]:
    """Give a driver on this server, and all that it reports."""
    own = KubernetesSettings(node="n1", kubeconfig=server.kubeconfig(tmp_path))
    settings = WorkerSettings(tmp_path / "w", "w1", secrets_dir=secrets_dir)
    kit = Kit("w1", settings, NO_RULES, SupervisorLink(tmp_path / "s"), 0, True, own)
    driver, events = KubernetesDriver.from_kit(kit), list[DriverEvent]()
    driver.attach(events.append, lambda name, payload: None)
    await driver.open()
    try:
        yield driver, events
    finally:
        await driver.close()


@contextlib.asynccontextmanager
async def closing(cluster: Cluster) -> AsyncIterator[Cluster]:
    try:
        yield cluster
    finally:
        await cluster.close()


async def cancelled_as_it_is_created(server: BadServer, driver: KubernetesDriver) -> asyncio.Event:
    """Start a job and cancel it; the request for its pod is lost on the way back, and carried out once this is set."""
    late = server.late = asyncio.Event()
    driver.start([Assignment(NAME, Request(run=Run("kubernetes", ["train"], image="trainer:1")), [], "none")])
    await server.posted.wait()
    driver.end(NAME, 1.0, "cancelled")
    server.cut.set()
    return late


def adds_pod(server: BadServer, driver: KubernetesDriver, status: dict[str, Any]) -> str:
    """Let the watch tell of a pod of this worker; return its name."""
    name = pod_name(driver._owner, NAME)
    notes = {ATTEMPT: msgspec.json.encode(NAME).decode()}
    metadata = {"name": name, "resourceVersion": "2", "annotations": notes, "finalizers": [FINALIZER]}
    server.added.put_nowait({"metadata": metadata, "status": status})
    return name


async def test_a_pod_that_may_still_be_created_is_not_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job is cancelled while the request for its pod is lost on the way back: the API server carries it out."""
    monkeypatch.setattr(kubernetes_driver, "RETRY_S", 0.01)
    async with BadServer().serving() as server, opened(tmp_path, server) as (driver, events):
        late = await cancelled_as_it_is_created(server, driver)
        looks = f"GET pods/{pod_name(driver._owner, NAME)}"
        await until(lambda: events or server.asked.count(looks) >= 3, what="looks for the pod")
        assert events == [], "an end was reported of a pod that may still come"
        before = len(server.asked)
        late.set()
        await until(lambda: looks.replace("GET", "DELETE") in server.asked[before:], what="the removal of the late pod")
        assert events == [], "the kubelet has not said that it is over"


async def test_a_pod_whose_creation_was_given_up_by_all_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_driver, "RETRY_S", 0.01)
    monkeypatch.setattr(kubernetes_driver, "LATE_S", 0.05)
    async with BadServer().serving() as server, opened(tmp_path, server) as (driver, events):
        await cancelled_as_it_is_created(server, driver)
        [ended] = await until(lambda: events, what="its end")
        assert ended.items == [(NAME, -9, "end")]


async def test_a_pod_that_comes_after_its_agent_was_killed_is_removed(tmp_path: Path) -> None:
    """That one has sent the request and got no answer; the next agent has listed the pods before."""
    async with BadServer().serving() as server, opened(tmp_path, server) as (driver, events):
        name = adds_pod(server, driver, {"phase": "Pending"})
        await until(lambda: f"DELETE pods/{name}" in server.asked, what="the removal of the pod")
        assert server.asked.index(f"PATCH pods/{name}") < server.asked.index(f"DELETE pods/{name}")
        assert events == []


async def test_a_pod_of_an_attempt_whose_end_is_reported_stays_until_the_ledger_has_it(tmp_path: Path) -> None:
    async with BadServer().serving() as server, opened(tmp_path, server) as (driver, _):
        ended = {"name": "job", "containerID": "c://1", "state": {"terminated": {"exitCode": 0}}}
        name = adds_pod(server, driver, {"containerStatuses": [ended]})
        await until(lambda: server.pods, what="the pod is told")
        for _ in range(5):
            await driver._cluster.get("pods", "any")
        assert not any(each.endswith(name) for each in server.asked)


async def test_a_watch_that_ends_at_once_is_not_begun_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_driver, "RETRY_S", 3600.0)
    async with BadServer(ends_watches=True).serving() as server, opened(tmp_path, server) as (driver, _):
        await until(lambda: "WATCH" in server.asked, what="a watch")
        for _ in range(20):
            assert await driver._cluster.get("pods", "any") is None
        assert server.asked.count("WATCH") == 1


async def test_pods_are_listed_again_once_the_clusters_store_is_of_an_older_backup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A watch from a version that the cluster does not have yet tells of nothing until it has that."""
    monkeypatch.setattr(kubernetes_driver, "RETRY_S", 0.01)
    async with BadServer(ends_watches=True).serving() as server:
        server.version = "20"
        async with opened(tmp_path, server) as (driver, events):
            driver.start([Assignment(NAME, Request(run=Run("kubernetes", ["train"], image="trainer:1")), [], "none")])
            await until(lambda: server.pods, what="its pod")
            looks = f"GET pods/{pod_name(driver._owner, NAME)}"
            await until(lambda: server.asked.count("WATCH") > 2, what="further watches")
            assert looks not in server.asked
            server.pods.clear()
            server.version = "9"
            [event] = await until(lambda: events, what="a report of the pod that is gone")
            assert isinstance(event, Stuck)
            assert event.names == [NAME]


async def test_a_secret_that_comes_after_its_agent_was_killed_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That one has sent the request and got no answer; the next agent has listed the Secrets before."""
    monkeypatch.setattr(kubernetes_driver, "LATE_S", 0.05)
    async with BadServer().serving() as server, opened(tmp_path, server, tmp_path) as (driver, _):
        await until(lambda: "GET secrets" in server.asked, what="a look for Secrets")
        name = pod_name(driver._owner, NAME)
        server.pods[name] = {"metadata": {"name": name}}  # Secrets are among them here
        await until(lambda: f"DELETE secrets/{name}" in server.asked, what="the removal of the Secret")


@pytest.mark.parametrize("answer", [b"", b"<html>", b'"ok"', b"[]", b"7", b"{}", b'{"metadata": null}'])
async def test_an_answer_that_is_none_of_an_api_server_counts_as_none(tmp_path: Path, answer: bytes) -> None:
    async with BadServer().serving() as server, closing(Cluster(server.kubeconfig(tmp_path))) as cluster:
        server.listed = answer
        with pytest.raises(ClusterDown):
            await cluster.list("pods", "a=b")


async def test_a_token_that_cannot_be_read_now_counts_as_no_answer(tmp_path: Path) -> None:
    """lightkube raises errors of its own for it, and for a program that gives no token."""
    token = tmp_path / "token"
    async with (
        BadServer().serving() as server,
        closing(Cluster(server.kubeconfig(tmp_path, tokenFile=str(token)))) as cluster,
    ):
        with pytest.raises(ClusterDown, match="token not found"):
            await cluster.get("pods", "any")
        token.write_text("t")
        assert await cluster.get("pods", "any") is None


async def test_devices_stay_as_they_were_while_the_kubeconfig_cannot_be_read() -> None:
    def connect() -> Cluster:
        raise refuse("failed-precondition", "no cluster: the kubeconfig cannot be used")

    inventory = ClusterInventory(connect, NODE, "owner", "nvidia.com/gpu")
    assert await inventory.sample() == [SlotReading()]

"""A Kubernetes cluster for tests: a real kube-apiserver on a real etcd, and a kubelet that the test plays.

`tests/kubernetes/build` builds the API server, which takes minutes; where it was not built, these tests are skipped.
The kubelet runs a pod's container as a process of this machine: it takes the pod's words, variables and secrets, asks
it to end, and says by the pod's status what became of it, as a real one does. It has no images and no limits.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import json
import os
import re
import signal
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import yaml
from aiohttp import web
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from moorage.worker.drivers.kubernetes.api import Cluster, ClusterDown, ClusterError
from tests.ports import free_ports
from tests.unit.docs.markdown import DOCS, page
from tests.waiting import until

START_S: Final = 90.0
NODE: Final = "node-1"
IMAGE: Final = "moorage-test:checks"
RESOURCE: Final = "nvidia.com/gpu"
ADMIN: Final = "admin-of-the-tests"
STRANGER: Final = "may-do-nothing"
NAMESPACE: Final = "moorage"
#: the service account of the how-to page
WORKER: Final = "worker-of-the-page"
ACCOUNT: Final = "system:serviceaccount:moorage:moorage-worker"
_MARK: Final = "TEST_KUBELET_POD"


def binaries() -> Path:
    """Return the folder of the two servers, whether they are there or not."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("KUBERNETES_BINARIES") or Path(cache) / "moorage-tests/kubernetes")


@functools.cache
def why_no_cluster() -> str:
    """Return "" where a test can have a cluster, else one line that says why not."""
    missing = [name for name in ("etcd", "kube-apiserver") if not os.access(binaries() / name, os.X_OK)]
    return f"no cluster: no {missing[0]} in the cache; tests/kubernetes/build builds it" if missing else ""


class ApiServer:
    """etcd and kube-apiserver on a folder of a test's own. `stop` and `start` keep what is stored."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port, self._etcd_port, self._peer_port = free_ports(3)
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        (folder / "accounts.key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.TraditionalOpenSSL,
                serialization.NoEncryption(),
            )
        )
        users = (f"{ADMIN},admin,1,system:masters", f"{STRANGER},stranger,2", f"{WORKER},{ACCOUNT},3")
        (folder / "tokens.csv").write_text("\n".join(users))
        self._etcd: subprocess.Popen[bytes] | None = None
        self._api: subprocess.Popen[bytes] | None = None
        self._etcd = self._run(
            "etcd", f"--data-dir={folder}/etcd", f"--listen-client-urls=http://127.0.0.1:{self._etcd_port}",
            f"--advertise-client-urls=http://127.0.0.1:{self._etcd_port}", "--unsafe-no-fsync",
            f"--listen-peer-urls=http://127.0.0.1:{self._peer_port}",
        )  # fmt: skip
        self.start()
        asyncio.run(self._apply())

    async def _apply(self) -> None:
        """Put into the cluster what the how-to page says: the namespace, and the worker's rights."""
        blocks = page(DOCS / "how-to/run-in-kubernetes.md").blocks
        [wanted] = [block.body for block in blocks if block.title == "moorage.yaml"]
        cluster = Cluster(self.kubeconfig())
        for made in yaml.safe_load_all(wanted):
            version, kind, namespace = made["apiVersion"], made["kind"], made["metadata"].get("namespace")
            root = f"/apis/{version}" if "/" in version else f"/api/{version}"
            place = f"{root}/namespaces/{namespace}" if namespace else root
            await cluster._ask("POST", f"{place}/{kind.lower()}s", None, made)
        await cluster.close()

    def _run(self, name: str, *options: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            command = [str(binaries() / name), *options]
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def start(self) -> None:
        """Start the API server, and wait until it answers. Raises RuntimeError."""
        self._api = self._run(
            "kube-apiserver", f"--etcd-servers=http://127.0.0.1:{self._etcd_port}", f"--secure-port={self.port}",
            "--bind-address=127.0.0.1", f"--cert-dir={self.folder}/certificates", "--authorization-mode=RBAC",
            f"--token-auth-file={self.folder}/tokens.csv", "--service-cluster-ip-range=10.0.0.0/24",
            "--disable-admission-plugins=ServiceAccount", "--service-account-issuer=https://tests",
            f"--service-account-key-file={self.folder}/accounts.key",
            f"--service-account-signing-key-file={self.folder}/accounts.key",
        )  # fmt: skip
        ends_s = time.monotonic() + START_S
        while time.monotonic() < ends_s and self._api.poll() is None:
            if asyncio.run(self._answers()):
                return
            time.sleep(0.1)
        log = (self.folder / "kube-apiserver.log").read_text()[-3000:]
        self.close()
        raise RuntimeError(f"kube-apiserver does not start here: {log}")

    async def _answers(self) -> bool:
        cluster = Cluster(self.kubeconfig())
        try:
            return (await cluster._http.get("/readyz")).status_code == 200  # with its rules of who may do what
        except cluster._errors:
            return False
        finally:
            await cluster.close()

    def stop(self) -> None:
        """End the API server alone."""
        if self._api is not None:
            self._api.kill()
            self._api.wait()
            self._api = None

    def close(self) -> None:
        self.stop()
        if self._etcd is not None:
            self._etcd.kill()
            self._etcd.wait()
            self._etcd = None

    def kubeconfig(self, token: str = ADMIN, port: int = 0) -> Path:
        """Return a kubeconfig of the user with this token."""
        path = self.folder / f"{token}-{port}.yaml"
        address = {"server": f"https://127.0.0.1:{port or self.port}", "insecure-skip-tls-verify": True}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "tests",
            "clusters": [{"name": "tests", "cluster": address}],
            "users": [{"name": "tests", "user": {"token": token}}],
            "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "tests", "namespace": NAMESPACE}}],
        }
        path.write_text(json.dumps(config))
        return path


@contextlib.contextmanager
def api_server() -> Iterator[ApiServer]:
    """Give an API server of a test's own."""
    with tempfile.TemporaryDirectory(prefix="moorage-cluster-") as folder:
        server = ApiServer(Path(folder))
        try:
            yield server
        finally:
            server.close()


class _Ran:
    """A pod that the kubelet runs."""

    def __init__(self, pod: dict[str, Any], folder: Path) -> None:
        self.name: str = pod["metadata"]["name"]
        self.uid: str = pod["metadata"]["uid"]
        self.folder = folder
        self.log = folder / "log"
        self.started = datetime.now(UTC)
        self.began = ""
        self.reason = ""
        self.process: asyncio.subprocess.Process | None = None
        self.is_asked = False
        self.is_over = False
        self.deadline: asyncio.TimerHandle | None = None
        self.deadline_s = 0


class Kubelet:
    """The kubelet of one node, in a thread of its own. While `answers` is false it hears and says nothing."""

    def __init__(self, server: ApiServer, gpus: int = 4) -> None:
        self.answers = True
        #: what it says of images that it has not: the message of its pull
        self.pull = 'failed to resolve reference "{image}": {image}: not found'
        self._server = server
        self._gpus = gpus
        self._pods: dict[str, _Ran] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._folder = tempfile.TemporaryDirectory(prefix="moorage-kubelet-")
        self._up = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()
        if not self._up.wait(START_S):
            raise RuntimeError("the kubelet of the tests does not start")

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._folder.cleanup()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        self._cluster = Cluster(self._server.kubeconfig())
        app = web.Application()
        app.router.add_get("/containerLogs/{namespace}/{pod}/{container}", self._logs)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        certificates = self._server.folder / "certificates"
        tls.load_cert_chain(certificates / "apiserver.crt", certificates / "apiserver.key")
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        assert site._server is not None
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        await self._make_node(port)
        watching = self._loop.create_task(self._watch())
        self._up.set()
        await self._stop.wait()
        tasks = {watching, *self._tasks}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for ran in self._pods.values():
            _kill(ran)
        await runner.cleanup()
        await asyncio.sleep(0.2)  # connections under TLS close a moment later
        await self._cluster.close()

    async def _make_node(self, port: int) -> None:
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}}
        with contextlib.suppress(ClusterError):
            await self._cluster._ask("POST", "/api/v1/nodes", None, node)
        counts = {RESOURCE: str(self._gpus), "cpu": "2", "memory": "4Gi", "pods": "110"}
        status = {
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
            "capacity": counts,
            "allocatable": counts,
            "conditions": [{"type": "Ready", "status": "True"}],
        }
        await self._patch(f"/api/v1/nodes/{NODE}/status", {"status": status})

    async def _patch(self, path: str, change: Mapping[str, Any]) -> dict[str, Any]:
        return await self._cluster._ask("PATCH", path, None, change, "application/strategic-merge-patch+json")

    async def _watch(self) -> None:
        """Look at the node's pods twice a second and act; a real one watches, and so does the driver under test."""
        while True:
            with contextlib.suppress(ClusterDown, ClusterError):
                pods = await self._cluster.pods_of_node(NODE)
                for pod in pods if self.answers else ():
                    self._see(pod)
                there = {pod["metadata"]["name"] for pod in pods}
                for ran in self._pods.values():
                    if self.answers and ran.name not in there and not ran.is_over:  # it was deleted by force
                        self._do(self._end(ran, 0.0))
            await asyncio.sleep(0.1)

    def _see(self, pod: dict[str, Any]) -> None:
        metadata = pod["metadata"]
        ran = self._pods.get(metadata["uid"])
        if ran is None:
            if pod.get("status", {}).get("phase") not in ("Succeeded", "Failed"):
                folder = Path(self._folder.name) / metadata["uid"]
                folder.mkdir()
                ran = self._pods[metadata["uid"]] = _Ran(pod, folder)
                self._do(self._run(ran, pod))
            return
        if "deletionTimestamp" in metadata and not ran.is_asked:
            ran.is_asked = True
            self._do(self._end(ran, float(metadata.get("deletionGracePeriodSeconds") or 0)))
        limit_s = pod["spec"].get("activeDeadlineSeconds")
        if limit_s is not None and limit_s != ran.deadline_s and not ran.is_over:
            ran.deadline_s = limit_s
            if ran.deadline is not None:
                ran.deadline.cancel()
            left_s = limit_s - (datetime.now(UTC) - ran.started).total_seconds()
            ran.deadline = self._loop.call_later(max(0.0, left_s), self._late, ran)

    def _late(self, ran: _Ran) -> None:
        if not ran.is_over:
            ran.reason = "DeadlineExceeded"
            self._do(self._end(ran, 1.0))

    def _do(self, work: Any) -> None:
        async def done() -> None:
            with contextlib.suppress(ClusterDown, ClusterError):  # the pod is gone
                await work

        task = self._loop.create_task(done())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, ran: _Ran, pod: dict[str, Any]) -> None:
        container = pod["spec"]["containers"][0]
        image = container["image"]
        if image != IMAGE:
            message = self.pull.format(image=image)
            await self._say(ran, {"waiting": {"reason": "ErrImagePull", "message": message}}, "Pending")
            return
        variables: dict[str, str] = {}
        for each in container.get("env") or ():
            if "valueFrom" in each:
                from_ = each["valueFrom"]["secretKeyRef"]
                secret = await self._sure(functools.partial(self._cluster.get, "secrets", from_["name"]))
                if secret is None:
                    message = f'secret "{from_["name"]}" not found'
                    await self._say(
                        ran, {"waiting": {"reason": "CreateContainerConfigError", "message": message}}, "Pending"
                    )
                    return
                variables[each["name"]] = base64.b64decode(secret["data"][from_["key"]]).decode()
            else:
                variables[each["name"]] = _expand(each.get("value", ""), variables)
        argv = [_expand(word, variables) for word in container.get("args") or ()]
        folder = ran.folder / "work"
        folder.mkdir()
        try:
            ran.process = await asyncio.create_subprocess_exec(
                *argv, env=variables | {"PATH": os.environ["PATH"], _MARK: ran.uid}, cwd=folder,
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        except OSError:
            ended = {"exitCode": 128, "reason": "StartError", "finishedAt": _now()}
            ended["message"] = f'exec: "{argv[0]}": executable file not found in $PATH'
            ran.is_over = True
            await self._say(ran, {"terminated": ended}, "Failed")
            return
        ran.began = _now()
        await self._say(ran, {"running": {"startedAt": ran.began}}, "Running")
        assert ran.process.stdout is not None
        with ran.log.open("ab") as log:
            while line := await ran.process.stdout.readline():
                stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f000Z")
                log.write(stamp.encode() + b" " + line)
                log.flush()
        await ran.process.wait()
        await self._ended(ran)

    async def _end(self, ran: _Ran, grace_s: float) -> None:
        if ran.process is not None and ran.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(ran.process.pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await ran.process.wait()
            _kill(ran)
        elif ran.process is None and not ran.is_over:
            await self._ended(ran)

    async def _ended(self, ran: _Ran) -> None:
        """The container is over: say so, and let the cluster forget a pod that it was asked to delete."""
        _kill(ran)
        await until(lambda: self.answers, 3600)
        ran.is_over = True
        ended: dict[str, Any] = {"exitCode": 137, "reason": "ContainerStatusUnknown"}
        if ran.process is not None:
            code = ran.process.returncode or 0
            code = 128 - code if code < 0 else code
            ended = {"exitCode": code, "reason": "Completed" if code == 0 else "Error", "startedAt": ran.began}
            ended |= {"finishedAt": _now(), "containerID": f"test://{ran.uid}"}
        await self._say(ran, {"terminated": ended}, "Failed" if ended["exitCode"] else "Succeeded")
        while True:
            pod = await self._sure(lambda: self._cluster.get("pods", ran.name))
            if pod is None:
                return
            if "deletionTimestamp" in pod["metadata"]:
                await self._sure(lambda: self._cluster.delete("pods", ran.name, 0))
                return
            await asyncio.sleep(0.1)

    async def _say(self, ran: _Ran, state: dict[str, Any], phase: str) -> None:
        container = {"name": "job", "state": state, "image": "", "imageID": "", "ready": False, "restartCount": 0}
        if ran.began:
            container["containerID"] = f"test://{ran.uid}"
        started = ran.started.strftime("%Y-%m-%dT%H:%M:%SZ")
        status = {"phase": phase, "startTime": started, "containerStatuses": [container]}
        if ran.reason:
            status["reason"] = ran.reason
        path = self._cluster._path("pods", f"{ran.name}/status")
        change = {"status": status}
        await self._sure(lambda: self._cluster._ask("PATCH", path, None, change, "application/merge-patch+json"))

    async def _sure(self, ask: Callable[[], Awaitable[Any]]) -> Any:
        """Ask until the API server answers: what a kubelet has to say is not lost with a connection."""
        while True:
            try:
                return await ask()
            except ClusterDown:
                await asyncio.sleep(0.1)

    async def _logs(self, request: web.Request) -> web.StreamResponse:
        """What the API server asks for in a client's name."""
        found = [ran for ran in self._pods.values() if ran.name == request.match_info["pod"] and ran.began]
        if not found:
            raise web.HTTPBadRequest(text="the container waits to start")
        ran = found[-1]
        since = request.query.get("sinceTime", "")
        answer = web.StreamResponse()
        await answer.prepare(request)
        at = 0
        while True:
            was_over = ran.is_over or (ran.process is not None and ran.process.returncode is not None)
            data = ran.log.read_bytes()[at:] if ran.log.exists() else b""
            at += len(data)
            lines = [line for line in data.splitlines(keepends=True) if line.decode(errors="replace") >= since]
            if lines:
                await answer.write(b"".join(lines))
            if (was_over and not data) or request.query.get("follow") != "true":
                return answer
            await asyncio.sleep(0.05)


def _expand(text: str, variables: Mapping[str, str]) -> str:
    """As a kubelet expands words: $(NAME) of variables that are known, and one $ of two."""

    def of(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        return variables.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", of, text)


def _kill(ran: _Ran) -> None:
    """End what a container has started, also what has left its group: a real kubelet's runtime ends a cgroup."""
    mark = f"{_MARK}={ran.uid}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)


def _now(later_s: float = 0.0) -> str:
    return (datetime.now(UTC) + timedelta(seconds=later_s)).strftime("%Y-%m-%dT%H:%M:%SZ")


@contextlib.contextmanager
def cluster(gpus: int = 4) -> Iterator[tuple[ApiServer, Kubelet]]:
    """Give an API server and the kubelet of its one node."""
    with api_server() as server:
        kubelet = Kubelet(server, gpus)
        try:
            yield server, kubelet
        finally:
            kubelet.close()

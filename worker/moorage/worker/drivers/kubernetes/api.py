"""Call a cluster's API for the driver kubernetes. `lightkube` is imported when a cluster is opened.

lightkube reads the kubeconfig and handles what it names: certificates, tokens that expire, programs that give a token.
Objects are plain JSON. A failed call is either `ClusterDown` (no answer) or `ClusterError` (an answer with an error).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from moorage.schemas.errors import refuse
from moorage.schemas.optional import install_extra
from moorage.schemas.printable import shortened
from moorage.worker.drivers.container.engine import Piece, lines_of

if TYPE_CHECKING:
    from httpx2 import AsyncClient

ASK_S: Final = 30.0
#: seconds until a watch is started again: a connection may be dead without either side noticing
WATCH_S: Final = 240
#: longest part of an output line; longer lines are cut
_PIECE_BYTES_MAX: Final = 1 << 16
#: most bytes of one object in a watch; a cluster stores far smaller ones
_OBJECT_BYTES_MAX: Final = 1 << 24
_MESSAGE_CHARS_MAX: Final = 500
#: where a pod finds its service account
SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
CONFLICT: Final = 409
GONE: Final = 410
NOT_FOUND: Final = 404


class ClusterDown(Exception):
    """The API server does not answer, or the connection broke: the request may or may not be done."""


class ClusterError(Exception):
    """The API server answered with an error; `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class Cluster:
    """One cluster, as one user, and one namespace of it. Its methods raise `ClusterDown` and `ClusterError`."""

    def __init__(self, kubeconfig: Path | None = None, context: str = "", namespace: str = "") -> None:
        """Open the cluster. `kubeconfig` None: the account of the agent's pod, else KUBECONFIG, else ~/.kube/config.

        Raises Refused if lightkube is not installed, or the kubeconfig is invalid.
        """
        try:
            import httpx2
            from lightkube.config import client_adapter
            from lightkube.config.kubeconfig import KubeConfig
        except ImportError as error:
            raise refuse(
                "failed-precondition",
                f"the driver kubernetes needs lightkube: {error}",
                next=install_extra("kubernetes"),
            ) from None
        try:
            read = KubeConfig.from_file(kubeconfig) if kubeconfig is not None else KubeConfig.from_env(SERVICE_ACCOUNT)
            config = read.get(context or None)
            if config is None or config.user is None:
                raise ValueError("it names no user")
            timeout = httpx2.Timeout(ASK_S)
            parameters = client_adapter.ConnectionParams(timeout=timeout)
            self._http: AsyncClient = client_adapter.AsyncClient(config, parameters)
        except Exception as error:  # lightkube raises many kinds of errors for an invalid file
            where = kubeconfig or os.environ.get("KUBECONFIG") or "that of this pod or ~/.kube/config"
            raise refuse(
                "failed-precondition",
                f"no cluster: the kubeconfig cannot be used: {type(error).__name__}: {error}",
                field="$.driver.kubernetes.kubeconfig",
                found=str(where),
                next="set kubeconfig in [driver.kubernetes], or run the worker in a pod with a service account",
            ) from None
        self.namespace = namespace or config.namespace or "default"
        self._forever = httpx2.Timeout(ASK_S, read=None)
        self._errors = (httpx2.HTTPError, httpx2.StreamError, httpx2.InvalidURL, OSError, EOFError)

    async def close(self) -> None:
        await self._http.aclose()

    # -- pods, secrets and nodes

    async def node(self, name: str) -> dict[str, Any]:
        """Return the node of this name."""
        return await self._ask("GET", f"/api/v1/nodes/{name}")

    async def pods_of_node(self, node: str) -> list[dict[str, Any]]:
        """Return all pods of a node, of every namespace."""
        params = {"fieldSelector": f"spec.nodeName={node}"}
        return list((await self._ask("GET", "/api/v1/pods", params)).get("items") or ())

    async def list(self, kind: str, label: str) -> tuple[list[dict[str, Any]], str]:
        """Return the objects with this label, `NAME=VALUE`, and the version of the list, from which `watch` goes on."""
        found = await self._ask("GET", self._path(kind), {"labelSelector": label})
        with self._sorted():
            return list(found.get("items") or ()), str(found["metadata"]["resourceVersion"])

    async def version(self, kind: str) -> str:
        """Return the version of a kind's objects now, whatever their labels: one of them is read."""
        found = await self._ask("GET", self._path(kind), {"limit": "1"})
        with self._sorted():
            return str(found["metadata"]["resourceVersion"])

    async def create(self, kind: str, made: Mapping[str, Any]) -> dict[str, Any]:
        """Create an object and return it. The cluster is asked to refuse fields that it does not know."""
        return await self._ask("POST", self._path(kind), {"fieldValidation": "Strict"}, made)

    async def get(self, kind: str, name: str) -> dict[str, Any] | None:
        """Return an object; None if no object has this name."""
        with _none_if(NOT_FOUND):
            return await self._ask("GET", self._path(kind, name))
        return None

    async def patch(self, kind: str, name: str, change: Mapping[str, Any]) -> dict[str, Any] | None:
        """Change an object (a merge patch) and return it; None if no object has this name."""
        with _none_if(NOT_FOUND):
            return await self._ask("PATCH", self._path(kind, name), None, change, "application/merge-patch+json")
        return None

    async def delete(self, kind: str, name: str, grace_s: int | None = None) -> None:
        """Begin to delete an object; do nothing if it does not exist.

        `grace_s` is how long a pod's containers may take to end; None: what the pod says. For a pod that is being
        deleted, only a shorter one has an effect.
        """
        body: dict[str, Any] = {"kind": "DeleteOptions", "apiVersion": "v1"}
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        with _none_if(NOT_FOUND):
            await self._ask("DELETE", self._path(kind, name), None, body)

    async def watch(self, kind: str, label: str, version: str) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Yield (ADDED | MODIFIED | DELETED | BOOKMARK, object) from a version on, until the cluster ends the watch.

        Raises ClusterError with `GONE` if the cluster no longer has that version: then `list` again. A cluster that
        does not have it yet, as its store is of an older backup, tells of nothing.
        """
        params = {
            "labelSelector": label,
            "resourceVersion": version,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_S),
        }
        with self._sorted():
            stream = self._stream(self._path(kind), params, _OBJECT_BYTES_MAX)
            async with asyncio.timeout(WATCH_S + ASK_S), stream as lines:
                async for line in lines:
                    event = msgspec.json.decode(line)
                    found = event["object"]
                    if event["type"] == "ERROR":
                        raise ClusterError(int(found.get("code") or 500), str(found.get("message", "")))
                    yield event["type"], found

    async def output(self, pod: str, container: str, since: str, follow: bool) -> AsyncIterator[Piece]:
        """Yield the kept output of a container from a time on (RFC 3339, "" for all), oldest first.

        With `follow`, until the container ends. The cluster does not say which stream a line is from.
        """
        params = {"container": container, "timestamps": "true", "follow": "true" if follow else "false"}
        if since:
            params["sinceTime"] = since
        with self._sorted():
            async with self._stream(self._path("pods", f"{pod}/log"), params, _PIECE_BYTES_MAX) as lines:
                stamp, is_whole = "", True
                async for line in lines:
                    if is_whole:
                        word, _, line = line.partition(b" ")
                        stamp = word.decode("ascii", "replace")
                    is_whole = line.endswith(b"\n")
                    yield Piece(False, stamp, line)

    # -- inside

    def _path(self, kind: str, name: str = "") -> str:
        return f"/api/v1/namespaces/{self.namespace}/{kind}" + (f"/{name}" if name else "")

    async def _ask(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
    ) -> dict[str, Any]:
        content = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"Content-Type": content_type}
        with self._sorted():
            async with asyncio.timeout(ASK_S):
                answer = await self._http.request(method, path, params=params, content=content, headers=headers)
            if answer.status_code >= 400:
                raise _error_of(answer.status_code, answer.content)
            return dict(msgspec.json.decode(answer.content))

    @contextlib.asynccontextmanager
    async def _stream(
        self, path: str, params: Mapping[str, str], bytes_max: int
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        async with self._http.stream("GET", path, params=params, timeout=self._forever) as answer:
            if answer.status_code >= 400:
                raise _error_of(answer.status_code, await answer.aread())
            yield lines_of(answer.aiter_bytes(), bytes_max)

    @contextlib.contextmanager
    def _sorted(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise ClusterDown("the API server does not answer") from None
        except self._errors as error:
            raise ClusterDown(f"lost the API server: {type(error).__name__}: {error}") from None
        except (ClusterDown, ClusterError):
            raise
        except Exception as error:  # lightkube raises many kinds of errors for a program that gives no token
            why = shortened(f"{type(error).__name__}: {error}", _MESSAGE_CHARS_MAX)
            raise ClusterDown(f"no answer of the API server, or none that can be read: {why}") from None


@contextlib.contextmanager
def _none_if(status: int) -> Iterator[None]:
    try:
        yield
    except ClusterError as error:
        if error.status != status:
            raise


def _error_of(status: int, content: bytes) -> ClusterError:
    """Return the error in an answer: an API server's object with a message, or the text of a proxy in front of it."""
    try:
        message = str(msgspec.json.decode(content)["message"])
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError):
        message = content[:_MESSAGE_CHARS_MAX].decode(errors="replace").strip()
    return ClusterError(status, shortened(message or f"HTTP {status}", _MESSAGE_CHARS_MAX))

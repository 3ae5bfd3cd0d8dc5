"""Call a container engine's API for the driver docker. `aiodocker` is imported when an engine is opened.

A failed call is either `EngineDown` (no answer) or `EngineError` (an answer with an error).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import tarfile
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import msgspec

from moorage.schemas.errors import refuse

if TYPE_CHECKING:
    from aiodocker import Docker

#: time limits: for calls that an engine answers at once, and for a start, which takes longer on a busy host
ASK_S: Final = 30.0
START_S: Final = 120.0
_CANNOT_CONNECT: Final = 900  # aiodocker's own
_HEADER_BYTES: Final = 8
_PIECE_BYTES_MAX: Final = 1 << 20
#: of a file that is read from a container
_FILE_BYTES_MAX: Final = 1 << 20
_MESSAGE_CHARS_MAX: Final = 500


class EngineDown(Exception):
    """The engine does not answer, or the connection broke: the request may or may not be done."""


class EngineError(Exception):
    """The engine answered with an error; `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class Piece(NamedTuple):
    """A piece of output as the engine stores it: a line or a part of one, with its time."""

    is_error: bool
    stamp: str
    data: bytes


class Engine:
    """One engine, by its socket. Its methods raise `EngineDown` and `EngineError`."""

    def __init__(self, socket: Path) -> None:
        """Open the engine's client. Raises Refused if `aiodocker` is not installed."""
        try:
            import aiodocker
            import aiohttp
        except ImportError as error:
            raise refuse(
                "failed-precondition",
                f"the driver docker needs aiodocker: {error}",
                next="pip install 'moorage[containers]'",
            ) from None
        self.socket = socket
        # each container keeps two connections open: with aiohttp's default, connections beyond 100 would wait
        self._connector = aiohttp.UnixConnector(str(socket), limit=0)
        self._docker: Docker = aiodocker.Docker(url="http://localhost", connector=self._connector)
        self._no_timeout = aiohttp.ClientTimeout()
        self._errors = (aiohttp.ClientError, OSError, asyncio.IncompleteReadError)
        self._docker_error = aiodocker.DockerError

    async def close(self) -> None:
        await self._docker.close()
        await self._connector.close()

    @contextlib.contextmanager
    def _sorted(self) -> Iterator[None]:
        try:
            yield
        except self._docker_error as error:
            if error.status == _CANNOT_CONNECT:
                raise EngineDown(error.message) from None
            raise EngineError(error.status, str(error.message)) from None
        except TimeoutError:
            raise EngineDown("the engine does not answer") from None
        except self._errors as error:
            raise EngineDown(f"lost the engine: {error}") from None

    async def ping(self) -> None:
        """Return once the engine has answered the cheapest question that there is."""
        with self._sorted():
            async with asyncio.timeout(ASK_S), self._docker.session.get("http://localhost/_ping") as response:
                if response.status != 200:
                    raise EngineError(response.status, _message(await response.text()))

    async def info(self) -> dict[str, Any]:
        """Return the engine's description of itself."""
        with self._sorted():
            async with asyncio.timeout(ASK_S):
                return dict(await self._docker.system.info())

    async def image(self, name: str) -> dict[str, Any] | None:
        """Return the engine's description of an image; None if it has no image of that name."""
        with self._sorted():
            async with asyncio.timeout(ASK_S):
                try:
                    return dict(await self._docker.images.inspect(name))
                except self._docker_error as error:
                    if error.status == 404:
                        return None
                    raise

    async def pull(self, image: str, login: tuple[str, str] | None = None) -> AsyncIterator[Mapping[str, Any]]:
        """Pull an image, with this user and password if given; yield the engine's progress messages."""
        # not by aiodocker, which leaves the connection open if the engine goes away meanwhile
        params, headers = {"fromImage": with_tag(image)}, {}
        if login is not None:
            auth = msgspec.json.encode({"username": login[0], "password": login[1]})
            headers["X-Registry-Auth"] = base64.urlsafe_b64encode(auth).decode()
        with self._sorted():
            asking = self._docker.session.post(
                self._url("images/create"), params=params, headers=headers, timeout=self._no_timeout
            )
            async with asking as response:
                if response.status != 200:
                    raise EngineError(response.status, _message(await response.text()))
                async for line in response.content:
                    told = _decoded(line)
                    if "error" in told:
                        raise EngineError(500, str(told["error"]))
                    yield told

    async def create(self, config: Mapping[str, Any], name: str) -> str:
        """Create a container and return its id."""
        with self._sorted():
            async with asyncio.timeout(ASK_S):
                return (await self._docker.containers.create(dict(config), name=name)).id

    async def start(self, container: str) -> None:
        with self._sorted():
            async with asyncio.timeout(START_S):
                await self._docker.containers.container(container).start()

    async def state(self, container: str) -> dict[str, Any] | None:
        """Return the container's state: Status, ExitCode, OOMKilled and more.

        None if the engine has no such container.
        """
        with self._sorted():
            async with asyncio.timeout(ASK_S):
                try:
                    shown = await self._docker.containers.container(container).show()
                except self._docker_error as error:
                    if error.status == 404:
                        return None
                    raise
        return cast(dict[str, Any], shown["State"])

    async def wait(self, container: str) -> None:
        """Return when the container is not running or does not exist."""
        with self._sorted():
            try:
                await self._docker.containers.container(container).wait()
            except self._docker_error as error:
                if error.status != 404:
                    raise

    async def read_file(self, container: str, path: str) -> bytes:
        """Return the first bytes, 1 MiB at most, of a file of a container, started or not.

        Return b"" if it does not exist or is no regular file.
        """
        url = self._url(f"containers/{container}/archive")
        with self._sorted():
            async with asyncio.timeout(ASK_S), self._docker.session.get(url, params={"path": path}) as response:
                if response.status == 404:
                    return b""
                if response.status != 200:
                    raise EngineError(response.status, _message(await response.text()))
                archive = b""
                async for chunk in response.content.iter_any():
                    archive += chunk
                    if len(archive) > _FILE_BYTES_MAX:
                        break
        with (
            contextlib.suppress(tarfile.TarError, EOFError, KeyError),  # not an archive, or cut, or a link
            tarfile.open(fileobj=io.BytesIO(archive)) as tar,
        ):
            for member in tar:
                found = tar.extractfile(member)
                return found.read(_FILE_BYTES_MAX) if found is not None else b""
        return b""

    def _url(self, path: str) -> str:
        version = "" if self._docker.api_version == "auto" else f"/{self._docker.api_version}"
        return f"http://localhost{version}/{path}"

    async def remove(self, container: str) -> None:
        """Remove a container, even if it runs; return when the engine has removed it, or has no such container."""
        with self._sorted():
            async with asyncio.timeout(ASK_S):
                try:
                    await self._docker.containers.container(container).delete(force=True, v=True)
                except self._docker_error as error:
                    if error.status != 404:
                        raise

    async def labelled(self, label: str) -> list[tuple[str, Mapping[str, str]]]:
        """Return (id, labels) of all containers that have this label, running or not."""
        with self._sorted():
            async with asyncio.timeout(ASK_S):
                filters = '{"label": ["%s"]}' % label  # noqa: UP031
                found = await self._docker.containers.list(all="true", filters=filters)
        return [(each.id, each["Labels"]) for each in found]

    async def output(self, container: str, since: str, follow: bool) -> AsyncIterator[Piece]:
        """Yield the kept output from a time on (seconds of the epoch), oldest first; with `follow` until the container
        ends.

        Yields nothing if the engine has no such container.
        """
        params = {"stdout": "1", "stderr": "1", "timestamps": "1", "since": since, "follow": "1" if follow else "0"}
        url = self._url(f"containers/{container}/logs")
        with self._sorted():
            async with self._docker.session.get(url, params=params, timeout=self._no_timeout) as response:
                if response.status == 404:
                    return
                if response.status != 200:
                    raise EngineError(response.status, _message(await response.text()))
                while True:
                    try:
                        header = await response.content.readexactly(_HEADER_BYTES)
                    except asyncio.IncompleteReadError as error:
                        if error.partial:
                            raise
                        return
                    length = int.from_bytes(header[4:], "big")
                    if length > _PIECE_BYTES_MAX:
                        raise EngineError(500, f"a piece of output of {length} bytes")
                    stamp, _, data = (await response.content.readexactly(length)).partition(b" ")
                    yield Piece(header[0] == 2, stamp.decode("ascii", "replace"), data)


def with_tag(image: str) -> str:
    """Return the name of an image with its tag: for a name without one, an engine would pull every tag."""
    is_exact = "@" in image or ":" in image.rpartition("/")[2]
    return image if is_exact else f"{image}:latest"


def _decoded(line: bytes) -> Mapping[str, Any]:
    """Return the object in a line of an engine's stream; an empty one if the line has none."""
    with contextlib.suppress(msgspec.DecodeError):
        found = msgspec.json.decode(line)
        if isinstance(found, dict):
            return found
    return {}


def _message(text: str) -> str:
    """Return the message in an engine's error, cut; the text itself if it has none."""
    return str(_decoded(text.encode()).get("message", text))[:_MESSAGE_CHARS_MAX]

"""Call a container engine over its UNIX socket: the one client for Docker's API and for podman's.

The two APIs differ in their paths, in the body that makes a container, and in what they say of themselves: `docker.py`
and `podman.py` have one request maker each. A failed call is either `EngineDown` (no answer) or `EngineError` (an
answer with an error). `aiohttp` is imported when an engine is opened.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import re
import tarfile
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple
from urllib.parse import quote, urlencode

import msgspec

from moorage.schemas.errors import refuse
from moorage.schemas.frames import Exec
from moorage.schemas.optional import install_extra
from moorage.schemas.printable import shortened

if TYPE_CHECKING:
    from aiohttp import ClientSession

#: time limits: for calls that an engine answers at once, and for a start, which takes longer on a busy host
ASK_S: Final = 30.0
START_S: Final = 120.0
#: how long an idle connection stays open
IDLE_S: Final = 1.0
_HEADER_BYTES: Final = 8
#: before each piece of a log without frames
_STAMP: Final = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[.\d]*(?:Z|[+-]\d\d:\d\d)) ")
_PIECE_BYTES_MAX: Final = 1 << 20
#: of a file that is read from a container
_FILE_BYTES_MAX: Final = 1 << 20
_MESSAGE_CHARS_MAX: Final = 500
#: the keys that detach, hardly ever typed: the default, Ctrl-P Ctrl-Q, would be taken out of what a terminal sends
_NO_DETACH: Final = "ctrl-@,ctrl-^,ctrl-_,ctrl-^"
_MESSAGE_BYTES_MAX: Final = 64 * 1024
#: answers that mean success; 304 is for a container that is started already
_DONE: Final = (200, 201, 204, 304)


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


class About(msgspec.Struct, frozen=True):
    """An engine's description of itself.

    `maps_users` says that the users of its containers are other users of the host. `limits` are those that it can set
    for a container: cpu, memory and pids. `cdi_folders` are where it looks for CDI specs, None if it does not use CDI.
    """

    is_rootless: bool
    maps_users: bool
    limits: frozenset[str]
    cdi_folders: tuple[str, ...] | None


class State(msgspec.Struct, frozen=True):
    """A container's state. `pid` is that of its first process on the host, 0 if it does not run.

    `is_new` says that it was never started, `is_over` that it has ended with `code`.
    """

    is_new: bool
    is_over: bool
    code: int
    is_out_of_memory: bool
    pid: int
    has_terminal: bool


class Engine(ABC):
    """One engine, by its socket. Its methods raise `EngineDown` and `EngineError`."""

    #: what comes before each path
    root: ClassVar[str]
    #: path and parameter of a pull
    pull_at: ClassVar[tuple[str, str]]
    #: how an operator starts the engine
    starts: ClassVar[str]
    #: parameters of a removal
    removes: ClassVar[Mapping[str, str]] = {"force": "true", "v": "true"}
    #: whether GPUs come by CDI alone, and not by a hook of NVIDIA's
    only_cdi: ClassVar[bool] = False
    #: whether its log has frames for a container with a terminal, too
    frames_terminals: ClassVar[bool] = False
    #: whether the engine itself gives a mounted folder to the container's user
    gives_folders: ClassVar[bool] = False

    def __init__(self, socket: Path) -> None:
        """Make the engine's client, which connects when it is asked. Raises Refused if `aiohttp` cannot be imported."""
        try:
            import aiohttp

            failed = aiohttp.ClientError  # only this imports it where `import_when_used` stands in for it
        except ImportError as error:
            raise refuse(
                "failed-precondition",
                f"a driver of containers needs aiohttp: {error}",
                next=install_extra("containers"),
            ) from None
        self.socket = socket
        self._aiohttp = aiohttp
        self._made: aiohttp.ClientSession | None = None
        self._errors = (failed, OSError, asyncio.IncompleteReadError)

    @property
    def _session(self) -> ClientSession:
        if self._made is None:
            # Each container keeps a connection open: with aiohttp's default, connections beyond 100 would wait. An idle
            # one is closed before the next ping, which would keep all of a burst open.
            connector = self._aiohttp.UnixConnector(str(self.socket), limit=0, keepalive_timeout=IDLE_S)
            forever = self._aiohttp.ClientTimeout()
            self._made = self._aiohttp.ClientSession("http://localhost", connector=connector, timeout=forever)
        return self._made

    async def close(self) -> None:
        if self._made is not None:
            await self._made.close()

    # -- the differences of the two APIs

    @abstractmethod
    def body_of(self, config: Mapping[str, Any], name: str) -> tuple[dict[str, str], dict[str, Any]]:
        """Return parameters and body of the request that makes a container, of a configuration of `config_of`."""

    @abstractmethod
    def about_of(self, info: Mapping[str, Any]) -> About:
        """Return what an engine's answer to `info` says."""

    # -- calls

    @contextlib.contextmanager
    def _sorted(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise EngineDown("the engine does not answer") from None
        except self._errors as error:
            raise EngineDown(f"lost the engine: {error}") from None
        except (EngineDown, EngineError):
            raise
        except Exception as error:  # of what cannot be read, aiohttp and the decoder raise many kinds of errors
            why = shortened(f"{type(error).__name__}: {error}", _MESSAGE_CHARS_MAX)
            raise EngineDown(f"the engine's answer cannot be read: {why}") from None

    @contextlib.asynccontextmanager
    async def _asked(
        self, method: str, path: str, *, limit_s: float | None = ASK_S, **fields: Any
    ) -> AsyncIterator[Any]:
        """Send a request and give its response; an answer with an error is raised."""
        with self._sorted():
            async with (
                asyncio.timeout(limit_s),
                self._session.request(method, f"{self.root}/{path}", **fields) as response,
            ):
                if response.status not in _DONE:
                    raise EngineError(response.status, _message(await response.text()))
                yield response

    async def _answer(self, method: str, path: str, **fields: Any) -> Any:
        """Return the object in the answer to a request; None if the engine does not know what the path names."""
        try:
            async with self._asked(method, path, **fields) as response:
                text = await response.read()
                return msgspec.json.decode(text) if text.strip() else {}
        except EngineError as error:
            if error.status == 404:
                return None
            raise

    async def ping(self) -> None:
        """Return once the engine has answered the cheapest question that there is."""
        async with self._asked("GET", "_ping"):
            pass

    async def about(self) -> About:
        """Return the engine's description of itself."""
        async with self._asked("GET", "info") as response:
            return self.about_of(msgspec.json.decode(await response.read()))

    async def image(self, name: str) -> dict[str, Any] | None:
        """Return the engine's description of an image; None if it has no image of that name."""
        found: dict[str, Any] | None = await self._answer("GET", f"images/{quote(name, safe='/:@')}/json")
        return found

    async def pull(self, image: str, login: tuple[str, str] | None = None) -> AsyncIterator[Mapping[str, Any]]:
        """Pull an image, with this user and password if given; yield the engine's progress messages."""
        headers = {}
        if login is not None:
            auth = msgspec.json.encode({"username": login[0], "password": login[1]})
            headers["X-Registry-Auth"] = base64.urlsafe_b64encode(auth).decode()
        path, word = self.pull_at
        params = {word: with_tag(image)}
        async with self._asked("POST", path, limit_s=None, params=params, headers=headers) as response:
            async for line in lines_of(response.content.iter_any(), _PIECE_BYTES_MAX):
                if len(line) == _PIECE_BYTES_MAX:  # it quotes what a registry has answered
                    said = _message(line.decode(errors="replace"))
                    raise EngineError(500, f"a message of the pull is too long: {said}")
                message = _decoded(line)
                if "error" in message:
                    raise EngineError(500, str(message["error"]))
                yield message

    async def create(self, config: Mapping[str, Any], name: str) -> str:
        """Create a container and return its id."""
        params, body = self.body_of(config, name)
        async with self._asked("POST", "containers/create", params=params, json=body) as response:
            return str((await response.json())["Id"])

    async def start(self, container: str) -> None:
        async with self._asked("POST", f"containers/{container}/start", limit_s=START_S):
            pass

    async def state(self, container: str) -> State | None:
        """Return the container's state; None if the engine has no such container."""
        shown = await self._answer("GET", f"containers/{container}/json")
        if shown is None:
            return None
        with self._sorted():
            state = shown["State"]
            return State(
                is_new=state["Status"] in ("created", "configured", "initialized"),
                is_over=state["Status"] in ("exited", "dead", "stopped"),
                code=int(state.get("ExitCode", -1)),
                is_out_of_memory=bool(state.get("OOMKilled")),
                pid=int(state.get("Pid") or 0),
                has_terminal=bool((shown.get("Config") or {}).get("Tty")),
            )

    async def read_file(self, container: str, path: str) -> bytes:
        """Return the first bytes, 1 MiB at most, of a file of a container, started or not.

        Return b"" if it does not exist or is no regular file.
        """
        archive = b""
        try:
            async with self._asked("GET", f"containers/{container}/archive", params={"path": path}) as response:
                async for chunk in response.content.iter_any():
                    archive += chunk
                    if len(archive) > _FILE_BYTES_MAX:
                        break
        except EngineError as error:
            if error.status == 404:
                return b""
            raise
        with (
            contextlib.suppress(tarfile.TarError, EOFError, KeyError),  # not an archive, or cut, or a link
            tarfile.open(fileobj=io.BytesIO(archive)) as tar,
        ):
            for member in tar:
                found = tar.extractfile(member)
                return found.read(_FILE_BYTES_MAX) if found is not None else b""
        return b""

    async def make_command(self, container: str, asked: Exec) -> str:
        """Have the engine prepare a command in a running container; return the command's id."""
        body = {
            "AttachStdin": True,
            "AttachStdout": True,
            "AttachStderr": True,
            "Tty": asked.tty,
            "Cmd": asked.argv,
            "DetachKeys": _NO_DETACH,
            "Env": [f"TERM={asked.term}"] if asked.term else [],
        }
        async with self._asked("POST", f"containers/{container}/exec", json=body) as response:
            return str((await response.json())["Id"])

    async def start_command(
        self, command: str, *, is_terminal: bool
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Start a prepared command; return its output, in frames unless it has a terminal, and its input."""
        body = {"Detach": False, "Tty": is_terminal}
        return await _handed_over(str(self.socket), f"{self.root}/exec/{command}/start", body, START_S)

    async def command_state(self, command: str) -> tuple[int, int | None]:
        """Return the pid of a command's process on the host, 0 if it is not known yet, and its exit code once it is
        over."""
        shown = await self._answer("GET", f"exec/{command}/json")
        if shown is None:
            raise EngineError(404, "the engine has forgotten the command")
        pid, code = int(shown.get("Pid") or 0), shown.get("ExitCode")
        # before its start Docker has no code, and podman 0; once it is over Docker keeps its pid, and podman lets go.
        # Of a program that cannot be started Docker has a code and no pid
        is_over = not shown.get("Running") and code is not None and bool(pid or code or shown.get("CanRemove"))
        return pid, int(code) if is_over else None

    async def resize_command(self, command: str, rows: int, columns: int) -> None:
        """Give the terminal of a running command another size."""
        params = {"h": str(rows), "w": str(columns)}
        async with self._asked("POST", f"exec/{command}/resize", params=params):
            pass

    async def attach(self, container: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Attach to the terminal of a container, started or not; return what it shows from now on, and its input.

        A container that is over must not be attached to: podman would set it up once more.
        """
        words = {"stdin": "true", "stdout": "true", "stderr": "true", "stream": "true", "logs": "false"}
        params = urlencode(words | {"detachKeys": _NO_DETACH})
        path = f"{self.root}/containers/{container}/attach?{params}"
        return await _handed_over(str(self.socket), path, None, START_S)

    async def resize(self, container: str, rows: int, columns: int) -> None:
        """Give the terminal of a running container another size."""
        params = {"h": str(rows), "w": str(columns)}
        async with self._asked("POST", f"containers/{container}/resize", params=params):
            pass

    async def remove(self, container: str) -> None:
        """Remove a container, even if it runs; return when the engine has removed it, or has no such container."""
        await self._answer("DELETE", f"containers/{container}", params=self.removes)

    async def labelled(self, label: str) -> list[tuple[str, Mapping[str, str]]]:
        """Return (id, labels) of all containers that have this label, running or not."""
        filters = msgspec.json.encode({"label": [label]}).decode()
        found = await self._answer("GET", "containers/json", params={"all": "true", "filters": filters})
        with self._sorted():
            return [(each["Id"], each.get("Labels") or {}) for each in found or ()]

    async def output(
        self, container: str, since: str, follow: bool, *, is_terminal: bool = False
    ) -> AsyncIterator[Piece]:
        """Yield the kept output from a time on (seconds of the epoch), oldest first; with `follow` until the container
        ends.

        Yields nothing if the engine has no such container. `is_terminal` says that the container has a terminal.
        """
        words = {"stdout": "true", "stderr": "true", "timestamps": "true", "since": since}
        params = words | {"follow": "true" if follow else "false"}
        try:
            async with self._asked("GET", f"containers/{container}/logs", limit_s=None, params=params) as response:
                if is_terminal and not self.frames_terminals:
                    async for piece in _unframed(response.content.iter_chunks()):
                        yield piece
                    return
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
        except EngineError as error:
            if error.status != 404:
                raise


async def lines_of(chunks: AsyncIterator[bytes], bytes_max: int) -> AsyncIterator[bytes]:
    """Yield the lines of a stream with their line feeds, cut after `bytes_max` bytes; the last may be incomplete."""
    rest = bytearray()
    async for chunk in chunks:
        seen = len(rest)
        rest += chunk
        begin = 0
        while True:
            end = rest.find(b"\n", max(begin, seen)) + 1
            if not end and len(rest) - begin <= bytes_max:
                break
            end = min(end or len(rest), begin + bytes_max)
            yield bytes(rest[begin:end])
            begin = end
        del rest[:begin]
    if rest:
        yield bytes(rest)


async def _unframed(chunks: AsyncIterator[tuple[bytes, bool]]) -> AsyncIterator[Piece]:
    """Yield the pieces of a log without frames: each is one chunk of the HTTP answer, a time and a blank before it.

    The text alone does not say where a piece ends: of a line of more than 16 KiB Docker sends the parts, each with a
    time, and no end of the line. `chunks` are pieces of chunks, with whether the chunk ends there.
    """
    text, stamp = bytearray(), ""
    async for data, is_end in chunks:
        text += data
        if is_end and text:
            if found := _STAMP.match(text):
                stamp = found[1].decode()
                del text[: found.end()]
            yield Piece(False, stamp, bytes(text))
            text.clear()


async def _handed_over(
    socket: str, path: str, body: dict[str, Any] | None, limit_s: float
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request to an engine that hands the connection over, and return its streams.

    Raises EngineDown, and EngineError for an answer with an error.
    """
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(limit_s):
            reader, writer = await asyncio.open_unix_connection(socket, limit=_PIECE_BYTES_MAX)
            payload = b"" if body is None else msgspec.json.encode(body)  # a container would get it as its input
            head = (
                f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
            )
            writer.write(head.encode() + payload)
            answer = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            status = int(answer.split(" ", 2)[1])
            if status not in (101, 200):
                text = (await reader.read(_MESSAGE_BYTES_MAX)).decode(errors="replace")
                raise EngineError(status, shortened(text.strip(), _MESSAGE_CHARS_MAX) or answer.splitlines()[0])
            return reader, writer
    except BaseException as error:
        if writer is not None:
            writer.close()
        if isinstance(error, OSError | EOFError | ValueError | TimeoutError | asyncio.LimitOverrunError):
            raise EngineDown(f"the engine handed over no connection: {error}") from None
        raise


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
    return shortened(str(_decoded(text.encode()).get("message", text)), _MESSAGE_CHARS_MAX)

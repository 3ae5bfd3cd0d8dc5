"""A program that is an HTTP server, as the one that answers the calls of a member.

It stands in the place of `Program`: the member's own process starts the server on a port of its own, waits until it is
healthy, and forwards each call as one request. Each read of the server is one part of the answer. A call whose caller
waits no longer closes its connection, by which such servers end what they do for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from moorage.calls.child import END_S, LAST_WORDS_S, BeforeKill, Child
from moorage.calls.wire import FromProgram, ToProgram
from moorage.schemas.exit_words import exit_words
from moorage.schemas.http_service import (
    HTTP_HEADERS,
    HTTP_METHOD,
    HTTP_PATH,
    HTTP_STATUS,
    PORT,
    PORT_VARIABLE,
    HttpRequest,
    HttpSpec,
    SleepBy,
    engine_load,
    is_http,
    passed_on,
    path_refused,
)
from moorage.schemas.optional import optional
from moorage.schemas.service import CONTENT_TYPE

if TYPE_CHECKING:
    import aiohttp

#: between two questions whether the server is healthy
HEALTH_S: Final = 0.1
#: what one question may take
HEALTH_S_MAX: Final = 10.0
#: between two of these questions once it has been ready, and so many in a row that it fails end that
LOOK_S: Final = 2.0
LOOKS: Final = 3
#: calls that run in a server which is to sleep have so long to end, its sleep and its wake take no longer
CALLS_END_S: Final = 30.0
AWAKE_S: Final = 300.0
#: where engines tell how many requests they run
METRICS: Final = "/metrics"
#: a part has at most so many bytes: half of what servers of NATS take by default
PART_BYTES_MAX: Final = 512 * 1024
#: an idle connection is closed sooner than servers do, which may then not be asked over it
IDLE_S: Final = 2.0
#: so many other ports are tried for a server that ends while another process has its port
PORTS_MAX: Final = 5
#: methods of a service of this kind: callers of `chat.embeddings` reach /v1/embeddings
METHODS: Final = ("completions", "embeddings", "rerank", "responses", "score")
#: most characters of a server's error that a bare caller gets
_WHY_CHARS_MAX: Final = 2000
BROKE_OFF: Final = 502
REFUSED: Final = 403

log = logging.getLogger("moorage.calls")


class HttpProgram(Child):
    """A started server. `on_frame` gets the frames of its answers as those of a program, `on_failed` the status of each
    answer of 500 or more, `on_well` whether it is healthy, whenever that changes once it has been ready, and `on_load`
    how many requests run in it and how many wait, if it has metrics."""

    def __init__(
        self,
        spec: HttpSpec,
        on_frame: Callable[[FromProgram, bytes], None],
        on_over: Callable[[str], None],
        before_kill: BeforeKill | None = None,
        on_failed: Callable[[int, str], None] = lambda status, why: None,
        on_well: Callable[[bool], None] = lambda is_well: None,
        on_load: Callable[[int, int], None] = lambda running, waiting: None,
        sleep_by: SleepBy | None = None,
    ) -> None:
        super().__init__(on_over, before_kill)
        self._spec = spec
        self._on_frame = on_frame
        self._on_failed = on_failed
        self._on_well = on_well
        self._on_load = on_load
        self._sleep_by = sleep_by
        self._heard_s = 0.0  # when it has sent a part of an answer last
        self._session: aiohttp.ClientSession | None = None
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._may_read = asyncio.Event()
        self._may_read.set()
        self._port = 0
        self.sleeps = False  # it was asked to, and not to wake again

    async def start(self, argv: Sequence[str], concurrency: int, environment: Mapping[str, str]) -> None:
        """Start the server, and say `ready` once it is healthy and warm. Raises OSError, and MoorageError without the
        package that it needs."""
        aiohttp = optional("aiohttp", extra="http")
        trace = aiohttp.TraceConfig()

        async def on_reused(_: Any, context: Any, __: Any) -> None:
            if context.trace_request_ctx is not None:
                context.trace_request_ctx.append(True)

        trace.on_connection_reuseconn.append(on_reused)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            trace_configs=[trace],
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        await self._start(argv, environment)
        self._watching = asyncio.get_running_loop().create_task(self._watch(argv, concurrency, environment))

    async def _start(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        self._port = _free_port()
        port = str(self._port)
        self._process = await asyncio.create_subprocess_exec(
            *(word.replace(PORT, port) for word in argv),
            # as `Program` does: SIGTERM is for the member, which lets the calls end first
            start_new_session=True,
            env={name: value.replace(PORT, port) for name, value in environment.items()} | {PORT_VARIABLE: port},
        )
        self.pid = self._process.pid

    async def _watch(self, argv: Sequence[str], concurrency: int, environment: Mapping[str, str]) -> None:
        """Say when the server is ready, while it is healthy, and when it has ended."""
        looking: asyncio.Task[None] | None = None
        for _ in range(PORTS_MAX):
            assert self._process is not None
            ending = asyncio.create_task(self._process.wait())
            getting_ready = asyncio.create_task(self._ready())
            await asyncio.wait((ending, getting_ready), return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                self._on_frame(FromProgram(ready=concurrency, endpoints=list(METHODS)), b"")
                looking = asyncio.create_task(self._look_after())
                break
            getting_ready.cancel()
            if self._process.returncode == 0 or not await _is_taken(self._port):
                break
            log.warning("the server ended, and another process listens on port %d: it starts anew", self._port)
            try:
                await self._start(argv, environment)
            except OSError as error:
                self._over(f"the server cannot be started: {error.strerror or error}")
                return
        ended = await ending
        if looking is not None:
            looking.cancel()
        self._over(f"the server ended {exit_words(ended)}")

    async def _look_after(self) -> None:
        """Tell when it is no longer healthy, and when it is again.

        One that has calls, and sends parts of their answers, is at work: some are unhealthy while they take no more.
        """
        loop = asyncio.get_running_loop()
        is_well, failed = True, 0
        while True:
            await asyncio.sleep(LOOK_S)
            if self.sleeps:
                continue
            if await self._status(self._spec.health, b"", HEALTH_S_MAX) in range(200, 400):
                failed = 0
            else:
                failed += 1
            works = bool(self._calls) and loop.time() - self._heard_s < self._spec.idle_s
            if (failed == 0 and not is_well) or (failed >= LOOKS and is_well and not works):
                is_well = failed == 0
                log.warning(
                    "the server is healthy%s", " again" if is_well else f" no longer: {self._spec.health} says so"
                )
                self._on_well(is_well)
            if engine := self._spec.metrics:
                told = engine_load((await self._text(METRICS)).decode(errors="replace"), engine)
                self._on_load(*(told or (0, 0)))

    @property
    def can_sleep(self) -> bool:
        """Whether requests put it to sleep and wake it."""
        return self._sleep_by is not None

    async def sleep(self) -> str:
        """Have the server sleep, once it has no calls. Return why it does not; "" if it does."""
        assert self._sleep_by is not None
        if self._calls:
            await asyncio.wait(list(self._calls.values()), timeout=CALLS_END_S)
        if self._calls:
            return f"{len(self._calls)} calls still run in it"
        self.sleeps = True
        status = await self._posted(self._sleep_by.sleep)
        if status in range(200, 300):
            return ""
        self.sleeps = not status  # one that does not answer may sleep all the same
        return f"{self._sleep_by.sleep.path} is answered with {status or 'nothing'}"

    async def wake(self) -> str:
        """Have the server run on; return once it is ready for calls. Return why it is not; "" if it is."""
        assert self._sleep_by is not None
        status = await self._posted(self._sleep_by.wake)
        if status not in range(200, 300):
            return f"{self._sleep_by.wake.path} is answered with {status or 'nothing'}"
        try:
            async with asyncio.timeout(AWAKE_S):
                await self._ready()
        except TimeoutError:
            return f"it is not healthy {AWAKE_S:g} s after {self._sleep_by.wake.path}"
        self.sleeps = False
        return ""

    async def _posted(self, request: HttpRequest) -> int:
        return (await self._asked(request.path, request.body.encode(), AWAKE_S, "POST"))[0]

    async def _ready(self) -> None:
        """Return once the server is healthy, and has answered the request that warms it."""
        await self._answered(self._spec.health)
        if (warm := self._spec.warm) is not None:
            await self._answered(warm.path, warm.body.encode(), within_s=None)

    async def _answered(self, path: str, body: bytes = b"", within_s: float | None = HEALTH_S_MAX) -> None:
        """Ask until the answer is 200 to 399. Another path is likely meant where it is 400 to 499: log that once."""
        told = 0
        while True:
            status = await self._status(path, body, within_s)
            if status in range(200, 400):
                return
            if status in range(400, 500) and status != told:
                told = status
                log.warning("the server answers %s with %d: it takes no calls until that is 200 to 399", path, status)
            await asyncio.sleep(HEALTH_S)

    async def _status(self, path: str, body: bytes, within_s: float | None) -> int:
        """Return the status of an answer; 0 if there is none."""
        return (await self._asked(path, body, within_s))[0]

    async def _text(self, path: str) -> bytes:
        """Return the body of an answer; b"" if there is none."""
        status, body = await self._asked(path, b"", HEALTH_S_MAX)
        return body if status == 200 else b""

    async def _asked(self, path: str, body: bytes, within_s: float | None, method: str = "") -> tuple[int, bytes]:
        import aiohttp

        assert self._session is not None
        headers = {CONTENT_TYPE: "application/json"} if body else {}
        method, url = method or ("POST" if body else "GET"), self._url(path)
        asking = self._session.request(method, url, data=body or None, headers=headers, allow_redirects=False)
        try:
            async with asyncio.timeout(within_s), asking as answer:
                return answer.status, await answer.read()
        except (aiohttp.ClientError, OSError, TimeoutError):
            return 0, b""

    # -- the way of the calls

    def send(self, head: ToProgram, body: bytes = b"") -> None:
        if head.call:
            task = asyncio.get_running_loop().create_task(self._call(head, body))
            self._calls[head.call] = task
            task.add_done_callback(lambda _: self._calls.pop(head.call, None))
        elif head.cancel and (running := self._calls.get(head.cancel)):
            running.cancel()

    def send_all(self, frames: Sequence[tuple[ToProgram, bytes]]) -> None:
        for head, body in frames:
            self.send(head, body)

    def hold(self, on: bool) -> None:
        if on:
            self._may_read.clear()
        else:
            self._may_read.set()

    def take_back(self) -> list[int]:
        return []

    async def _call(self, head: ToProgram, body: bytes) -> None:
        import aiohttp

        number = head.call
        self._heard_s = asyncio.get_running_loop().time()
        try:
            await self._forward(head, body)
        except asyncio.CancelledError:
            self._on_frame(FromProgram(error=number, message="its caller waits no longer"), b"")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # the end of the server comes first as that of its connections: the member is to say that it died
            assert self._process is not None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS_S):
                    await self._process.wait()
                    return
            why = "the server broke its answer off"
            if not isinstance(error, aiohttp.ClientPayloadError):  # whose words are of parsers, and name a status
                why += f": {error or type(error).__name__}"
            self._on_failed(BROKE_OFF, why)
            self._on_frame(FromProgram(error=number, message=why, code=BROKE_OFF), b"")

    async def _forward(self, head: ToProgram, body: bytes) -> None:
        number, whole = head.call, is_http(head.headers)
        given = {name.lower(): value for name, value in head.headers.items()}
        path = f"/v1/{head.endpoint}" if head.endpoint else self._spec.path
        method, target = given.get(HTTP_METHOD.lower(), "POST"), given.get(HTTP_PATH.lower(), path)
        own = head.endpoint or HTTP_PATH.lower() not in given  # the service's own path may be outside its paths
        if why := path_refused(
            method, target, [*self._spec.paths, path.partition("?")[0]] if own else self._spec.paths
        ):
            self._on_frame(FromProgram(error=number, message=why, code=REFUSED), b"")
            return
        headers = passed_on(head.headers.items())
        if not whole and CONTENT_TYPE.lower() not in given and (body or head.file):
            headers.append((CONTENT_TYPE, "application/json"))
        async with self._answer(method, target, headers, body, head.file) as answer:
            if whole:
                await self._in_parts(number, answer)
            else:
                await self._plain(number, answer)

    @contextlib.asynccontextmanager
    async def _answer(
        self, method: str, target: str, headers: list[tuple[str, str]], body: bytes, file: str
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Ask the server. Of a connection that was idle, and that it closes without a word, it has read nothing: it is
        asked again."""
        import aiohttp

        assert self._session is not None
        has_body = bool(body or file) or method in ("POST", "PUT", "PATCH")
        while True:
            reused: list[bool] = []
            # the file is in the memory of the page cache: the member has just written it
            with open(file, "rb") if file else contextlib.nullcontext(body if has_body else None) as data:  # noqa: ASYNC230
                asking = self._session.request(
                    method,
                    self._url(target),
                    headers=headers,
                    data=data,
                    allow_redirects=False,
                    trace_request_ctx=reused,
                )
                try:
                    answer = await asking
                except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                    if reused and self.code is None:
                        continue
                    raise
            try:
                yield answer
            except BaseException:
                answer.close()  # what is left of it may never be the beginning of another one's
                raise
            answer.release()
            return

    async def _in_parts(self, number: int, answer: aiohttp.ClientResponse) -> None:
        """Pass an answer on as it comes, whatever its status."""
        found = passed_on((name, value) for name, value in answer.headers.items())
        if (length := answer.headers.get("Content-Length")) is not None:
            found.append(("Content-Length", length))
        head = {HTTP_STATUS: str(answer.status), HTTP_HEADERS: json.dumps(found)}
        if answer.status >= 500:
            self._on_failed(answer.status, answer.reason or "")
        begun = False
        async for read in self._reads(answer):
            for at in range(0, len(read), PART_BYTES_MAX):
                self._on_frame(FromProgram(part=number, headers={} if begun else head), read[at : at + PART_BYTES_MAX])
                begun = True
            if not self._may_read.is_set():
                await self._may_read.wait()
        if not begun:
            self._on_frame(FromProgram(part=number, headers=head), b"")
        self._on_frame(FromProgram(answer=number, in_parts=True), b"")

    async def _plain(self, number: int, answer: aiohttp.ClientResponse) -> None:
        """Answer a caller that knows nothing of HTTP: with one value, with parts of a stream of events, or an error."""
        kind = answer.headers.get(CONTENT_TYPE, "")
        headers = {CONTENT_TYPE: kind} if kind else {}
        if answer.status >= 400:
            said = (await answer.read()).decode(errors="replace")[:_WHY_CHARS_MAX]
            self._on_frame(
                FromProgram(error=number, message=said or answer.reason or "", code=min(answer.status, 599)), b""
            )
        elif kind.startswith("text/event-stream"):
            left = b""
            async for read in self._reads(answer):
                events, end, left = (left + read).rpartition(b"\n\n")  # a caller gets whole events
                if end:
                    self._on_frame(FromProgram(part=number, headers=headers), events + end)
                if not self._may_read.is_set():
                    await self._may_read.wait()
            if left:
                self._on_frame(FromProgram(part=number, headers=headers), left)
            self._on_frame(FromProgram(answer=number, in_parts=True, headers=headers), b"")
        else:
            self._on_frame(FromProgram(answer=number, headers=headers), await answer.read())

    async def _reads(self, answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        async for read in answer.content.iter_any():
            self._heard_s = loop.time()
            yield read

    def _url(self, target: str) -> Any:
        from yarl import URL

        return URL(f"http://127.0.0.1:{self._port}{target}", encoded=True)

    # -- its end

    async def finish(self, grace_s: float = END_S) -> int:
        """Ask the server to end, kill it if it does not within `grace_s`, and return its exit code."""
        assert self._process is not None
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
        code = await self._ended(grace_s, LAST_WORDS_S)
        await self._close()
        return code

    async def kill(self, announced_s: float = END_S) -> None:
        """Kill the server, as any program, and end the calls that it has."""
        await super().kill(announced_s)
        await self._close()

    async def _close(self) -> None:
        for task in list(self._calls.values()):
            task.cancel()
        if self._session is not None:
            await self._session.close()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


async def _is_taken(port: int) -> bool:
    """Return whether a process listens on a port of this host."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True

"""The door: requests of HTTP become calls of services, and what comes back goes out as it came.

It translates nothing, counts no tokens, and repeats nothing once a call began. It holds no state: any number of doors
stand behind any balancer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec
from aiohttp import web
from multidict import CIMultiDictProxy

from moorage.cli.door.keys import Key, Keyring
from moorage.cli.door.models import Models
from moorage.cli.door.problems import DoorProblem, problem_of
from moorage.client.affinity import KEY_CHARS_MAX
from moorage.client.errors import ClientError
from moorage.schemas.answers.jobs import ServiceRow
from moorage.schemas.http_service import HTTP_HEADERS, HTTP_METHOD, HTTP_PATH, HTTP_STATUS, passed_on, target_trouble
from moorage.schemas.names import is_service
from moorage.schemas.served import Answer, is_header
from moorage.schemas.service import MEMBER, PRIORITY_DEFAULT, PRIORITY_MAX, WAITED_MS

#: how long a call may wait for its start, and between two parts of its answer, in seconds
START_S: Final = 300.0
IDLE_S: Final = 600.0
#: a stream whose call has not begun after the first time gets a sign of life, and then one after each second time
BEAT_FIRST_S: Final = 15.0
BEAT_S: Final = 10.0
#: most bytes of one body, of all bodies that are here, and of one head
BODY_BYTES_MAX: Final = 64 << 20
BODIES_BYTES_MAX: Final = 1 << 30
HEAD_BYTES_MAX: Final = 16 * 1024
#: half of the seconds that calls have to end with the door: aiohttp waits so long twice before it cuts them off
END_S: Final = 30.0
REQUESTS_MAX: Final = 4096
#: how long a body may take to come, in seconds
BODY_S: Final = 600.0
#: parts of one answer that a slow reader lets wait here
AHEAD_BYTES: Final = 4 << 20
#: headers that stay at the door: who calls is the door's to know
_KEPT: Final = frozenset(
    (
        "authorization",
        "cookie",
        "x-api-key",
        "x-moorage-affinity",
        "x-moorage-priority",
        "x-moorage-wait",
        "content-type",
    )
)
#: headers of the member's server that the door has of its own
_OWN: Final = frozenset(("date", "server"))
_SHOWN: Final = "X-Moorage-Member, X-Moorage-Waited-Ms, X-Request-Id, X-Should-Retry, Retry-After"
_LOCAL: Final = frozenset(("localhost", "127.0.0.1", "::1"))

log = logging.getLogger("moorage.door")


class Limits(NamedTuple):
    """The numbers that an operator may set: seconds and bytes."""

    start_s: float = START_S
    idle_s: float = IDLE_S
    body_bytes: int = BODY_BYTES_MAX


class _Named(msgspec.Struct):
    """What the door reads of a body: the rest is the service's."""

    model: str = ""
    stream: bool = False
    prompt_cache_key: Any = None


_named: Final = msgspec.json.Decoder(_Named).decode


class Door:
    """What one door answers. `models` are those of each tenant; without a `keyring` everybody is the only tenant's."""

    def __init__(
        self,
        models: Mapping[str, Models],
        keyring: Keyring | None,
        origins: Collection[str] = (),
        limits: Limits | None = None,
    ) -> None:
        self._models = models
        self._keyring = keyring
        self._origins = frozenset(origins)
        self.limits = limits or Limits()
        self.bodies_bytes = 0  # of all requests that are here
        self.requests = 0  # calls that are here
        self._counts: Counter[tuple[str, str, int]] = Counter()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer any request."""
        request_id = request.headers.get("X-Request-Id", "")
        if not (request_id and len(request_id) <= 128 and is_header("X-Request-Id", request_id)):
            request_id = uuid.uuid4().hex
        exposed = self._exposed(request) | {"X-Request-Id": request_id}
        service, key_name = "", ""
        try:
            self._check_origin(request)
            if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
                return self._preflight(request, exposed)
            if request.raw_path == "/health":
                return web.json_response({"status": "ok" if self._is_connected else "disconnected"},
                                         status=200 if self._is_connected else 503)  # fmt: skip
            key = self._key(request)
            key_name = "" if key is None else key.name
            models = self._models_of(key)
            if request.raw_path == "/metrics":
                return web.Response(text=self._metrics())
            if request.method == "GET" and request.path.partition("/v1/models")[::2] in (
                ("", ""),
                ("", request.path[10:]),
            ):
                return self._list(await models.listed(), key, request.path[len("/v1/models/") :], exposed)
            with self._begun(key), _Held(self) as held:
                call = await self._call_of(request, models, key, held)
                service = call.service
                answered = await self._forward(request, models, call, key, exposed)
            self._counts[service, key_name, answered.status] += 1
            return answered
        except Exception as error:
            problem = error if isinstance(error, DoorProblem) else _unexpected(request, error)
            self._counts[service, key_name, problem.status] += 1
            return web.Response(body=problem.body, status=problem.status, headers={**exposed, **problem.headers})

    # -- who asks

    def _check_origin(self, request: web.Request) -> None:
        """Without keys, only programs of this machine may call: a page that a browser has loaded may not."""
        origin = request.headers.get("Origin")
        if self._keyring is None:
            host = urlsplit(f"//{request.headers.get('Host', '')}").hostname or ""
            if host not in _LOCAL:
                raise DoorProblem(
                    403, "forbidden", f"this door without keys answers on this machine alone, not as {host}"
                )
        if origin is not None and origin not in self._origins and not self._is_own(request, origin):
            raise DoorProblem(403, "forbidden", f"pages of {origin[:200]} may not call: start the door with --origin")

    def _is_own(self, request: web.Request, origin: str) -> bool:
        return urlsplit(origin).netloc == request.headers.get("Host", "")

    def _exposed(self, request: web.Request) -> dict[str, str]:
        origin = request.headers.get("Origin")
        if origin is None or origin not in self._origins:
            return {}
        return {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": _SHOWN, "Vary": "Origin"}

    def _preflight(self, request: web.Request, exposed: dict[str, str]) -> web.Response:
        wanted = request.headers.get("Access-Control-Request-Headers", "")
        headers = {"Access-Control-Allow-Methods": "GET, POST, PUT, DELETE, PATCH", "Access-Control-Max-Age": "600"}
        if wanted and is_header("Access-Control-Allow-Headers", wanted):
            headers["Access-Control-Allow-Headers"] = wanted
        return web.Response(status=204, headers={**exposed, **headers})

    def _key(self, request: web.Request) -> Key | None:
        if self._keyring is None:
            return None
        kind, _, bearer = request.headers.get("Authorization", "").partition(" ")
        given = bearer.strip() if kind.lower() == "bearer" else request.headers.get("X-Api-Key", "")
        if not given:
            raise DoorProblem(401, "invalid_api_key", "a key is needed: Authorization: Bearer mk-…")
        key = self._keyring.find(given)
        if key is None:
            raise DoorProblem(401, "invalid_api_key", "this key is unknown, or its time is over")
        return key

    def _models_of(self, key: Key | None) -> Models:
        if key is None:
            return next(iter(self._models.values()))
        models = self._models.get(key.tenant)
        if models is None:
            raise DoorProblem(503, "unreachable", f"this door has no connection for tenant {key.tenant}: --tenant-key")
        return models

    @contextlib.contextmanager
    def _begun(self, key: Key | None) -> Any:
        """Count a call of this key while it is here. Raises DoorProblem if there are too many."""
        if self.requests >= REQUESTS_MAX:
            raise DoorProblem(429, "rate_limit_exceeded", f"{REQUESTS_MAX} calls are at this door", again=True)
        if key is not None and self._keyring is not None and (bound := self._keyring.begin(key)) is not None:
            told = f"the key {key.name} {bound.words}"
            raise DoorProblem(429, "key_limit", told, again=True, after_s=bound.after_s)
        self.requests += 1
        try:
            yield
        finally:
            self.requests -= 1
            if key is not None and self._keyring is not None:
                self._keyring.end(key)

    # -- what is asked

    def _list(
        self, known: Mapping[str, ServiceRow], key: Key | None, one: str, exposed: dict[str, str]
    ) -> web.Response:
        rows = [
            {
                "id": model, "object": "model", "created": row.accepted_ms // 1000, "owned_by": row.service,
                "moorage": {"service": row.service, "state": "ready" if row.members else "asleep"},
            }
            for model, row in sorted(known.items()) if key is None or key.may_call(row.service)
        ]  # fmt: skip
        if not one:
            return web.json_response({"object": "list", "data": rows}, headers=exposed)
        found = next((row for row in rows if row["id"] == one), None)
        if found is None:
            raise DoorProblem(404, "model_not_found", f"no service serves the model {one[:200]}")
        return web.json_response(found, headers=exposed)

    async def _call_of(self, request: web.Request, models: Models, key: Key | None, held: _Held) -> _Call:
        target = request.raw_path
        if why := target_trouble(target):
            raise DoorProblem(400, "bad_path", f"the path {why}")
        if sum(len(name) + len(value) + 4 for name, value in request.raw_headers) > HEAD_BYTES_MAX:
            raise DoorProblem(431, "headers_too_large", f"the headers have more than {HEAD_BYTES_MAX} bytes")
        if target.startswith("/svc/"):
            name, slash, rest = target[len("/svc/") :].partition("/")
            name, query = name.partition("?")[::2] if not slash else (name, "")
            if key is not None and not key.raw:
                raise DoorProblem(403, "forbidden", f"the key {key.name} calls models, and no service by its name")
            self._check_service(name, key)
            body = await self._body(request, held)
            target = f"/{rest}" + (f"?{query}" if query else "")
            return _Call(name, target, body, _is_stream(request, body), _affinity(request.headers))
        if not target.startswith("/v1/"):
            raise DoorProblem(404, "not_found", "this door has /v1/…, /svc/NAME/…, /v1/models, /health and /metrics")
        body = await self._body(request, held)
        if not body and request.method != "POST":
            raise DoorProblem(
                404, "not_found", f"{request.method} {request.path[:200]} names no model: a POST's body does; "
                "/svc/NAME/… takes any method",
            )  # fmt: skip
        named = await _read(request, body)
        if not named.model:
            raise DoorProblem(400, "invalid_request", "the body names no model")
        service = await models.service_of(named.model)
        if service is None and models.is_stale:
            raise DoorProblem(
                503, "unreachable", f"no scheduler answers, and the model {named.model[:200]} is new here", again=True
            )
        if service is None or (key is not None and not key.may_call(service)):
            known = ", ".join(
                m for m, row in sorted(models.rows.items())[:20] if key is None or key.may_call(row.service)
            )
            raise DoorProblem(
                404, "model_not_found", f"no service serves the model {named.model[:200]}; there are: {known or 'none'}"
            )
        return _Call(service, target, body, named.stream, _affinity(request.headers, named.prompt_cache_key))

    def _check_service(self, name: str, key: Key | None) -> None:
        if not is_service(name):
            raise DoorProblem(404, "not_found", f"{name[:80]!r} is no name of a service")
        if key is not None and not key.may_call(name):
            raise DoorProblem(403, "forbidden", f"the key {key.name} is not for the service {name}")

    async def _body(self, request: web.Request, held: _Held) -> bytes:
        try:
            async with asyncio.timeout(BODY_S):
                return await self._read_body(request, held)
        except TimeoutError:
            raise DoorProblem(408, "timeout", f"the body did not come within {BODY_S:g} s", again=True) from None

    async def _read_body(self, request: web.Request, held: _Held) -> bytes:
        most = self.limits.body_bytes
        if (request.content_length or 0) > most:
            raise DoorProblem(413, "too_large", f"the body has {request.content_length} bytes, allowed are {most}")
        got = bytearray()
        async for piece in request.content.iter_any():
            got += piece
            held.add(len(piece))
            if len(got) > most:
                raise DoorProblem(413, "too_large", f"the body has more than {most} bytes")
            if self.bodies_bytes > BODIES_BYTES_MAX:
                raise DoorProblem(503, "overloaded", "too many large bodies are at this door", again=True)
        return bytes(got)

    # -- the way of a call

    async def _forward(
        self, request: web.Request, models: Models, call: _Call, key: Key | None, exposed: dict[str, str]
    ) -> web.StreamResponse:
        """Call the service, and pass its answer on. A caller that leaves cancels this, and so the call."""
        service = models.client.service(
            call.service,
            priority=_priority(request.headers, key),
            headers=_headers(request, call, exposed["X-Request-Id"]),
            affinity=call.affinity,
        )
        start_s = min(self.limits.start_s, _seconds(request.headers, "X-Moorage-Wait") or self.limits.start_s)
        out = _Out(request, exposed)
        answers = service.answers(
            call.body,
            timeout=self.limits.idle_s,
            start_within=start_s,
            raw=True,
            ahead_bytes=AHEAD_BYTES,
            on_overrun=out.overrun,
        )
        try:
            async with contextlib.aclosing(answers) as parts:  # type: ignore[type-var]
                async for part in _with_beats(parts, out, is_stream=call.stream):
                    await out.write(part)
            return await out.end()
        except ClientError as error:
            problem = problem_of(error, is_connected=models.client._wire.link.is_connected)
            if out.response is None:
                raise problem from None
            return await out.broken(problem)

    @property
    def _is_connected(self) -> bool:
        return all(each.client._wire.link.is_connected for each in self._models.values())

    def _metrics(self) -> str:
        lines = ["# TYPE moorage_door_requests_total counter"]
        for (service, key, status), count in sorted(self._counts.items()):
            lines.append(f'moorage_door_requests_total{{service="{service}",key="{key}",status="{status}"}} {count}')
        lines += ["# TYPE moorage_door_requests gauge", f"moorage_door_requests {self.requests}"]
        return "\n".join(lines) + "\n"


def _unexpected(request: web.Request, error: Exception) -> DoorProblem:
    """Return what a caller is told of an error that nobody thought of. Raises it where the caller is gone."""
    if request.transport is None or request.transport.is_closing() or isinstance(error, ConnectionError):
        raise error
    log.error("%s %s: %s", request.method, request.path[:200], error, exc_info=error)
    return DoorProblem(500, "internal", "the door failed on this request")


class _Held:
    """The bytes of a body that one request holds at the door, while the block runs."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._bytes = 0

    def add(self, size: int) -> None:
        self._bytes += size
        self._door.bodies_bytes += size

    def __enter__(self) -> _Held:
        return self

    def __exit__(self, *_: object) -> None:
        self._door.bodies_bytes -= self._bytes


class _Call(NamedTuple):
    """A call to make: the service, the target there, the body, whether its caller wants a stream of events, and what
    it has in common with those that go to one member."""

    service: str
    target: str
    body: bytes
    stream: bool
    affinity: str | None


class _Out:
    """What goes out to one caller. `response` is None until its status is sent."""

    def __init__(self, request: web.Request, exposed: dict[str, str]) -> None:
        self.response: web.StreamResponse | None = None
        self._request = request
        self._exposed = exposed
        self._is_events = False
        self._is_writing = False
        self._is_told = False  # the status was sent before the answer came: what follows are events

    async def beat(self) -> None:
        """Send a comment of a stream of events, which clients skip: proxies see that this lives."""
        if self.response is None:
            self._is_told = True
            await self._begin(200, [("Content-Type", "text/event-stream")], {})
        assert self.response is not None
        await self.response.write(b": waiting for a member\n\n")

    async def write(self, part: Answer) -> None:
        if self.response is None:
            kind = part.headers.get("Content-Type")  # of a service that is no server of HTTP
            found = json.loads(part.headers.get(HTTP_HEADERS, "[]")) or ([("Content-Type", kind)] if kind else [])
            status = int(part.headers.get(HTTP_STATUS, "200"))
            await self._begin(status, found, part.headers)
        elif self._is_told:
            self._is_told = False
            if (status := int(part.headers.get(HTTP_STATUS, "200"))) >= 400:
                await self.response.write(b"data: " + b" ".join(part.value.split()) + b"\n\n")
                return
        assert self.response is not None
        if part.value:
            self._is_writing = True
            await self.response.write(part.value)
            self._is_writing = False

    def overrun(self) -> None:
        """Cut off a caller that reads too slowly: it may never read the rest, and its call would have its place."""
        if self._is_writing and self._request.transport is not None:
            self._request.transport.abort()

    async def _begin(self, status: int, found: list[tuple[str, str]], of_member: Mapping[str, str]) -> None:
        self.response = response = web.StreamResponse(status=status)
        for name, value in found:
            if name.lower() not in _OWN:
                response.headers.add(name, value)
        for name, header in (("X-Moorage-Member", MEMBER), ("X-Moorage-Waited-Ms", WAITED_MS)):
            if header in of_member:
                response.headers[name] = of_member[header]
        self._is_events = response.headers.get("Content-Type", "").startswith("text/event-stream")
        if self._is_events:
            response.headers["X-Accel-Buffering"] = "no"
            response.headers["Cache-Control"] = "no-cache"
        response.headers.update(self._exposed)
        await response.prepare(self._request)

    async def end(self) -> web.StreamResponse:
        if self.response is None:
            await self._begin(200, [], {})
        assert self.response is not None
        await self.response.write_eof()
        return self.response

    async def broken(self, problem: DoorProblem) -> web.StreamResponse:
        """The answer ends in its middle: as an event where there are events, else as a connection that is closed."""
        assert self.response is not None
        if self._is_events:
            await self.response.write(b"data: " + problem.body + b"\n\n")
            await self.response.write_eof()
        elif self._request.transport is not None:
            self._request.transport.close()
        return self.response


async def _with_beats(parts: AsyncIterator[Answer], out: _Out, *, is_stream: bool) -> AsyncIterator[Answer]:
    """Yield the parts; while the first one is awaited, beat."""
    if is_stream:
        first = asyncio.ensure_future(anext(parts))
        try:
            wait_s = BEAT_FIRST_S
            while not (await asyncio.wait((first,), timeout=wait_s))[0]:
                await out.beat()
                wait_s = BEAT_S
        finally:
            if not first.done():
                first.cancel()
                await asyncio.wait((first,))
        try:
            yield first.result()
        except StopAsyncIteration:
            return
    async for part in parts:
        yield part


def _is_stream(request: web.Request, body: bytes) -> bool:
    if "json" not in request.headers.get("Content-Type", ""):
        return False
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
        return _named(body).stream
    return False


async def _read(request: web.Request, body: bytes) -> _Named:
    """Return the model that a body names: a field of JSON, or of a form."""
    kind = request.content_type
    if kind == "multipart/form-data":
        return _Named(_form_field(request.headers["Content-Type"], body, "model"))
    try:
        return _named(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DoorProblem(400, "invalid_json", f"the body is no JSON with a model: {error}") from None


def _form_field(kind: str, body: bytes, name: str) -> str:
    """Return a short field of a form; "" if it has none."""
    from email.parser import BytesHeaderParser
    from email.policy import HTTP

    boundary = BytesHeaderParser(policy=HTTP).parsebytes(b"Content-Type: " + kind.encode() + b"\r\n\r\n").get_boundary()
    for piece in body.split(b"--" + (boundary or "").encode()) if boundary else ():
        head, _, value = piece.lstrip(b"\r\n").partition(b"\r\n\r\n")
        about = BytesHeaderParser(policy=HTTP).parsebytes(head + b"\r\n\r\n")
        if about.get_param("name", header="content-disposition") == name and about.get_filename() is None:
            return value.removesuffix(b"\r\n")[:1024].decode(errors="replace")
    return ""


def _headers(request: web.Request, call: _Call, request_id: str) -> dict[str, str]:
    """Return the headers of the call: those of the request that go on, and what it asks for."""
    kept = {
        name: value
        for name, value in passed_on(request.headers.items())
        if name.lower() not in _KEPT and is_header(name, value)
    }
    own = {HTTP_METHOD: request.method, HTTP_PATH: call.target, "X-Request-Id": request_id}
    if kind := request.headers.get("Content-Type"):
        own["Content-Type"] = kind
    return {name: value for name, value in kept.items() if name.lower() != "x-request-id"} | own


def _priority(headers: CIMultiDictProxy[str], key: Key | None) -> int | None:
    """Return the priority that a caller may have; None for the usual one."""
    most = PRIORITY_MAX if key is None else key.priority
    told = headers.get("X-Moorage-Priority")
    if told is None:
        return most if most < PRIORITY_DEFAULT else None
    if not told.isascii() or not told.isdigit() or int(told[:4]) > PRIORITY_MAX:
        raise DoorProblem(400, "bad_header", f"X-Moorage-Priority must be 0..{PRIORITY_MAX}, found {told[:20]!r}")
    return min(int(told), most)


def _affinity(headers: CIMultiDictProxy[str], of_body: Any = None) -> str | None:
    """Return what calls have in common that go to one member: the header, or else OpenAI's field of the body."""
    found = headers.get("X-Moorage-Affinity") or of_body
    return found[:KEY_CHARS_MAX] if isinstance(found, str) and found else None


def _seconds(headers: CIMultiDictProxy[str], name: str) -> float | None:
    told = headers.get(name)
    if told is None:
        return None
    try:
        found = float(told)
        if 0 < found < 1e6:
            return found
    except ValueError:
        pass
    raise DoorProblem(400, "bad_header", f"{name} must be a number of seconds above 0, found {told[:20]!r}")


@contextlib.asynccontextmanager
async def serving(door: Door, sockets: Collection[Any], tls: Any = None) -> AsyncIterator[None]:
    """Answer on these sockets while the block runs."""
    app = web.Application(client_max_size=0)
    app.router.add_route("*", "/{path:.*}", door.answer)
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=END_S,
        max_line_size=4 * HEAD_BYTES_MAX,  # the door itself refuses what is a little too large, in its own form
        max_field_size=4 * HEAD_BYTES_MAX,
    )
    await runner.setup()
    keeping = [asyncio.create_task(each.keep()) for each in door._models.values()]
    try:
        for each in sockets:
            await web.SockSite(runner, each, ssl_context=tls).start()
        yield
    finally:
        for task in keeping:
            task.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)
        await runner.cleanup()

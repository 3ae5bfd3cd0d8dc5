"""Services whose members are HTTP servers: the field of a request, and how a call carries a request of HTTP.

A call has its method, target and content type in headers, its body as the data, and gets each read of the server as a
part. What is here is the same for who sends such calls and for the member that forwards them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final
from urllib.parse import unquote_to_bytes

import msgspec

from moorage.schemas.trouble import Trouble, quoted

#: of a call: the request's method and target, as they came
HTTP_METHOD: Final = "Http-Method"
HTTP_PATH: Final = "Http-Path"
#: of the first part of an answer: its status, and its headers as a JSON list of pairs
HTTP_STATUS: Final = "Http-Status"
HTTP_HEADERS: Final = "Http-Headers"
#: the variable of the field `service.http`, and that of the port on which the program is to listen
HTTP_VARIABLE: Final = "MOORAGE_CALL_HTTP"
PORT_VARIABLE: Final = "MOORAGE_HTTP_PORT"
#: stands for the port in the words of the program and in the values of its variables
PORT: Final = "{port}"
SLEEP_BY_VARIABLE: Final = "MOORAGE_CALL_SLEEP_BY"  # that of `service.sleep_by`
#: in the folder of an attempt whose program sleeps by a request: where its worker asks for that, and a file
#: that is there while it sleeps
SLEEP_SOCKET: Final = ".moorage-sleep"
ASLEEP_FILE: Final = ".moorage-asleep"
PATH_DEFAULT: Final = "/v1/chat/completions"
PATHS_DEFAULT: Final = ("/v1/*",)
PATHS_MAX: Final = 64
#: some servers are unhealthy while all that they can run is running, and one answer may take minutes
IDLE_S_DEFAULT: Final = 600.0
IDLE_S_MAX: Final = 86_400.0
TARGET_BYTES_MAX: Final = 8192
MODELS_MAX: Final = 64
MODEL_CHARS_MAX: Final = 256
#: of engines that tell it at /metrics: which gauges say how many requests run there, and how many wait
ENGINE_GAUGES: Final = {
    "vllm": ("vllm:num_requests_running", "vllm:num_requests_waiting"),
    "sglang": ("sglang:num_running_reqs", "sglang:num_queue_reqs"),
    "llama.cpp": ("llamacpp:requests_processing", "llamacpp:requests_deferred"),
}
#: headers of one connection alone (RFC 9110 §7.6.1), and those that the next connection has of its own
HOP_BY_HOP: Final = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade", "host", "content-length", "expect", "accept-encoding",
})  # fmt: skip
#: headers that are moorage's own, or NATS'
OWN_PREFIXES: Final = ("moorage-", "http-", "nats-")
_METHOD: Final = re.compile(r"[A-Z]{1,16}")
_TARGET: Final = re.compile(r"/[!-~]*")
_DOTS: Final = re.compile(r"(?:^|/)\.{1,2}(?:/|$)")


class HttpRequest(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """One request that a member makes by itself."""

    path: str
    body: str = ""  # JSON; without one it is a GET


class HttpSpec(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """How the members' program speaks HTTP on 127.0.0.1, where `moorage serve` started it."""

    health: str  # the path that answers 200 to 399 once the program is ready
    path: str = PATH_DEFAULT  # where a call goes that names no path
    paths: tuple[str, ...] = PATHS_DEFAULT  # what callers reach: paths, or beginnings of them with a final *
    warm: HttpRequest | None = None  # a request that has to be answered before the member is ready
    idle_s: float = IDLE_S_DEFAULT  # an unhealthy one with calls is ready as long as an answer goes on within this time
    #: whose metrics the program has at /metrics: vllm, sglang or llama.cpp. Calls that wait in it count as waiting; ""
    #: looks at none
    metrics: str = ""

    @property
    def trouble(self) -> Trouble | None:
        """What is wrong with it; None if nothing is."""
        for field, path in (("health", self.health), ("path", self.path)):
            if why := target_trouble(path):
                return Trouble(f"service.http.{field}", f"{field} {why}", quoted(path), "a path, as /health")
        if not 1 <= len(self.paths) <= PATHS_MAX:
            return Trouble("service.http.paths", f"1..{PATHS_MAX} paths are needed", len(self.paths), f"1..{PATHS_MAX}")
        for path in self.paths:
            if target_trouble(path.removesuffix("*")) or "*" in path[:-1]:
                message = "a path of paths must begin with / and may end with *"
                return Trouble("service.http.paths", message, quoted(path), "as /v1/* or /generate")
        if self.warm is not None and (why := target_trouble(self.warm.path)):
            return Trouble("service.http.warm", f"its path {why}", quoted(self.warm.path), "a path, as /v1/completions")
        if not 1 <= self.idle_s <= IDLE_S_MAX:
            message = "idle_s must be a number of seconds"
            return Trouble("service.http.idle_s", message, f"{self.idle_s:g}", f"1..{IDLE_S_MAX:g}")
        if self.metrics and self.metrics not in ENGINE_GAUGES:
            names = ", ".join(ENGINE_GAUGES)
            return Trouble("service.http.metrics", "metrics names an engine", quoted(self.metrics), f"{names} or none")
        return None


class SleepBy(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """The requests that put a member's HTTP server to sleep, its GPU memory in the host's RAM, and that wake it."""

    sleep: HttpRequest
    wake: HttpRequest

    @property
    def trouble(self) -> Trouble | None:
        """What is wrong with them; None if nothing is."""
        for field, request in (("sleep", self.sleep), ("wake", self.wake)):
            if why := target_trouble(request.path):
                return Trouble(
                    f"service.sleep_by.{field}", f"its path {why}", quoted(request.path), "as /sleep?level=1"
                )
        if "level=2" in self.sleep.path.partition("?")[2].split("&"):
            message = "level 2 gives up the weights, and nothing loads them again"
            return Trouble("service.sleep_by.sleep", message, quoted(self.sleep.path), "/sleep?level=1")
        return None

    def reached(self, paths: Iterable[str]) -> str:
        """Return the one of them that callers who reach these paths would reach; "" if none."""
        reached = (each.path for each in (self.sleep, self.wake) if not path_refused("POST", each.path, paths))
        return next(reached, "")


#: by engine, how it sleeps: vLLM with VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode, SGLang with --enable-memory-saver
SLEEP_BY: Final = {
    "vllm": SleepBy(HttpRequest("/sleep?level=1"), HttpRequest("/wake_up")),
    "sglang": SleepBy(HttpRequest("/release_memory_occupation", "{}"), HttpRequest("/resume_memory_occupation", "{}")),
}


def models_trouble(models: Sequence[str]) -> Trouble | None:
    """Return what is wrong with the names of what a service serves; None if nothing is."""
    if len(models) > MODELS_MAX:
        return Trouble("service.models", f"at most {MODELS_MAX} models", len(models), f"0..{MODELS_MAX}")
    for model in models:
        if not 1 <= len(model) <= MODEL_CHARS_MAX or not model.isprintable() or "," in model or model != model.strip():
            message = f"a model needs a name of 1..{MODEL_CHARS_MAX} printable characters, without commas"
            return Trouble("service.models", message, quoted(model), "as Qwen/Qwen3-8B")
    if len(set(models)) < len(models):
        return Trouble("service.models", "a model is named twice", ", ".join(models), "each name once")
    return None


def target_trouble(target: str) -> str:
    """Return what is wrong with a target, its query included; "" if nothing is.

    Servers take `..`, doubled slashes and their escapes differently: what a check has allowed must be what they serve.
    """
    if len(target) > TARGET_BYTES_MAX:
        return f"has more than {TARGET_BYTES_MAX} bytes"
    if _TARGET.fullmatch(target) is None:
        return "must begin with / and be of printable ASCII"
    path = target.partition("?")[0]
    plain = unquote_to_bytes(path)
    if "#" in target or "\\" in path or "//" in path or _DOTS.search(path):
        return "must have no //, \\, # and no . or .. between slashes"
    if b"%" in plain or b"\\" in plain or any(byte < 0x20 or byte == 0x7F for byte in plain):
        return "must have no escaped %, \\ or control byte"
    if b"//" in plain or _DOTS.search(plain.decode("latin-1")):
        return "must have no escaped //, . or .. between slashes"
    return ""


def path_refused(method: str, target: str, paths: Iterable[str]) -> str:
    """Return why a call may not reach this target of a service; "" if it may."""
    if _METHOD.fullmatch(method) is None or method in ("CONNECT", "TRACE"):
        return f"{method[:16]!r} is no method that a service takes"
    if why := target_trouble(target):
        return f"the path {why}"
    path = unquote_to_bytes(target.partition("?")[0]).decode("latin-1")
    for allowed in paths:
        if path.startswith(allowed[:-1]) if allowed.endswith("*") else path == allowed:
            return ""
    return f"callers of this service do not reach {path[:80]}; they reach {', '.join(paths)}"


def passed_on(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the headers that go on to the other side: none of one connection alone, none of moorage's own."""
    given = [(name, value) for name, value in headers]
    named = {word.strip().lower() for name, value in given if name.lower() == "connection" for word in value.split(",")}
    dropped = HOP_BY_HOP | named
    return [(n, v) for n, v in given if n.lower() not in dropped and not n.lower().startswith(OWN_PREFIXES)]


def http_of(variable: str) -> HttpSpec | None:
    """Return what `HTTP_VARIABLE` says; None for "". Raises msgspec.MsgspecError for what it cannot be."""
    return msgspec.json.decode(variable, type=HttpSpec) if variable else None


def sleep_by_of(variable: str) -> SleepBy | None:
    """Return what `SLEEP_BY_VARIABLE` says; None for "". Raises msgspec.MsgspecError for what it cannot be."""
    return msgspec.json.decode(variable, type=SleepBy) if variable else None


def is_http(headers: Mapping[str, str]) -> bool:
    """Return whether a call carries a request of HTTP whole, and so wants its status and headers back."""
    return any(name.lower() in (HTTP_METHOD.lower(), HTTP_PATH.lower()) for name in headers)


def engine_load(metrics: str, engine: str) -> tuple[int, int] | None:
    """Return how many requests run in an engine and how many wait, by the text of its metrics; None if it does not
    say."""
    sums: list[float | None] = [None, None]
    for line in metrics.splitlines():
        name, _, rest = line.partition("{") if "{" in line else line.partition(" ")
        value = (rest.rpartition("}")[2] if "{" in line else rest).split()
        for at, gauge in enumerate(ENGINE_GAUGES[engine]):
            if name == gauge and value:
                with contextlib.suppress(ValueError):
                    sums[at] = (sums[at] or 0.0) + float(value[0])
    running, waiting = sums
    if running is None or waiting is None or not (0 <= running < 1e6 and 0 <= waiting < 1e6):
        return None
    return round(running), round(waiting)

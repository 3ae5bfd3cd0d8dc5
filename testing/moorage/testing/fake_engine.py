"""A small HTTP server with the habits of engines for models, for tests of what stands before them.

    python -m moorage.testing.fake_engine 8000 --like vllm --model tiny --load 2

It answers what OpenAI's API asks for, with made-up tokens: chat, completions, embeddings, models, streams with usage.
The body's `max_tokens` and `delay_ms` say how many come and how fast, and `fail_at` where a stream breaks. `GET /stat`
says what it has run, finished and given up. `POST /v1/health?status=503` makes it unhealthy.
`POST /sleep` and `/wake_up` are as vLLM's: it dies of a call while it sleeps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from aiohttp import web

#: tokens of an answer that names no number
TOKENS: Final = 16
DELAY_MS: Final = 5.0
BODY_BYTES_MAX: Final = 1 << 30


class Habits(NamedTuple):
    """How an engine tells that it is ready: at which path, whether its port is closed until then, and whether the first
    call loads the model."""

    health: str
    is_closed: bool = False
    loads_late: bool = False


LIKE: Final[dict[str, Habits]] = {
    "vllm": Habits("/health", is_closed=True),
    "llama.cpp": Habits("/health"),
    "ollama": Habits("/api/version", loads_late=True),
    "triton": Habits("/v2/health/ready"),
    "comfyui": Habits("/system_stats"),
}


class FakeEngine:
    """One engine: `app` is what it answers. It is ready `load_s` after it was made."""

    def __init__(
        self, model: str = "tiny", like: str = "vllm", load_s: float = 0.0, version: str = "1", places: int = 4096
    ) -> None:
        self.model = model
        self.habits = LIKE[like]
        self.version = version
        self.counts: Counter[str] = Counter()
        self.ids: Counter[str] = Counter()
        self.prompts: dict[str, int] = {}
        self._places = asyncio.Semaphore(places)
        self._ready_s = time.monotonic() + load_s
        self._load_s = load_s
        self._is_loaded = self._is_asleep = False
        self._health_status = 200
        self.app = web.Application(client_max_size=BODY_BYTES_MAX)
        self.app.router.add_get(self.habits.health, self._health)
        for path, answer in (("chat/completions", self._chat), ("completions", self._chat), ("responses", self._chat)):
            self.app.router.add_post(f"/v1/{path}", answer)
        self.app.router.add_post("/v1/embeddings", self._embeddings)
        self.app.router.add_get("/v1/models", self._models)
        self.app.router.add_get("/stat", self._stat)
        self.app.router.add_get("/metrics", self._metrics)
        self.app.router.add_route("*", "/v1/echo{rest:.*}", self._echo)
        self.app.router.add_get("/v1/blob", self._blob)
        self.app.router.add_post("/v1/health", self._set_health)
        self.app.router.add_post("/sleep", self._sleep)
        self.app.router.add_post("/wake_up", self._wake)
        self.app.router.add_post("/v2/models/{model}/infer", self._echo)
        self.app.router.add_post("/api/chat", self._chat)
        self.app.router.add_post("/prompt", self._prompt)
        self.app.router.add_get("/history/{prompt}", self._history)

    async def _health(self, _: web.Request) -> web.Response:
        is_ready = self.habits.loads_late or time.monotonic() >= self._ready_s
        self.counts["unhealthy"] += self._health_status != 200
        return web.json_response({"version": self.version}, status=self._health_status if is_ready else 503)

    async def _set_health(self, request: web.Request) -> web.Response:
        self._health_status = int(request.query["status"])
        return web.json_response({"status": self._health_status})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self.ids[request.headers.get("X-Request-Id", "")] += 1
        if self._is_asleep:
            os._exit(1)
        try:
            body = await request.json()
        except ValueError:
            return self._error(400, "BadRequestError", "the body is no JSON")
        if body.get("model") not in (self.model, None):
            return self._error(404, "NotFoundError", f"The model `{body['model']}` does not exist.")
        if self.habits.loads_late and not self._is_loaded:
            await asyncio.sleep(self._load_s)
            self._is_loaded = True
        self.counts["waiting"] += 1
        state = "waiting"
        try:
            async with self._places:
                self.counts[state] -= 1
                state = "running"
                self.counts[state] += 1
                answer = await (self._stream(request, body) if body.get("stream") else self._whole(body))
        except (asyncio.CancelledError, ConnectionResetError):
            self.counts["aborted"] += 1
            raise
        finally:
            self.counts[state] -= 1
        self.counts["done"] += 1
        return answer

    async def _whole(self, body: dict[str, Any]) -> web.Response:
        tokens, delay_s = _asked(body)
        await asyncio.sleep(tokens * delay_s)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
        if body.get("tools"):
            called = {"name": body["tools"][0]["function"]["name"], "arguments": "{}"}
            call = {"id": "call_1", "type": "function", "function": called}
            choice |= {"finish_reason": "tool_calls", "message": {"role": "assistant", "tool_calls": [call]}}
        else:
            choice["message"] = {"role": "assistant", "content": " ".join(["tok"] * tokens)}
        return web.json_response(self._head("chat.completion") | {"choices": [choice], "usage": _usage(tokens)})

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        tokens, delay_s = _asked(body)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Version": self.version})
        await answer.prepare(request)
        head = self._head("chat.completion.chunk")
        due_s = time.monotonic()
        for at in range(tokens):
            due_s += delay_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            if body.get("fail_at") == at:
                await answer.write(_event({"error": {"message": "boom", "type": "InternalServerError", "code": 500}}))
                break
            if body.get("break_at") == at:
                assert request.transport is not None
                request.transport.abort()
                return answer
            delta = {"content": f"tok{at} ", **({"role": "assistant"} if at == 0 else {})}
            await answer.write(_event(head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}))
        else:
            await answer.write(_event(head | {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}))
            if (body.get("stream_options") or {}).get("include_usage"):
                await answer.write(_event(head | {"choices": [], "usage": _usage(tokens)}))
        await answer.write(b"data: [DONE]\n\n")
        await answer.write_eof()
        return answer

    async def _embeddings(self, request: web.Request) -> web.Response:
        body = await request.json()
        texts = body["input"] if isinstance(body["input"], list) else [body["input"]]
        rows = [
            {"object": "embedding", "index": at, "embedding": [len(str(each)) / 10, 0.5]}
            for at, each in enumerate(texts)
        ]
        return web.json_response({"object": "list", "model": self.model, "data": rows, "usage": _usage(0)})

    async def _models(self, _: web.Request) -> web.Response:
        row = {"id": self.model, "object": "model", "created": 1, "owned_by": "fake"}
        return web.json_response({"object": "list", "data": [row]})

    async def _stat(self, _: web.Request) -> web.Response:
        counts = {name: self.counts[name] for name in ("running", "done", "aborted", "unhealthy", "slept")}
        twice = [each for each, times in self.ids.items() if each and times > 1]
        return web.json_response({**counts, "pid": os.getpid(), "version": self.version, "ran_twice": twice})

    async def _metrics(self, _: web.Request) -> web.Response:
        of = f'{{model_name="{self.model}"}}'
        running = f"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{of} {self.counts['running']}.0\n"
        return web.Response(text=f"{running}vllm:num_requests_waiting{of} {self.counts['waiting']}.0\n")

    async def _echo(self, request: web.Request) -> web.Response:
        body = await request.read()
        told = {
            "method": request.method,
            "target": request.raw_path,
            "headers": list(request.headers.items()),
            "bytes": len(body),
        }
        answer = web.json_response(told)
        answer.headers.add("Set-Cookie", "a=1")
        answer.headers.add("Set-Cookie", "b=2")
        return answer

    async def _prompt(self, request: web.Request) -> web.Response:
        """As ComfyUI: a graph goes into its queue, and what became of it is asked for."""
        self.counts["prompts"] += 1
        found = f"prompt-{self.counts['prompts']}"
        self.prompts[found] = len((await request.json()).get("prompt") or {})
        return web.json_response({"prompt_id": found, "number": self.counts["prompts"], "node_errors": {}})

    async def _history(self, request: web.Request) -> web.Response:
        prompt = request.match_info["prompt"]
        if prompt not in self.prompts:
            return web.json_response({})
        told = {"status": {"status_str": "success", "completed": True}, "nodes": self.prompts[prompt]}
        return web.json_response({prompt: told})

    async def _blob(self, request: web.Request) -> web.Response:
        return web.Response(body=bytes(range(256)) * (int(request.query.get("kib", "4")) * 4))

    async def _sleep(self, _: web.Request) -> web.Response:
        """As vLLM: it dies of a sleep with calls under way, and of a call while it sleeps."""
        if self.counts["running"] or self.counts["waiting"]:
            os._exit(1)
        self._is_asleep = True
        self.counts["slept"] += 1
        return web.Response()

    async def _wake(self, _: web.Request) -> web.Response:
        await asyncio.sleep(self._load_s / 10)
        self._is_asleep = False
        return web.Response()

    def _error(self, status: int, kind: str, message: str) -> web.Response:
        return web.json_response(
            {"error": {"message": message, "type": kind, "param": None, "code": status}}, status=status
        )

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": "chatcmpl-1",
            "object": kind,
            "created": 1,
            "model": self.model,
            "system_fingerprint": self.version,
        }


def _asked(body: dict[str, Any]) -> tuple[int, float]:
    most = body.get("max_completion_tokens") or body.get("max_tokens")
    return int(most or TOKENS), float(body.get("delay_ms", DELAY_MS)) / 1000


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 7, "completion_tokens": tokens, "total_tokens": tokens + 7}


def _event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


async def serve(engine: FakeEngine, port: int, closed_s: float = 0.0) -> None:
    """Answer on 127.0.0.1 until cancelled; its port is closed for so long."""
    await asyncio.sleep(closed_s)
    runner = web.AppRunner(engine.app, handler_cancellation=True, access_log=None, keepalive_timeout=5)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def main(argv: Sequence[str] | None = None) -> None:
    """Run one engine, with the options that the module's docstring shows."""
    parser = argparse.ArgumentParser(prog="python -m moorage.testing.fake_engine", description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("--like", choices=LIKE, default="vllm")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--load", type=float, default=0.0, metavar="SECONDS", help="until it is ready")
    parser.add_argument("--version", default="1")
    parser.add_argument("--places", type=int, default=4096, metavar="N", help="requests that it runs at once")
    asked = parser.parse_args(argv)
    engine = FakeEngine(asked.model, asked.like, asked.load, asked.version, asked.places)
    try:
        asyncio.run(serve(engine, asked.port, asked.load if engine.habits.is_closed else 0.0))
    except KeyboardInterrupt:
        return


if __name__ == "__main__":
    main()

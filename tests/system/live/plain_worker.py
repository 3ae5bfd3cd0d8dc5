"""A worker that shares no code with moorage: nats-py, JSON, and what docs/protocol.md says. It pretends to run."""

import asyncio
import base64
import json
import secrets
from typing import Any

import nats
from nats.aio.msg import Msg

RENEW_S, TRY_S = 0.2, 2.0


class PlainWorker:
    """`async with PlainWorker(url, prefix, "w1")`: whatever it is asked to run prints its argv and ends with code 0.

    A job whose program is `wait` runs until it is asked to end. `requests` are those that it was asked to run.
    """

    def __init__(self, url: str, prefix: str, worker: str) -> None:
        self.url, self.worker, self.subject = url, worker, f"{prefix}.worker.{worker}"
        self.session, self.reign, self.renewals, self.no = "", 0, 0, 0
        self.held: dict[int, list[Any]] = {}  # fence: the member and its phase
        self.output: dict[int, str] = {}
        self.requests: list[dict[str, Any]] = []
        self.facts: asyncio.Queue[list[list[Any]]] = asyncio.Queue()
        self.tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "PlainWorker":
        self.nats = await nats.connect(self.url)
        await self.nats.subscribe(f"{self.subject}.wanted", cb=self.wanted)
        await self.nats.subscribe(f"{self.subject}.logs", cb=self.logs)
        gpu = {"index": 0, "vendor": "nvidia", "name": "NVIDIA T4", "uuid": f"GPU-{secrets.token_hex(8)}"}
        hello = {"kind": "hello", "worker": self.worker, "boot": "b1", "drivers": ["process"], "gpu_pool": [gpu]}
        join = {"kind": "join", "machine": secrets.token_hex(8), "boot": "b1", "n": 1, "hello": hello}
        joined = await self.ask("join", join)
        self.session, self.reign = joined["session"], joined["reign"]
        self.tasks = [asyncio.create_task(self.renew()), asyncio.create_task(self.report())]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self.tasks:
            task.cancel()
        assert (await self.ask("join", {"kind": "goodbye", "session": self.session}))["kind"] == "goodbye"
        await self.nats.close()

    async def ask(self, verb: str, frame: dict[str, Any]) -> Any:
        """Ask until it is answered; without a leader there is no answer."""
        while True:
            try:
                answer = await self.nats.request(f"{self.subject}.{verb}", json.dumps(frame).encode(), TRY_S)
            except (TimeoutError, nats.errors.Error):
                await asyncio.sleep(RENEW_S)
                continue
            return json.loads(answer.data)

    async def renew(self) -> None:
        while True:
            self.renewals += 1
            answer = await self.ask(
                "renew",
                {
                    "kind": "renew", "session": self.session, "n": self.renewals, "no": self.no,
                    "held": list(self.held.values()), "reign": self.reign,
                },
            )  # fmt: skip
            assert answer["kind"] == "renewed", answer
            self.reign = max(self.reign, answer["reign"])
            await asyncio.sleep(RENEW_S)

    async def report(self) -> None:
        """Send facts in numbered frames, each again until it is recorded."""
        while True:
            facts = await self.facts.get()
            frame = {"kind": "facts", "session": self.session, "no": self.no + 1, "facts": facts}
            assert (await self.ask("fact", frame))["kind"] == "recorded"
            self.no += 1

    async def wanted(self, message: Msg) -> None:
        frame = json.loads(message.data)
        if frame["session"] != self.session or frame["reign"] < self.reign:
            return
        for tenant, job, replica, attempt, fence, _slots, _mode, hold, body, *_ in frame.get("place", []):
            if fence not in self.held and fence not in self.output:
                self.requests.append(json.loads(base64.b64decode(body)))
                self.held[fence] = [tenant, job, replica, attempt, fence, "claimed"]
                self.tell(fence, "claimed", detail="127.0.0.1:29500" if hold else "")
                if not hold:
                    self.start(fence)
        for _tenant, _job, _replica, _attempt, fence, *_ in frame.get("start", []):
            if fence in self.held and self.held[fence][5] == "claimed":
                self.start(fence)
        for tenant, job, replica, attempt, fence, why, *_ in frame.get("end", []):
            if fence not in self.held:
                self.facts.put_nowait([["withdrawn", tenant, job, replica, attempt, fence]])
            elif self.held[fence][5] == "running":
                self.end(fence, -15, why)

    def start(self, fence: int) -> None:
        argv = self.requests[-1]["run"]["argv"]
        self.held[fence][5], self.output[fence] = "running", " ".join(argv)
        self.tell(fence, "started")
        if argv[0] != "wait":
            self.end(fence, 0, "exit")

    def end(self, fence: int, code: int, why: str) -> None:
        self.tell(fence, "exited", code, why)
        self.tell(fence, "freed")
        del self.held[fence]

    def tell(self, fence: int, kind: str, code: int = 0, detail: str = "") -> None:
        self.facts.put_nowait([[kind, *self.held[fence][:5], code, detail]])

    async def logs(self, message: Msg) -> None:
        asked = json.loads(message.data)
        text = self.output.get(asked["fence"], "")[asked["offset"] :]
        page = {"kind": "log-page", "attempt": asked["attempt"], "stream": asked["stream"], "offset": asked["offset"]}
        await message.respond(
            json.dumps(page | {"next": asked["offset"] + len(text), "text": text, "over": True}).encode()
        )

"""The load of a fault run: tenants that submit by endpoint, array and durable queue, cancel some, and note what was
accepted; beside them somebody who says garbage and repeats what others said."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path
from typing import Any, Final

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from moorage.schemas.job import TERMINAL
from moorage.testing.requests import beside
from tests.release.chaos.judge import Outcome, Planned
from tests.system.live.stack import Caller, request

#: one O_APPEND write a line, so that the file's order is that of what happened; the first field of /proc/uptime
#: counts suspended time too
SCRIPT: Final = """
me="$MOORAGE_TENANT $MOORAGE_JOB $MOORAGE_REPLICA $MOORAGE_ATTEMPT $MOORAGE_FENCE ${MOORAGE_GPU_UUIDS:--}"
say() { read up _ < /proc/uptime; echo "$1 $me $up" >> "$LINES"; }
say start; n=0; while [ $n -lt $BEATS ]; do sleep 0.2; say beat; n=$((n+1)); done; say end
"""
ARRAY_MAX: Final = 6
GANG_RANKS: Final = (2, 3)
#: jobs on their way at which a tenant waits: an outage must not pile up more than is worked off soon after it
AHEAD_MAX: Final = 60
#: of a tenant, submits and cancels that wait for their answers
AT_ONCE_MAX: Final = 8
_RETRIES: Final = 1000
_SETTLE_S: Final = 180.0
_SHOW_AT_ONCE: Final = 8


class Tenant:
    """One caller under load. `accepted` holds what was answered as accepted, or acknowledged by the queue."""

    def __init__(self, caller: Caller, lines: Path, seed: str, pace_s: float) -> None:
        self.caller = caller
        self.accepted: list[Planned] = []
        self._lines = lines
        self._random = random.Random(f"{seed} {caller.tenant}")
        self._pace_s = pace_s
        self._count = 0
        self._over = asyncio.Event()

    def stop(self) -> None:
        self._over.set()

    async def run(self) -> None:
        """Submit until `stop`, several at once; whatever was begun by then is carried to its answer."""
        room = asyncio.Semaphore(AT_ONCE_MAX)

        async def one() -> None:
            try:
                await self._some()
            finally:
                room.release()

        async with asyncio.TaskGroup() as group:
            while True:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._over.wait(), self._random.expovariate(1 / self._pace_s))
                if self._over.is_set():
                    return
                if self._unfinished() < AHEAD_MAX:
                    await room.acquire()
                    group.create_task(one())

    def _unfinished(self) -> int:
        """By the events heard; a lost one is made good by the bound being far from any promise."""
        ended = sum(1 for state in self.caller.states.values() if state in TERMINAL)
        return len(self.accepted) - ended

    async def _some(self) -> None:
        kind = self._random.choices(("single", "array", "queue", "gang", "cancel", "again"), (8, 2, 3, 2, 2, 1))[0]
        if kind == "array":
            bodies = [self._request() for _ in range(self._random.randint(2, ARRAY_MAX))]
            answers = await self._ask("submit", [body for body, _ in bodies])
            for (_, planned), answer in zip(bodies, answers, strict=True):
                self._take(planned, answer)
        elif kind == "queue":
            body, planned = self._request()
            await self._queue("submit", body)
            self.accepted.append(planned)
        elif kind == "gang":
            body, planned = self._request(gang=self._random.choice(GANG_RANKS))
            self._take(planned, await self._ask("submit", body))
        else:
            body, planned = self._request(may_be_cancelled=kind == "cancel")
            self._take(planned, await self._ask("submit", body))
            if kind == "again":  # a caller that missed the answer: the same request, no second job
                answer = await self._ask("submit", body)
                assert answer.get("duplicate"), answer
            elif kind == "cancel" and self._random.random() < 0.5:
                await self._ask("cancel", {"job": planned.job})
            elif kind == "cancel":
                await self._queue("cancel", {"job": planned.job})

    def _request(self, *, gang: int = 0, may_be_cancelled: bool = False) -> tuple[dict[str, Any], Planned]:
        self._count += 1
        job = f"j{self._count}"
        beats = self._random.choice((0, 1, 2, 3, 5, 12))
        environment = {"LINES": str(self._lines), "BEATS": str(beats)}
        gpu: dict[str, Any] = {"count": 1 if gang else self._random.choice((1, 1, 1, 2))}
        more: dict[str, Any] = {}
        if gang:
            gpu["scheduling"] = "gang"
            more["replicas"] = gang
        elif self._random.random() < 0.1:
            more["replicas"] = 2
        body = request(
            job, "/bin/sh", "-c", SCRIPT, gpu=gpu, retries_on_lost=_RETRIES, run={"env": environment, "grace_s": 0.3},
            **more,
        )  # fmt: skip
        return beside(body), Planned(self.caller.tenant, job, more.get("replicas", 1), bool(gang), may_be_cancelled)

    def _take(self, planned: Planned, answer: dict[str, Any]) -> None:
        assert answer["kind"] == "accepted", answer
        self.accepted.append(planned)

    async def _ask(self, verb: str, body: object) -> Any:
        """Until it is answered: what was taken and never answered is in the ledger or is not, and asked again."""
        return await self.caller.ask(self.caller.subjects.api(self.caller.tenant, verb), body, _SETTLE_S)

    async def _queue(self, verb: str, body: object) -> None:
        """Publish to the durable queue until JetStream says that it has it."""
        while True:
            answer = await self.caller.ask(self.caller.subjects.request(self.caller.tenant, verb), body, _SETTLE_S)
            if "seq" in answer and "error" not in answer:
                return
            await asyncio.sleep(0.1)  # full, or its stream has no leader now: said at once, again and again

    # ------------------------------------------------------------------------------------------------ at the end

    async def settle(self) -> dict[str, Outcome]:
        """Wait until every accepted job is over, as a leader tells it, and what became of each."""
        gate = asyncio.Semaphore(_SHOW_AT_ONCE)
        ends = asyncio.get_running_loop().time() + _SETTLE_S

        async def one(planned: Planned) -> tuple[str, Outcome]:
            while True:
                async with gate:
                    shown = await self.caller.show(planned.job)
                if shown.get("state") in TERMINAL or asyncio.get_running_loop().time() > ends:
                    return f"{planned.tenant}/{planned.job}", _outcome(shown)
                await asyncio.sleep(0.5)

        return dict(await asyncio.gather(*map(one, self.accepted)))


def _outcome(shown: dict[str, Any]) -> Outcome:
    moves = [(move["rev"], move["replica"], move["attempt"], move["state"]) for move in shown.get("changes", ())]
    losses = sum(replica["losses"] for replica in shown.get("replica_states", ()))
    return Outcome(str(shown.get("state", "UNKNOWN")), moves, losses)


class Nuisance:
    """Says garbage on every subject, and says again, late and out of order, what workers, leader and callers said."""

    KEPT_MAX: Final = 500

    def __init__(self, nc: Client, prefix: str, ledger: Client, ledger_subject: str, seed: str) -> None:
        self._nc = nc
        self._prefix = prefix
        self._ledger = ledger
        self._ledger_subject = ledger_subject
        self._random = random.Random(f"{seed} nuisance")
        self._heard: list[tuple[str, bytes]] = []
        self.garbage = self.repeats = self.junk = 0

    async def run(self) -> None:
        """For ever, some twenty messages a second."""
        heard = await self._nc.subscribe(f"{self._prefix}.>", cb=self._on_message)
        try:
            while True:
                await asyncio.sleep(self._random.expovariate(20))
                with contextlib.suppress(nats.errors.Error, OSError):
                    await self._one()
        finally:
            with contextlib.suppress(nats.errors.Error, OSError):
                await heard.unsubscribe()

    async def _on_message(self, msg: Msg) -> None:
        if len(self._heard) < self.KEPT_MAX:
            self._heard.append((msg.subject, msg.data))
        else:
            self._heard[self._random.randrange(self.KEPT_MAX)] = (msg.subject, msg.data)

    async def _one(self) -> None:
        draw = self._random.random()
        if draw < 0.6 and self._heard:
            self.repeats += 1
            await self._nc.publish(*self._random.choice(self._heard))
        elif draw < 0.97:
            self.garbage += 1
            await self._nc.publish(self._subject(), self._noise())
        else:
            self.junk += 1
            await self._ledger.publish(self._ledger_subject, self._noise())

    def _subject(self) -> str:
        worker, tenant = f"w{self._random.randint(0, 4)}", self._random.choice(("acme", "beta", "none"))
        verb = self._random.choice(("submit", "cancel", "show", "ls", "explain", "logs", "nothing"))
        return f"{self._prefix}." + self._random.choice(
            (
                f"api.{tenant}.{verb}", f"request.{tenant}.submit", f"request.{tenant}.cancel",
                "admin._.drain",
                f"worker.{worker}.join", f"worker.{worker}.renew", f"worker.{worker}.fact", f"worker.{worker}.wanted",
                f"hello.{worker}", f"load.{worker}", "fleet.rollcall",
            )
        )  # fmt: skip

    def _noise(self) -> bytes:
        size = self._random.choice((0, 1, 7, 64, 4096))
        noise = self._random.randbytes(size)
        if self._random.random() < 0.5:
            return msgspec.json.encode({"kind": self._random.choice(("join", "renew", "facts", "wanted")), "x": size})
        return noise

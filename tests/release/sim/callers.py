"""Who asks: services of two tenants that submit and cancel, each until it is answered, under the same id."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from typing import Any, Final, cast

from moorage.bus.connection import Connection
from moorage.bus.errors import BusError
from moorage.bus.jetstream import Ack, JetStream
from moorage.schemas.subjects import Subjects
from moorage.testing.requests import beside
from tests.release.sim.judge import Judge

SUBJECTS: Final = Subjects()
TENANTS: Final = ("red", "blue")
ANSWER_S: Final = 2.0
#: after the last fault every question is answered within this
UNANSWERED_S_MAX: Final = 120.0


class Callers:
    """`run` asks for `jobs` jobs within some `within_s` seconds; `asked` are the questions under way."""

    def __init__(self, link: Connection, rng: random.Random, judge: Judge, jobs: int, within_s: float) -> None:
        self._link = link
        self._rng = rng
        self._judge = judge
        self._jobs = jobs
        self._within_s = within_s
        self.asked: list[asyncio.Task[Any]] = []
        self.healed_s = float("inf")  # when the last fault was over

    async def run(self) -> None:
        rng = self._rng
        for number in range(self._jobs):
            await asyncio.sleep(rng.expovariate(self._jobs / self._within_s))
            tenant, job = rng.choice(TENANTS), f"j{number}"
            body = request(rng, job)
            ask = self._submit_durably if rng.random() < 0.3 else self._submit
            self.asked.append(asyncio.create_task(ask(tenant, job, body)))
            beside = random.Random(f"{tenant} {job} {self._within_s}")  # the worlds of older seeds stay as they are
            if rng.random() < 0.15:
                of: dict[str, Any] = {"job": f"j{rng.randrange(number + 2)}"}
                if beside.random() < 0.5:  # as who has sent it, and has no answer yet
                    of["before"] = True
                self.asked.append(asyncio.create_task(self._cancel(rng.choice(TENANTS), of)))
            if beside.random() < 0.05:
                of_another = beside.choice(TENANTS), f"j{beside.randrange(number + 2)}"
                self.asked.append(asyncio.create_task(self._uncancel(*of_another)))

    async def _submit(self, tenant: str, job: str, body: dict[str, Any]) -> None:
        answer = await self.ask(SUBJECTS.api(tenant, "submit"), body)
        self._judge.answered(tenant, job, body, answer)

    async def _cancel(self, tenant: str, of: dict[str, Any]) -> None:
        answer = await self.ask(SUBJECTS.api(tenant, "cancel"), of)
        if answer.get("kind") == "answer":
            self._judge.orders.cancelled(tenant, of["job"], answer["ledger"])

    async def _uncancel(self, tenant: str, job: str) -> None:
        self._judge.orders.uncancelled(tenant, job)  # one record may lift the cancel and place the job
        await self.ask(SUBJECTS.api(tenant, "uncancel"), {"job": job})

    async def _submit_durably(self, tenant: str, job: str, body: dict[str, Any]) -> None:
        stream, payload = JetStream(self._link), json.dumps(body).encode()
        while self._is_patient():
            with contextlib.suppress(BusError):
                stored = await stream.append(SUBJECTS.request(tenant, "submit"), payload)
                if isinstance(stored, Ack):
                    self._judge.stored(tenant, job, body)
                    return
            await asyncio.sleep(ANSWER_S)
        self._judge.violated(f"the queue took no submit of {tenant}/{job} {UNANSWERED_S_MAX:g} s after the last fault")

    async def ask(self, subject: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer of whoever leads, however long it takes."""
        payload, began_s = json.dumps(body).encode(), asyncio.get_running_loop().time()
        while self._is_patient(began_s):
            with contextlib.suppress(BusError):
                answer = json.loads((await self._link.request(subject, payload, ANSWER_S)).data)
                if answer.get("code") not in ("not-leading", "queue-full"):
                    return cast("dict[str, Any]", answer)
            await asyncio.sleep(self._rng.uniform(0.1, 2 * ANSWER_S))
        self._judge.violated(f"{subject} gave no answer {UNANSWERED_S_MAX:g} s after the last fault")
        return {}

    def _is_patient(self, began_s: float = 0.0) -> bool:
        """`began_s`: when it was asked first, which may be long after the last fault."""
        return asyncio.get_running_loop().time() < max(self.healed_s, began_s) + UNANSWERED_S_MAX


def request(rng: random.Random, job: str) -> dict[str, Any]:
    """A request of any kind that a small fleet can run."""
    gpu = rng.choice(
        (
            None,
            {},
            {},
            {"count": 2},
            {"model": "L40S"},
            {"scheduling": "gang"},
            {"scheduling": "gang", "count": 2},
            {"scheduling": "spread"},
            {"sharing": "mps", "share": {"memory_mib": 15_000, "compute_percent": 40}},
            {"sharing": "time-slice"},
        )
    )
    body: dict[str, Any] = {
        "job": job,
        "replicas": rng.choice((1, 1, 1, 2, 3)),
        "priority": rng.choice((10, 50, 50, 60, 90, 90)),
        "retries": rng.choice((0, 1, 2)),
        "retries_on_lost": 10,
        "run": {
            "argv": [
                rng.choice(("sleep", "sleep", "sleep", "stubborn", "graceful", "fragile")),
                str(round(rng.choice((0.0, 0.5, 3.0, 20.0, 45.0, 120.0)) * rng.random(), 3)),
                str(int(rng.random() < 0.15)),
            ],
            "grace_s": rng.choice((0.5, 5)),
        },
    }
    if gpu is not None:
        body["gpu"] = gpu
        if gpu.get("scheduling") != "gang" and rng.random() < 0.2:
            body["on_partition"] = "keep"
    if rng.random() < 0.1:
        body["run"] |= {"checkpoint_signal": "SIGUSR1", "checkpoint_before_s": 3}
    if rng.random() < 0.1:
        body["run"]["timeout_s"] = 5
    if rng.random() < 0.1:
        body["deadline_s"] = rng.choice((5, 60))
    if rng.random() < 0.1:
        body["start_within_s"] = rng.choice((1, 20))
    return beside(body)

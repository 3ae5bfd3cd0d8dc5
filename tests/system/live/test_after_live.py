"""Jobs that start after others, on a real server: the leader is killed as ends are told, the next tells the rest."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Final

from moorage.bus.embedded import EmbeddedServer
from tests.system.live.stack import BRIEF, Caller, caller, stack, unique_prefix
from tests.waiting import until

#: behind each of the two: more than one record tells
MANY: Final = 1_200


async def submitted(one: Caller, bodies: list[dict[str, Any]]) -> None:
    for at in range(0, len(bodies), 200):
        answers = await one.api("submit", bodies[at : at + 200])
        assert {answer["kind"] for answer in answers} == {"accepted"}, answers


def until_there(file: Path, code: int) -> dict[str, Any]:
    return {"argv": ["sh", "-c", f"until [ -e {file} ]; do sleep 0.05; done; exit {code}"]}


async def test_whoever_leads_each_job_starts_after_those_that_it_names(
    nats_server: EmbeddedServer, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    async with stack(nats_server, unique_prefix()) as made, caller(made) as one:
        first = await made.scheduler(config=BRIEF)
        await one.leader()
        await made.scheduler(config=BRIEF)
        await made.agent("a0", "8xH100", worker="w0", drivers=["noop", "process"])
        await one.workers_up("w0")
        noop = {"driver": "noop"}
        await submitted(one, [{"job": name, "run": until_there(go, code)} for name, code in (("well", 0), ("ill", 3))])
        names = [f"{of}-{number}" for of in ("well", "ill") for number in range(MANY)]
        await submitted(
            one, [{"job": name, "after": [name.partition("-")[0]], "run": noop, "events": "tenant"} for name in names]
        )
        await submitted(one, [{"job": "last", "after": ["well-7", {"job": "ill-7", "when": "failed"}], "run": noop}])
        told = (await one.api("explain", {"job": "last"}))["data"]
        assert (told["reason"], [link["job"] for link in told["chain"]]) == ("after", ["well-7", "well"])
        assert (await one.api("submit", {"after": ["nobody"], "run": noop}))["code"] == "unknown-job"
        go.touch()
        await first.kill()
        await one.leader(2)

        async def over() -> dict[str, int] | None:
            counts: dict[str, int] = (await one.api("ls", {"limit": 1}))["data"]["counts"]
            return counts if not {"QUEUED", "PLACED", "CLAIMED", "RUNNING"} & counts.keys() else None

        counts = await until(over, 90, "all of them ended")
        assert Counter(counts) == {"SUCCEEDED": MANY + 2, "FAILED": 1, "CANCELLED": MANY}
        assert (await one.show("ill-9"))["why"] == "after ill: FAILED"
        assert (await one.show("last"))["state"] == "SUCCEEDED"

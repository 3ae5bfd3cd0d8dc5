"""Fair share, idleness and the biggest gang with real servers and processes, judged by the ledger's own seconds.

Nothing is timed here: the ledger is read again record by record once enough has ended, and says who leased what when.
The half-life and the patience of reservations are shortened, so that each is over in some twenty seconds.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import pytest

from moorage.bus.connection import connect
from moorage.bus.jetstream import JetStream
from moorage.client import AsyncClient
from moorage.scheduler.ledger.ledger_reader import LedgerReader, rows
from tests.live.stack import ANSWER_S, Stack, caller, stack
from tests.servers import Server

GPUS: Final = 8
#: three to one of so many comes out in time alone
ODD: Final = 7
RUNS: Final = ["sleep", "0.3"]
HALF_LIFE_S: Final = 2.0
PATIENCE_S: Final = 2.0


def client(made: Stack, tenant: str) -> AsyncClient:
    return AsyncClient(made.url, tenant=tenant, prefix=made.subjects.prefix, timeout=ANSWER_S)


async def begin(made: Stack, **settings: float) -> None:
    await made.set_scheduler("", settings, made.url, made.ledger_url)
    async with caller(made, "looker") as one:
        await one.leader()


async def leased(made: Stack, *tenants: str, since: int = 0) -> Counter[str]:
    """GPU milliseconds that each had while all of these tenants had jobs waiting, behind a record, in ledger time."""
    got: Counter[str] = Counter()
    async with await connect(made.ledger_url, "judge") as connection:
        before, held = 0, dict.fromkeys(tenants, 0)
        async for told in LedgerReader(JetStream(connection), made.subjects).records():
            for tenant in tenants if before and told.seq > since else ():
                got[tenant] += held[tenant] * (told.record.time - before)
            known = [told.state.tenants.get(tenant) for tenant in tenants]
            all_wait = all(row is not None and row.live > row.gpus for row in known)  # jobs of one GPU
            held = {row.name: row.gpus for row in known if row is not None}
            before = told.record.time if all_wait else 0
    return got


@pytest.mark.slow
async def test_weights_of_three_to_one_come_to_three_to_one_of_ledger_time(nats_server: Server, unique: str) -> None:
    async with stack(nats_server, unique) as made:
        await begin(made, fair_share_half_life=5 * HALF_LIFE_S)
        async with client(made, "heavy") as heavy, client(made, "light") as light:
            await heavy.admin.share(weight=3, tenant="heavy")
            many = await light.submit_many([RUNS] * 300, gpu=1)
            more = await heavy.submit_many([RUNS] * 500, gpu=1)
            await made.agent("w", f"1x{ODD}xH100")  # both wait before there is a GPU
            await heavy.wait(more[:300], "200s")
            await light.wait(many[:100], "200s")
            got = await leased(made, "heavy", "light")
            print(f"weights 3:1 got {got['heavy'] / got['light']:.3f} of {sum(got.values()) / 1000:.0f} GPU seconds")
            assert got["heavy"] + got["light"] > 1_000 * ODD * 5
            assert got["heavy"] / got["light"] == pytest.approx(3, rel=0.1), got


@pytest.mark.slow
async def test_a_tenant_that_was_idle_makes_up_for_less_than_a_half_life(nats_server: Server, unique: str) -> None:
    async with stack(nats_server, unique) as made:
        await begin(made, fair_share_half_life=HALF_LIFE_S)
        async with client(made, "busy") as busy, client(made, "idle") as idle:
            await busy.admin.share(weight=1, tenant="busy")
            jobs = await busy.submit_many([RUNS] * 500, gpu=1)
            await made.agent("w", f"1x{GPUS}xH100")
            await busy.wait(jobs[:200], "200s")  # four half-lives and more in which the other one has nothing
            later = await idle.submit_many([RUNS] * 250, gpu=1)
            await idle.wait(later[:150], "200s")
            got = await leased(made, "busy", "idle")
            more = (got["idle"] - got["busy"]) / 2
            print(f"{more / 1000:.1f} GPU seconds made up for, a half-life is {GPUS * HALF_LIFE_S:.0f}")
            assert 0 < more < GPUS * HALF_LIFE_S * 1_000, got
            assert got["busy"] > 0


@pytest.mark.slow
async def test_the_biggest_gang_starts_when_what_ran_has_ended(nats_server: Server, unique: str) -> None:
    async with stack(nats_server, unique) as made:
        await begin(made, reserve_after=PATIENCE_S)
        async with client(made, "many") as many, client(made, "big") as big:
            stream = await many.submit_many([["sleep", str(0.4 + number % 5 / 5)] for number in range(400)], gpu=1)
            await made.agent("w", f"2x{GPUS // 2}xH100")
            await many.wait(stream[:20], "200s")
            gpu = {"count": GPUS // 2, "scheduling": "gang"}
            gang = await big.submit({"replicas": 2, "gpu": gpu, "run": {"argv": ["true"]}})
            await big.wait([gang], "200s")
            told = await decisions(made)
            asked = next(row["time_ms"] for row in told if row["job"] == gang.job and row["state"] == "ACCEPTED")
            began = max(row["time_ms"] for row in told if row["job"] == gang.job and row["state"] == "PLACED")
            reserved = asked + int(PATIENCE_S * 1000) + 1_000  # hosts are looked for once a second
            longest = max(0, *(end - reserved for start, end in runs(told, gang.job) if start <= reserved))
            assert began - reserved <= 1.2 * longest + 5_000, (began - reserved, longest)
            assert len(runs(told, gang.job)) < len(stream), "the stream had not ended"
            print(f"the gang waited {began - asked} ms; what ran at {reserved - asked} ms ended {longest} ms later")


async def decisions(made: Stack) -> list[dict[str, Any]]:
    async with await connect(made.ledger_url, "judge") as connection:
        look = LedgerReader(JetStream(connection), made.subjects)
        found = [row async for told in look.records() for row in rows(told)]
    return [row for row in found if row["kind"] == "decision"]


def runs(told: list[dict[str, Any]], but: str) -> list[tuple[int, int]]:
    """From when to when others held their GPUs, in ledger ms; who runs on is left out."""
    placed = {row["job"]: row["time_ms"] for row in told if row["state"] == "PLACED" and row["job"] != but}
    return [
        (placed[row["job"]], row["time_ms"]) for row in told if row["state"] == "SUCCEEDED" and row["job"] in placed
    ]

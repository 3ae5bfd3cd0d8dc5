"""A host dies with its disk while a training runs: the next attempt goes on from what was stored meanwhile."""

from __future__ import annotations

import pytest

from moorage.bus.embedded import EmbeddedServer
from tests.release.checkpoints.deaths import world
from tests.system.live.checkpoint_training import asked, lose_host, said, training, undisturbed
from tests.system.live.stack import BRIEF, caller, stack
from tests.waiting import until

STEPS = 200


@pytest.mark.slow
async def test_a_training_whose_hosts_die_loses_nothing_but_what_came_after_the_last_stored_step(
    nats_server: EmbeddedServer, unique: str
) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme:
        await made.scheduler(config=BRIEF)
        await acme.leader()
        agents = {name: await made.agent(name, "1xH100", worker=name, drivers=["process"]) for name in ("a", "b")}
        await acme.workers_up("a", "b")
        whole = await undisturbed(acme, STEPS)
        await acme.submit("train", *training(STEPS, 0.05), run=asked(), retries_on_lost=3)
        step = 0
        for death in (1, 2):

            async def has_stored(death: int = death, before: int = step) -> int:
                [row] = (await acme.show("train"))["replica_states"]
                told = row.get("checkpoint", {}).get("step") or 0
                return told if row["attempt"] == death and told > before else 0

            step = await until(has_stored, what="a step is stored")
            worker = (await acme.show("train"))["worker"]
            await lose_host(made, agents[worker], worker)
            new = f"{worker}{death}"
            agents[new] = await made.agent(new, "1xH100", worker=new, drivers=["process"])

            async def goes_on(death: int = death) -> bool:
                [row] = (await acme.show("train"))["replica_states"]
                return bool(row["attempt"] == death + 1 and row["state"] in ("RUNNING", "SUCCEEDED"))

            await until(goes_on, 90, "the next attempt")
            [row] = (await acme.show("train"))["replica_states"]
            assert row["checkpoint"]["from_step"] >= step
            assert row["checkpoint"]["from_attempt"] == death
        await acme.reaches("train", "SUCCEEDED")
        page = (await acme.api("logs", {"job": "train"}))["data"]
        first, digest = said(page["text"])
        assert first[-1] >= step
        assert digest == whole


@pytest.mark.long
@pytest.mark.slow
async def test_hosts_that_die_at_random_moments_cost_no_training_what_was_stored(
    nats_server: EmbeddedServer, unique: str
) -> None:
    found = await world(nats_server, unique, seed=7, deaths=3)
    assert found.deaths == 3

"""Hosts of a gang die while it trains: all ranks go on from one step, and lose nothing but what came after it."""

from __future__ import annotations

import secrets
from typing import Any

import pytest

from moorage.bus.embedded import EmbeddedServer
from tests.release.checkpoints.gang_deaths import world
from tests.system.live.checkpoint_training import asked, said
from tests.system.live.stack import BRIEF, caller, stack

GANG = {"scheduling": "gang", "model": "H100"}


@pytest.mark.slow
@pytest.mark.long
async def test_a_gang_of_which_a_host_dies_goes_on_from_one_step_of_all_ranks(
    nats_server: EmbeddedServer, unique: str
) -> None:
    found = await world(nats_server, unique, seed=3, deaths=2, gangs=1)
    assert found.deaths == 2


@pytest.mark.slow
@pytest.mark.long
async def test_a_gang_that_names_no_steps_goes_on_from_what_all_ranks_had_as_none_wrote(
    nats_server: EmbeddedServer, unique: str
) -> None:
    found = await world(nats_server, unique, seed=4, deaths=2, gangs=1, moments=True)
    assert found.deaths == 2


@pytest.mark.slow
async def test_ranks_that_save_and_exit_at_a_step_go_on_from_it_and_one_whose_set_is_gone_refuses_the_start(
    nats_server: EmbeddedServer, unique: str
) -> None:
    script = (
        'mkdir -p ck; n=$(ls ck | sort | tail -1 | cut -d- -f2); n=${n:-0}; echo "from step $((n + 0))"; '
        'if [ "$n" -ge 2 ]; then exit 0; fi; : > ck/step-$((n + 1)); exit 75'
    )
    async with stack(nats_server, unique) as made, caller(made) as acme:
        await made.scheduler(config=BRIEF)
        await acme.leader()
        for name in ("a", "b"):
            await made.agent(name, "1xH100", worker=name, drivers=["process"])
        job = f"g{secrets.token_hex(3)}"
        run = asked(checkpoint_every_s=0.0)
        await acme.submit(job, "sh", "-c", script, replicas=2, gpu=GANG, run=run, retries=9)
        shown: dict[str, Any] = await acme.reaches(job, "SUCCEEDED")
        # A rank that exits ends the gang: where the other had not saved yet, the step is made once more.
        assert shown["attempt"] >= 3
        pages = [(await acme.api("logs", {"job": job, "replica": rank}))["data"]["text"] for rank in (0, 1)]
        assert [said(page)[0] for page in pages] == [[2], [2]], "the last attempt began with what both had stored"

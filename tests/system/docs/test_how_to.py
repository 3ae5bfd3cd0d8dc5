"""Every how-to, typed as it stands, on one simulated fleet; what cannot run here is counted, with its reason."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import pytest

from moorage.bus.contexts import Context
from moorage.bus.own_login import offer, with_own_login
from moorage.client import AsyncClient
from tests.system.cli.node import Node
from tests.system.docs.driver import engine_for, environment, run, skip_without
from tests.unit.docs.markdown import DOCS, page, pages

#: blocks of the docs that no test runs, by page: add to it with the reason above the block, and take away from it
NOT_RUN: Final = {
    "README.md": 2,  # the tests themselves, an engine on a GPU
    "docs/how-to/add-and-remove-hosts.md": 3,  # it never ends; an account of a cloud; a program that ends machines
    "docs/how-to/be-told-in-slack-or-by-mail.md": 1,  # a mail server of the reader's own
    "docs/how-to/bring-a-python-environment.md": 3,  # pip, uv and conda, with packages of the reader's own
    "docs/how-to/freeze-unused-jobs.md": 1,  # a setting of the host
    "docs/how-to/from-python.md": 1,  # the installation
    "docs/how-to/give-everybody-a-key.md": 8,  # the nats command, and what needs several machines
    "docs/how-to/let-an-agent-ask.md": 1,  # a file of an agent's program
    "docs/how-to/many-models-on-few-gpus.md": 1,  # a model on a GPU
    "docs/how-to/open-an-http-door.md": 2,  # a certificate, a proxy
    "docs/how-to/run-a-gang-with-torchrun.md": 3,  # torch, and the fleet's size
    "docs/how-to/run-a-production-cluster.md": 11,  # test_production_cluster.py runs all but the installation
    "docs/how-to/run-unlike-parts-together.md": 2,  # two kinds of hosts; a part of a program
    "docs/how-to/run-as-a-service.md": 4,  # the installation, a user of the system, images of a registry
    "docs/how-to/run-in-kubernetes.md": 3,  # a cluster
    "docs/how-to/run-several-schedulers.md": 1,
    "docs/how-to/run-virtual-machines.md": 1,  # the installation
    "docs/how-to/serve-a-model-to-any-language.md": 1,  # the installation of the model
    "docs/how-to/serve-an-llm.md": 1,  # a model on a GPU
    "docs/how-to/share-a-gpu.md": 1,  # a file that is not one of settings
    "docs/how-to/show-a-fleet-in-a-browser.md": 4,  # keys of a site, a proxy, and a page that keeps its secret
    "docs/how-to/two-sites-one-fleet.md": 1,  # a cut of the link
    "docs/how-to/use-ml-tools.md": 2,  # scikit-learn and Optuna
    "docs/how-to/use-the-nats-you-have.md": 2,  # a tool that is no dependency, and a second machine
    "docs/how-to/train-with-hugging-face.md": 2,  # test_trainer.py runs it with torch
    "docs/how-to/use-weights-and-biases.md": 3,  # wandb, and a key of its server
    "docs/how-to/write-a-worker.md": 1,  # it waits for a worker
    "docs/index.md": 1,  # the first steps of the pages that it leads to
    "docs/tutorial/first-worker.md": 4,  # a GPU, a server and an account of the reader's own
    "docs/tutorial/ten-minutes.md": 1,  # the installation
}


@pytest.mark.slow
@pytest.mark.parametrize("path", pages("how-to"), ids=lambda path: path.stem)
def test_every_step_does_what_the_page_says(path: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    wanted = page(path)
    skip_without(wanted)
    if any(block.body.startswith("moorage up") for block in wanted.blocks):
        run(wanted, tmp_path, environment(tmp_path))
        return
    is_open = "moorage up --open" in path.read_text()
    fleet: Node = request.getfixturevalue("open_fleet" if is_open else "fleet")
    with engine_for(wanted) as more:
        home = environment(tmp_path, MOORAGE_HOME=str(fleet.folder), **more)
        if is_open:
            home["NATS_URL"] = fleet.url
        else:
            offer(fleet.folder, fleet.url, home)  # as `moorage up` of this home would have
        try:
            run(wanted, tmp_path, home)
        finally:
            asyncio.run(leave_nothing(fleet))


async def leave_nothing(fleet: Node) -> None:
    """End what a page left running, and wait until its GPUs are free again."""
    for tenant in ("default", "vision", "sandbox"):
        async with AsyncClient(with_own_login(Context(url=fleet.url), fleet.env()), tenant=tenant) as client:
            rows = (await client.ls(states=["QUEUED", "PLACED", "CLAIMED", "RUNNING"], limit=1000)).jobs
            jobs = [client.job(row.job) for row in rows]
            for job in jobs:
                await job.cancel("the page is read")
            await client.wait(jobs, "120s")


def test_what_is_not_run_is_counted_and_says_why() -> None:
    found = {}
    for path in [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]:
        unrun = [block for block in page(path).blocks if block.not_run]
        if unrun:
            found[page(path).name] = len(unrun)
    assert found == NOT_RUN


def test_every_block_is_one_on_the_site_too() -> None:
    """Behind the kind of a block the site reads a title and nothing else; with more, the fence is text, and so is what
    follows up to the next one."""
    odd = [
        f"{page(path).name}:{block.line}"
        for path in [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]
        for block in page(path).blocks
        if not block.kind.isalnum()
    ]
    assert odd == []

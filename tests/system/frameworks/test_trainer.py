"""Hugging Face's Trainer, as its page has it: asked to end it saves, and the next attempt goes on from there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from moorage.client import AsyncClient
from tests.system.cli.node import Node
from tests.system.frameworks.gangs import from_page, variables
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.long]

TRAIN: Final = from_page("train-with-hugging-face", "train.py")


async def test_an_attempt_that_is_asked_to_end_loses_no_step(node: Node, unique: str, tmp_path: Path) -> None:
    trains = tmp_path / "trains"
    slow = (
        f"Path({str(trains)!r}).touch()\n"
        "        __import__('time').sleep(0.3 if os.environ['MOORAGE_ATTEMPT'] == '1' else 0)\n"
        "        if asked:"
    )
    assert TRAIN.count("if asked:") == 1
    (tmp_path / "train.py").write_text(TRAIN.replace("if asked:", slow))
    async with AsyncClient(node.url, tenant=unique) as client:
        job = await client.submit(
            ["python", "train.py"], gpu="1xH100", retries=3, files=tmp_path / "train.py", env={
                **variables("torch"), "STEPS": "300", "HF_HUB_OFFLINE": "1",
            }, checkpoint="checkpoints", checkpoint_signal="SIGUSR1", checkpoint_before_s=30, grace_s=60,
        )  # fmt: skip

        async def has_left() -> bool:
            shown = await job.show()
            return shown.state == "QUEUED" or shown.changes[-1].attempt > 1

        await until(trains.exists, 180, "it trains")
        worker = (await job.show()).changes[-1].worker
        await client.fleet.drain(worker, within="60s")
        try:
            await until(has_left, 180, "the attempt has left")
        finally:
            await client.fleet.uncordon(worker)
        result = await job.result(300)
        said = ["".join([piece.text async for piece in job.logs(follow=False, attempt=attempt)]) for attempt in (1, 2)]
    assert result.state == "SUCCEEDED", said
    first, last = (re.findall(r"^(?:from|step) (\S+)", text, re.MULTILINE) for text in said)
    assert first[0] == "the"
    assert 0 < int(first[1]) < 300
    assert last == [f"checkpoint-{first[1]}", "300"]

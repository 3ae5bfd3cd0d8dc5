"""A function mapped over items: values and exceptions by item, on a real node. It takes some 6 s."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from moorage.client import AsyncClient, Client, ItemFailed, JobFailed, Rejected
from moorage.client.handlers import Progress
from moorage.schemas.job import CANCELLED, RUNNING, SUCCEEDED
from tests.system.cli.node import Node


@pytest.fixture
def lesson(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module with a function, in a folder that only this process has in its path."""
    (tmp_path / "lesson.py").write_text(
        "import os\n"
        "def learn(item):\n"
        "    if item['n'] == 2: raise ValueError('two')\n"
        "    if item['n'] == 3: os._exit(9)\n"
        "    return {'loss': item['n'] / 2, 'gpus': os.environ['CUDA_VISIBLE_DEVICES']}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import lesson  # type: ignore[import-not-found]

    yield lesson
    del sys.modules["lesson"]


@pytest.fixture(name="node", scope="module")
def _node(node_of_its_own: Node) -> Node:
    """A tenant's bucket takes its room of the server's disk, and those of other tests stay."""
    return node_of_its_own


def test_a_function_gives_values_and_exceptions_by_item(node: Node, unique: str, lesson: Any) -> None:
    seen: list[Progress] = []
    with Client(node.url, tenant=unique) as client:
        job = client.map(lesson.learn, [{"n": n} for n in range(4)], gpu=1)
        answers = list(job.answers(errors="return", on_progress=seen.append))
        assert [answer["loss"] for answer in answers[:2]] == [0, 0.5]
        assert all(answer["gpus"] for answer in answers[:2])
        raised, died = answers[2:]
        assert isinstance(raised, ItemFailed)
        assert (raised.kind, raised.replica, raised.exit_code) == ("ValueError", 2, 1)
        assert "in learn" in "".join(raised.__notes__)
        assert isinstance(died, ItemFailed)
        assert (died.kind, died.replica, died.exit_code) == ("", 3, 9)
        assert (seen[-1].fraction, seen[-1].text) == (1, "4 of 4, 2 failed")
    with Client(node.url, tenant=unique) as other:  # as the first one may be killed
        again = dict(other.job(job.job).answers_as_completed(errors="return"))
        assert (again[0], again[1]) == (answers[0], answers[1])
        with pytest.raises(ItemFailed, match=r"item 2 of job .* failed: ValueError: two"):
            list(other.job(job.job).answers())
        with pytest.raises(Rejected, match="calls no function"):
            list(other.submit(["true"]).answers())


async def test_a_closure_travels_by_cloudpickle_and_what_cannot_be_loaded_fails_once(node: Node, unique: str) -> None:
    factor = 7
    async with AsyncClient(node.url, tenant=unique) as client:
        job = await client.map(lambda n: n * factor, range(3))  # no import finds it: it is pickled without asking
        assert [answer async for answer in job.answers()] == [0, 7, 14]
        with pytest.raises(Rejected, match="no module has the function"):
            await client.map(lambda n: n, range(3), how="module")
        other = await client.map(os.path.join, ["a", "b"])
        assert [answer async for answer in other.answers()] == ["a", "b"]  # an installed module is there as well

        class Missing:
            def __reduce__(self) -> Any:
                return __import__, ("no_such_module",)

        missing = Missing()
        lost = await client.map(lambda _: missing, range(20), how="cloudpickle", python=sys.executable)
        with pytest.raises(JobFailed, match="-check failed with code 78") as failed:
            [answer async for answer in lost.answers(errors="return")]
        assert "no_such_module" in failed.value.log_tail
        assert (await lost.show()).state == CANCELLED


async def test_an_interrupted_wait_cancels_the_job_and_says_how_to_go_on(
    node: Node, unique: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = str(tmp_path / "gate")

    def stay(item: str) -> str:
        if item == "stays":
            os.mkfifo(gate)
            open(gate).close()
        return item

    async with AsyncClient(node.url, tenant=unique) as client:
        job = await client.map(stay, ["goes", "stays"], how="cloudpickle", python=sys.executable, check=False)
        come: list[Any] = []

        async def wait() -> None:
            come.extend([pair async for pair in job.answers_as_completed()])

        waits = asyncio.create_task(wait())
        async for step in job.steps():
            if step.state == SUCCEEDED and step.replica == 0:
                break
        other = client.job(job.job)
        assert (await anext(other.answers())) == "goes"  # who did not submit it leaves it alone
        assert {row.replica: row.state for row in (await job.show()).replica_states}[1] == RUNNING
        waits.cancel()
        await asyncio.wait({waits})
        with pytest.raises(JobFailed, match="was cancelled: the wait for its answers was interrupted"):
            await job.result()
        assert f"job('{job.job}').again(failed=True)" in caplog.text

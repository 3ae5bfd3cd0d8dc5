"""taskiq's own client over moorage: tasks are jobs, their values and errors come back, and none runs twice."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest

from moorage.client import JobFailed, Rejected
from tests.system.cli.node import Node, node_on
from tests.waiting import until

taskiq = pytest.importorskip("taskiq")

WAIT_S: Final = 100.0
TASKS: Final = """
import os
import sys
import time
from pathlib import Path

from moorage.contrib.taskiq_broker import MoorageBroker

broker = MoorageBroker("tasks_of_the_test:broker", URL, tenant=TENANT, python=sys.executable, files=__file__)


@broker.task(gpu="1xH100")
async def add(one: int, other: int) -> dict[str, object]:
    return {"sum": one + other, "gpus": len(os.environ["CUDA_VISIBLE_DEVICES"].split(","))}


@broker.task(limit="60s")
def fails(kind: str) -> object:
    print("to standard error", file=sys.stderr)
    if kind == "odd":
        return object()
    raise ValueError(kind)


@broker.task(gpu="1xH100")
def long(folder: str) -> str:
    with open(f"{folder}/began", "a") as file:
        file.write("began\\n")
    while not Path(folder, "go").exists():
        time.sleep(0.02)
    return "done"
"""


@asynccontextmanager
async def tasks(folder: Path, node: Node, tenant: str) -> AsyncIterator[ModuleType]:
    """The module of tasks, whose broker is open."""
    file = folder / "tasks_of_the_test.py"
    file.write_text(TASKS.replace("URL", repr(node.url)).replace("TENANT", repr(tenant)))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    await module.broker.startup()
    try:
        yield module
    finally:
        await module.broker.shutdown()
        del sys.modules[file.stem]


@pytest.mark.slow
async def test_values_errors_and_ends_of_tasks_come_back(tmp_path: Path, node: Node, unique: str) -> None:
    async with tasks(tmp_path, node, unique) as module:
        added, two = await asyncio.gather(module.add.kiq(3, 4), module.add.kicker().with_labels(gpu="2xH100").kiq(1, 1))
        assert (await added.wait_result(timeout=WAIT_S)).return_value == {"sum": 7, "gpus": 1}
        assert (await two.wait_result(timeout=WAIT_S)).return_value == {"sum": 2, "gpus": 2}
        failed = await (await module.fails.kiq("no")).wait_result(timeout=WAIT_S, with_logs=True)
        assert (failed.is_err, repr(failed.error)) == (True, "ValueError('no')")
        assert "to standard error" in failed.log
        odd = await (await module.fails.kiq("odd")).wait_result(timeout=WAIT_S)
        assert (odd.is_err, type(odd.error)) == (True, JobFailed)
        limited = await module.long.kicker().with_labels(limit="1s").kiq(str(tmp_path))
        late = await limited.wait_result(timeout=WAIT_S)
        assert (late.is_err, late.error.result.state) == (True, "TIMED_OUT")
        with pytest.raises(taskiq.exceptions.SendTaskError) as told:
            await module.add.kicker().with_labels(gpu="0xH100").kiq(1, 2)
        assert isinstance(told.value.__cause__, Rejected)
        with pytest.raises(RuntimeError, match="no `taskiq worker` is needed"):
            await anext(module.broker.listen())
    assert (await node.run("ls", "--format", "{gpu}", tenant=unique)).out.split().count("2xH100") == 1


@pytest.mark.slow
async def test_a_long_task_runs_once_whoever_is_killed_and_however_often_it_is_sent(
    tmp_path: Path, unique: str
) -> None:
    async with node_on(tmp_path / "home", simulate="1x4xH100") as node, tasks(tmp_path, node, unique) as module:
        sent = await module.long.kicker().with_task_id("epoch-7").kiq(str(tmp_path))
        await until((tmp_path / "began").exists, WAIT_S, "the task began")
        pids = [node.up.children[name] for name in ("scheduler", "worker")]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for _ in range(3):
            assert not await sent.is_ready()
            again = await module.long.kicker().with_task_id("epoch-7").kiq(str(tmp_path))
        (tmp_path / "go").touch()
        assert (await again.wait_result(timeout=WAIT_S)).return_value == "done"
        assert (await sent.wait_result(timeout=WAIT_S)).return_value == "done"
        assert (tmp_path / "began").read_text() == "began\n"

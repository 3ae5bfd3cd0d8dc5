"""The SDK in the cells of a notebook, run by a kernel of ipykernel."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Final

import pytest

from tests.system.client.kernel import Cell, Notebook, notebook_in

BEGIN: Final = """
import asyncio, threading
from moorage.client import AsyncClient, Client
from moorage.testing import Ran, SimFleet
seen = []
def script(task):
    seen.append(task.argv[0])
    return Ran(int(task.argv[1]), "from the job\\n", seconds=float(task.argv[2]))
m = Client(transport=SimFleet("2x4xH100", script=script), tenant="vision").open()
"""


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with notebook_in(tmp_path_factory.mktemp("notebook")) as notebook:
        assert notebook.run(BEGIN) == Cell("", "", [])
        yield notebook


def test_a_client_in_a_cell_blocks_and_says_nothing(notebook: Notebook) -> None:
    ran = notebook.run("done = m.run(['exit', '0', '0'], gpu=1, job='one')\nprint(done.stdout, end='')")
    assert ran == Cell("from the job\n", "", [])
    assert notebook.run("m.ls().jobs[0].job").pictures[0]["text/plain"] == "'one'"


def test_the_python_of_the_kernel_is_a_jobs_as_that_of_a_shell_is_a_commands(notebook: Notebook) -> None:
    path = f"{sys.prefix}/bin/python"
    run = "for _ in '12': m.run(['python', '0', '0'], gpu=1)\nprint(seen[-2:])"
    said = f"python is {path}, of the environment that is active here: it has to be on the worker, too\n"
    assert notebook.run(run) == Cell(f"{said}{[path, path]}\n", "", [])


def test_a_result_is_one_line_and_a_table(notebook: Notebook) -> None:
    [shown] = notebook.run("m.run(['exit', '0', '0'], gpu='3x1xH100', job='three')").pictures
    assert re.fullmatch(r"<Result three  SUCCEEDED  code 0  stdout 39  \d+ transitions>", shown["text/plain"])
    assert "<caption>Result of three</caption>" in shown["text/html"]
    assert "from the job" in shown["text/html"]


def test_a_job_in_a_cell_follows_itself_until_it_has_ended(notebook: Notebook) -> None:
    """The cell is over at once. Of several replicas the picture has a bar, and which of them failed."""
    code = "m.submit(['exit', '0', '0.2'], gpu=1, job='alone')"
    alone = notebook.run(code, lambda pictures: "SUCCEEDED" in pictures[-1]["text/html"])
    assert alone.error == ""
    assert len(alone.pictures) > 1
    code = "m.submit(['exit', '{item}', '0.2'], gpu=1, items=[0, 3, 0], retries=0, job='several')"
    several = notebook.run(code, lambda pictures: "value='3'" in pictures[-1]["text/html"]).pictures[-1]["text/html"]
    assert "<progress max='3' value='3'>" in several
    assert "FAILED</th><td style='text-align:left;white-space:pre-wrap'>1: 1</td>" in several


def test_the_jobs_of_an_async_client_follow_themselves_too(notebook: Notebook) -> None:
    code = """
a = await AsyncClient(transport=SimFleet("2x4xH100", script=script)).open()
await a.submit(["exit", "0", "0.2"], gpu=1)
"""
    cell = notebook.run(code, lambda pictures: "SUCCEEDED" in pictures[-1]["text/html"])
    assert cell.error == ""
    assert notebook.run("await a.close()").error == ""


def test_what_waits_in_a_cell_is_interrupted_and_the_job_goes_on(notebook: Notebook) -> None:
    code = """
import os, signal
job = m.submit(["exit", "0", "1000"], gpu=1, job="long")
next(step for step in job.steps() if step.state == "RUNNING")
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
job.result()
"""
    assert notebook.run(code).error.startswith("KeyboardInterrupt")
    assert notebook.run("print(job.show().state, job.cancel().was)").printed == "RUNNING RUNNING\n"


def test_a_callback_in_the_clients_own_thread_is_refused_in_a_notebook_too(notebook: Notebook) -> None:
    code = """
async def inside():
    try:
        m.ls()
    except RuntimeError as error:
        print("AsyncClient" in str(error))
m._thread.call(inside())
"""
    assert notebook.run(code).printed == "True\n"


def test_a_job_that_is_shown_once_its_client_is_closed_stays_as_it_is_known(notebook: Notebook) -> None:
    code = """
with Client(transport=SimFleet("1xH100", script=script)) as other:
    shown = other.submit(["exit", "0", "0"], gpu=1, job="closed")
shown
"""
    cell = notebook.run(code)
    assert cell.error == ""
    assert "<caption>Job closed</caption>" in cell.pictures[0]["text/html"]

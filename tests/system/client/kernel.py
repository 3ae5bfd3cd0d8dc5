"""A kernel of ipykernel, and the cells that it runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import start_new_kernel

#: bound for a hang, in seconds
LATE_S: Final = 90


class Cell(NamedTuple):
    """What a cell has shown: its output, its error, and the pictures of its last line, the first one first."""

    printed: str
    error: str
    pictures: list[dict[str, str]]


class Notebook:
    def __init__(self, kernel: BlockingKernelClient) -> None:
        self._kernel = kernel

    def run(self, code: str, until: Callable[[list[dict[str, str]]], object] = bool) -> Cell:
        """Run a cell; if it shows a picture, wait `until` its pictures are as wanted."""
        cell = self._kernel.execute(code)
        printed, error, idle, pictures = "", "", False, list[dict[str, str]]()
        while not idle or (pictures and not until(pictures)):
            message: Any = self._kernel.get_iopub_msg(timeout=LATE_S)
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and message["parent_header"].get("msg_id") == cell:
                idle = content["execution_state"] == "idle"
            elif kind == "stream":
                printed += content["text"]
            elif kind == "error":
                error = f"{content['ename']}: {content['evalue']}"
            elif kind in ("execute_result", "display_data", "update_display_data"):
                pictures.append(content["data"])
        return Cell(printed, error, pictures)


@contextmanager
def notebook_in(folder: Path, variables: Mapping[str, str] | None = None) -> Iterator[Notebook]:
    """A kernel in a folder, where its settings are, too, with more variables; it ends with the block."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR"):
            patch.setenv(name, str(folder / name))
        env = {**os.environ, **(variables or {})}
        manager, kernel = start_new_kernel(kernel_name="python3", startup_timeout=LATE_S, env=env, cwd=str(folder))
        try:
            yield Notebook(kernel)
        finally:
            kernel.stop_channels()
            manager.shutdown_kernel(now=True)

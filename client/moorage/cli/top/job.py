"""One job in full, as the live screen opens it: its history, why it waits and what would help, its use, its output."""

from __future__ import annotations

import io
import sys
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final, TextIO

from moorage.cli.framework.render import table
from moorage.cli.jobs.explain import explained_rows, fix_lines
from moorage.cli.jobs.show import job_words
from moorage.cli.jobs.use import use_rows, use_table
from moorage.client.answers import JobInfo
from moorage.client.errors import NotPermitted
from moorage.client.tenant import is_operators
from moorage.schemas.errors import MoorageError
from moorage.schemas.job import TERMINAL
from moorage.schemas.names import word_of

if TYPE_CHECKING:
    from moorage.client.client import AsyncClient
    from moorage.schemas.answers.jobs import Explained

#: lines of output that are shown
TAIL: Final = 20


class _Paper(io.TextIOWrapper):
    """Stands for the terminal where a stream is asked what it can show: the live screen has taken stdout."""

    def isatty(self) -> bool:
        return True


async def job_text(client: AsyncClient, tenant: str, job: str, *, ascii: bool) -> str:
    """Return the job as text, with the color codes of the terminal. Raises `NotFound`, `NoScheduler`."""
    shown, why = await client._wire.show(job, tenant=tenant), await client._wire.explain(job, tenant)
    fixes = fix_lines(why, operates=is_operators(client._wire.context))
    parts = [f"{job} of {tenant}: {shown.state}", *_why(why, fixes), job_words(shown)]
    if shown.state not in TERMINAL:
        parts += await _use(client, tenant, job, _Paper(io.BytesIO(), encoding="ascii" if ascii else "utf-8"))
    caption, lines = await tail(client, tenant, shown)
    return "\n\n".join([*parts, "\n".join([caption, *lines])])


def _why(why: Explained, fixes: list[str]) -> list[str]:
    """Return why it waits and what would help; nothing of a job that does not wait."""
    if not why.reason:
        return ["\n".join(fixes)] if why.state in TERMINAL and why.state != "SUCCEEDED" else []
    rows = [(name, value) for name, value in explained_rows(why) if value]
    return ["\n".join([table(["WAITS", ""], rows, wraps=True, stream=sys.stdout), *fixes])]


async def _use(client: AsyncClient, tenant: str, job: str, paper: TextIO) -> list[str]:
    try:
        rows = await use_rows(client, job, None, tenant)
    except MoorageError:  # it does not run, its worker does not answer, or this key may not ask
        return []
    return [use_table(rows, paper)] if rows else []


async def tail(client: AsyncClient, tenant: str, shown: JobInfo) -> tuple[str, list[str]]:
    """Return a caption and the last lines of the output, in the order in which they came to each worker.

    Without lines, the caption says why there are none.
    """
    from moorage.client.output import Joiner

    job, read = shown.job, partial(client._wire.read, tenant=tenant)
    joiner, text = Joiner(read, job, TAIL), deque[str](maxlen=4 * TAIL)
    try:
        async for piece in joiner.kept_of(await joiner.newest(shown, None), None, None):
            text.append(piece.text)
    except NotPermitted:
        return f"output is the tenant's: moorage logs {word_of(job)} --tenant {tenant}, with its key", []
    except MoorageError as error:
        return f"no output: {error.problem.message}", []
    lines = "".join(text).splitlines()[-TAIL:]
    if not lines and joiner.trouble is not None:
        return f"no output: {joiner.trouble.problem.message}", []
    return ("its last output:", lines) if lines else ("it has written nothing so far", [])

"""A running `moorage page`, and requests to it as a browser, a proxy or another program sends them."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import re
import signal
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlencode

from tests.system.cli.node import COMMAND_S_MAX, Lines, start

_LINK: Final = re.compile(r"page at (https?://\S+?)/(?:\?key=(\S+))? \(until Ctrl-C\)")
_PORT: Final = re.compile(r" at http://127\.0\.0\.1:(\d+)")
ANSWER_S: Final = 30.0


@dataclass(frozen=True)
class Got:
    """An answer: its status, its headers in lower case, its text."""

    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def cookie(self) -> str:
        """The cookie that it sets, as a request has it."""
        return self.headers["set-cookie"].partition(";")[0]


class Served:
    """A page at `port`; `key` is the secret of its link, "" without one."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, key: str, err: Lines) -> None:
        self.process = process
        self.err = err
        self.port = port
        self.key = key
        self.url = f"http://127.0.0.1:{port}"

    @property
    def link(self) -> str:
        return f"{self.url}/?key={self.key}" if self.key else f"{self.url}/"

    async def get(self, path: str, **headers: str) -> Got:
        return await asyncio.to_thread(self._ask, "GET", path, None, headers)

    async def post(self, path: str, fields: Mapping[str, str], **headers: str) -> Got:
        headers = {"Content-Type": "application/x-www-form-urlencoded", **headers}
        return await asyncio.to_thread(self._ask, "POST", path, urlencode(fields), headers)

    async def entered(self) -> str:
        """Open the link, and return the cookie that it gives."""
        return (await self.get(f"/?key={self.key}")).cookie

    def _ask(self, method: str, path: str, body: str | None, headers: Mapping[str, str]) -> Got:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S)
        try:
            connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Got(answer.status, found, answer.read().decode())
        finally:
            connection.close()


@contextlib.asynccontextmanager
async def served(*argv: str, env: dict[str, str], port: int = 0) -> AsyncIterator[Served]:
    """`moorage page`, ready; it is ended in order."""
    process = await start("page", "--listen", str(port), *argv, env=env)
    err = Lines(process.stderr)
    found = _LINK.search(await err.until("until Ctrl-C"))
    at = _PORT.search(err.text)
    assert found is not None, err.text
    assert at is not None, err.text
    try:
        yield Served(process, int(at[1]), found[2] or "", err)
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
            async with asyncio.timeout(COMMAND_S_MAX):
                _, err_left = await process.communicate()
            assert process.returncode == 0, err_left.decode()


def fields_of(form: str) -> dict[str, Any]:
    """Return the hidden fields of the form for orders in this page."""
    own = form[form.index('action="/act"') :]
    return dict(re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', own))

"""No test here starts a process: the session's nats-server is the only one, and a fixture starts it."""

from __future__ import annotations

import sys
from collections.abc import Generator

import pytest

from moorage.system.build import build

#: the audit events of Python for a program that begins; a fork alone is none: the leader's what-if is one
STARTS = frozenset(
    {"subprocess.Popen", "os.forkpty", "os.posix_spawn", "os.exec", "os.spawn", "os.system", "pty.spawn"}
)
#: the test whose function runs now
_running: list[str] = []


def _refuse(event: str, arguments: tuple[object, ...]) -> None:
    if _running and event in STARTS:
        raise RuntimeError(f"{_running[-1]} starts a process ({arguments[0]!r}): it belongs to tests/system")


sys.addaudithook(_refuse)
build()  # a checkout asks git for it, once a process


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    _running.append(item.nodeid)
    try:
        yield
    finally:
        _running.pop()

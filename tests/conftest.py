"""Fixtures for all tests: a real nats-server, and `async def` tests run by asyncio.

- `nats_server`  one real server for the whole session, JetStream fsynced, two accounts (see `bus/embedded.py`).
                 Shared: use names of your own (`unique`) for subjects and streams, and never stop it.
- `nats_url`     its URL in the users' account.
- `fresh_server` a server of your own, to stop or kill; `fresh_data_dir` is its folder, to start it again on.
- `unique`       a random token for subjects, streams and ids.

An `async def test_…` runs in its own event loop with these fixtures as arguments.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from moorage.bus.embedded import EmbeddedServer


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test in a loop of its own; pytest alone does not."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    server = asyncio.run(EmbeddedServer.start(tmp_path_factory.mktemp("nats")))
    yield server
    asyncio.run(server.stop())


@pytest.fixture
def nats_url(nats_server: EmbeddedServer) -> str:
    return nats_server.url


@pytest.fixture
def fresh_data_dir(tmp_path: Path) -> Path:
    return tmp_path / "nats"


@pytest.fixture
def fresh_server(fresh_data_dir: Path) -> Iterator[EmbeddedServer]:
    server = asyncio.run(EmbeddedServer.start(fresh_data_dir))
    yield server
    asyncio.run(server.stop())
    # The test may have started another one on the same folder.
    if (other := EmbeddedServer.attach(fresh_data_dir)) is not None:
        asyncio.run(other.stop())


@pytest.fixture
def unique() -> str:
    return "t" + secrets.token_hex(6)

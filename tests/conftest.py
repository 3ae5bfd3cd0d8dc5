"""Fixtures for all tests: a real nats-server, and `async def` tests run by asyncio.

- `nats_server`   one real server for the whole session, JetStream fsynced, two accounts (see `bus/embedded.py`).
                  Shared: use names of your own (`unique`) for subjects and streams, and never stop it.
- `nats_url`      its URL in the users' account.
- `mortal_server` a server of your own, to kill or stop and to start again on its data and its port.
- `fresh_server`  an embedded server of your own; `fresh_data_dir` is its folder.
- `unique`        a random token for subjects, streams and ids.

A test that is marked `any_server` runs twice: on the wheel's nats-server, and on the image of `deploy/nats` in a
container. Both are one program: mark what the image's configuration may break, its storage and its bounds.
An `async def test_…` runs in its own event loop with these fixtures as arguments.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import secrets
import signal
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from moorage.bus.embedded import EmbeddedServer
from tests.containers import ContainerServer, built_image, why_no_docker
from tests.derandomized import derandomize
from tests.groups import GroupScheduling, put_longest_first
from tests.leftover import end_processes
from tests.ports import free_ports
from tests.servers import KINDS, MortalServer, Server, WheelServer, delete_streams
from tests.skips import pytest_make_collect_report, pytest_runtest_makereport

derandomize()  # before tests make settings of their own

__all__ = ["pytest_make_collect_report", "pytest_runtest_makereport"]  # hooks that pytest finds here


def pytest_configure() -> None:
    """A shell without job control makes what it puts in the background deaf to Ctrl-C, and its children with it."""
    os.environ["XDG_STATE_HOME"] = "/dev/null"  # a test finds no fleet that another one, or the developer, runs
    gc.disable()  # until all is collected: of thousands of tests and of their modules none is garbage
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("any_server"):
        for name in ("nats_server", "mortal_server"):
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, KINDS, indirect=True)


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The log of this test alone: what earlier tests left may speak when it is collected, so that is done first."""
    gc.collect()
    caplog.clear()
    return caplog


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark a test with its layer: the folder below `tests`."""
    item.add_marker(item.nodeid.split("/")[1])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    put_longest_first(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling:
    return GroupScheduling(config, log)


def pytest_collection_finish() -> None:
    """From here on the garbage collector looks only at what the tests make."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test in a loop of its own; pytest alone does not."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(_whole(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})))
    return True


async def _whole(test: Coroutine[Any, Any, None]) -> None:
    try:
        await test
    finally:
        await end_processes()


@pytest.fixture(scope="session")
def wheel_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    server = asyncio.run(EmbeddedServer.start(tmp_path_factory.mktemp("nats")))
    yield server
    asyncio.run(server.stop())


@pytest.fixture(scope="session")
def docker_engine() -> None:
    """Ask for it where a Docker engine is needed: without one the test is skipped, in CI it fails."""
    if why := why_no_docker():
        pytest.skip(why)


@pytest.fixture(scope="session")
def nats_image(docker_engine: None) -> Iterator[str]:
    with built_image() as tag:
        yield tag


@pytest.fixture(scope="session")
def container_server(nats_image: str) -> Iterator[ContainerServer]:
    server = ContainerServer(nats_image)
    yield server
    server.remove()


@pytest.fixture
def nats_server(request: pytest.FixtureRequest) -> Server:
    server: Server = request.getfixturevalue(f"{getattr(request, 'param', 'wheel')}_server")
    return server


@pytest.fixture
def nats_url(nats_server: Server) -> str:
    return nats_server.url


@pytest.fixture
def mortal_server(request: pytest.FixtureRequest, fresh_data_dir: Path) -> Iterator[MortalServer]:
    if getattr(request, "param", "wheel") == "container":
        container = ContainerServer(request.getfixturevalue("nats_image"))
        yield container
        container.remove()
    else:
        wheel = asyncio.run(WheelServer.on(fresh_data_dir))
        yield wheel
        asyncio.run(wheel.stop())


@pytest.fixture
def fresh_data_dir(tmp_path: Path) -> Path:
    return tmp_path / "nats"


@pytest.fixture
def fresh_server(fresh_data_dir: Path) -> Iterator[EmbeddedServer]:
    server = asyncio.run(EmbeddedServer.start(fresh_data_dir, port=free_ports(1)[0]))
    yield server
    asyncio.run(server.stop())
    # The test may have started another one on the same folder.
    if (other := EmbeddedServer.attach(fresh_data_dir)) is not None:
        asyncio.run(other.stop())


@pytest.fixture
def unique(request: pytest.FixtureRequest) -> Iterator[str]:
    """A prefix or a tenant of the test's own; its streams on the session's server or node are gone after it."""
    name = "t" + secrets.token_hex(6)
    yield name
    if (server := request.node.funcargs.get("nats_server")) is not None:
        asyncio.run(delete_streams((server.url, server.ledger_url), name))
    if (node := request.node.funcargs.get("node")) is not None:
        asyncio.run(delete_streams((node.url,), name))

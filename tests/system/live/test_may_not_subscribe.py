"""A scheduler whose NATS user lacks a permission ends with the problem in one line, also once it has begun to lead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from moorage.bus.embedded import HOST
from moorage.scheduler.main import EXIT_UNREACHABLE
from tests.cluster import Node
from tests.ports import free_ports
from tests.system.cli.node import moorage

_CONFIG: Final = """\
listen: "{host}:{port}"
log_file: "{folder}/server.log"
jetstream {{ store_dir: "{folder}/jetstream", sync_interval: always }}
accounts {{
  ONE: {{
    jetstream: enabled
    users: [ {{ user: u, password: p, permissions: {{ subscribe: {{ deny: "*.load.*" }} }} }} ]
  }}
}}
no_auth_user: u
"""


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A server whose one user may not subscribe to the workers' load frames."""
    port = free_ports(1)[0]
    (tmp_path / "nats.conf").write_text(_CONFIG.format(host=HOST, port=port, folder=tmp_path))
    node = Node("one", tmp_path, port)
    node.start()
    yield f"nats://{HOST}:{port}"
    node.kill()


@pytest.mark.slow
async def test_a_refused_subscription_of_a_leader_is_one_line_and_an_exit_code(url: str, unique: str) -> None:
    ended = await moorage("scheduler", "--nats", url, "--prefix", unique)
    assert "leading epoch 1" in ended.err
    assert f"error[permission-refused]: this NATS user may not subscribe to {unique}.load.*" in ended.err
    assert (ended.code, "Traceback" in ended.err) == (EXIT_UNREACHABLE, False)

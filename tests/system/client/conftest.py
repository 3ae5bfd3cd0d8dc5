"""The fixtures of `tests/system/cli`: a real node to talk to."""

from __future__ import annotations

from tests.system.cli.conftest import node, node_loop, node_of_its_own

__all__ = ["node", "node_loop", "node_of_its_own"]

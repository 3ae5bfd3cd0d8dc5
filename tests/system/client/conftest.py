"""The fixtures of `tests/system/cli`: a real node to talk to."""

from __future__ import annotations

from tests.system.cli.conftest import node, node_loop

__all__ = ["node", "node_loop"]

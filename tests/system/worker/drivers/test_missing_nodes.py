"""Whether a container was given its device files is read from its first process, which may end at any moment."""

import os
import shutil

import pytest

from moorage.system.proctree import read_process
from moorage.worker.drivers.container import start

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="namespaces of its own need root")

TIMES = 100  # one in six was found between its root and its end


def test_nothing_is_missing_where_the_first_process_is_on_its_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "containers_of", lambda _: ["c1"])
    unshare = shutil.which("unshare")
    assert unshare is not None
    for _ in range(TIMES):
        pid = os.spawnv(os.P_NOWAIT, unshare, ["unshare", "--mount", "--pid", "--ipc", "--fork", "true"])
        try:
            while (process := read_process(pid)) is not None and not process.dead:
                assert start.missing_nodes("c1", pid, ["/dev/null"]) == []
        finally:
            os.waitpid(pid, 0)


def test_what_a_running_container_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "containers_of", lambda _: ["c1"])
    assert start.missing_nodes("c1", os.getpid(), ["/dev/null", "/dev/moorage-none"]) == ["/dev/moorage-none"]
    assert start.missing_nodes("another", os.getpid(), ["/dev/moorage-none"]) == []

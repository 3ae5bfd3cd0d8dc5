"""Which processes may use the supervisor's socket: none of which it is not known that it is no job's."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

import moorage
from moorage.worker.supervisor import server
from moorage.worker.supervisor.protocol import SOCKET_NAME, StartAttempt
from tests.system.worker.supervisor_rig import Rig, arguments_of, lives, sh, with_rig

ROOTS: Final = os.pathsep.join(str(Path(path).parent) for path in moorage.__path__)

#: a job whose child connects and ends before the supervisor, which the job stops meanwhile, can look at it
TRICK: Final = """
import os, signal, socket, sys
from moorage.worker.supervisor.protocol import Shutdown, encode_request
path, supervisor = sys.argv[1], int(sys.argv[2])
os.chdir(os.path.dirname(path))
ours = socket.socket(socket.AF_UNIX)
os.kill(supervisor, signal.SIGSTOP)
child = os.fork()
if child == 0:
    ours.connect(os.path.basename(path))  # short enough for a socket's address
    os._exit(0)
os.waitpid(child, 0)
os.kill(supervisor, signal.SIGCONT)
said = ours.recv(65536)
if b"not-permitted" not in said:
    ours.sendall(encode_request(Shutdown(n=1, grace_s=0.0)))
print(said)
"""

CONNECT: Final = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.recv(1)"


def test_a_job_whose_connecting_process_has_ended_is_refused(tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.client.start([sh("other", "exec sleep 1000")])
        other = await rig.started("other")
        supervisor = rig.client.identity.pid
        argv = (sys.executable, "-c", TRICK, str(rig.state / SOCKET_NAME), str(supervisor))
        ended = await rig.run(StartAttempt(key="j", argv=argv, env={"PYTHONPATH": ROOTS}))
        assert ended.exit_code == 0
        assert "not-permitted" in rig.text("j")
        assert "has ended" in rig.text("j")
        assert lives(supervisor)
        assert lives(other.pid)

    with_rig(tmp_path, arguments_of("walk"), scenario)


@pytest.mark.parametrize(("most", "reason"), [(1, "more than 1 ancestors"), (1000, "is a job's")])
def test_a_peer_with_too_many_ancestors_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, reason: str
) -> None:
    monkeypatch.setattr(server, "ANCESTORS_MAX", most)
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)
        command = ["sh", "-c", '"$@"; :', "sh", sys.executable, "-c", CONNECT, str(path)]
        with subprocess.Popen(command) as job:
            peer, _ = listener.accept()
            with peer:
                assert reason in (server.refusal(peer) or "")
            assert job.wait() == 0


def test_a_peer_that_is_no_job_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as ours:
        listener.bind(str(path))
        listener.listen(1)
        ours.connect(str(path))
        peer, _ = listener.accept()
        with peer:
            assert server.refusal(peer) is None

"""A new release on a host whose supervisor it cannot use: the jobs there end with their grace, and begin again."""

from __future__ import annotations

from pathlib import Path

import pytest

from moorage.schemas.errors import UPGRADED
from moorage.worker.agent.run import SUPERVISOR_FOLDER
from moorage.worker.supervisor import client
from moorage.worker.supervisor.protocol import PROTOCOL
from tests.servers import Server
from tests.system.live.stack import caller, stack
from tests.system.worker.supervisor_rig import sh, start_other
from tests.waiting import until

OTHER = PROTOCOL + 1
#: saves its work when it is first asked to end, which takes a while, and ends well in its second attempt
SAVES = """
echo run >> {0}/runs
[ $(wc -l < {0}/runs) = 2 ] && exit 0
trap 'sleep 0.5; echo saved >> {0}/saved; exit 3' TERM
while :; do sleep 0.02; done
"""


@pytest.mark.slow
async def test_jobs_under_a_supervisor_of_another_release_end_with_their_grace_and_begin_again(
    nats_server: Server, unique: str, tmp_path: Path
) -> None:
    async with stack(nats_server, unique) as made, caller(made) as acme:
        folder = made.folder / "w" / SUPERVISOR_FOLDER
        folder.mkdir(parents=True)
        await start_other(folder, OTHER)
        await made.scheduler()
        before = await made.agent("w", "2xH100", worker="w", protocol=OTHER)
        await acme.leader()
        await acme.workers_up("w")
        run = {"argv": ["sh", "-c", SAVES.format(tmp_path)], "grace_s": 60.0}
        await acme.submit("saves", run=run, retries=0, retries_on_lost=0)
        await acme.reaches("saves", "RUNNING")
        await until((tmp_path / "runs").exists, what="the first attempt")
        await before.kill()

        after = await made.agent("w", "2xH100", worker="w")
        shown = await acme.reaches("saves", "SUCCEEDED", "FAILED")
        assert shown["state"] == "SUCCEEDED"
        ends = [change for change in shown["changes"] if change.get("why") == UPGRADED]
        assert [(change["state"], change["attempt"]) for change in ends] == [("QUEUED", 1)]
        assert (tmp_path / "saved").read_text().split() == ["saved"]
        assert f"speaks protocol {OTHER}, this agent {PROTOCOL}: its jobs end" in after.words()
        supervised = await made.supervisor("w")
        assert supervised.protocol == PROTOCOL
        supervised.close()
        await acme.check_history("saves")
        await acme.all_free()


@pytest.mark.slow
async def test_a_worker_that_waits_for_such_jobs_can_be_stopped(
    nats_server: Server, unique: str, tmp_path: Path
) -> None:
    async with stack(nats_server, unique) as made:
        folder = made.folder / "w" / SUPERVISOR_FOLDER
        folder.mkdir(parents=True)
        await start_other(folder, OTHER)
        with pytest.MonkeyPatch.context() as release:
            release.setattr(client, "PROTOCOL", OTHER)
            theirs = await made.supervisor("w")
        deaf = sh("w|t/a/0/1/1", f"trap '' TERM; touch {tmp_path}/ready; while :; do sleep 0.02; done", grace_s=600.0)
        theirs.protocol = PROTOCOL
        try:
            await theirs.start([deaf])
            await until((tmp_path / "ready").exists, what="a job that does not end")
            agent = await made.agent("w", "2xH100", worker="w")
            await until(lambda: "its jobs end, each with its grace" in agent.words(), what="an agent that waits")
            assert await agent.terminate() == 0
            assert (await theirs.list()).living == ["w|t/a/0/1/1"]
        finally:
            await theirs.shutdown(0.0)

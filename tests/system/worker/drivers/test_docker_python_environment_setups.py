"""The setup of a container's job: in a container of the same image, into a folder that the job reads."""

from __future__ import annotations

import msgspec
import pytest

from moorage.testing.conformance.leader import ScriptedLeader
from moorage.worker.agent.run import start
from tests.engines import engine, why_no_dockerd
from tests.system.worker.agent.test_agent_process import name_of, settings_of, state_folder
from tests.system.worker.attempt.test_attempt_folders import placed
from tests.waiting import until

IMAGE = "moorage-test:setups"


@pytest.mark.slow
async def test_a_setup_fills_the_folder_that_its_job_reads(
    nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why := why_no_dockerd():
        pytest.skip(why)
    with engine() as docker:
        docker.make_image(IMAGE)
        monkeypatch.setenv("DOCKER_HOST", f"unix://{docker.socket}")
        async with ScriptedLeader(nats_url, unique) as leader, state_folder() as state:
            running = await start(settings_of(state, unique, drivers=("docker",)), nats_url)
            try:
                await leader.joined("w1")
                setup = "echo made > $MOORAGE_SETUP/it"
                names = [name_of("a"), name_of("b", fence=11)]
                for slot, name in enumerate(names):
                    script = "read it < $MOORAGE_SETUP/it; echo $it ${PATH%%:*}; (: > /setup/x) 2>/dev/null || echo no"
                    run = {"driver": "docker", "image": IMAGE, "argv": ["sh", "-c", script], "setup": setup}
                    await leader.want("w1", msgspec.structs.replace(placed(name, "", **run), slots=[slot]))
                for name in names:
                    assert (await leader.await_report("w1", "exited", name, 60)).code == 0
                    await until(lambda name=name: leader.text(name) == "made /setup/bin\nno\n", 60)
                docker.make_image(IMAGE, "ENV OF=another")
                moved = name_of("moved", fence=13)
                assert len(list(state.glob(".setups/*/*.done"))) == 1
                await leader.want("w1", placed(moved, "", **run))
                assert (await leader.await_report("w1", "exited", moved, 60)).code == 0
                assert len(list(state.glob(".setups/*/*.done"))) == 2, "its name stands for another image now"
                bad = name_of("bad", fence=12)
                run |= {"setup": "echo no such package >&2; exit 3"}
                await leader.want("w1", placed(bad, "", **run))
                refused = await leader.await_report("w1", "refused", bad, 60)
                assert (refused.code, refused.detail) == (3, "setup-failed: exit code 3: no such package")
            finally:
                await running.stop()

"""The files of a container's job: brought into its folder before its start, and kept of it before its end is told."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Final

import pytest

from moorage.schemas.held_data import held_key
from moorage.schemas.settings import SettingsFile
from moorage.testing.conformance.leader import ScriptedLeader
from moorage.worker.agent.run import start
from moorage.worker.attempt.attempt_folders import FOLDERS
from tests.engines import PROGRAMS, engine, why_no_dockerd
from tests.system.worker.agent.test_agent_process import name_of, settings_of, state_folder
from tests.system.worker.attempt.test_attempt_folders import placed
from tests.system.worker.attempt.test_job_data import DIGEST, Web
from tests.system.worker.attempt.test_job_files import bucket, sent, tar
from tests.system.worker.attempt.test_kept_files import kept
from tests.waiting import until

IMAGE: Final = "moorage-test:files"
GATEWAY: Final = "{{(index .IPAM.Config 0).Gateway}}"


@pytest.mark.slow
async def test_a_container_has_the_files_of_its_job_and_the_next_agent_keeps_what_it_left(
    nats_url: str, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why := why_no_dockerd():
        pytest.skip(why)
    with engine() as docker:
        docker.make_image(IMAGE)
        monkeypatch.setenv("DOCKER_HOST", f"unix://{docker.socket}")
        async with (
            bucket(nats_url, unique) as store,
            ScriptedLeader(nats_url, unique) as leader,
            state_folder() as state,
        ):
            address = await sent(
                store, tar(**{"src/train": b"echo trained > made; ls; while ! [ -e go ]; do sleep 0.1; done"})
            )
            settings = settings_of(state, unique, drivers=("docker",))
            running, name = await start(settings, nats_url), name_of()
            try:
                await leader.joined("w1")
                run = {"driver": "docker", "image": IMAGE, "argv": ["sh", "train"], "cwd": "src", "files": address}
                await leader.want("w1", placed(name, "", **run, keep=["src/made"]))
                await leader.await_report("w1", "started", name, 60)
                folder = state / FOLDERS / "w1@docker" / "acme.a.0.1.10"
                await until(lambda: "train" in leader.text(name), 60)
                assert (folder / "src/train").stat().st_uid == 65534
            finally:
                await running.stop()
            (folder / "src" / "go").touch()
            (container,) = docker.containers()
            await until(lambda: not docker.inspect(container)["State"]["Running"], 60)
            last = leader.seat("w1").joins[-1].n
            await until(lambda: int(time.time()) > last, 60, "joins count in seconds")
            running = await start(settings, nats_url)
            try:
                assert (await leader.await_report("w1", "exited", name, 60)).code == 0
                assert await kept(store, "a.0.10", tmp_path) == {"src/made": "trained\n"}
            finally:
                await running.stop()
            assert os.listdir(state / FOLDERS / "w1@docker") == ["acme.a.0.1.10"]


@pytest.mark.slow
async def test_containers_read_data_by_a_mount_that_is_read_only_and_fetched_once(
    nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why := why_no_dockerd():
        pytest.skip(why)
    with engine() as docker:
        docker.make_image(IMAGE, programs=(*PROGRAMS, "cp"))
        monkeypatch.setenv("DOCKER_HOST", f"unix://{docker.socket}")
        async with (
            bucket(nats_url, unique) as store,
            ScriptedLeader(nats_url, unique) as leader,
            state_folder() as state,
        ):
            address = await sent(store, tar(**{"set/deep/one": b"1\n", "set/two": b"2\n"}))
            running = await start(settings_of(state, unique, drivers=("docker",)), nats_url)
            try:
                await leader.joined("w1")
                data = {"Set": f"object:{address}", "also": f"object:{address}"}
                script = "echo $MOORAGE_DATA_SET; cd $MOORAGE_DATA_ALSO && cat deep/one two; touch x 2>&- || echo no"
                run = {"driver": "docker", "image": IMAGE, "argv": ["sh", "-c", script], "data": data}
                for job, fence in (("a", 10), ("b", 11)):
                    name = name_of(job, fence=fence)
                    await leader.want("w1", placed(name, "", **run))
                    assert (await leader.await_report("w1", "exited", name, 60)).code == 0
                    await until(lambda name=name: leader.text(name) == "/moorage/data/Set\n1\n2\nno\n", 60)
                assert len(list(state.glob(".data/*/*.done"))) == 1
                key = held_key("acme", "docker", data["Set"])
                await until(lambda: leader.seat("w1").loads[-1].data == [key], 60)
                bad = name_of("bad", fence=12)
                await leader.want("w1", placed(bad, "", **run | {"data": {"set": "https://127.0.0.1:1/x"}}))
                refused = await leader.await_report("w1", "refused", bad, 60)
                assert "python3" in refused.detail, "its image has none"
            finally:
                await running.stop()


@pytest.mark.slow
async def test_a_container_fetches_from_the_web_by_its_own_network_alone(
    nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why := why_no_dockerd():
        pytest.skip(why)
    if not os.path.exists("/usr/bin/python3"):
        pytest.skip("no python3 in /usr that an image could have")
    with engine() as docker, docker.network() as network, contextlib.ExitStack() as stack:
        docker.make_image(IMAGE)
        monkeypatch.setenv("DOCKER_HOST", f"unix://{docker.socket}")
        web = Web(docker.docker("network", "inspect", "--format", GATEWAY, network).stdout.strip())
        serving = threading.Thread(target=web.server.serve_forever)
        serving.start()
        stack.callback(web.server.server_close)
        stack.callback(serving.join)
        stack.callback(web.server.shutdown)
        source = f"{web.url}/set.csv#sha256={DIGEST}"
        run = {
            "driver": "docker",
            "image": IMAGE,
            "argv": ["cat", "/moorage/data/set/set.csv"],
            "data": {"set": source},
        }
        without = "there is no network here: containers have one if their operator"
        for at, (own, detail) in enumerate(((network, ""), ("none", without))):
            tables = {"driver": {"docker": {"network": own, "mounts": ["/usr:/usr:ro"]}}}
            async with ScriptedLeader(nats_url, f"{unique}{at}") as leader, state_folder() as state:
                settings = settings_of(state, f"{unique}{at}", drivers=("docker",))
                running = await start(settings, nats_url, SettingsFile(Path(), tables))
                try:
                    await leader.joined("w1")
                    name = name_of("a", fence=10)
                    await leader.want("w1", placed(name, "", **run))
                    report = await leader.await_report("w1", "refused" if detail else "exited", name, 60)
                    assert detail in report.detail
                    assert report.code == (report.code if detail else 0)
                finally:
                    await running.stop()
        assert web.asked == [("/set.csv", "")]

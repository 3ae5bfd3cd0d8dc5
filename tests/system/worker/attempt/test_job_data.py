"""What a job reads is fetched once a worker, read-only, by whom may have it, and paths stay below `data_dirs`."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moorage.schemas.held_data import held_key
from moorage.testing.conformance.leader import ScriptedLeader
from tests.system.worker.agent.test_agent_process import body, name_of, place, worker
from tests.system.worker.attempt.test_attempt_folders import OTHER_USER, placed
from tests.waiting import until

USER: dict[str, Any] = {"user": OTHER_USER} if os.geteuid() == 0 else {}
CONTENT = b"one,two\n" * 1000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


class Web:
    """A server with one file, at `/set.csv`, and what it was asked for."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.asked: list[tuple[str, str]] = []
        self.token = ""
        web = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                given = self.headers.get("Authorization", "")
                web.asked.append((self.path, given))
                code = 200 if self.path == "/set.csv" else 503 if self.path == "/later" else 404
                code = 401 if web.token and given != f"Bearer {web.token}" else code
                self.send_response(code)
                self.end_headers()
                if code == 200:
                    self.wfile.write(CONTENT)

            def log_message(self, *words: Any) -> None:
                """Say nothing."""

        self.server = http.server.ThreadingHTTPServer((address, 0), Handler)
        self.url = f"http://{address}:{self.server.server_address[1]}"


@pytest.fixture
def web() -> Iterator[Web]:
    made = Web()
    thread = threading.Thread(target=made.server.serve_forever)
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


READ = 'wc -c < "$MOORAGE_DATA_SET/set.csv"; touch "$MOORAGE_DATA_SET/mine" 2>/dev/null || echo read-only'


async def test_a_source_is_fetched_once_for_all_attempts_and_later_jobs_and_nobody_can_change_it(
    nats_url: str, unique: str, web: Web
) -> None:
    source = {"set": f"{web.url}/set.csv#sha256={DIGEST}"}
    async with ScriptedLeader(nats_url, unique) as leader, worker(nats_url, unique, leader):
        names = [name_of(job, fence=10 + at) for at, job in enumerate(("a", "b", "c"))]
        for some in (names[:2], names[2:]):
            places = [placed(name, READ, data=source, **USER) for name in some]
            await leader.want("w1", *(msgspec.structs.replace(each, slots=[at]) for at, each in enumerate(places)))
            for name in some:
                assert (await leader.await_report("w1", "exited", name)).code == 0
                said = await until(lambda name=name: leader.text(name), what="what it read")
                assert said.split() == (["8000", "read-only"] if USER else said.split())
        assert web.asked == [("/set.csv", "")]
        key = held_key(names[0][0], "process", source["set"])
        await until(
            lambda: any(key in load.data for load in leader.seat("w1").loads), what="a load frame that tells of it"
        )
        other = ("other", "a", 0, 1, 20)
        await leader.want("w1", place(other, body(READ, run={"data": source, **USER})))
        assert (await leader.await_report("w1", "exited", other)).code == 0
        assert len(web.asked) == 2, "another tenant fetches for itself"


@pytest.mark.parametrize(
    ("path", "detail"),
    [
        ("/set.csv#sha256=" + "0f" * 32, f"data set: its SHA-256 is {DIGEST}, not {'0f' * 32}"),
        ("/nothing", "its server answers 404 Not Found"),
        ("/later", "not-here: setup: exit code 75: data set: its server answers 503 Service Unavailable"),
    ],
)
async def test_why_it_cannot_be_had_is_said(nats_url: str, unique: str, web: Web, path: str, detail: str) -> None:
    async with ScriptedLeader(nats_url, unique) as leader, worker(nats_url, unique, leader):
        name = name_of()
        await leader.want("w1", placed(name, "echo ran", data={"set": web.url + path}, **USER))
        refused = await leader.await_report("w1", "refused", name)
        assert detail in refused.detail
        assert refused.detail.startswith("not-here: " if "503" in detail else "setup-failed: ")


async def test_what_a_secret_opens_is_shared_only_with_jobs_that_have_it(
    nats_url: str, unique: str, web: Web, tmp_path: Path
) -> None:
    web.token = "s3cret"
    (tmp_path / "token").write_text(web.token)
    (tmp_path / "token").chmod(0o600)
    source = {"set": f"{web.url}/set.csv"}
    env = {"DATA_TOKEN": {"secret": "token"}}
    async with ScriptedLeader(nats_url, unique) as leader, worker(nats_url, unique, leader, secrets_dir=tmp_path):
        first, second = name_of("a", fence=10), name_of("b", fence=11)
        await leader.want("w1", placed(first, READ, data=source, env=env, **USER))
        assert (await leader.await_report("w1", "exited", first)).code == 0
        await leader.want("w1", placed(second, READ, data=source, **USER))
        refused = await leader.await_report("w1", "refused", second)
        assert "its server answers 401" in refused.detail
        assert web.token not in "".join(frame["text"] for _, frame in leader.output) + refused.detail


async def test_a_path_of_the_host_must_lie_below_data_dirs_whatever_links_say(
    nats_url: str, unique: str, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    (shared / "set").mkdir(parents=True)
    (shared / "set" / "set.csv").write_bytes(CONTENT)
    (tmp_path / "private").mkdir()
    (shared / "out").symlink_to(tmp_path / "private")
    (tmp_path / "in").symlink_to(shared / "set")
    async with (
        ScriptedLeader(nats_url, unique) as leader,
        worker(nats_url, unique, leader, data_dirs=(str(shared),)),
    ):
        keys = {held_key("", "process", f"{shared}{tail}") for tail in ("/set", "/out", "/.")}
        await until(
            lambda: any(keys == set(load.data) for load in leader.seat("w1").loads),
            what="a load frame that tells of it",
        )
        for at, (path, detail) in enumerate(
            (
                (shared / "set", ""),
                (tmp_path / "in", ""),
                (shared / "out", "not below data_dirs of this worker"),
                (tmp_path / "private", "not below data_dirs of this worker"),
                (Path("/etc"), "not below data_dirs of this worker"),
                (shared / "none", f"there is no {shared / 'none'} on this host"),
            )
        ):
            name = name_of(f"j{at}", fence=10 + at)
            await leader.want("w1", placed(name, 'wc -c < "$MOORAGE_DATA_SET/set.csv"', data={"set": str(path)}))
            report = await leader.await_report("w1", "refused" if detail else "exited", name)
            assert detail in report.detail
            assert report.code == (report.code if detail else 0)


async def test_data_that_are_too_large_for_the_worker_send_the_job_elsewhere(
    nats_url: str, unique: str, web: Web
) -> None:
    async with ScriptedLeader(nats_url, unique) as leader, worker(nats_url, unique, leader, data_bytes=1 << 20):
        with contextlib.ExitStack() as stack:
            global CONTENT
            before = CONTENT
            stack.callback(lambda: globals().update(CONTENT=before))
            CONTENT = os.urandom(3 << 20)
            name = name_of()
            await leader.want("w1", placed(name, "true", data={"set": f"{web.url}/set.csv"}, **USER))
            refused = await leader.await_report("w1", "refused", name)
            assert refused.detail == "not-here: the setup takes 3 MiB, data_bytes is 1 MiB"

"""A job that brings its own files, from the SDK and from the command, on a real node."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import tarfile
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moorage.bus.errors import JetStreamRefused
from moorage.bus.jetstream import JetStream
from moorage.bus.object_store import ObjectInfo, ObjectStore
from moorage.cli.jobs import get
from moorage.client import AsyncClient
from moorage.client.again import keep_files
from moorage.client.answers import JobInfo
from moorage.client.errors import JobFailed, NoOutput, NotFound, Rejected
from moorage.client.handlers import Heard, value_of
from moorage.client.kept_files import why_none
from moorage.client.kept_output import newest_attempts
from moorage.client.output import Piece
from moorage.client.reading import as_struct
from moorage.client.sending import bucket_of, send
from moorage.schemas.errors import problem
from moorage.schemas.frames import Answer, Change
from moorage.schemas.handler import ACCEPTED_HEADER, kept_object
from moorage.system.archive_parts import decode_parts, part_object
from moorage.system.archives import compressed
from moorage.worker.attempt.job_files import JobFiles
from tests.system.cli.node import Node, start
from tests.unit.client.scripted_scheduler import ScriptedScheduler, shown
from tests.unit.client.test_packing import made
from tests.waiting import until_state


async def messages(client: AsyncClient) -> int:
    """How much was ever sent into the tenant's bucket."""
    try:
        stream = f"OBJ_{client._wire.subjects.files_bucket(client.tenant)}"
        return (await JetStream(client._wire.link).stream_info(stream)).last_seq
    except JetStreamRefused:
        return 0


async def test_files_are_sent_once_for_all_replicas_and_for_the_next_submit(
    node: Node, unique: str, tmp_path: Path
) -> None:
    code = made(tmp_path / "code", "train.py", "lib/a.txt")
    (code / "train.py").write_text("print(open('lib/a.txt').read())")
    async with AsyncClient(node.url, tenant=unique) as client:
        result = await client.run(["python3", "train.py"], files=code, replicas=4)
        assert result.stdout.count("lib/a.txt") == 4
        once = await messages(client)
        assert once > 0
        job = await client.submit(["sh", "-c", "cat lib/a.txt >&2; exit 3"], files=[code], replicas=1000)
        again = await client.submit_many([["true"], ["python3", "train.py"]], files=[code])
        assert await messages(client) == once
        await job.cancel()
        assert (await again[1].result()).code == 0
        (code / "train.py").write_text("print('other')")
        assert (await client.run(["python3", "train.py"], files=code)).stdout == "other\n"
        assert await messages(client) > once


async def test_a_job_brings_what_another_one_has_kept(node: Node, unique: str, tmp_path: Path) -> None:
    """It takes some 3 s."""
    look = tmp_path / "look.sh"
    look.write_text("cat */*/loss; ls")
    gate = tmp_path / "gate"
    waits = f"until [ -e {gate} ]; do sleep 0.05; done"
    async with AsyncClient(node.url, tenant=unique) as client:
        script = f"{waits}; echo $MOORAGE_INDEX > loss; exit $((MOORAGE_INDEX == 1))"
        sweep = await client.submit(["sh", "-c", script], replicas=3, keep=["loss"])
        after = {"job": sweep.job, "when": "any"}
        seen = await client.submit(["sh", "look.sh"], files=[f"job:{sweep.job}", look], after=[after], keep=["none"])
        bad = await client.submit(["sh", "-c", f"{waits}; exit 1"], keep=["loss"])
        lost = await client.submit(["true"], files=f"job:{bad.job}", after=[{"job": bad.job, "when": "any"}])
        # an earlier job of that id has kept some
        await bucket_of(client._wire).put(kept_object(bad.job, 0), [b"x"], {ACCEPTED_HEADER: "1"}, lambda _: None)
        gate.touch()
        assert (await seen.result()).state == "SUCCEEDED"
        text = "".join([piece.text async for piece in seen.logs()])
        assert text == f"0\n2\n{sweep.job}\nlook.sh\n"  # those of replica 1, which failed, are not there
        with pytest.raises(JobFailed, match=f"files-gone: no kept files of job {bad.job}"):
            await lost.result()
        for other in (f"job:{bad.job}", [f"job:{lost.job}"], "job:a/b"):
            with pytest.raises(Rejected):
                await client.submit(["true"], files=other)


async def test_the_address_of_what_was_sent_can_be_named_in_its_place(node: Node, unique: str, tmp_path: Path) -> None:
    code = made(tmp_path / "code", "a.txt")
    async with AsyncClient(node.url, tenant=unique) as client:
        address = await client.send_files(code)
        assert await client.send_files(address) == address
        request = {"run": {"argv": ["cat", "a.txt"], "files": address}}
        assert (await client.run(request)).stdout == "a.txt"
        assert (await client.run(["cat", "a.txt"], files=address, cwd=".")).stdout == "a.txt"
        with pytest.raises(Rejected) as refused:
            client.request(["cat"], fields={"files": "no-address"})
        assert refused.value.problem.field == "$.run.files"


async def test_files_that_were_sent_long_ago_are_sent_again(
    node: Node, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = made(tmp_path / "code", "a.txt")
    async with AsyncClient(node.url, tenant=unique) as client:
        told: list[int] = []
        assert (await send(client._wire, code, lambda packed, size: told.append(size))).is_new
        assert told[-1] > 0
        assert not (await send(client._wire, code)).is_new
        monkeypatch.setattr("moorage.client.sending.AGAIN_AFTER_S", -1.0)
        assert (await send(client._wire, code)).is_new


@pytest.mark.slow
async def test_the_command_brings_files_and_says_what_it_cannot_bring(node: Node, unique: str, tmp_path: Path) -> None:
    code = made(tmp_path / "code", "train.py", "secret.key")
    (code / "train.py").write_text("import os\nprint(sorted(os.listdir()))")
    (code / ".moorageignore").write_text("*.key\n.moorageignore\n")
    single = made(tmp_path, "extra.txt") / "extra.txt"
    brought = ("--with", str(code), "--with", str(single))
    ran = await node.run("run", *brought, "--", "python3", "train.py", tenant=unique)
    assert (ran.code, ran.out) == (0, "['extra.txt', 'train.py']\n"), ran.err
    ran = await node.run("submit", "--job", "s", *brought, "--", "python3", "train.py", tenant=unique)
    assert ran.code == 0, ran.err
    assert (await node.run("wait", "s", tenant=unique)).code == 0
    same = await node.run("submit", "--job", "s", *brought, "--", "python3", "train.py", tenant=unique)
    assert same.code == 0, same.err  # the same content under the same id is the same job
    none = await node.run("run", "--with", str(tmp_path / "none"), "--", "true", tenant=unique)
    assert none.code == 2
    assert "there is no file or folder" in none.err


async def test_what_a_job_kept_is_fetched_whole_or_in_part(node: Node, unique: str, tmp_path: Path) -> None:
    script = "mkdir -p out/deep; echo $MOORAGE_REPLICA > out/a; echo b > out/deep/b; exit $MOORAGE_REPLICA"
    async with AsyncClient(node.url, tenant=unique) as client:
        job = await client.submit(["sh", "-c", script], keep=["out/**"], replicas=2)
        with pytest.raises(JobFailed):
            await job.result()
        found = await job.files(tmp_path / "both")
        assert [path.relative_to(tmp_path).as_posix() for path in found] == [
            "both/0/out/a", "both/0/out/deep/b", "both/1/out/a", "both/1/out/deep/b",
        ]  # fmt: skip
        assert [path.read_text() for path in found] == ["0\n", "b\n", "1\n", "b\n"]
        (one,) = await job.files(tmp_path / "one", "out/deep", replica=1)
        assert one == tmp_path / "one/out/deep/b"
        with pytest.raises(NotFound, match="no file of out/none"):
            await job.files(tmp_path / "none", "out/none", replica=1)
        assert not (tmp_path / "none").exists()
        for path in ("../x", "/etc", "a/../../b"):
            with pytest.raises(Rejected, match="not a path below"):
                await job.files(tmp_path / "up", path)
        with pytest.raises(Rejected, match="not an empty folder"):
            await job.files(tmp_path / "one", replica=1)
        nothing = await client.submit(["true"])
        await nothing.result()
        with pytest.raises(NotFound):
            await nothing.files(tmp_path / "nothing")


async def test_what_is_stored_of_a_job_and_reaches_out_is_not_unpacked(node: Node, unique: str, tmp_path: Path) -> None:
    """A worker that is not honest, or another client of the bucket, may have written it."""
    async with AsyncClient(node.url, tenant=unique) as client:
        job = await client.submit(["true"], keep=["x"])
        await job.result()
        shown = await job.show()
        (row,) = shown.replica_states
        held = io.BytesIO()
        with tarfile.open(fileobj=held, mode="w") as archive:
            archive.addfile(tarfile.TarInfo("../reached"))
        await bucket_of(client._wire).put(f"{job.job}.0.{row.fence}", compressed(held), {}, lambda _: None)
        with pytest.raises(Rejected, match="leaves the folder"):
            await job.files(tmp_path / "into")
        assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
async def test_the_command_gets_what_a_job_kept(node: Node, unique: str, tmp_path: Path) -> None:
    script = "mkdir out; echo model > out/model.pt; echo log > run.log"
    run = ("run", "--job", "j", "--keep", "out/**", "--keep", "*.log", "--", "sh", "-c", script)
    ran = await node.run(*run, tenant=unique)
    assert ran.code == 0, ran.err
    got = await node.run("get", "j", "--out", str(tmp_path / "j"), tenant=unique)
    assert (got.code, sorted(got.out.splitlines())) == (0, [f"{tmp_path}/j/out/model.pt", f"{tmp_path}/j/run.log"])
    got = await node.run("get", "j", "run.log", "--out", str(tmp_path / "log"), "--json", tenant=unique)
    assert got.frame == {"kind": "files", "job": "j", "files": [f"{tmp_path}/log/run.log"]}
    again = await node.run("get", "j", "--out", str(tmp_path / "j"), tenant=unique)
    assert again.code != 0
    assert "exists and is not an empty folder" in again.err
    below_a_file = tmp_path / "j" / "run.log" / "x"
    unwritten = await node.run("get", "j", "--out", str(below_a_file), tenant=unique)
    assert unwritten.code == 1, unwritten.err
    assert f"{below_a_file} cannot be written: File exists\nfix: name another folder with --out" in unwritten.err


def test_a_device_without_room_may_be_that_of_the_temporary_folder() -> None:
    full, denied = (get._fix_of(OSError(code, os.strerror(code))) for code in (errno.ENOSPC, errno.EACCES))
    assert denied == "name another folder with --out"
    assert full.startswith(f"{denied}; the temporary folder ({tempfile.gettempdir()}; TMPDIR names another) needs room")


async def test_what_a_job_kept_is_put_into_the_folder_that_one_is_in(
    node: Node, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "mkdir out; echo secret > out/key; chmod 600 out/key; echo x > run; chmod 755 run"
    async with AsyncClient(node.url, tenant=unique) as client:
        job = await client.submit(["sh", "-c", script], keep=["*"])
        await job.result()
        monkeypatch.chdir(tmp_path)
        assert [path.as_posix() for path in await job.files(".")] == ["out/key", "run"]
        assert Path("out/key").read_text() == "secret\n"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]
        assert [Path(name).stat().st_mode & 0o777 for name in ("out/key", "run")] == [0o600, 0o755]


def test_a_job_that_keeps_nothing_and_one_without_a_match_are_told_apart() -> None:
    ended = shown("a", "SUCCEEDED")
    assert "has no keep patterns" in why_none("", as_struct(JobInfo, ended), ((0, 0),))[0]
    keeps = as_struct(JobInfo, {**ended, "request": {"run": {"keep": ["out/**"]}}})
    assert "files that match out/** when it ends" in why_none("x", keeps, ((0, 0),))[0]


def test_what_to_do_is_said_of_the_replicas_that_were_asked_for() -> None:
    rows = [{"replica": each, "state": "RUNNING"} for each in range(3)]
    for only in range(3):
        runs = as_struct(JobInfo, shown("a", "RUNNING", replica_states=rows))
        assert f"exec a/{only} -- " in why_none("", runs, ((only, only),))[1]
    ends = [Change(rev, rev, rev - 1, 1, "SUCCEEDED", f"w{rev - 1}", code=0, fence=10) for rev in (1, 2, 3)]
    ended = shown("a", "SUCCEEDED", *ends, replica_states=[{**row, "state": "SUCCEEDED"} for row in rows])
    ended["replica_states"][0]["state"] = "RUNNING"
    assert "moorage get a --rescue" in why_none("", as_struct(JobInfo, ended), ((1, 1),))[1]


async def test_what_a_job_wrote_without_keep_can_be_had_while_it_runs_and_rescued_after_its_end(
    node: Node, unique: str, tmp_path: Path
) -> None:
    async with AsyncClient(node.url, tenant=unique) as client:
        job = await client.submit(["sh", "-c", "echo x > o.txt; until [ -e go ]; do sleep 0.1; done"], job="forgot")
        await until_state(job, "RUNNING")
        ran = await node.run("get", "forgot", "--rescue", tenant=unique)
        assert (ran.code, "fix: moorage exec forgot/0 -- tar c . | tar x\n" in ran.err) == (1, True), ran.err
        ran = await node.run("get", "forgot", tenant=unique)
        assert (ran.code, "fix: while it runs: moorage exec forgot -- tar c . | tar x\n" in ran.err) == (3, True), (
            ran.err
        )
        taken = await start("exec", "forgot", "--", "sh", "-c", "tar c . && touch go", env=node.env(unique))
        archive, _ = await taken.communicate(b"")
        with tarfile.open(fileobj=io.BytesIO(archive)) as found:
            assert "./o.txt" in found.getnames()
        await job.result()
        ran = await node.run("get", "forgot", tenant=unique)
        assert ": moorage get forgot --rescue; next time submit it with --keep 'out/**'\n" in ran.err, ran.err
        into = str(tmp_path / "forgot")
        ran = await node.run("get", "forgot", "--rescue", "--out", into, tenant=unique)
        assert (ran.code, ran.out.split()) == (0, [f"{into}/go", f"{into}/o.txt"]), ran.err
        assert Path(into, "o.txt").read_text() == "x\n"
        ran = await node.run("get", "forgot", "nope", "--rescue", "--out", str(tmp_path / "x"), tenant=unique)
        assert (ran.code, "job forgot has left nothing at nope\n" in ran.err) == (3, True), ran.err


async def test_of_many_replicas_what_each_has_left_is_rescued_and_those_that_left_nothing_are_named(
    node: Node, unique: str, tmp_path: Path
) -> None:
    script = "mkdir 'a b'; echo $MOORAGE_REPLICA > 'a b/c*[d]'; touch e; [ $MOORAGE_REPLICA != 1 ] || rm -r *"
    async with AsyncClient(node.url, tenant=unique) as client:
        job = await client.submit(["sh", "-c", script], job="some", replicas=3)
        await job.result()
        with pytest.raises(NotFound, match="rescue"):
            await job.files(tmp_path / "none")
        found = await job.files(tmp_path / "some", "a b/c*[d]", rescue=True)
        names = [str(each.relative_to(tmp_path / "some")) for each in found]
        assert names == ["0/a b/c*[d]", "2/a b/c*[d]"]
        ran = await node.run("get", "some", "--rescue", "--out", str(tmp_path / "all"), tenant=unique)
        assert (ran.code, len(ran.out.splitlines())) == (0, 4), ran.err
        assert "replica 1: attempt 1 of replica 1 has left nothing here, or it is gone" in ran.err


async def test_json_names_a_file_whose_name_is_not_utf8(node: Node, unique: str, tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    code = made(tmp_path / "code", "a.txt")
    (code / name).symlink_to("/etc/passwd")
    refused = await node.run("submit", "--json", "--with", str(code), "--", "true", tenant=unique)
    assert refused.code == 2, refused.err
    assert name in json.loads(refused.out)["message"]
    script = "touch kept-$(printf 'caf\\351')"
    ran = await node.run("run", "--job", "latin", "--keep", "kept-*", "--", "sh", "-c", script, tenant=unique)
    assert ran.code == 0, ran.err
    got = await node.run("get", "latin", "--json", "--out", str(tmp_path / "got"), tenant=unique)
    assert (got.code, got.err) == (0, "")
    assert f"kept-{name}" in json.loads(got.out)["files"][0]


@pytest.mark.parametrize("is_whole", [True, False])
async def test_files_and_values_of_a_large_job_that_left_memory_are_whole_or_refused(
    nats_url: str, unique: str, tmp_path: Path, is_whole: bool
) -> None:
    """`show` has the last transitions only, if they are many: the others are in the history, page by page."""
    ends = [Change(rev, rev, rev - 1, 1, "SUCCEEDED", "w", code=0, fence=10 + rev, result=rev) for rev in (1, 2, 3)]
    request = {"run": {"argv": ["x"], "keep": ["out"]}, "replicas": 3}

    def page(*changes: Change, more: bool) -> Answer:
        plain, about = msgspec.to_builtins(changes), {"job": "j", "tenant": "t", "state": "SUCCEEDED"}
        return Answer("history", 9, {**about, "rev": 3, "changes": plain, "complete": True, "more": more})

    async with ScriptedScheduler(nats_url, unique) as scheduler, AsyncClient(nats_url, tenant=unique) as client:
        scheduler.will_show(shown("j", "SUCCEEDED", ends[2], request=request))
        gone = problem("history-gone", "no longer kept", job="j")
        scheduler.will("history", *([page(ends[0], more=True), page(*ends[1:], more=False)] if is_whole else [gone]))
        held = io.BytesIO()
        with tarfile.open(fileobj=held, mode="w") as archive:
            archive.addfile(tarfile.TarInfo("out"))
        heard = Heard(None)
        for each in ends:
            name = f"j.{each.replica}.{each.fence}"
            await bucket_of(client._wire).put(name, compressed(held), {}, lambda _: None)
            line = {"result": name, "content_type": "application/json", "value": each.rev}
            heard.take(Piece(each.replica, 1, "out", 0, json.dumps(line) + "\n"))
        if not is_whole:
            with pytest.raises(NoOutput, match="2 of the 3 replicas"):
                await client.job("j").files(tmp_path / "into")
            with pytest.raises(NoOutput, match="2 of the 3 replicas"):
                await value_of(client._wire, "j", [], heard, ((0, 2),))
            return
        found = await client.job("j").files(tmp_path / "into")
        assert [path.relative_to(tmp_path).as_posix() for path in found] == ["into/0/out", "into/1/out", "into/2/out"]
        scheduler.will("history", page(ends[0], more=True), page(*ends[1:], more=False))
        assert await value_of(client._wire, "j", [], heard, ((0, 2),)) == [1, 2, 3]


def test_the_output_of_each_replica_of_a_large_job_that_left_memory_is_read() -> None:
    data = shown("j", "SUCCEEDED", Change(9, 9, 2, 4, "SUCCEEDED", fence=7), request={"replicas": 3})
    assert newest_attempts(as_struct(JobInfo, data)) == {0: None, 1: None, 2: 4}


async def test_an_end_says_that_there_is_no_checkpoint_and_a_file_or_a_link_is_one(node: Node, unique: str) -> None:
    async with AsyncClient(node.url, tenant=unique) as client:
        with pytest.raises(JobFailed) as failed:
            await client.run(["sh", "-c", "mkdir ckpt; touch ckpt/x; exit 3"], checkpoint="ck", retries=1)
        assert "checkpoint-not-stored: files: there is no ck" in failed.value.result.changes[-1].why
        for form in ("echo 1 > ck", "mkdir s1; echo 1 > s1/x; ln -s s1 ck"):
            script = f"if test -e ck; then ls -l ck; cat ck ck/x; else {form}; exit 3; fi 2>/dev/null; exit 0"
            done = await client.run(["sh", "-c", script], checkpoint="./ck/", retries=1)
            assert "1\n" in done.stdout
            assert ("-> s1" in done.stdout) == ("ln -s" in form)


async def test_a_changed_line_sends_and_fetches_its_own_part_of_many_files(
    node: Node, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = made(tmp_path / "code", "a.py", "z.py")
    (code / "weights.bin").write_bytes(os.urandom(9 << 20))
    (code / "set").mkdir()
    for number in range(40):
        (code / "set" / f"{number:02}").write_bytes(os.urandom(100_000))
    read = ["sh", "-c", "cat a.py set/* weights.bin z.py | sha256sum"]

    def wanted() -> str:
        files = [code / "a.py", *sorted((code / "set").iterdir()), code / "weights.bin", code / "z.py"]
        return hashlib.sha256(b"".join(each.read_bytes() for each in files)).hexdigest()

    async with AsyncClient(node.url, tenant=unique) as client:
        stream = f"OBJ_{client._wire.subjects.files_bucket(client.tenant)}"
        fetched: list[str] = []
        inflate = JobFiles._inflate

        async def counted(files: JobFiles, store: ObjectStore, info: ObjectInfo, *rest: Any) -> str:
            fetched.append(await inflate(files, store, info, *rest))
            return fetched[-1]

        monkeypatch.setattr(JobFiles, "_inflate", counted)

        async def stored() -> int:
            return (await JetStream(client._wire.link).stream_info(stream)).size_bytes

        sizes = [0]
        for line in ("one", "two", "one"):
            (code / "a.py").write_text(line)
            assert (await client.run(read, files=code)).stdout.split()[0] == wanted()
            sizes.append(await stored())
        first, second, third = (after - before for before, after in pairwise(sizes))
        assert first > 12 << 20
        assert 0 < second < 5 << 20, "the file's own part, and the list"
        assert third == 0
        (code / "set" / "39").unlink()
        assert (await client.run(read, files=code)).stdout.split()[0] == wanted()
        assert len(fetched) == len(set(fetched)), "no part was fetched twice"

        request = client.request(["true"], fields={"files": await client.send_files(code)})
        monkeypatch.setattr("moorage.client.sending.AGAIN_AFTER_S", -1.0)
        before = await stored()
        await keep_files(client._wire, request)
        assert await stored() > before + (12 << 20), "each part is stored anew, as it would go first"
        (part, *_) = decode_parts(await content_of(client, str(request.workload.files)))
        bucket = bucket_of(client._wire)
        found = await bucket.find(part_object(part.digest))
        assert found is not None
        await bucket.forget(bucket.subject(found.nuid))
        with pytest.raises(Rejected, match="no longer kept"):
            await keep_files(client._wire, request)
        monkeypatch.undo()
        await client.send_files(code)
        assert await bucket.find(part_object(part.digest)) is not None, "what is gone is sent again"


async def content_of(client: AsyncClient, name: str) -> bytes:
    bucket = bucket_of(client._wire)
    info = await bucket.find(name)
    assert info is not None
    return b"".join([piece async for piece in bucket.get(info)])

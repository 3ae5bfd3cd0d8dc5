"""`Job.again`: a job once more, or what of it did not succeed, with the same request and files and what is changed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from moorage.bus.errors import RequestTimeout
from moorage.bus.object_store import ObjectStore
from moorage.client import AsyncClient, JobFailed, Rejected
from moorage.client.again import keep_files
from moorage.client.sending import AGAIN_AFTER_S, bucket_of
from moorage.testing import Ran, SimFleet, Task
from tests.scenes import in_virtual_time
from tests.system.cli.node import Node
from tests.unit.client.test_packing import made


def odd_ones_fail(task: Task) -> Ran:
    return Ran(seconds=1, code=int(task.env["MOORAGE_INDEX"]) % 2 if task.env.get("WRONG") else 0)


@in_virtual_time
async def test_what_failed_is_run_again_under_its_numbers_with_what_is_changed() -> None:
    async with AsyncClient(transport=SimFleet("8xH100", script=odd_ones_fail)) as client:
        job = await client.submit(
            ["train"], gpu=1, job="sweep", replicas=6, env={"WRONG": "1", "KEPT": "2"}, labels={"sweep": "lr"}
        )
        with pytest.raises(JobFailed):
            await job.result()
        again = await job.again(failed=True, env={"WRONG": ""}, limit="2h", labels={"try": "2"})
        assert again.job == "sweep-again-1"
        assert (await again.result()).state == "SUCCEEDED"
        asked = (await again.show()).request
        assert asked is not None
        assert (asked.indices, asked.again_of) == ("1,3,5", "sweep")
        assert asked.workload.env == {"WRONG": "", "KEPT": "2"}
        assert asked.workload.timeout_s == 7200
        assert asked.labels == {"sweep": "lr", "try": "2"}
        with pytest.raises(Rejected, match="all of job sweep-again-1 has succeeded"):
            await again.again(failed=True)
        whole = await again.again()
        assert whole.job == "sweep-again-2"
        assert (await whole.result()).state == "SUCCEEDED"
        one = await job.again(failed=True, replica=3, job="mine", gpu="2xH100")
        asked = (await one.show()).request
        assert asked is not None
        assert (one.job, asked.indices, asked.gpu and asked.gpu.count) == ("mine", "3", 2)


async def test_the_files_come_again_and_files_that_are_gone_are_told(
    node: Node, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = made(tmp_path / "code", "a.txt")
    async with AsyncClient(node.url, tenant=unique) as client:
        job = await client.submit(["sh", "-c", "cat a.txt; exit ${CODE:-3}"], files=code)
        with pytest.raises(JobFailed):
            await job.result("60s")
        again = await job.again(failed=True, env={"CODE": "0"})
        assert "".join([piece.text async for piece in again.logs("60s")]) == "a.txt"
        request = client.request(["cat", "a.txt"], fields={"files": await client.send_files(code)})
        bucket, address = bucket_of(client._wire), request.workload.files
        assert address is not None
        before = await bucket.find(address)
        await keep_files(client._wire, request)
        assert await bucket.find(address) == before
        monkeypatch.setattr("moorage.client.sending.AGAIN_AFTER_S", AGAIN_AFTER_S - 1e9)
        await keep_files(client._wire, request)
        after = await bucket.find(address)
        assert before is not None
        assert after is not None
        assert after.seq > before.seq
        assert (after.digest, after.size) == (before.digest, before.size)
        assert (await client.run(["cat", "a.txt"], files=code, wait="60s")).stdout == "a.txt"
        elsewhere = client.request(["cat", "a.txt"], fields={"files": "0" * 64})
        with pytest.raises(Rejected) as gone:
            await keep_files(client._wire, elsewhere)
        assert (gone.value.code, gone.value.problem.field) == ("request-gone", "$.run.files")
        of_data = client.request(["true"], fields={"data": {"set": f"object:{'0' * 64}"}})
        with pytest.raises(Rejected):
            await keep_files(client._wire, of_data)


async def test_the_files_come_whole_if_the_server_answers_the_second_try_alone(
    node: Node, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, put, tries = made(tmp_path / "code", "a.txt"), ObjectStore.put, 0

    async def put_late(store: ObjectStore, name: str, pieces: Iterable[bytes], *more: Any) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            assert list(pieces), "they were read"
            raise RequestTimeout(name, 0.1)
        await put(store, name, pieces, *more)

    async with AsyncClient(node.url, tenant=unique) as client:
        request = client.request(["cat", "a.txt"], fields={"files": await client.send_files(code)})
        bucket, address = bucket_of(client._wire), request.workload.files
        assert address is not None
        before = await bucket.find(address)
        monkeypatch.setattr("moorage.client.sending.AGAIN_AFTER_S", AGAIN_AFTER_S - 1e9)
        monkeypatch.setattr(ObjectStore, "put", put_late)
        await keep_files(client._wire, request)
        after = await bucket.find(address)
        assert tries == 2
        assert before is not None
        assert after is not None
        assert (after.digest, after.size) == (before.digest, before.size)

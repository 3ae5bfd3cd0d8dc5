"""The item of a replica on its way into its command and its variables, with real processes over a real nats-server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from moorage.schemas.frames import End
from moorage.schemas.items import ItemsFile, item_of
from moorage.schemas.job import Run
from moorage.system import item_files
from moorage.testing.conformance.leader import ScriptedLeader
from moorage.worker.attempt import job_items
from moorage.worker.attempt.job_files import FilesUnavailable
from moorage.worker.attempt.job_items import ItemRefused, JobItems
from tests.system.worker.agent.test_agent_process import name_of, worker
from tests.system.worker.attempt.test_attempt_folders import placed
from tests.system.worker.attempt.test_job_files import bringing, bucket, never_over, sent, tar
from tests.waiting import until

SAY = ["/bin/sh", "-c", 'echo "$0 $1 ${{MOORAGE_ITEM_SEED:-none} $MOORAGE_INDEX: $MOORAGE_ITEM"']


@pytest.mark.parametrize(
    ("items", "words", "says"),
    [
        (["a b", "c d"], ["{item}", "{{item}"], "c d {item} none 1: c d\n"),
        ([{"seed": 1}, {"seed": 2, "lr": 0.5}], ["{seed}", "lr={lr}"], '2 lr=0.5 2 1: {"seed":2,"lr":0.5}\n'),
    ],
)
async def test_a_replica_gets_the_item_of_its_number(
    nats_url: str, unique: str, items: list[Any], words: list[str], says: str
) -> None:
    async with ScriptedLeader(nats_url, unique) as leader, worker(nats_url, unique, leader):
        name = name_of(replica=1)
        await leader.want("w1", placed(name, "", argv=[*SAY, *words], items=items))
        assert (await leader.await_report("w1", "exited", name)).code == 0
        await until(lambda: leader.text(name) == says, what="its item")


async def test_items_of_a_file_come_with_the_jobs_files(nats_url: str, unique: str) -> None:
    async with (
        bucket(nats_url, unique) as store,
        ScriptedLeader(nats_url, unique) as leader,
        worker(nats_url, unique, leader),
    ):
        address = await sent(store, tar(sweeps_a=b"lr,seed\n0.1,1\n\n0.2,2\n0.3\n"))
        names = [name_of(replica=number, fence=10 + number) for number in range(4)]
        run = {"argv": [*SAY, "{lr}", "{seed}"], "files": address, "items": {"file": "sweeps/a", "format": "csv"}}
        await leader.want("w1", *(_on(slot, placed(name, "", **run)) for slot, name in enumerate(names)))
        ends = [await leader.await_report("w1", "exited", name) for name in names]
        await until(
            lambda: leader.text(names[1]) == '0.2 2 2 1: {"lr":"0.2","seed":"2"}\n', what="the item of the second"
        )
        assert [end.code for end in ends] == [0, 0, 126, 126]
        assert ends[2].detail == (
            "start-failed: items: sweeps/a item 2 must have 2 values, one for each column, found 1"
        )
        assert ends[3].detail == "start-failed: items: sweeps/a has 3 items, and none for replica 3"


def _on(slot: int, place: Any) -> Any:
    place.slots[:] = [slot]
    return place


async def test_a_column_that_an_item_has_not_fails_its_replica_alone(nats_url: str, unique: str) -> None:
    async with ScriptedLeader(nats_url, unique) as leader, worker(nats_url, unique, leader):
        run = {"argv": ["echo", "{lr}"], "items": [{"lr": 1}, {"seed": 1}]}  # a scheduler would not have accepted it
        good, bad = name_of(), name_of(replica=1, fence=11)
        await leader.want("w1", placed(good, "", **run), _on(1, placed(bad, "", **run)))
        assert (await leader.await_report("w1", "exited", good)).code == 0
        exited = await leader.await_report("w1", "exited", bad)
        assert exited.detail == (
            "start-failed: items: argv names {lr}, and its item has the columns seed: write {{lr} for braces"
        )


async def test_a_program_that_an_item_names_is_checked_with_the_item_in_it(nats_url: str, unique: str) -> None:
    rules = {"programs_for": {"acme": "/bin/*"}}
    async with ScriptedLeader(nats_url, unique) as leader, worker(nats_url, unique, leader, **rules):
        run = {"argv": ["/bin/{item}"], "items": ["true", "../usr/bin/true"]}
        good, bad = name_of(), name_of(replica=1, fence=11)
        await leader.want("w1", placed(good, "", **run), _on(1, placed(bad, "", **run)))
        assert (await leader.await_report("w1", "exited", good)).code == 0
        refused = await leader.await_report("w1", "refused", bad)
        assert "may not start /bin/../usr/bin/true on this worker" in refused.detail


async def test_a_job_that_is_ended_while_its_item_comes_never_starts(
    nats_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = never_over(monkeypatch, "opened")
    async with ScriptedLeader(nats_url, unique) as leader, worker(nats_url, unique, leader) as (_, agent):
        name = name_of()
        await leader.want("w1", placed(name, "true", files="0" * 64, items={"file": "items"}))
        await asyncio.wait_for(reached.wait(), 60)
        assert await agent.lost.look() == []
        await leader.want("w1", End(*name, why="cancelling"))
        exited = await leader.await_report("w1", "exited", name)
        assert (exited.code, exited.detail) == (-15, "end")
        assert "started" not in leader.seat("w1").kinds(name)


async def test_an_index_is_made_once_for_all_replicas(
    nats_url: str, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    plain = item_files.ItemIndex.__init__

    def counted(*given: Any) -> None:
        plain(*given)
        made.append(len(given[0]))

    monkeypatch.setattr(item_files.ItemIndex, "__init__", counted)
    monkeypatch.setattr(job_items, "ITEMS_MAX", 1500)
    async with bucket(nats_url, unique) as store, bringing(nats_url, unique, tmp_path) as files:
        address = await sent(store, tar(a="\n".join(map(str, range(1000))).encode(), b=b"1\n" * 600))
        items = JobItems(files)
        one, other = (Run(argv=["true"], files=address, items=ItemsFile(file)) for file in "ab")
        parts = await asyncio.gather(*(items.in_file("acme", one, range(at, at + 10)) for at in range(0, 1000, 10)))
        assert [item for part in parts for item in part] == [item_of(str(number)) for number in range(1000)]
        assert await items.in_file("acme", other, [599]) == [item_of("1")]
        assert made == [1000, 600]
        await items.in_file("acme", one, [0])
        assert made == [1000, 600, 1000], "both together are over the bound, so the first was forgotten"
        await items.close()


@pytest.mark.parametrize(
    ("file", "why"),
    [
        ("items.txt", "items: items.txt is not among the job's files"),
        ("lib", "items: lib is not among the job's files"),
        ("lib/a", "items: lib/a line 1 must have at most 32768 bytes"),
    ],
)
async def test_a_file_that_has_no_items_is_told(
    nats_url: str, unique: str, tmp_path: Path, file: str, why: str
) -> None:
    async with bucket(nats_url, unique) as store, bringing(nats_url, unique, tmp_path) as files:
        run = Run(argv=["true"], files=await sent(store, tar(lib_a=b"x" * 40_000)), items=ItemsFile(file))
        with pytest.raises(ItemRefused, match=why):
            await JobItems(files).in_file("acme", run, [0])
        with pytest.raises(FilesUnavailable):
            await JobItems().in_file("acme", run, [0])

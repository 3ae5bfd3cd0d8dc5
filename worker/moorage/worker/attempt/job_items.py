"""Find the item of a replica: in its request, or in a file of its job's files by an index that is made once a job."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import BinaryIO, Final, NamedTuple

import msgspec

from moorage.schemas.errors import Refused, problem
from moorage.schemas.items import Item, ItemsFile, item_of, substituted
from moorage.schemas.job import Request, Run
from moorage.schemas.ranges import NUMBERS_MAX
from moorage.system.archives import find_file
from moorage.system.item_files import ItemIndex
from moorage.worker.attempt.job_files import FilesUnavailable, JobFiles, translated

#: most items of all indexes that are kept, at 8 bytes each; one is kept in any case
ITEMS_MAX: Final = 4 * NUMBERS_MAX


class ItemRefused(Refused):
    """No worker can give the replica its item: there is none, or it is invalid."""

    def __init__(self, why: str) -> None:
        super().__init__(problem("failed-precondition", f"items: {why}"))


class _Key(NamedTuple):
    tenant: str
    address: str
    items: ItemsFile


class JobItems:
    """The items of one worker's jobs. Without `files` no job brings any."""

    def __init__(self, files: JobFiles | None = None) -> None:
        self.files = files
        self._indexes: OrderedDict[_Key, asyncio.Task[ItemIndex]] = OrderedDict()  # the last used last

    @staticmethod
    def at_hand(run: Run, number: int) -> Item | None:
        """Return the item of a replica if it stands in the request, else None. Raises ItemRefused."""
        if not isinstance(run.items, list):
            return None
        try:
            return item_of(run.items[number])
        except ValueError as error:
            raise ItemRefused(f"item {number} {error}") from None
        except IndexError:
            raise ItemRefused(f"there are {len(run.items)}, and none for replica {number}") from None

    async def in_file(self, tenant: str, run: Run, numbers: Sequence[int]) -> list[Item | ItemRefused]:
        """Return the items of replicas of a job whose items are in a file: of each its item, or why it has none.

        Raises ItemRefused and FilesRefused if no worker can have them, FilesUnavailable if this one cannot have them
        now.
        """
        assert isinstance(run.items, ItemsFile), "its job's items are in a file"
        if run.files is None:
            raise ItemRefused(f"{run.items.file} is among the job's files, and it brings none")
        if self.files is None:
            raise FilesUnavailable("this worker has no folders for jobs")
        index = await self._index(self.files, _Key(tenant, run.files, run.items))
        with translated():
            archive = await self.files.opened(tenant, run.files)
            return await asyncio.to_thread(_read, archive, index, run.items.file, numbers)

    async def _index(self, files: JobFiles, key: _Key) -> ItemIndex:
        making = self._indexes.get(key)
        if making is None:
            making = self._indexes[key] = asyncio.create_task(_make_index(files, key))
            making.add_done_callback(lambda task: self._made(key, task))
        self._indexes.move_to_end(key)
        return await asyncio.shield(making)  # shielded: if this attempt ends, others still wait for it

    def _made(self, key: _Key, task: asyncio.Task[ItemIndex]) -> None:
        """Forget what failed, as its cause may pass, and the indexes used longest ago beyond the bound."""
        if task.cancelled() or task.exception() is not None:
            del self._indexes[key]
            return
        sizes = {each: len(made.result()) for each, made in self._indexes.items() if made.done()}
        while len(sizes) > 1 and sum(sizes.values()) > ITEMS_MAX:
            oldest = next(iter(sizes))
            del sizes[oldest], self._indexes[oldest]

    async def close(self) -> None:
        """Stop making indexes."""
        for making in list(self._indexes.values()):
            making.cancel()
            await asyncio.wait((making,))


def with_item(request: Request, item: Item) -> Request:
    """Return a request with the item in its command. Raises ItemRefused."""
    try:
        argv = substituted(request.workload.argv, item)
    except ValueError as error:
        raise ItemRefused(str(error)) from None
    run = msgspec.structs.replace(request.workload, argv=argv, items=None)
    return msgspec.structs.replace(request, run=run)


async def _make_index(files: JobFiles, key: _Key) -> ItemIndex:
    try:
        with translated():
            archive = await files.opened(key.tenant, key.address)
            return await asyncio.to_thread(_index, archive, key.items, files.bytes_max)
    except ValueError as error:
        raise ItemRefused(f"{key.items.file} {error}") from None


def _index(archive: BinaryIO, items: ItemsFile, bytes_max: int) -> ItemIndex:
    with archive:
        found = find_file(archive, items.file, bytes_max)
        if found is None:
            raise ValueError("is not among the job's files")
        return ItemIndex(archive, items.format, *found)


def _read(archive: BinaryIO, index: ItemIndex, file: str, numbers: Sequence[int]) -> list[Item | ItemRefused]:
    found: list[Item | ItemRefused] = []
    with archive:
        for number in numbers:
            try:
                found.append(index.item(archive, number))
            except ValueError as error:
                found.append(ItemRefused(f"{file} {error}"))
    return found

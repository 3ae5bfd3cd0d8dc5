"""How an archive is cut: a changed file changes its own part, and an added one few others."""

from __future__ import annotations

import io
import random
import zlib

import pytest

from moorage.system.archive_parts import (
    PART_BYTES_MAX,
    PART_BYTES_MIN,
    PARTS_MAX,
    SPLIT_BYTES_MIN,
    Member,
    Slice,
    ends_of,
    read_parts,
)
from moorage.system.archives import compressed

MIB = 1 << 20


def laid_out(sizes: dict[str, int]) -> tuple[list[Member], int]:
    """The members of a tar file in the order of names, each with a header of 512 bytes."""
    members, at = [], 0
    for name in sorted(sizes):
        members.append(Member(name, at, sizes[name]))
        at += 512 + -(-sizes[name] // 512) * 512
    return members, at + 1024


def parts(sizes: dict[str, int]) -> set[tuple[str, ...]]:
    """The names in each part."""
    members, size = laid_out(sizes)
    found, begin = set(), 0
    for end in ends_of(members, size):
        found.add(tuple(each.name for each in members if begin <= each.at < end))
        begin = end
    assert begin == size
    return found


def test_a_small_archive_is_not_cut_and_a_large_file_is_alone() -> None:
    assert parts({"a.py": 10, "data.bin": SPLIT_BYTES_MIN - 8192}) == {("a.py", "data.bin")}
    sizes = {"a.py": 10, "b.py": 10, "data.bin": 300 * MIB, "more.bin": 9 * MIB, "train.py": 20}
    assert parts(sizes) == {("a.py", "b.py"), ("data.bin",), ("more.bin",), ("train.py",)}


@pytest.mark.parametrize("seed", range(20))
def test_among_many_files_an_added_or_removed_one_changes_few_parts(seed: int) -> None:
    dice = random.Random(seed)
    sizes = {f"set/{dice.getrandbits(40):010x}": dice.choice((100, 3_000, 200_000)) for _ in range(1_000)}
    before = parts(sizes)
    members, size = laid_out(sizes)
    ends = ends_of(members, size)
    lengths = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    assert len(ends) > 5
    assert max(lengths) < PART_BYTES_MAX + 2 * PART_BYTES_MIN
    name = dice.choice(sorted(sizes))
    for changed in (
        {**sizes, f"set/{dice.getrandbits(40):010x}": 5_000},
        {k: v for k, v in sizes.items() if k != name},
    ):
        assert len(parts(changed) - before) <= len(before) // 2
    assert len(ends_of([Member(f"{n}", n * 4 * MIB, 3 * MIB) for n in range(PARTS_MAX * 2)], 1 << 50)) == PARTS_MAX


def test_parts_are_those_bytes_of_the_file() -> None:
    data = random.Random(1).randbytes(100_000)
    _, found = read_parts(io.BytesIO(data), [10, 70_000, 100_000])
    assert [part.size for part in found] == [10, 69_990, 30_000]
    slice_ = Slice(io.BytesIO(data), 10, 69_990)
    assert slice_.read() == data[10:70_000]
    assert zlib.decompress(b"".join(compressed(slice_)), wbits=31) == data[10:70_000]

"""A memo holds as much as it may, and makes room by forgetting all of it."""

from __future__ import annotations

from moorage.schemas.memo import Memo


def test_it_keeps_what_is_put_until_one_more_has_no_room() -> None:
    memo = Memo[int, str](3)
    assert [memo.put(number, str(number)) for number in range(3)] == ["0", "1", "2"]
    assert memo.put(1, "one") == "one", "a key that is there needs no room"
    assert memo == {0: "0", 1: "one", 2: "2"}
    memo.put(3, "3")
    assert memo == {3: "3"}

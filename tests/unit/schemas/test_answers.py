"""Answers of a newer or older scheduler are read, and fields that are always sent stay so."""

from __future__ import annotations

import msgspec
import pytest

from tools.answers import DATA, parts_of

STRUCTS = [*DATA.values(), *dict.fromkeys(part for struct in DATA.values() for part in parts_of(struct))]


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_an_answer_of_another_release_is_read(struct: type[msgspec.Struct]) -> None:
    needed: dict[str, str | int] = {}
    needed |= {each.encode_name: "x" for each in msgspec.structs.fields(struct) if each.required and each.type is str}
    needed |= {each.encode_name: 1 for each in msgspec.structs.fields(struct) if each.required and each.type is int}
    try:
        msgspec.convert({**needed, "from_a_newer_release": [1]}, struct)
    except msgspec.ValidationError as error:
        pytest.fail(f"a field without default is no name or number, or a newer field is refused: {error}")


def test_a_field_that_is_always_sent_is_sent_with_its_default_and_others_are_left_out() -> None:
    sent = msgspec.to_builtins(DATA["admin.fleet"]())
    assert (sent["queued"], sent["workers"], sent["leader"]) == (0, [], "")
    assert not sent.keys() & {"next", "request_queue", "follower"}

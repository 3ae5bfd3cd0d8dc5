"""What is said of a header that a call, or an answer, cannot have: never its value, which may be a token."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.cli.jobs.flag_values import pairs
from moorage.client import AsyncClient, Rejected
from moorage.schemas.served import checked_headers


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer s3cret\n"}, {"Authorization": b"s3cret"}, {"Moorage-Hops": "s3cret"},
        {"X Of": "s3cret"}, {"Authorization: s3cret": ""},
    ],
)  # fmt: skip
async def test_a_header_that_a_call_cannot_have_is_told_by_its_name_alone(headers: dict[str, Any]) -> None:
    with pytest.raises(Rejected, match="cannot be a header of a call") as refused:
        AsyncClient("nats://127.0.0.1:1").service("embed", headers=headers)
    assert "s3cret" not in repr(refused.value.problem)
    assert next(iter(headers)).partition(":")[0] in refused.value.why


def test_a_header_that_an_answer_cannot_have_is_told_by_its_name_alone() -> None:
    with pytest.raises(ValueError, match="'Set-Cookie' cannot be a header") as refused:
        checked_headers({"Set-Cookie": "s3cret\n"})
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize("text", ["Authorization: Bearer s3cret", "s3cret", "=s3cret"])
def test_an_option_that_needs_a_name_does_not_show_what_it_has(text: str) -> None:
    with pytest.raises(Rejected, match="--header needs NAME=value") as refused:
        pairs("header", [text])
    assert "s3cret" not in repr(refused.value.problem)

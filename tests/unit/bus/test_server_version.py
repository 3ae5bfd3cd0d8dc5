"""Which nats-servers are too old, and the words for it."""

from __future__ import annotations

import pytest

from moorage.bus.server_version import SERVER_MIN, check_oldest, is_at_least
from moorage.schemas.errors import Refused


class Told:
    """What a connection tells of its server."""

    def __init__(self, server_version: str) -> None:
        self.server_version = server_version


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("2.11.0", True), ("2.15.1", True), ("3.0.0", True), ("2.12.0-preview.1", True), ("2.100.0", True),
        ("2.10.26", False), ("2.9.10", False), ("1.99.0", False), ("", False), ("dev", False), ("2", False),
    ],
)  # fmt: skip
def test_what_is_old_enough(version: str, known: bool) -> None:
    assert is_at_least(version, SERVER_MIN) is known


def test_an_older_server_is_refused_with_its_version_and_what_to_do() -> None:
    check_oldest(Told("2.11.0"))
    with pytest.raises(Refused) as refused:
        check_oldest(Told("2.10.26"))
    problem = refused.value.problem
    assert problem.code == "failed-precondition"
    assert problem.message == "nats-server 2.10.26 is too old: it stores no record of a ledger"
    assert (problem.found, problem.allowed) == ("2.10.26", "nats-server 2.11 or newer")
    assert problem.next == "upgrade nats-server to 2.11 or newer"

"""The hash that digests are made of is the same on every Python; where it is another, it is said what to do."""

from __future__ import annotations

from moorage.scheduler.core.ledger import digests
from moorage.scheduler.core.ledger import snapshot as snapshots
from tests.scheduler.driving import Driving


def test_this_python_computes_the_hash_that_ledgers_are_written_with() -> None:
    """Should this fail on a new Python: it can neither follow a ledger of the others nor read its backup as it is."""
    assert [hash(row) for row, _ in digests.GOLDEN] == [found for _, found in digests.GOLDEN]
    assert digests.COMPUTED == digests.TUPLE_HASH == "cpython-3.8"


def test_the_digest_of_a_state_is_the_same_on_every_python() -> None:
    drive = Driving()
    drive.worker("w0", 2)
    drive.submit("a", gpu={})
    drive.settle()
    drive.submit("b", gpu={"count": 2}, tenant="u")
    assert drive.state.digest == snapshots.load(snapshots.dump(drive.state)).digest == 10975196416832586459


def test_another_hash_has_another_name_and_says_what_to_do() -> None:
    other = digests.name_of([found + 1 for _, found in digests.GOLDEN])
    assert other.startswith("unnamed-")
    assert digests.name_of([found for _, found in digests.GOLDEN]) == digests.TUPLE_HASH
    assert digests.trouble(digests.TUPLE_HASH, digests.COMPUTED) == ""
    assert "admin restore FILE --rehash" in digests.trouble(digests.TUPLE_HASH, other)

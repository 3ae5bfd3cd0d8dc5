"""A bounded round of `tests/release/fuzz/many.py`: whatever comes to a decoder, only the errors that it declares
escape."""

from __future__ import annotations

from typing import Final

import pytest

from tests.release.fuzz.many import GROWTH_KIB_MAX, fuzz
from tests.release.fuzz.targets import Target, targets
from tests.turns import turns

TARGETS: list[Target] = targets()
#: whose first frames CI reads; `make release-check` reads those of the others
OFTEN: Final = len(TARGETS) // 3 + 1
FEW: Final = 15

#: target, seed and number of what escaped once
REGRESSIONS = (
    ("the supervisor's socket", 0, 30),  # text in msgpack that is no UTF-8 ended the supervisor's reading
    ("a lease's answer", 0, 71),  # nesting without end
    ("the agent's end of it", 0, 0),  # bytes that are no frame left the agent waiting for an answer
    ("an agent's journal", 0, 9),
    ("a supervisor's journal", 0, 38),
    ("an acknowledgement", 0, 132),
    ("a ledger record", 0, 1577),  # steps that end within one, and acts too short: a standby ended without a word
    ("a ledger record", 0, 1824),
    ("moorage.worker.attempt.output_reader._decode_ask", 0, 795),  # a refusal that repeated 64 KiB of what came
)


@pytest.mark.parametrize("target", turns(TARGETS, OFTEN), ids=lambda target: target.name)
def test_nothing_escapes(target: Target) -> None:
    check(target, range(FEW))


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_nothing_escapes_for_longer(target: Target) -> None:
    check(target, range(FEW, 150))


def check(target: Target, frames: range) -> None:
    found = fuzz(target, 1, frames)
    assert found.escapes == []
    assert found.grown_kib <= GROWTH_KIB_MAX
    assert found.frames == len(frames)


@pytest.mark.parametrize(("name", "seed", "number"), REGRESSIONS)
def test_what_escaped_once(name: str, seed: int, number: int) -> None:
    target = next(target for target in TARGETS if target.name == name)._replace(right=())  # as it was found
    assert fuzz(target, seed, range(number, number + 1)).escapes == []


@pytest.mark.parametrize("name", ["schemas.codec.decode_request", "scheduler.leader.intake._decode_from_worker"])
def test_what_the_outside_may_send_is_nearly_right_and_not_noise(name: str) -> None:
    """So that what stands behind the first look is met, too."""
    [target] = [each for each in targets() if each.name == f"moorage.{name}"]
    found = fuzz(target, 1, range(150))
    assert found.taken > 3, found  # of noise none in five hundred is


def test_every_frame_that_there_is_is_fuzzed() -> None:
    """Each message type of the protocol is read by some target, as itself or as one of a union."""
    from moorage.schemas import frames

    read = {str(target.kind) for target in TARGETS}
    classes = {name: kind for name, kind in vars(frames).items() if isinstance(kind, type)}
    kinds = {name: kind for name, kind in classes.items() if hasattr(kind, "__struct_fields__")}
    assert {"Hello", "Wanted", "Event"} <= kinds.keys()
    for name, kind in kinds.items():
        assert any(f"{kind.__module__}.{name}" in each for each in read), name

"""What a restarted agent makes of the placements in its journal."""

from __future__ import annotations

from typing import Any, cast

from moorage.schemas.codec import encode
from moorage.schemas.frames import Place, Report
from moorage.worker.driver import Living
from moorage.worker.session.restoring import match

NAME = ("acme", "j", 0, 1, 7)
PLACE = Place(*NAME, [0], "exclusive", False, encode({"gpu": {}, "run": {"driver": "kubernetes", "argv": ["true"]}}))


def test_an_attempt_in_doubt_that_no_driver_has_any_more_stays_in_doubt() -> None:
    """As a pod that was taken out of the cluster while its node did not answer."""
    found = match({NAME: PLACE}, {}, ["kubernetes"], 0.0, [0], {NAME})
    assert [(attempt.name, phase) for attempt, phase, *_ in found.held] == [(NAME, "stuck")]
    found = match({NAME: PLACE}, {}, ["kubernetes"], 0.0, [0])
    assert (found.held, found.withdrawn) == ([], [NAME])


def test_an_attempt_that_had_ended_and_whose_memory_stayed_is_looked_at_again_and_not_in_doubt() -> None:
    """As a container whose image was still being pulled, on a device that a process outside moorage used."""
    end = Report("exited", *NAME, -9, "end")
    found = match({NAME: PLACE}, {}, ["kubernetes"], 0.0, [0], {NAME}, {NAME: end})
    assert [(attempt.name, *rest) for attempt, *rest in found.held] == [(NAME, "exited", -9, "end")]
    found = match({NAME: PLACE}, {}, ["kubernetes"], 0.0, [0], (), {NAME: end})
    assert (found.held, found.withdrawn) == ([], [NAME])


def test_what_no_driver_has_any_more_may_have_left_memory_on_its_whole_devices() -> None:
    """An agent that ended it as it restored may have been killed before it could join: its journal says nothing."""
    other = ("acme", "j", 1, 1, 7)
    shared = Place(*other, [1], "mps", False, PLACE.body)
    found = match({NAME: PLACE, other: shared}, {}, ["kubernetes"], 0.0, [0, 1])
    assert (found.withdrawn, found.left) == ([NAME, other], {0})
    taken = Place(*other, [0], "exclusive", True, PLACE.body)
    found = match({NAME: PLACE, other: taken}, {}, ["kubernetes"], 0.0, [0])
    assert ([attempt.name for attempt, *_ in found.held], found.withdrawn, found.left) == ([other], [NAME], set())
    frozen = {other: (cast(Any, None), Living(other, "running", frozen=True))}
    found = match({NAME: PLACE, other: taken}, frozen, ["kubernetes"], 0.0, [0])
    assert ([attempt.frozen for attempt, *_ in found.held], found.left) == ([True], {0}), "it is not on the device now"

"""What a restarted agent makes of the placements in its journal."""

from __future__ import annotations

from moorage.schemas.codec import encode
from moorage.schemas.frames import Place
from moorage.worker.session.restoring import match

NAME = ("acme", "j", 0, 1, 7)
PLACE = Place(*NAME, [0], "exclusive", False, encode({"gpu": {}, "run": {"driver": "kubernetes", "argv": ["true"]}}))


def test_a_member_in_doubt_that_no_driver_has_any_more_stays_in_doubt() -> None:
    """As a pod that was taken out of the cluster while its node did not answer."""
    found = match({NAME: PLACE}, {}, ["kubernetes"], 0.0, [0], {NAME})
    assert [(member.name, phase) for member, phase, *_ in found.held] == [(NAME, "stuck")]
    found = match({NAME: PLACE}, {}, ["kubernetes"], 0.0, [0])
    assert (found.held, found.withdrawn) == ([], [NAME])

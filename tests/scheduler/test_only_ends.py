"""What may wait a little for a request: news that members are over, of a few, and only where nobody waits for it."""

from __future__ import annotations

import pytest

from moorage.scheduler.core.events import ENDS_FACTS_MAX
from moorage.schemas.frames import FactKind
from tests.scheduler.driving import Driving

WHOLE: tuple[FactKind, ...] = ("claimed", "started", "exited", "freed")


def test_news_of_an_end_alone_may_wait_and_a_request_ends_that() -> None:
    driving = Driving()
    driving.worker("w", 8, auto=False)
    driving.submit("a", gpu={})
    driving.facts([(kind, "a", 0, 0, "") for kind in WHOLE], tick=False)
    assert driving.engine.only_ends
    driving.offer_submit("b")
    assert not driving.engine.only_ends
    assert driving.engine.submitted
    driving.tick()
    assert not driving.engine.only_ends
    assert not driving.engine.submitted


@pytest.mark.parametrize("kind", ["claimed", "started", "refused", "withdrawn"])
def test_any_other_news_waits_for_nothing(kind: FactKind) -> None:
    """A gang starts once all of it is claimed, and what is refused goes elsewhere."""
    driving = Driving()
    driving.worker("w", 8, auto=False)
    driving.submit("a", gpu={})
    driving.submit("b", gpu={})
    driving.facts([*((kind, "a", 0, 0, "") for kind in WHOLE), (kind, "b", 0, 0, "")], tick=False)
    assert not driving.engine.only_ends


def test_where_somebody_waits_for_room_an_end_waits_for_nothing() -> None:
    driving = Driving()
    driving.worker("w", 1, auto=False)
    driving.submit("a", gpu={})
    driving.submit("next", gpu={})
    driving.facts([(kind, "a", 0, 0, "") for kind in WHOLE], tick=False)
    assert not driving.engine.only_ends


def test_a_cancel_beside_it_and_much_of_it_wait_for_nothing() -> None:
    driving = Driving()
    driving.worker("w", 8, auto=False)
    driving.submit("a", gpu={})
    driving.facts([(kind, "a", 0, 0, "") for kind in WHOLE], tick=False)
    driving.offer_cancel("nobody")
    assert not driving.engine.only_ends
    many = Driving()
    many.worker("w", ENDS_FACTS_MAX, auto=False)
    for number in range(ENDS_FACTS_MAX // 4 + 1):
        many.submit(f"j{number}", gpu={})
    many.facts(
        [(kind, f"j{number}", 0, 0, "") for number in range(ENDS_FACTS_MAX // 4 + 1) for kind in WHOLE], tick=False
    )
    assert not many.engine.only_ends

"""The colours of tenants on the page: apart, and the same for whoever looks."""

from __future__ import annotations

from moorage.cli.page.templates import COLOURS, colours


def test_tenants_have_colours_of_their_own_while_there_are_enough() -> None:
    assert len(set(colours(["speech", "vision"]).values())) == 2, "their sums are alike"
    tenants = [f"t{number}" for number in range(COLOURS)]
    assert set(colours(tenants).values()) == {f"t{number}" for number in range(COLOURS)}
    assert colours(reversed(tenants)) == colours(tenants)
    assert len(colours([*tenants, "one-more"])) == COLOURS + 1

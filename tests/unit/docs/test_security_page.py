"""docs/explanation/security.md says of each role what a stolen key can do, with a test that shows the bound."""

from __future__ import annotations

import re
from typing import Final

from moorage.bus.site import Server, Site
from tests.named_tests import ROOT, left_out, missing

PAGE: Final = (ROOT / "docs/explanation/security.md").read_text()
SECTION: Final = PAGE.partition("## A stolen key, by role")[2].partition("\n## ")[0]
TESTS: Final = re.findall(r"`(tests/[^`]+::[^`]+)`", SECTION)
SITE: Final = Site(
    tenants=("t",),
    workers=("w",),
    operators=("o",),
    observers=("b",),
    callers=("t.c",),
    leaves={"l": Server("127.0.0.1")},
    pools={"p": 1},
)


def test_each_role_has_its_bounds_and_what_to_do_when_its_key_is_stolen() -> None:
    bounds, _, remedies = SECTION.partition("Then do this")
    assert SITE.system is not None
    roles = {identity.role for identity in (*SITE.identities, SITE.system)}
    for rows in (bounds, remedies):
        first = [row.split("|")[1] for row in rows.splitlines() if row.startswith("| `")]
        assert {role for cell in first for role in re.findall(r"`(\w+)`", cell)} == roles


def test_each_bound_names_a_test_that_exists_and_runs_in_ci() -> None:
    rows = [row for row in SECTION.partition("Then do this")[0].splitlines() if row.startswith("| `")]
    assert all(re.search(r"`tests/[^`]+` \|$", row) for row in rows)
    assert [why for test in TESTS if (why := missing(test))] == []
    assert [test for test in TESTS if left_out(test)] == []

"""Whose jobs they are."""

from __future__ import annotations

import pytest

from moorage.client import AsyncClient, Rejected
from moorage.client.tenant import find_tenant


def test_whose_jobs() -> None:
    assert find_tenant("a", {"MOORAGE_TENANT": "b"}) == "a"
    assert find_tenant(None, {"MOORAGE_TENANT": "b"}) == "b"
    assert find_tenant(None, {}) == "default"


async def test_a_tenant_is_checked() -> None:
    with pytest.raises(Rejected) as refused:
        AsyncClient(tenant="No.Such")
    assert refused.value.code == "invalid-argument"

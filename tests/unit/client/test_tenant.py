"""Whose jobs they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from moorage.client import AsyncClient, Rejected
from moorage.client.tenant import find_tenant


def test_whose_jobs() -> None:
    assert find_tenant("a", {"MOORAGE_TENANT": "b"}) == "a"
    assert find_tenant(None, {"MOORAGE_TENANT": "b"}) == "b"
    assert find_tenant(None, {}) == "default"


@pytest.mark.parametrize(
    ("inbox", "tenant"),
    [("submitter.vision", "vision"), ("operator.ana", "default"), ("service.vision", "default"), ("", "default")],
)
def test_without_a_name_the_tenant_is_that_of_the_contexts_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inbox: str, tenant: str
) -> None:
    folder = tmp_path / "nats" / "context"
    folder.mkdir(parents=True)
    prefix = f', "inbox_prefix": "_INBOX.{inbox}"' if inbox else ""
    (folder / "mine.json").write_text(f'{{"url": "nats://127.0.0.1:1"{prefix}}}')
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("MOORAGE_TENANT", raising=False)
    assert AsyncClient("mine").tenant == tenant
    assert AsyncClient("mine", tenant="speech").tenant == "speech"
    monkeypatch.setenv("NATS_CONTEXT", "mine")
    assert AsyncClient().tenant == tenant
    monkeypatch.setenv("MOORAGE_TENANT", "audio")
    assert AsyncClient().tenant == "audio"


async def test_a_tenant_is_checked() -> None:
    with pytest.raises(Rejected) as refused:
        AsyncClient(tenant="No.Such")
    assert refused.value.code == "invalid-argument"

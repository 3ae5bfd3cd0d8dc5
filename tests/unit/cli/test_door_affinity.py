"""What of a request of the door says to which member its call goes."""

from __future__ import annotations

from typing import Any

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from moorage.cli.door.server import _affinity, _named


@pytest.mark.parametrize(
    ("headers", "body", "key"),
    [
        ({}, b'{"model": "m"}', None),
        ({}, b'{"model": "m", "prompt_cache_key": "user-7"}', "user-7"),
        ({"x-moorage-affinity": "session"}, b'{"model": "m", "prompt_cache_key": "user-7"}', "session"),
        ({}, b'{"model": "m", "prompt_cache_key": ""}', None),
        ({}, b'{"model": "m", "prompt_cache_key": null}', None),
        ({}, b'{"model": "m", "prompt_cache_key": {"of": "no text"}}', None),
        ({"X-Moorage-Affinity": "x" * 1000}, b'{"model": "m"}', "x" * 512),
    ],
)
def test_the_header_or_openais_field_of_the_body_is_the_key(headers: dict[str, str], body: bytes, key: Any) -> None:
    given = CIMultiDictProxy(CIMultiDict(headers))
    assert _affinity(given, _named(body).prompt_cache_key) == key

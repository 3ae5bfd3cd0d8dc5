"""Reads the answers of a scheduler into structs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from moorage.client.answers import Explanation, FleetInfo, JobInfo, JobList
from moorage.client.errors import unread_answer

T = TypeVar("T", JobInfo, JobList, Explanation, FleetInfo)


def as_struct(kind: type[T], data: Mapping[str, Any]) -> T:
    """Return an answer's data as a struct. It lacks a request with fields that this release does not know, which is in
    `data`: requests are read strictly. Raises `ClientError` (`unread-answer`)."""
    try:
        return msgspec.convert({**data, "data": data}, kind)
    except msgspec.ValidationError as error:
        unread = error
    if "request" in data or "capabilities" in data:
        try:
            return msgspec.convert({**data, "request": None, "capabilities": None, "data": data}, kind)
        except msgspec.ValidationError as error:
            unread = error
    raise unread_answer(unread, data)

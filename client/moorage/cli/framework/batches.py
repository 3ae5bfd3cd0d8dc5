"""The texts of --batch, --queue and --sleep-by, which a request's flags and `moorage serve` take."""

from __future__ import annotations

from typing import Any

import msgspec

from moorage.cli.framework.arguments import lacks_unit
from moorage.client.durations import seconds
from moorage.client.errors import Rejected, rejected
from moorage.schemas.http_service import SLEEP_BY


def batch(text: str) -> dict[str, int]:
    """Return the batches of --batch, as the field of a request has them. Raises `Rejected`."""
    about = "--batch needs the most calls of a batch, and may say how long one waits for others"
    most, wait_s = _number_and_time(text, about, "for example --batch 32, or --batch 32,5ms")
    return {"most": most} | ({} if wait_s is None else {"wait_ms": round(wait_s * 1000)})


def queue(text: str) -> dict[str, Any]:
    """Return the waiting calls of --queue, as the field of a request has them. Raises `Rejected`."""
    about = "--queue needs the most calls that wait at a member, and may say how long"
    most, wait_s = _number_and_time(text, about, "for example --queue 200, or --queue 200,10s")
    return {"most": most} | ({} if wait_s is None else {"wait_s": wait_s})


def sleep_by(text: str) -> dict[str, Any]:
    """Return the requests of --sleep-by, as the field of a request has them. Raises `Rejected`."""
    if (known := SLEEP_BY.get(text)) is not None:
        return dict(msgspec.to_builtins(known))
    first, comma, then = text.partition(",/")
    if not first.startswith("/") or not comma:
        raise rejected(
            "invalid-argument", "--sleep-by needs an engine, or the requests that put it to sleep and wake it",
            found=text, allowed=f"{', '.join(SLEEP_BY)} or SLEEP,WAKE", next="for example --sleep-by /sleep,/wake_up",
        )  # fmt: skip
    return {"sleep": request(first), "wake": request(f"/{then}")}


def request(text: str) -> dict[str, str]:
    """Return a request of HTTP as the fields of a request have it: a path, and behind a space the JSON of its body.

    Raises `Rejected`.
    """
    path, _, body = text.partition(" ")
    try:
        msgspec.json.decode(body or "null")
    except msgspec.DecodeError as error:
        raise rejected("invalid-argument", f"the body of {path} is no JSON: {error}", found=body, next="") from None
    return {"path": path} | ({"body": body} if body else {})


def _number_and_time(text: str, about: str, example: str) -> tuple[int, float | None]:
    most, comma, wait = text.partition(",")
    if not (most.isascii() and most.isdigit()) or (comma and lacks_unit(wait)):
        raise rejected("invalid-argument", about, found=text, allowed="N or N,DURATION", next=example)
    try:
        return int(most[:8]), seconds(wait) if comma else None
    except Rejected as refused:
        option = about.partition(" ")[0]
        raise rejected("invalid-argument", f"{option}: {refused.problem.message}", found=text, next=example) from None

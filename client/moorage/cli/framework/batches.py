"""The text of --batch, which a request's flags and `moorage serve` take."""

from __future__ import annotations

from typing import Final

from moorage.cli.framework.arguments import lacks_unit
from moorage.client.durations import seconds
from moorage.client.errors import Rejected, rejected

_NEXT: Final = "for example --batch 32, or --batch 32,5ms"


def batch(text: str) -> dict[str, int]:
    """Return the batches of --batch, as the field of a request has them. Raises `Rejected`."""
    most, comma, wait = text.partition(",")
    if not (most.isascii() and most.isdigit()) or (comma and lacks_unit(wait)):
        raise rejected(
            "invalid-argument", "--batch needs the most calls of a batch, and may say how long one waits for others",
            found=text, allowed="N or N,DURATION", next=_NEXT,
        )  # fmt: skip
    try:
        return {"most": int(most[:8])} | ({"wait_ms": round(seconds(wait) * 1000)} if comma else {})
    except Rejected as refused:
        raise rejected("invalid-argument", f"--batch: {refused.problem.message}", found=text, next=_NEXT) from None

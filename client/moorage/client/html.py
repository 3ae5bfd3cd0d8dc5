"""What a notebook shows of a client's objects."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape


def table(title: str, rows: Mapping[str, str]) -> str:
    """Return a table of names and values, as HTML; rows without a value are left out."""
    cells = "".join(
        f"<tr><th style='text-align:left'>{escape(name)}</th><td>{escape(value)}</td></tr>"
        for name, value in rows.items()
        if value
    )
    return f"<table><caption>{escape(title)}</caption>{cells}</table>"

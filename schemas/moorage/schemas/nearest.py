"""Finds the known word that a misspelled one most likely means."""

from __future__ import annotations

from collections.abc import Iterable


def nearest(word: str, known: Iterable[str], ratio_min: float = 0.6) -> str:
    """Return the known word that is most similar, by difflib's ratio of 0..1; "" if none is similar enough."""
    import difflib  # only for who slipped: a one-shot command must be quick

    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=ratio_min)), "")

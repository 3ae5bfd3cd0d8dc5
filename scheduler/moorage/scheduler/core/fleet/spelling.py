"""Finds the model of the fleet that a request names in another spelling, as `a100_80gb` or `RTX4090`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from moorage.schemas.gpu import WHOLE_WORDS, bare_model, is_superchip, model_matches, nominal_mib

_WORD: Final = re.compile(r"[a-z0-9]+")
_GIGABYTES: Final = re.compile(r"(\d{1,5})g(?:i?b)?")
#: a word that can name a model by itself: letters, then a number
_MODEL: Final = re.compile(r"[a-z]+\d[a-z0-9]*")
_MODEL_WORD: Final = re.compile(r"(?=[^ ]*\d)[A-Za-z][A-Za-z0-9]*")


class Spelling(NamedTuple):
    """A model as the fleet's devices have it, and the nominal gigabytes that stood in the name (0: none)."""

    model: str
    gigabytes: int

    @property
    def words(self) -> str:
        return f"{self.model}:{self.gigabytes}G" if self.gigabytes else self.model


def spelled(pattern: str, devices: Iterable[tuple[str, int]]) -> Spelling | None:
    """Return how the fleet spells the model that `pattern` means; None if it means no model of the fleet.

    `devices` are names with their memory in MiB. Two spellings mean the same if they have the same letters and digits:
    another model is never returned, however near its name is.
    """
    words = _WORD.findall(bare_model(pattern).lower())
    size = next((int(found[1]) for word in words if (found := _GIGABYTES.fullmatch(word))), 0)
    words = [word for word in words if not _GIGABYTES.fullmatch(word)]
    names = [name for name, memory_mib in devices if memory_mib >= nominal_mib(size)]
    for name in names:
        if glued := _glued("".join(words), name):
            return Spelling(glued, size)
    for word in filter(_MODEL.fullmatch, words):
        for name in names:
            if model_matches(word, name) == WHOLE_WORDS:
                return Spelling(_as_in(word, name), size)
    return None


def _glued(wanted: str, name: str) -> str:
    """Return the words of a name that have the letters and digits of `wanted`, in its spelling; "" for none."""
    found = list(_WORD.finditer(name.lower()))
    for at, first in enumerate(found):
        text = ""
        for last in found[at:]:
            text += last[0]
            if text == wanted and any(map(str.isdigit, wanted)):
                return name[first.start() : last.end()]
            if not wanted.startswith(text):
                break
    return ""


def _as_in(word: str, name: str) -> str:
    at = name.lower().find(word)
    return name[at : at + len(word)]


def inside(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that have the model of `pattern` inside a word, which `~` in front of it would match."""
    wanted = bare_model(pattern)
    return [name for name in names if not is_superchip(name) and model_matches(f"~{wanted}", name)]


def short_name(device: str) -> str:
    """Return a device's name as users write it: `H100` for `NVIDIA H100 80GB HBM3`.

    If it contains no such word, its first 64 characters.
    """
    found = _MODEL_WORD.search(device)
    return found[0] if found is not None else device[:64]

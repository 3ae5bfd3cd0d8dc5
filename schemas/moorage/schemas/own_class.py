"""Loads the class that a setting names: one of moorage, one that an installed package offers, or `module:Class`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


def is_own(word: str) -> bool:
    """Return whether a word has the form `module:Class`, which names a class of the user's own."""
    return ":" in word


class NotOffered(ValueError):
    """Nothing has this name; `allowed` says which names there are."""

    def __init__(self, allowed: str) -> None:
        self.allowed = allowed
        super().__init__(f"allowed: {allowed}")


def place_of(word: str, built_in: Mapping[str, str], group: str) -> str:
    """Return the `module:Class` that a name stands for: in `built_in`, or as an installed package's entry point of this
    group. Raises NotOffered for a name that nobody has."""
    if word in built_in or is_own(word):
        return built_in.get(word, word)
    from importlib.metadata import entry_points  # imported late: it reads the metadata of every installed package

    offered = {point.name: point.value for point in entry_points(group=group)}
    if word not in offered:
        raise NotOffered(", ".join([*built_in, *sorted(offered), "module:Class of your own"]))
    return offered[word]


def own_class(word: str, base: type[T]) -> type[T]:
    """Import and return the class. Raises ValueError, with what to do, if the module or class does not exist, the
    import fails, or the class is not a subclass of `base`."""
    module, _, name = word.partition(":")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{word}: there is no module {error.name!r}; install it, or put its folder on PYTHONPATH"
        ) from None
    except Exception as error:  # whatever its own code raises
        raise ValueError(f"{word}: the module {module!r} failed: {type(error).__name__}: {error}") from error
    made = getattr(found, name, None)
    if not (isinstance(made, type) and issubclass(made, base)):
        what = "there is no such class" if made is None else f"it is no {base.__name__}"
        raise ValueError(f"{word}: {what}; name a class that builds on {base.__module__}.{base.__name__}")
    return made

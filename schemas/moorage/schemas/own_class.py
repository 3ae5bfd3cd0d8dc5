"""Loads a class of the user's own, which a setting names as `module:Class`: a ranker or a driver."""

from __future__ import annotations

import importlib
from typing import TypeVar

T = TypeVar("T")


def is_own(word: str) -> bool:
    """Return whether a word has the form `module:Class`, which names a class of the user's own."""
    return ":" in word


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

"""Items: what each replica of a sweep works on. Replica 7 has item 7, in its variables and in its command.

An item is a text, or has columns: `{"lr": 0.1, "seed": 3}`. A job's items are a list in its request, or a file among
the files that it brings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec

#: bytes of one item as UTF-8
ITEM_BYTES_MAX: Final = 32 * 1024
COLUMNS_MAX: Final = 256
#: bytes of one word of a command with the item in it: Linux starts no program with a longer one
WORD_BYTES_MAX: Final = 128 * 1024 - 1
#: the variable with the whole item, and the beginning of the names of those with its columns
VARIABLE: Final = "MOORAGE_ITEM"
#: stands in a command for the whole item
WHOLE: Final = "item"
#: the beginning of the warning about a placeholder that nothing fills
PLACEHOLDER: Final = "placeholder:"

#: how a file is divided into items
Format = Literal["lines", "csv", "jsonl"]

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_NAME_WORDS: Final = "1..64 letters, digits and _.-, no digit, dot or - first"
#: a brace that is written twice, or a name in braces; every other brace is one
_MARK: Final = re.compile(r"\{(?:(\{)|([A-Za-z_][A-Za-z0-9_.-]*)\})")
#: a word in which a name in braces is meant as a placeholder
_PLAIN: Final = re.compile(r"[\w./:=@,+{}-]+")


class ItemsFile(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """The file that has the items of a job, one for each replica number. Blank lines are no items."""

    file: str  # path in the job's files
    #: `lines`: each line is an item; `jsonl`: each line is JSON, whose keys are columns; `csv`: each row after the
    #: first is an item, and the first names its columns
    format: Format = "lines"


class Item(NamedTuple):
    """One item: its text, the texts of its columns by name, and its value.

    The value is any JSON value, of a row of CSV a mapping of texts. The text is that value as JSON, or the value itself
    if it is a text.
    """

    text: str
    columns: Mapping[str, str]
    value: Any

    @property
    def variables(self) -> dict[str, str]:
        """The variables of the replica that has this item."""
        return {VARIABLE: self.text} | {variable_of(name): text for name, text in self.columns.items()}


def variable_of(column: str) -> str:
    """Return the name of the variable with a column: of `learning-rate` it is MOORAGE_ITEM_LEARNING_RATE."""
    return f"{VARIABLE}_{re.sub('[.-]', '_', column).upper()}"


def item_of(value: Any) -> Item:
    """Return the item with this JSON value. Raises ValueError, as `must be ..., found ...`."""
    text = _text(value)
    columns = {name: _text(each) for name, each in value.items()} if isinstance(value, Mapping) else {}
    check_columns(columns)
    return checked(Item(text, columns, value))


def checked(item: Item) -> Item:
    """Return an item that has a size and characters which a variable can have. Raises ValueError."""
    size = len(item.text.encode(errors="surrogatepass"))
    if size > ITEM_BYTES_MAX:
        raise ValueError(f"must have at most {ITEM_BYTES_MAX} bytes, found {size}")
    for text in (item.text, *item.columns.values()):
        if "\0" in text:
            raise ValueError("must be text without NUL, found a NUL")
        if not text.isascii():
            _check_text(text)
    return item


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must be UTF-8, found half of a surrogate pair") from None


def check_columns(names: Sequence[str] | Mapping[str, str]) -> None:
    """Raise ValueError unless columns may have these names: each gives a variable of its own."""
    if len(names) > COLUMNS_MAX:
        raise ValueError(f"must have at most {COLUMNS_MAX} columns, found {len(names)}")
    variables: dict[str, str] = {}
    for name in names:
        if _NAME.fullmatch(name) is None:
            raise ValueError(f"must have columns named by {_NAME_WORDS}, found {name[:80]!r}")
        if (before := variables.get(variable_of(name))) is not None:
            raise ValueError(f"must have columns with variables of their own, found {before!r} and {name!r}")
        variables[variable_of(name)] = name


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def names_in(argv: Sequence[str]) -> Iterator[str]:
    """Yield the name of each `{column}` in a command, `item` for the whole item."""
    for word in argv:
        for found in _MARK.finditer(word):
            if found[2] is not None:
                yield found[2]


def unfilled(argv: Sequence[str]) -> str:
    """Return the first placeholder in the command of a job without items, which nothing fills; "" for none.

    Braces are common in shell and awk: but for `{item}`, only a name in a word without blanks and quotes counts.
    """
    for word in argv:
        for found in _MARK.finditer(word) if "{" in word else ():
            is_ours = found[2] == WHOLE or (found[2] and _PLAIN.fullmatch(word) is not None)
            if is_ours and word[found.start() - 1 : found.start()] != "$":
                return found[2]
    return ""


def missing(argv: Sequence[str], columns: Sequence[str] | Mapping[str, str]) -> str:
    """Return the first name in braces in a command that is neither `item` nor one of these columns; "" for none."""
    return next((name for name in names_in(argv) if name != WHOLE and name not in columns), "")


def no_column(name: str, columns: Sequence[str] | Mapping[str, str], which: str = "its item") -> str:
    """Return what is wrong with a command that names a column which an item has not."""
    has = f"has the columns {', '.join(columns)}" if columns else "has no columns"
    return f"argv names {{{name}}}, and {which} {has}: write {{{{{name}}} for braces"


def substituted(argv: Sequence[str], item: Item) -> list[str]:
    """Return a command with the item in place of `{item}`, its columns in place of `{column}`, and `{` of `{{`.

    Raises ValueError for a name that is no column, and for a word that becomes too long.
    """
    if name := missing(argv, item.columns):
        raise ValueError(no_column(name, item.columns))
    texts = {WHOLE: item.text, **item.columns}
    words = []
    for word in argv:
        size = len(word.encode(errors="surrogatepass"))
        for name in names_in((word,)):
            size += len(texts[name].encode()) - len(name) - 2
        if size > WORD_BYTES_MAX:
            raise ValueError(
                f"a word of the command has {size} bytes with the item in it; {WORD_BYTES_MAX} is the most"
            )
        words.append(_MARK.sub(lambda found: "{" if found[1] else texts[found[2]], word))
    return words

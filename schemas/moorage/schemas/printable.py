"""Text from others, made safe to show: a terminal obeys control characters, and log files are read on terminals.

Names that have rules (see `names`) need none of this. Labels, reasons, device and process names are free text on the
wire: nothing is refused for how it would look, so what shows it has to escape it.
"""

from __future__ import annotations

from typing import Final

#: all but the tab and the end of a line: control characters, and those that turn the direction of what follows
_OF_TEXT: Final = {
    **{at: f"\\x{at:02x}" for at in (*range(9), *range(11, 32), *range(127, 160))},
    **{at: f"\\u{at:04x}" for at in (0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))},
}
_OF_LINE: Final = {**_OF_TEXT, ord("\t"): "\\t", ord("\n"): "\\n"}


def shown(text: str) -> str:
    """Return the text with line ends and tabs kept and its other control characters shown as escapes."""
    return text if text.isprintable() else text.translate(_OF_TEXT)


def stripped(text: str, most: int) -> str:
    """Return the printable ones of at most so many characters of the text: for names and short words."""
    return "".join(char for char in text[:most] if char.isprintable())


def carried(text: str) -> str:
    """Return the text as a frame can carry it: what is not UTF-8 in it, as in some file names, becomes `\\udcff`."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def in_one_line(text: str) -> str:
    """Return the text as `shown` does, but on one line, so that no part of it looks like another entry of a log."""
    return text if text.isprintable() else text.translate(_OF_LINE)


def shortened(text: str, most: int) -> str:
    """Return at most so many characters of the text; a long one has `…` in its middle, as its end may be the advice."""
    if len(text) <= most:
        return text
    tail = min(most - 1, most * 2 // 5)
    return f"{text[: most - 1 - tail]}…{text[len(text) - tail :]}"

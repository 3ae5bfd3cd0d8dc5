"""The exceptions that msgspec raises for bytes that do not decode as a type: some are not its own."""

from __future__ import annotations

from typing import Final

import msgspec

#: Text in msgpack that is no UTF-8 is a UnicodeDecodeError (a ValueError), nesting without end a RecursionError.
UNREADABLE: Final = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError)

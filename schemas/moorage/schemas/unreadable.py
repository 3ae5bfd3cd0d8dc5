"""What bytes that are not of the type asked for raise in msgspec: more than its own errors."""

from __future__ import annotations

from typing import Final

import msgspec

#: Text in msgpack that is no UTF-8 is a UnicodeDecodeError (a ValueError), nesting without end a RecursionError.
UNREADABLE: Final = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError)

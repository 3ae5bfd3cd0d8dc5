"""The values of calls: data as bytes with the headers that say what they are, and answers read again."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from moorage.bus.transport import Delivery
from moorage.client.errors import CallFailed, client_problem, rejected
from moorage.schemas.arrays import ARRAY, decoded_array, encoded_array, plain_number
from moorage.schemas.handler import NOT_FINITE, Result, decode_result, is_json, null_place
from moorage.schemas.service import CONTENT_TYPE
from moorage.schemas.unreadable import UNREADABLE

_encode: Final = msgspec.json.Encoder(enc_hook=plain_number).encode


def encoded(data: Any) -> tuple[bytes, dict[str, str]]:
    """Return a call's data as bytes, with the headers that say what they are; none for bytes. Raises `Rejected`."""
    if data is None:
        return b"", {}
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(data), {}
    try:
        if isinstance(data, str):
            return data.encode(), {CONTENT_TYPE: "text/plain; charset=utf-8"}
        if (array := encoded_array(data)) is not None:
            return array[0], {CONTENT_TYPE: "application/octet-stream", ARRAY: array[1]}
        encoded = _encode(data)
        if place := null_place("data", data, encoded):
            raise ValueError(f"{place} is {NOT_FINITE}")
        return encoded, {CONTENT_TYPE: "application/json"}
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise rejected(
            "invalid-argument",
            f"the data of a call are neither bytes nor text nor JSON: {error}",
            found=type(data).__name__,
            next="send bytes, or what JSON can hold",
        ) from None


class Reads:
    """How the values of an answer are read: as what their content type says, as the type that they are to be, or
    `raw`."""

    __slots__ = ("_decode", "_returns", "raw")

    def __init__(self, returns: Any = None, *, raw: bool = False) -> None:
        """Raises TypeError for a type that nothing can be read as, before anything is sent."""
        self._returns = returns
        self._decode = None if returns is None else msgspec.json.Decoder(returns).decode
        self.raw = raw

    def value(self, delivery: Delivery) -> Any:
        """Return the value of an answer that is no error. Raises CallFailed."""
        if self.raw:
            return delivery.data
        headers = delivery.headers or {}
        kind = headers.get(CONTENT_TYPE, "")
        try:
            if (array := headers.get(ARRAY)) is not None:
                return self.converted(decoded_array(delivery.data, array))
            if self._decode is not None and is_json(kind):
                return self._decode(delivery.data)
            return self.converted(decode_result(Result(kind, delivery.data)))
        except msgspec.ValidationError as error:
            raise self._of_another_type(error) from None
        except UNREADABLE as error:
            raise CallFailed(client_problem("call-failed", f"the answer is not {kind}: {error}")) from None

    def converted(self, value: Any) -> Any:
        """Return a value that was read as the type that it is to be. Raises CallFailed."""
        try:
            return value if self._returns is None else msgspec.convert(value, self._returns)
        except msgspec.ValidationError as error:
            raise self._of_another_type(error) from None

    def _of_another_type(self, error: msgspec.ValidationError) -> CallFailed:
        name = getattr(self._returns, "__name__", None) or str(self._returns)
        return CallFailed(
            client_problem(
                "call-failed",
                f"the answer is no {name}: {error}",
                next_step="give returns= the type that the service's function returns, or leave it out",
            )
        )


#: reads an answer as what it says that it is
ANY: Final = Reads()

"""How a new machine asks for a key of its own, by a join token, on `moorage.join.<pool>`; and how it is answered.

The token is an nkey, with which the machine signs what it asks: so its secret is in no frame. A key that was made ahead
is answered sealed, for this machine alone; one that is signed now is a JWT of the machine's own key, and no secret.
"""

from __future__ import annotations

from typing import Final

import msgspec

from moorage.schemas.codec import Decoder
from moorage.schemas.errors import Problem

HOST_CHARS_MAX: Final = 64


class JoinAsk(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="join-ask"):
    """A machine asks for a key. Asked again with the same `seal`, it gets the same worker, and no use counts."""

    token: str  # public nkey of the join token
    public: str  # public nkey of the machine, for a site that signs keys
    seal: str  # its X25519 public key, in base64: what is secret in the answer is sealed for it
    gpus: int  # GPUs that it has
    host: str = ""  # its own name, for the list of uses
    signature: str = ""  # by the token's key, in base64, of `signed`

    @property
    def signed(self) -> bytes:
        return "\n".join((self.token, self.public, self.seal, str(self.gpus), self.host)).encode()


class JoinGiven(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="join-given"):
    """The answer: the worker's id and its key, as one of the two forms."""

    worker: str
    sealed: str = ""  # seed of an nkey that the servers know, sealed, in base64
    jwt: str = ""  # of the machine's own key


decode_ask: Final[Decoder[JoinAsk]] = Decoder(JoinAsk)
decode_given: Final[Decoder[JoinGiven | Problem]] = Decoder(JoinGiven | Problem)

"""Join tokens: the secret that a new machine has, what it signs with that, and the keys that are given for it.

A token is one line of JSON in a private file. `nkeys` and the library below it do what is cryptography here.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import secrets
import socket
import time
from pathlib import Path
from typing import Any, Final

import msgspec
import nacl.exceptions
import nacl.public
import nacl.signing
import nkeys

from moorage.bus.connection import connect
from moorage.bus.contexts import Context, load_context
from moorage.bus.errors import NoResponders, RequestTimeout
from moorage.schemas.codec import encode
from moorage.schemas.errors import Problem, Refused, refuse
from moorage.schemas.joining import HOST_CHARS_MAX, JoinAsk, JoinGiven, decode_given
from moorage.schemas.roles import Rights, inbox, pool_inbox
from moorage.schemas.subjects import PREFIX_DEFAULT, Subjects

#: a token's file is read as far as this
TOKEN_BYTES_MAX: Final = 65_536
#: how long a joiner is waited for, and how long for one answer, in seconds
JOIN_S_MAX: Final = 60.0
ANSWER_S: Final = 5.0
#: a machine asks again so much later
AGAIN_S: Final = 1.0
_PUBLIC_BYTES: Final = slice(1, 33)


class JoinToken(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="join-token"):
    """A join token with all that a machine needs to ask by it. The whole of it is a secret."""

    url: str
    pool: str
    seed: str  # of the token's own nkey
    nkey: str = ""  # seed of the pool's user, by which it connects; or
    creds: str = ""  # that user's creds
    ca: str = ""  # the authority of the servers' certificates, PEM
    prefix: str = PREFIX_DEFAULT


def new_key() -> tuple[str, str]:
    """Return the seed and the public key of a new user."""
    seed = nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_USER).decode()
    return seed, public_of(seed)


def public_of(seed: str) -> str:
    return str(nkeys.from_seed(bytearray(seed.encode())).public_key.decode())


def sign(seed: str, data: bytes) -> bytes:
    signature: bytes = nkeys.from_seed(bytearray(seed.encode())).sign(data)
    return signature


def is_signed(ask: JoinAsk) -> bool:
    """Return whether the holder of the token that an ask names has signed it."""
    try:
        key = nacl.signing.VerifyKey(base64.b32decode(ask.token)[_PUBLIC_BYTES])
        key.verify(ask.signed, base64.b64decode(ask.signature))
    except (ValueError, TypeError, nacl.exceptions.CryptoError):
        return False
    return True


def seal(seed: str, public: str) -> str:
    """Return a secret key for the holder of this X25519 key alone. Raises ValueError for one that is none."""
    try:
        box = nacl.public.SealedBox(nacl.public.PublicKey(base64.b64decode(public)))
    except (TypeError, nacl.exceptions.CryptoError) as error:
        raise ValueError(f"seal is no X25519 key: {error}") from None
    return base64.b64encode(box.encrypt(seed.encode())).decode()


def user_jwt(issuer_seed: str, account: str, public: str, name: str, may: Rights, until_s: int = 0) -> str:
    """Return the JWT (NATS ADR-14) of a user with these rights, signed by a key of its account.

    `account` is the account's public key, where the issuer is one of its signing keys. `until_s` is when it ends, in
    seconds since the epoch; 0 is never.
    """
    claims: dict[str, Any] = {"subs": -1, "data": -1, "payload": -1, "type": "user", "version": 2}
    for verb, allowed, denied in (("pub", may.publish, may.refused), ("sub", may.subscribe, may.unheard)):
        claims[verb] = ({"allow": list(allowed)} if allowed else {"deny": [">"]}) | (
            {"deny": list(denied)} if denied else {}
        )
    if may.answers:
        claims["resp"] = {"max": may.answers, "ttl": 60_000_000_000}
    issuer = public_of(issuer_seed)
    if account and account != issuer:
        claims["issuer_account"] = account
    body: dict[str, Any] = {"iat": int(time.time()), "iss": issuer, "name": name, "sub": public, "nats": claims}
    if until_s:
        body["exp"] = until_s
    body["jti"] = base64.b32encode(hashlib.sha256(msgspec.json.encode(body)).digest()).decode().rstrip("=")
    text = ".".join(map(_encoded, (b'{"typ":"JWT","alg":"ed25519-nkey"}', msgspec.json.encode(body))))
    return f"{text}.{_encoded(sign(issuer_seed, text.encode()))}"


def creds_of(jwt: str, seed: str) -> str:
    """Return the text of a creds file."""
    return (
        f"-----{'BEGIN'} NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
        f"-----{'BEGIN'} USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    )


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def read_token(text: bytes, where: str) -> JoinToken:
    """Return the token in a file. Raises Refused, which names nothing of it."""
    try:
        token = msgspec.json.decode(text, type=JoinToken)
        public_of(token.seed)
    except Exception:  # nkeys and msgspec name parts of what they refuse
        raise refuse(
            "invalid-argument", f"{where} holds no join token", found=where,
            next="on a machine with the site's folder: moorage admin token SITE pool=NAME > FILE",
        ) from None  # fmt: skip
    return token


async def join(file: Path, folder: Path, gpus: int) -> tuple[str, Context]:
    """Return the worker's id and its context; ask for its key by the token in `file`, unless `folder` has it already.

    Raises Refused, MoorageError of the connection, OSError.
    """
    if not (folder / _ID).exists():
        text = _read_private(file)
        await _ask(read_token(text, str(file)), folder, gpus)
    worker = (folder / _ID).read_text(encoding="utf-8").strip()
    return worker, load_context("worker", {"XDG_CONFIG_HOME": str(folder)})


_ID: Final = "worker.id"


def _read_private(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            text = opened.read(TOKEN_BYTES_MAX)
    except OSError as error:
        raise refuse(
            "failed-precondition",
            f"the join token cannot be read: {file}: {error.strerror}",
            found=str(file),
            next="bring the file that moorage admin token wrote to this machine, and name it with --join",
        ) from None
    if mode & 0o077 and file.is_file():
        raise refuse(
            "failed-precondition",
            f"others than its owner may read the join token {file}",
            found=oct(mode & 0o777),
            allowed="0600",
            next=f"chmod 600 {file}; if somebody may have read it: moorage admin token SITE --revoke ID",
        )
    return text


async def _ask(token: JoinToken, folder: Path, gpus: int) -> None:
    from moorage.system.private_files import replace_private

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / "nats/context").mkdir(mode=0o700, parents=True, exist_ok=True)
    ca = folder / "ca.pem"
    if token.ca:
        replace_private(ca, token.ca)
    if token.creds:
        replace_private(folder / "pool.creds", token.creds)
    where = Context(
        source="the join token", url=token.url, ca=str(ca) if token.ca else "", inbox_prefix=pool_inbox(token.pool),
        user_seed=token.nkey, creds=str(folder / "pool.creds") if token.creds else "",
    )  # fmt: skip
    box, (seed, public) = nacl.public.PrivateKey.generate(), new_key()
    ask = JoinAsk(
        token=public_of(token.seed),
        public=public,
        seal=base64.b64encode(bytes(box.public_key)).decode(),
        gpus=gpus,
        host=socket.gethostname()[:HOST_CHARS_MAX],
    )
    ask = msgspec.structs.replace(ask, signature=base64.b64encode(sign(token.seed, ask.signed)).decode())
    given = await _answer(where, Subjects(token.prefix).join(token.pool), encode(ask))
    fields = {
        "description": f"worker {given.worker}, by a join token of pool {token.pool}",
        "url": token.url,
        "inbox_prefix": inbox("worker", given.worker),
    }
    if token.ca:
        fields["ca"] = str(ca)
    if given.jwt:
        replace_private(folder / "worker.creds", creds_of(given.jwt, seed))
        fields["creds"] = str(folder / "worker.creds")
    else:
        replace_private(folder / "worker.nk", nacl.public.SealedBox(box).decrypt(base64.b64decode(given.sealed)))
        fields["nkey"] = str(folder / "worker.nk")
    replace_private(folder / "nats/context/worker.json", msgspec.json.encode(fields))
    (folder / "pool.creds").unlink(missing_ok=True)
    replace_private(folder / _ID, given.worker)


async def _answer(where: Context, subject: str, ask: bytes) -> JoinGiven:
    """Return the joiner's answer, which is waited for a minute. Raises Refused, MoorageError."""
    until_s = time.monotonic() + JOIN_S_MAX
    async with await connect(where, "moorage worker, to join", give_up_after_s=JOIN_S_MAX) as connection:
        while True:
            try:
                answer = decode_given((await connection.request(subject, ask, ANSWER_S)).data)
            except (RequestTimeout, NoResponders):
                if time.monotonic() > until_s:
                    raise refuse(
                        "failed-precondition", "no joiner answers: this machine has no key yet", found=subject,
                        next="start one on a machine with the site's folder: moorage admin joiner SITE",
                    ) from None  # fmt: skip
                await asyncio.sleep(AGAIN_S)
                continue
            if isinstance(answer, Problem) and answer.retry_after_s is not None and time.monotonic() < until_s:
                await asyncio.sleep(answer.retry_after_s)
                continue
            if isinstance(answer, Problem):
                raise Refused(answer)
            return answer

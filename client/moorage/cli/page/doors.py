"""Who may look, and who may act: a link with a secret, or a proxy that names who asks; and a token against requests
that other pages make a browser send."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from collections.abc import Collection
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

COOKIE: Final = "moorage-page"
#: a browser is known for so long
KEPT_S: Final = 30 * 86_400
#: names under which a browser on this machine reaches what listens on loopback alone
LOCAL_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})
NAME_CHARS_MAX: Final = 64


def new_key() -> str:
    """Return a secret for the link, too long to be guessed."""
    return secrets.token_urlsafe(24)


class Doors:
    """The rules for one server. `key` is the secret, and `proxies` are the addresses that may name who asks, in the
    header `header`. With `local` it listens on loopback alone."""

    def __init__(self, key: str, proxies: Collection[str], header: str, *, local: bool) -> None:
        self._proxies = frozenset(map(ipaddress.ip_address, proxies))
        self._header = header
        self._local = local
        #: what the link has that the command prints
        self.key: Final = key

    def is_rebound(self, request: Request) -> bool:
        """Return whether a page from elsewhere asks under a name of its own, which it lets point to this machine."""
        return self._local and not self._proxies and request.url.hostname not in LOCAL_NAMES

    def name(self, request: Request) -> str:
        """Return who asks, as a trusted proxy says; "" if none does."""
        peer = request.client.host if request.client is not None else ""
        try:
            trusted = ipaddress.ip_address(peer) in self._proxies
        except ValueError:
            return ""
        name = request.headers.get(self._header, "") if trusted else ""
        return name if len(name) <= NAME_CHARS_MAX and name.isprintable() else ""

    def may_enter(self, request: Request) -> bool:
        """Return whether this request may see what is not public."""
        return bool(self.name(request)) or self._session(request) is not None

    def opens(self, request: Request) -> bool:
        """Return whether the request has the secret of the link."""
        return hmac.compare_digest(request.query_params.get("key", "").encode(), self.key.encode())

    def let_in(self, request: Request, response: Response) -> None:
        """Give a browser the cookie by which it is known for as long as the secret is the same."""
        nonce = secrets.token_urlsafe(18)
        signed = f"{nonce}.{self._signed('session', nonce)}"
        response.set_cookie(_cookie(request), signed, max_age=KEPT_S, httponly=True, samesite="strict")

    def token(self, request: Request) -> str:
        """Return the token that a form of this browser, or of this name behind the proxy, has to have."""
        return self._signed("form", self._session(request) or f"name {self.name(request)}")

    def may_act(self, request: Request, token: str) -> bool:
        """Return whether an act came from a form that this server made for the one who sends it."""
        origin = request.headers.get("origin")
        same = origin is None or origin.partition("://")[2] == request.headers.get("host")
        entered = self.may_enter(request)
        return same and entered and hmac.compare_digest(token.encode(), self.token(request).encode())

    def _session(self, request: Request) -> str | None:
        nonce, _, signed = request.cookies.get(_cookie(request), "").partition(".")
        is_ours = bool(nonce) and hmac.compare_digest(signed.encode(), self._signed("session", nonce).encode())
        return nonce if is_ours else None

    def _signed(self, what: str, value: str) -> str:
        return hmac.new(self.key.encode(), f"{what} {value}".encode(), "sha256").hexdigest()


def _cookie(request: Request) -> str:
    """Return the name of the cookie. It has the port, because a browser sends a host's cookies to all of its ports."""
    port = request.headers.get("host", "").rpartition(":")[2]
    return f"{COOKIE}-{port}" if port.isascii() and port.isdecimal() else COOKIE

"""Who may look, and who may act: a link with a secret, or a proxy that names who asks; and a token against requests
that other pages make a browser send."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import time
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response

from moorage.cli.page.secret import Secret

COOKIE: Final = "moorage-page"
#: a browser is known for so long, in seconds
KEPT_S: Final = 30 * 86_400
#: names under which a browser on this machine reaches what listens on loopback alone
LOCAL_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})
NAME_CHARS_MAX: Final = 64
#: the header in which a trusted proxy sends the secret that it shares with the page
PROXY_HEADER: Final = "X-Moorage-Proxy"


class Proxy(NamedTuple):
    """A proxy that may name who asks, in the header `header`. It asks from one of `addresses`, and proves itself by the
    secret: on a host with jobs and other users, everybody asks from the same address."""

    addresses: frozenset[ipaddress.IPv4Address | ipaddress.IPv6Address]
    header: str
    secret: Secret

    def has_sent(self, request: Request) -> bool:
        """Return whether the request came through this proxy."""
        peer = request.client.host if request.client is not None else ""
        shown = request.headers.get(PROXY_HEADER, "").encode()
        try:
            is_there = ipaddress.ip_address(peer) in self.addresses
        except ValueError:
            return False
        return is_there and hmac.compare_digest(shown, self.secret.key.encode())


class Doors:
    """The rules for one server. `public` is the URL under which browsers reach it behind a proxy, "" without one. With
    `local` it listens on loopback alone."""

    def __init__(self, secret: Secret, proxy: Proxy | None = None, public: str = "", *, local: bool) -> None:
        self._secret = secret
        self._proxy = proxy
        self._public = urlsplit(public)
        self._local = local

    @property
    def key(self) -> str:
        """What the link has that the command prints."""
        return self._secret.key

    def renewed(self) -> bool:
        """Take the secrets that their files have now. Returns whether links and cookies of before are void."""
        if self._proxy is not None:
            self._proxy.secret.renewed()
        return self._secret.renewed()

    @property
    def names(self) -> str:
        """The hosts under which it answers, for people."""
        public = [self._public.netloc] if self._public.netloc else []
        return " and ".join(public + (["127.0.0.1", "localhost"] if self._local else ["its own addresses"]))

    def is_rebound(self, request: Request) -> bool:
        """Return whether a page from elsewhere asks under a name of its own, which it lets point to this machine."""
        if not self._local and not self._public.netloc:
            return False
        host = _host(request)
        is_own = host in LOCAL_NAMES if self._local else _is_address(host)
        return not is_own and host != self._public.hostname

    def name(self, request: Request) -> str:
        """Return who asks, as a trusted proxy says; "" if none does."""
        if self._proxy is None or not self._proxy.has_sent(request):
            return ""
        name = request.headers.get(self._proxy.header, "")
        return name if len(name) <= NAME_CHARS_MAX and name.isprintable() else ""

    def may_enter(self, request: Request) -> bool:
        """Return whether this request may see what is not public."""
        return bool(self.name(request)) or self._session(request) is not None

    def opens(self, request: Request) -> bool:
        """Return whether the request has the secret of the link."""
        return hmac.compare_digest(request.query_params.get("key", "").encode(), self.key.encode())

    def let_in(self, request: Request, response: Response) -> None:
        """Give a browser the cookie by which it is known for as long as the secret is the same."""
        session = f"{secrets.token_urlsafe(18)}:{int(time.time())}"
        signed = f"{session}.{self._signed('session', session)}"
        response.set_cookie(
            _cookie(request), signed, max_age=KEPT_S, httponly=True, samesite="strict", secure=self._by_tls(request)
        )

    def token(self, request: Request) -> str:
        """Return the token that a form of this browser, or of this name behind the proxy, has to have."""
        return self._signed("form", self._session(request) or f"name {self.name(request)}")

    def may_act(self, request: Request, token: str) -> bool:
        """Return whether an act came from a form that this server made for the one who sends it."""
        origin = request.headers.get("origin")
        here = request.headers.get("host"), self._public.netloc
        same = origin is None or origin.partition("://")[2] in here
        entered = self.may_enter(request)
        return same and entered and hmac.compare_digest(token.encode(), self.token(request).encode())

    def _session(self, request: Request) -> str | None:
        session, _, signed = request.cookies.get(_cookie(request), "").partition(".")
        began = session.rpartition(":")[2]
        if not hmac.compare_digest(signed.encode(), self._signed("session", session).encode()) or not began.isdecimal():
            return None
        return session if time.time() < int(began) + KEPT_S else None

    def _by_tls(self, request: Request) -> bool:
        """Return whether the browser speaks TLS with a proxy in front: the cookie then never goes without it."""
        if self._public.scheme != "https":
            return False
        return _host(request) == self._public.hostname or bool(self._proxy and self._proxy.has_sent(request))

    def _signed(self, what: str, value: str) -> str:
        return hmac.new(self.key.encode(), f"{what} {value}".encode(), "sha256").hexdigest()


def _host(request: Request) -> str:
    """Return the host that the browser asked, as it says; "" for what is none. `request.url` has the server's own
    address then."""
    try:
        return urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
    except ValueError:
        return ""


def _is_address(host: str) -> bool:
    try:
        return bool(ipaddress.ip_address(host))
    except ValueError:
        return False


def _cookie(request: Request) -> str:
    """Return the name of the cookie. It has the port, because a browser sends a host's cookies to all of its ports."""
    port = request.headers.get("host", "").rpartition(":")[2]
    return f"{COOKIE}-{port}" if port.isascii() and port.isdecimal() else COOKIE

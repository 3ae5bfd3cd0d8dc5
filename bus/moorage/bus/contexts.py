"""Find the server's address and the user's credentials: `nats` contexts, environment variables, plain URLs.

Layout as the `nats` tool writes it: `$XDG_CONFIG_HOME/nats/context/<name>.json` (default `~/.config`), with the
selected name in `$XDG_CONFIG_HOME/nats/context.txt`. nats-py reads none of it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import ssl
from codecs import BOM_UTF8
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import msgspec

from moorage.bus.errors import BadContext, BadSubject
from moorage.bus.framing import INBOX_PREFIX_DEFAULT, check_subject
from moorage.schemas.nearest import nearest

CONTEXT_VARIABLE: Final = "NATS_CONTEXT"
URL_VARIABLE: Final = "NATS_URL"
#: names the inbox of who logs in without a context's file, as `_INBOX.submitter.vision`
INBOX_VARIABLE: Final = "MOORAGE_INBOX_PREFIX"
#: the sources of contexts that no file or variable names
ARGUMENT: Final = "argument"
DEFAULT: Final = "default"
URL_DEFAULT: Final = "nats://127.0.0.1:4222"
#: Bytes of a context file; more is no context.
CONTEXT_BYTES_MAX: Final = 64 * 1024
SCHEMES: Final = ("nats", "tls", "ws", "wss")
_HIDDEN: Final = "***"
_ESCAPES: Final = "in a password / ? # , @ [ ] and % are written %2F %3F %23 %2C %40 %5B %5D %25"
#: in the lines before the two keys of a file of credentials
_JWT_MARK: Final = "BEGIN NATS USER JWT"
_SEED_MARK: Final = "BEGIN USER NKEY SEED"
_NAME: Final = re.compile(r"[^\s/\\]{1,256}")
#: Settings of a context that change how one connects and that we do not know: ignoring them would connect wrongly.
_UNSUPPORTED: Final = {
    "nsc": "export the credentials to a file and set creds",
    "socks_proxy": "connect without a proxy",
    "windows_cert_store": "use cert, key and ca files",
    "windows_cert_match": "use cert, key and ca files",
}


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """A way to connect to NATS. `source` says where it was found, for `doctor` and errors; the repr hides secrets.

    `creds`, `nkey`, `cert`, `key` and `ca` are paths of files. `url` may be several URLs, separated by commas.
    """

    name: str = ""
    source: str = ""
    url: str = URL_DEFAULT
    user: str = ""
    password: str = ""
    token: str = ""
    creds: str = ""
    nkey: str = ""
    user_jwt: str = ""
    user_seed: str = ""
    cert: str = ""
    key: str = ""
    ca: str = ""
    tls_first: bool = False
    inbox_prefix: str = INBOX_PREFIX_DEFAULT
    jetstream_domain: str = ""
    jetstream_api_prefix: str = ""

    @property
    def servers(self) -> list[str]:
        """The URLs, each with its scheme (nats:// if none is given)."""
        parts = [part.strip() for part in self.url.split(",") if part.strip()]
        return [part if "://" in part else f"nats://{part}" for part in parts]

    @property
    def safe_url(self) -> str:
        """The URLs without user, password and token, fit for logs and screens."""
        return ",".join(_without_secrets(server) for server in self.servers)

    @property
    def where(self) -> str:
        """The URLs without secrets and where they were found, for errors: `nats://h:4222 (from NATS_URL)`."""
        found = {"": "as given", ARGUMENT: "as given", DEFAULT: "the default"}.get(self.source, f"from {self.source}")
        return f"{self.safe_url} ({found})"

    @property
    def login(self) -> tuple[str, str, str]:
        """User, password and token, each "" where there is none: the context's own, else what the URLs say.

        A user of the context without a password is left out. They are for every server, also for one that another has
        told of: its address has no password in it. Where URLs say different ones, each is for its own server, and all
        are "" here.
        """
        if self.user and self.password:
            return self.user, self.password, ""
        if self.token:
            return "", "", self.token
        parts = [urlsplit(server) for server in self.servers]
        said = {(each.username, each.password) for each in parts if each.username}
        if len(said) != 1:
            return "", "", ""
        user, password = said.pop()
        who = unquote(user or "")
        return ("", "", who) if password is None else (who, unquote(password), "")

    @property
    def has_login(self) -> bool:
        """Whether the user shows who it is, in any way."""
        keys = self.creds, self.nkey, self.cert, self.user_jwt, self.user_seed
        return any(self.login) or any(keys) or any("@" in server for server in self.servers)

    @property
    def api_prefix(self) -> str:
        """The prefix of the JetStream API's subjects, without a final dot (NATS ADR-17 for domains)."""
        if self.jetstream_api_prefix:
            return self.jetstream_api_prefix.rstrip(".")
        return f"$JS.{self.jetstream_domain}.API" if self.jetstream_domain else "$JS.API"

    @property
    def encrypts(self) -> bool:
        """Whether nothing is sent to a server but under TLS."""
        return bool(self.ca or self.cert or self.tls_first) or any(s.startswith(("tls:", "wss:")) for s in self.servers)

    def tls(self) -> ssl.SSLContext | None:
        """Return the TLS settings, or None if the context has none. Raises `BadContext` for files that do not load."""
        if not self.encrypts:
            return None
        try:
            tls = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=self.ca or None)
        except (OSError, ssl.SSLError) as error:
            raise BadContext(
                f"ca {self.ca} does not load: {error}", key="ca", next_step="point ca at a PEM file"
            ) from None
        if self.cert:
            try:
                tls.load_cert_chain(self.cert, self.key or None)
            except (OSError, ssl.SSLError) as error:
                raise BadContext(
                    f"cert {self.cert} or key {self.key} does not load: {error}",
                    key="cert",
                    next_step="point cert and key at a matching PEM pair",
                ) from None
        return tls

    def check_login(self) -> None:
        """Raise `BadContext` for a key that cannot be one: an empty, damaged or missing file of `nkey` or `creds`, or
        such a `user_seed`. Nothing of the key is in the message."""
        if self.creds:
            text = _read_key("creds", self.creds)
            if not _line_behind(_JWT_MARK, text):
                raise _damaged("creds", self.creds, "it holds no JWT of a user")
            _check_seed("creds", self.creds, _line_behind(_SEED_MARK, text))
        elif self.user_jwt:
            _check_seed("user_seed", "", self.user_seed)
        elif self.nkey:
            _check_seed("nkey", self.nkey, _read_key("nkey", self.nkey))
        elif self.user_seed:
            _check_seed("user_seed", "", self.user_seed)

    def __repr__(self) -> str:
        shown = [f"name={self.name!r}", f"source={self.source!r}", f"url={self.safe_url!r}"]
        for field in ("user", "creds", "nkey", "cert", "key", "ca", "inbox_prefix", "jetstream_domain"):
            if value := getattr(self, field):
                shown.append(f"{field}={value!r}")
        for secret in ("password", "token", "user_jwt", "user_seed"):
            if getattr(self, secret):
                shown.append(f"{secret}={_HIDDEN}")
        return f"Context({', '.join(shown)})"

    __str__ = __repr__

    def __rich_repr__(self) -> Any:
        yield repr(self)


def _read_key(key: str, path: str) -> str:
    """Return the text of a key's file. Raises `BadContext`."""
    try:
        with open(path, "rb") as opened:
            return opened.read(CONTEXT_BYTES_MAX).decode("ascii", errors="replace")
    except OSError as error:
        raise BadContext(
            f"{key} {path} cannot be read: {error.strerror}", key=key, next_step="check the path and its permissions"
        ) from None


def _line_behind(mark: str, text: str) -> str:
    """Return the line behind that with `mark`, as nats-py reads a file of credentials; "" if there is none."""
    _, _, rest = text.partition(mark)
    return "".join(rest.splitlines()[1:2]).strip()


def _check_seed(key: str, path: str, seed: str) -> None:
    """Raise `BadContext` if this is no seed of a user."""
    import nkeys  # loads libsodium, which connections without such a key do not need

    try:
        pair = nkeys.from_seed(bytearray(seed.strip().encode()))
        if not pair.public_key.startswith(b"U"):
            raise _damaged(key, path, "its seed is not that of a user")
    except (nkeys.NkeysError, ValueError):
        raise _damaged(key, path, "it holds no seed of a user") from None


def _damaged(key: str, path: str, why: str) -> BadContext:
    named = f"{key} {path}" if path else key
    return BadContext(
        f"{named} is damaged: {why}",
        key=key,
        next_step="copy the key again from where it was made (moorage admin nats-config writes keys/NAME.nk)",
    )


def config_dir(env: Mapping[str, str] | None = None) -> Path:
    """Return the folder `nats` of the user's configuration."""
    env = os.environ if env is None else env
    base = env.get("XDG_CONFIG_HOME") or os.path.join(env.get("HOME") or os.path.expanduser("~"), ".config")
    return Path(base) / "nats"


def list_contexts(env: Mapping[str, str] | None = None) -> list[str]:
    """Return the names of all contexts, sorted; empty if their folder cannot be read."""
    try:
        return sorted(path.stem for path in (config_dir(env) / "context").iterdir() if path.suffix == ".json")
    except OSError:
        return []


def selected_context(env: Mapping[str, str] | None = None) -> str:
    """Return the name that `nats context select` left, or ""."""
    try:
        return (config_dir(env) / "context.txt").read_text(encoding="utf-8-sig").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def resolve(target: Context | str | None = None, env: Mapping[str, str] | None = None) -> Context:
    """Return the context to use: `target` (a Context, a URL or a context's name), else what NATS_CONTEXT and NATS_URL
    name, else the selected context, else nats://127.0.0.1:4222.

    As with the `nats` command, the address in NATS_URL goes before that of any context. The other settings are those of
    the context in NATS_CONTEXT; the login of a context that is only selected is not sent to another address.

    A string is a URL if it has a scheme, or a port and is no context's name. Raises `BadContext`.
    """
    env = os.environ if env is None else env
    return target if isinstance(target, Context) else with_inbox(_resolve(target, env), env)


def with_inbox(context: Context, env: Mapping[str, str] | None = None, prefix: str | None = None) -> Context:
    """Return the context with this inbox prefix; without one, with that of $MOORAGE_INBOX_PREFIX, if it names none
    itself. Raises `BadContext`."""
    named = prefix
    if named is None and context.inbox_prefix == INBOX_PREFIX_DEFAULT:
        named = (os.environ if env is None else env).get(INBOX_VARIABLE) or None
    if named is None:
        return context
    try:
        check_subject(named)
    except BadSubject as error:
        raise BadContext(
            f"the inbox prefix {named!r} cannot be one: {error.problem.message}",
            key="inbox_prefix",
            next_step=f"name it without a dot or a star at its end, as {INBOX_PREFIX_DEFAULT}.submitter.TENANT",
        ) from None
    return msgspec.structs.replace(context, inbox_prefix=named)


def _resolve(target: str | None, env: Mapping[str, str]) -> Context:
    if target:
        if "://" in target:
            return _from_url(target, ARGUMENT)
        if ":" in target and target not in list_contexts(env):
            return _from_url(f"nats://{target}", ARGUMENT)
        return load_context(target, env)
    url = env.get(URL_VARIABLE, "")
    plain = _from_url(url if "://" in url else f"nats://{url}", URL_VARIABLE) if url else None
    if name := env.get(CONTEXT_VARIABLE, ""):
        named = load_context(name, env, why=CONTEXT_VARIABLE)
        named = msgspec.structs.replace(named, source=f"{named.source}, named by {CONTEXT_VARIABLE}")
        return named if plain is None else msgspec.structs.replace(named, url=plain.url, source=URL_VARIABLE)
    if plain is not None:
        return plain
    if name := selected_context(env):
        selected = load_context(name, env, why=str(config_dir(env) / "context.txt"))
        return msgspec.structs.replace(selected, source=f"{selected.source}, the selected context")
    return Context(source=DEFAULT)


def load_context(name: str, env: Mapping[str, str] | None = None, why: str = "") -> Context:
    """Return one context of the `nats` tool. `why` says what names it, for the error. Raises `BadContext`."""
    env = os.environ if env is None else env
    named = f", named by {why}" if why else ""
    if _NAME.fullmatch(name) is None or name in (".", ".."):
        raise BadContext(f"{name!r} is not the name of a nats context{named}", next_step="`nats context ls` lists them")
    file = config_dir(env) / "context" / f"{name}.json"
    try:
        with file.open("rb") as opened:
            raw = opened.read(CONTEXT_BYTES_MAX + 1)
    except FileNotFoundError:
        raise BadContext(f"there is no context {name!r}{named}", file=file, next_step=_nearest(name, env)) from None
    except OSError as error:
        fix = f"nats context edit {name}, or the file's permissions"
        raise BadContext(f"context {name!r} cannot be read: {error.strerror}", file=file, next_step=fix) from None
    if len(raw) > CONTEXT_BYTES_MAX:
        raise BadContext(
            f"context {name!r} is over {CONTEXT_BYTES_MAX} bytes", file=file, next_step="`nats context edit`"
        )
    try:
        fields = msgspec.json.decode(raw.removeprefix(BOM_UTF8))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadContext(f"context {name!r} is not JSON: {error}", file=file, next_step="`nats context edit`") from None
    if not isinstance(fields, dict):
        raise BadContext(f"context {name!r} is not a JSON object", file=file, next_step="`nats context edit`")
    return _from_fields(name, file, fields, env)


def _from_fields(name: str, file: Path, fields: dict[str, Any], env: Mapping[str, str]) -> Context:
    for key, instead in _UNSUPPORTED.items():
        if fields.get(key):
            raise BadContext(
                f"context {name!r} uses {key}, which is not supported", file=file, key=key, next_step=instead
            )
    taken: dict[str, Any] = {}
    for key in Context.__struct_fields__:
        value = fields.get(key)
        if value in (None, "", False) or key in ("name", "source"):
            continue
        wanted = bool if key == "tls_first" else str
        if not isinstance(value, wanted):
            raise BadContext(
                f"context {name!r}: {key} is {type(value).__name__}, must be {wanted.__name__}",
                file=file,
                key=key,
                next_step=f"nats context edit {name}",
            )
        taken[key] = value
    for key in ("creds", "nkey", "cert", "key", "ca"):
        if key in taken:
            taken[key] = _file_named(name, file, key, taken[key], env)
    context = Context(name=name, source=str(file), **taken)
    _check(context, file)
    return context


def _from_url(url: str, source: str) -> Context:
    context = Context(source=source, url=url)
    _check(context, None)
    return context


def _bracketed(server: str) -> str:
    """Return a URL that has an IPv6 address without both brackets as it should be written; "" for any other."""
    scheme, _, rest = server.rpartition("://")
    address, _, port = rest.rstrip("/").rpartition(":")
    for host, end in ((address, f":{port}" if port.isdecimal() else ""), (rest.rstrip("/"), "")):
        with contextlib.suppress(ValueError):
            return f"{scheme or SCHEMES[0]}://[{ipaddress.IPv6Address(host.strip('[]'))}]{end}"
    return ""


def _check(context: Context, file: Path | None) -> None:
    if not context.servers:
        raise BadContext("no server in url", file=file, key="url", next_step=f"for example {URL_DEFAULT}")
    for server in context.servers:
        try:
            parts = urlsplit(server)
            usable = parts.scheme in SCHEMES and parts.hostname is not None and parts.port != 0
        except ValueError:
            usable = False
        if not usable:
            # a comma in a password cuts it in two, and the first part looks like a server
            is_whole = "@" in server or "@" not in context.url
            fix = f"{', '.join(SCHEMES)} with a host, for example {URL_DEFAULT}"
            if bracketed := _bracketed(server):
                fix = f"an IPv6 address has brackets: {bracketed}"
            raise BadContext(
                f"{_without_secrets(server) if is_whole else _HIDDEN!r} is not a NATS URL",
                file=file,
                key="url",
                next_step=f"{fix}; {_ESCAPES}" if "@" in context.url else fix,
            )
    if context.key and not context.cert:
        raise BadContext("key without cert", file=file, key="key", next_step="set cert as well")
    if context.password and not context.user:
        raise BadContext("password without user", file=file, key="password", next_step="set user as well")
    if context.user_jwt and not context.user_seed:
        raise BadContext("user_jwt without user_seed", file=file, key="user_jwt", next_step="set user_seed as well")
    try:
        check_subject(context.inbox_prefix)
    except BadSubject as error:
        raise BadContext(f"inbox_prefix: {error}", file=file, key="inbox_prefix") from None


def _file_named(name: str, file: Path, key: str, value: str, env: Mapping[str, str]) -> str:
    if "://" in value and not value.startswith("file://"):
        raise BadContext(
            f"context {name!r}: {key} {value.partition('://')[0]}:// is not supported",
            file=file,
            key=key,
            next_step=f"set {key} to the path of a file",
        )
    value = value.removeprefix("file://")
    if value == "~" or value.startswith("~/"):
        value = (env.get("HOME") or os.path.expanduser("~")) + value[1:]
    if not os.access(value, os.R_OK):
        raise BadContext(
            f"context {name!r}: {key} names {value}, which is not a readable file",
            file=file,
            key=key,
            next_step=f"correct {key}, or the file's permissions",
        )
    return value


def _nearest(name: str, env: Mapping[str, str]) -> str:
    known = list_contexts(env)
    if of_name := [one for one in known if one.endswith(f".{name}")]:  # a tenant's name, as in submitter.vision
        return f"there are {', '.join(sorted(of_name, key=lambda one: one.startswith('service.')))}"
    if near := nearest(name, known):
        return f"the nearest is {near}"
    return f"there are: {', '.join(known[:20])}" if known else "`nats context add` makes one"


def _without_secrets(server: str) -> str:
    scheme, separator, rest = server.partition("://")
    if "@" not in rest:
        return server
    # not by the rules of URLs: by those, what stands behind a slash in a password is no part of it
    return f"{scheme}{separator}{_HIDDEN}@{re.split('[?#]', rest.rpartition('@')[2])[0]}"

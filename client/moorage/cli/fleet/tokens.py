"""`moorage admin token`, `moorage admin joiner`: new machines of a pool get keys of their own, by a secret of bounded
use."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hmac
import logging
import os
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import print_err, print_out
from moorage.cli.framework.files import cannot_write
from moorage.cli.framework.options import LOCAL_ROWS, OF_LEDGER, LedgerOptions, LocalRowOptions, guarded
from moorage.cli.framework.render import age, table
from moorage.client.errors import rejected
from moorage.schemas.units import many
from moorage.system.logged import begin_log

if TYPE_CHECKING:
    from moorage.bus.connection import Connection
    from moorage.bus.transport import Delivery
    from moorage.schemas.errors import Problem
    from moorage.schemas.joining import JoinAsk, JoinGiven
    from moorage.schemas.roles import Rights

#: the tokens of a site's folder, with whom each has let in: public keys alone, no secret
TOKENS: Final = "tokens.json"
#: characters of a token's public key that name it
ID_CHARS: Final = 8
USES_MAX: Final = 10_000
UNTIL_DEFAULT: Final = "24h"
#: how long the leader may take to record a use, in seconds
RECORD_S: Final = 5.0
#: asks that wait while one is answered; others are dropped, and come again
ASKS_MAX: Final = 1_000
#: tokens that have ended stay listed for so long
KEPT_S: Final = 30 * 86_400

log = logging.getLogger("moorage.joiner")


class Use(msgspec.Struct, frozen=True):
    """A machine that a token has let in: its worker's id and public key, its ask, when, and how it calls itself."""

    worker: str
    public: str
    seal: str
    at_s: float
    host: str


class Token(msgspec.Struct, kw_only=True):
    """A join token: what it is good for. Times are seconds since the epoch."""

    pool: str
    uses: int
    until_s: float
    made_s: float
    gpus: int | None = None
    revoked_s: float = 0.0
    used: list[Use] = []

    def state(self, now_s: float) -> str:
        if self.revoked_s:
            return "revoked"
        return "ended" if now_s >= self.until_s else "used up" if len(self.used) >= self.uses else "good"


class TokenRow(msgspec.Struct, frozen=True):
    """A token as it is listed; times in epoch milliseconds."""

    token: str
    pool: str
    state: str
    used: int
    uses: int
    gpus: int | None
    until_ms: int
    workers: list[str]


_Site = Annotated[Path, Parameter(help="The folder that nats-config wrote; with --signing-key any folder.")]
_SigningKey = Annotated[
    Path | None,
    Parameter(help="The seed of a signing key of the account MOORAGE, where accounts are JWTs.", value="FILE"),
]
_Account = Annotated[
    str | None, Parameter(help="With --signing-key: the account's public key, if that key is not its own.", value="KEY")
]
_Prefix = Annotated[str, Parameter(help="Beginning of every subject.", value="WORD")]


def token(
    site: _Site,
    pool: Annotated[str, Parameter(help="pool=NAME: a token for this pool. Without it, tokens are listed.")] = "",
    /,
    *,
    uses: Annotated[int, Parameter(help="How many machines it lets in.", value="NUMBER")] = 1,
    until: Annotated[str, Parameter(help="When it ends: 24h, 22:00, or a date.", value="WHEN")] = UNTIL_DEFAULT,
    gpus: Annotated[int | None, Parameter(help="GPUs that a machine has to have.", value="NUMBER")] = None,
    revoke: Annotated[str | None, Parameter(help="End this token, as listed.", value="TOKEN")] = None,
    nats: Annotated[
        str | None,
        Parameter(help="With --signing-key: the context of the joiner, whose servers machines use.", value="WHERE"),
    ] = None,
    signing_key: _SigningKey = None,
    account: _Account = None,
    prefix: _Prefix = "moorage",
    options: LocalRowOptions = LOCAL_ROWS,
) -> int:
    """Print a secret by which so many new machines get keys of workers of a pool, until then; or list these secrets.

    The secret is in no argument, log or message: write it into a file of mode 0600, or pipe it. A machine has it as its
    worker's setting join. moorage admin joiner has to run. moorage admin acts lists each use.
    """

    def act() -> int:
        if revoke is not None:
            return _revoke(site, revoke)
        name = pool.removeprefix("pool=")
        if not pool and (uses, until, gpus) == (1, UNTIL_DEFAULT, None):
            with _tokens(site) as known:
                return _list(known, options)
        if not pool.startswith("pool=") or not name or not 1 <= uses <= USES_MAX or (gpus is not None and gpus < 0):
            raise rejected(
                "invalid-argument", "a token is for a pool and a number of uses",
                found=f"{pool} --uses {uses}" + (f" --gpus {gpus}" if gpus is not None else ""),
                allowed=f"pool=NAME, --uses 1..{USES_MAX}, --gpus 0 or more",
                next="moorage admin token SITE pool=spot --uses 50 --until 24h > spot.token",
            )  # fmt: skip
        from moorage.bus.join_tokens import new_key
        from moorage.client.moments import seconds_until

        until_s = time.time() + seconds_until(until, datetime.now())
        made = _made(site, name, int(until_s), nats, signing_key, account, prefix)
        seed, public = new_key()
        with _tokens(site, changes=True) as known:
            known[public] = Token(pool=name, uses=uses, until_s=until_s, made_s=time.time(), gpus=gpus)
        text = msgspec.json.encode(msgspec.structs.replace(made, seed=seed)).decode()
        if not os.isatty(1):
            os.fchmod(1, 0o600) if Path("/dev/stdout").resolve().is_file() else None
        print_out(text)
        print_err(f"token {public[:ID_CHARS]} of pool {name}: {many(uses, 'machine')}, until {_day(until_s)}")
        print_err(f"undo: moorage admin token {site} --revoke {public[:ID_CHARS]}")
        return 0

    return guarded(options, act)


def _made(
    site: Path, pool: str, until_s: int, nats: str | None, signing_key: Path | None, account: str | None, prefix: str
) -> Any:
    """Return a token without its own seed: where and as whom its machines connect. Raises MoorageError."""
    from moorage.bus.contexts import load_context, resolve
    from moorage.bus.errors import BadContext
    from moorage.bus.join_tokens import JoinToken, creds_of, new_key, user_jwt
    from moorage.schemas.roles import pool_rights
    from moorage.schemas.subjects import Subjects

    if signing_key is not None:
        where = resolve(nats)
        seed, public = new_key()
        rights = pool_rights(pool, Subjects(prefix))
        jwt = user_jwt(_seed(signing_key), account or "", public, f"pool.{pool}", rights, until_s)
        login = {"creds": creds_of(jwt, seed)}
    else:
        try:
            where = load_context(f"pool.{pool}", {"XDG_CONFIG_HOME": str(site)})
            login = {"nkey": (site / "keys" / f"pool.{pool}.nk").read_text(encoding="utf-8").strip()}
        except (OSError, BadContext):
            raise _no_pool(site, pool) from None
    ca = Path(where.ca).read_text(encoding="utf-8") if where.ca else ""
    return JoinToken(url=where.safe_url, pool=pool, seed="", ca=ca, prefix=prefix, **login)


def _no_pool(site: Path, pool: str) -> Exception:
    return rejected(
        "failed-precondition",
        f"{site} has no pool {pool}",
        found=pool,
        next=f"moorage admin nats-config --pool {pool}:50, with every name, then reload the nats-servers",
    )


def _seed(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise rejected("failed-precondition", f"the signing key cannot be read: {file}: {error.strerror}") from None


@contextlib.contextmanager
def _tokens(site: Path, *, changes: bool = False) -> Iterator[dict[str, Token]]:
    """Give the tokens of a site by their public keys; write them if they change, as one user of the folder at a time.

    Raises Rejected for a folder that is none, or that cannot be written.
    """
    from moorage.system.private_files import replace_private

    file = site / TOKENS
    try:
        descriptor = os.open(site, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise rejected(
            "failed-precondition", f"{site} is no folder of a site: {error.strerror}", found=str(site),
            next="name the folder that `moorage admin nats-config --out` wrote",
        ) from None  # fmt: skip
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        known = msgspec.json.decode(file.read_bytes(), type=dict[str, Token]) if file.exists() else {}
        yield known
        if changes:
            now_s = time.time()
            kept = {key: each for key, each in known.items() if each.until_s + KEPT_S > now_s or each.used}
            replace_private(file, msgspec.json.encode(kept))
    except (OSError, msgspec.MsgspecError) as error:
        raise cannot_write(file, str(error), "run this as the folder's user") from None
    finally:
        os.close(descriptor)


def _list(known: dict[str, Token], options: LocalRowOptions) -> int:
    now_s = time.time()
    rows = [
        TokenRow(
            token=public[:ID_CHARS],
            pool=each.pool,
            state=each.state(now_s),
            used=len(each.used),
            uses=each.uses,
            gpus=each.gpus,
            until_ms=int(each.until_s * 1000),
            workers=[use.worker for use in each.used],
        )
        for public, each in sorted(known.items(), key=lambda item: item[1].made_s)
    ]
    if not options.shown({"kind": "tokens", "tokens": msgspec.to_builtins(rows)}, rows):
        cells = [
            [row.token, row.pool, row.state, f"{row.used}/{row.uses}", _left(row, now_s), ", ".join(row.workers) or "-"]
            for row in rows
        ]
        print_out(table(["TOKEN", "POOL", "STATE", "USED", "LEFT", "WORKERS"], cells, numbers=["LEFT"]))
    return 0


def _left(row: TokenRow, now_s: float) -> str:
    return age(row.until_ms - now_s * 1000) if row.state == "good" else "-"


def _day(at_s: float) -> str:
    return datetime.fromtimestamp(at_s).astimezone().isoformat(" ", "minutes")


def _revoke(site: Path, name: str) -> int:
    with _tokens(site, changes=True) as known:
        found = [each for public, each in known.items() if name and public.startswith(name)]
        if len(found) != 1:
            raise rejected(
                "invalid-argument", f"{many(len(found), 'token')} of {site} begin with {name}", found=name,
                next=f"moorage admin token {site}",
            )  # fmt: skip
        found[0].revoked_s = found[0].revoked_s or time.time()
    print_out(f"{name}\trevoked")
    if found[0].used:
        print_err(f"it has let in {', '.join(use.worker for use in found[0].used)}: their keys hold")
    return 0


# ---------------------------------------------------------------------------------------------------------- joiner


def joiner(
    site: _Site,
    /,
    *,
    signing_key: _SigningKey = None,
    account: _Account = None,
    tenant: Annotated[
        list[str] | None,
        Parameter(help="With --signing-key: a tenant that has buckets for files; may be repeated.", value="NAME"),
    ] = None,
    prefix: _Prefix = "moorage",
    options: LedgerOptions = OF_LEDGER,
) -> int:
    """Answer machines that have a join token with a key of a worker of its pool, in the foreground.

    It runs on a machine that has the site's folder, with the key joiner.main of nats-config: that may answer such
    machines, and have the leader record each use, and no more. It hands out keys that were made ahead (nats-config
    --pool), each to one machine. With --signing-key, it signs a machine's own key instead, for as many as a token has
    uses.
    """

    def act() -> int:
        from moorage.bus.contexts import load_context, resolve
        from moorage.cli.framework.interrupts import run
        from moorage.schemas.subjects import Subjects

        begin_log("INFO", "text")
        issued = _Issuer(site, Subjects(prefix), signing_key, account or "", tuple(tenant or ()))
        with _tokens(site):
            pass
        where = load_context("joiner.main", {"XDG_CONFIG_HOME": str(site)}) if options.nats is None else None
        run(_serve(issued, where or resolve(options.nats)))
        return 0

    return guarded(options, act)


class _Issuer:
    """Decides which key a machine gets, and writes it down."""

    def __init__(
        self, site: Path, subjects: Any, signing_key: Path | None, account: str, tenants: tuple[str, ...]
    ) -> None:
        self.site = site
        self.subjects = subjects
        self._issuer = _seed(signing_key) if signing_key is not None else ""
        self._account = account
        self._tenants = tenants

    def chosen(self, ask: JoinAsk, pool: str) -> Use | Problem:
        """Return the worker that a machine is to be, which its former ask may have chosen; or a problem."""
        from moorage.bus.join_tokens import is_signed
        from moorage.schemas.errors import problem

        with _tokens(self.site) as known:
            found = known.get(ask.token)
            # the same words for a token that never was, and for a signature that is not by it
            if found is None or not hmac.compare_digest(found.pool, pool) or not is_signed(ask):
                return problem("not-permitted", "no such join token", next="moorage admin token SITE pool=NAME")
            before = next((use for use in found.used if use.seal == ask.seal), None)
            if before is not None and not found.revoked_s:
                return before
            if (state := found.state(time.time())) != "good":
                return problem(
                    "not-permitted", f"the join token {ask.token[:ID_CHARS]} is {state}",
                    next="ask who runs this fleet for another one: moorage admin token SITE pool=NAME",
                )  # fmt: skip
            if found.gpus is not None and ask.gpus != found.gpus:
                return problem(
                    "failed-precondition", "a machine of another kind than the join token is for",
                    found=many(ask.gpus, "GPU"), allowed=many(found.gpus, "GPU"),
                )  # fmt: skip
            given = [use for each in known.values() for use in each.used]
            free = self._free(pool, given, ask.public)
            if free is None:
                return problem(
                    "failed-precondition", f"all keys of pool {pool} are given out",
                    next=f"moorage admin nats-config --pool {pool}:COUNT with more of them, and every other name",
                )  # fmt: skip
            return Use(*free, ask.seal, time.time(), ask.host)

    def _free(self, pool: str, given: list[Use], public: str) -> tuple[str, str] | None:
        """Return the id and the public key of the next worker of a pool; None if there is none."""
        from moorage.bus.join_tokens import public_of

        if self._issuer:
            numbers = [use.worker.removeprefix(f"{pool}-") for use in given if use.worker.startswith(f"{pool}-")]
            return f"{pool}-{max((int(each) for each in numbers if each.isdecimal()), default=0) + 1}", public
        gone = {use.public for use in given}
        files = self.site.glob(f"keys/worker.{pool}-*.nk")
        numbers = [file.stem.removeprefix(f"worker.{pool}-") for file in files]
        for number in sorted(int(each) for each in numbers if each.isdecimal()):
            key = public_of(_seed(self.site / "keys" / f"worker.{pool}-{number}.nk"))
            if key not in gone:
                return f"{pool}-{number}", key
        return None

    def give(self, ask: JoinAsk, use: Use) -> JoinGiven:
        """Write down that a machine has this worker's key, and return that. Raises ValueError, MoorageError."""
        from moorage.bus.join_tokens import seal, user_jwt
        from moorage.schemas.joining import JoinGiven

        if self._issuer:
            jwt = user_jwt(self._issuer, self._account, ask.public, f"worker.{use.worker}", self._rights(use.worker))
            given = JoinGiven(worker=use.worker, jwt=jwt)
        else:
            seed = _seed(self.site / "keys" / f"worker.{use.worker}.nk")
            given = JoinGiven(worker=use.worker, sealed=seal(seed, ask.seal))
        with _tokens(self.site, changes=True) as known:
            uses = [each for token in known.values() for each in token.used]
            if all(each.seal != use.seal for each in uses):
                if any((each.worker, each.public) == (use.worker, use.public) for each in uses):
                    raise ValueError("another joiner has just given this key: the machine asks again")
                known[ask.token].used.append(use)
        return given

    def _rights(self, worker: str) -> Rights:
        from moorage.schemas.roles import rights

        return rights("worker", worker, self.subjects, results_of=self._tenants)


async def _serve(issuer: _Issuer, where: Any) -> None:
    """Answer machines one after the other, until the process is told to end."""
    from moorage.bus.connection import connect
    from moorage.cli.framework.interrupts import ENDING

    asks: asyncio.Queue[Delivery] = asyncio.Queue(ASKS_MAX)

    def heard(delivery: Delivery) -> None:
        if not asks.full():
            asks.put_nowait(delivery)

    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in ENDING:
        loop.add_signal_handler(number, stop.set)
    async with await connect(where, "moorage joiner") as connection:
        await connection.subscribe(issuer.subjects.join("*"), heard, "joiners")
        log.info("answers machines with a join token, at %s", connection.context.safe_url)
        answering = asyncio.create_task(_answer_all(issuer, connection, asks))
        ended = asyncio.create_task(stop.wait())
        await asyncio.wait((answering, ended), return_when=asyncio.FIRST_COMPLETED)
        for task in (answering, ended):
            task.cancel()


async def _answer_all(issuer: _Issuer, connection: Connection, asks: asyncio.Queue[Delivery]) -> None:
    from moorage.schemas.roles import pool_inbox

    while True:
        asked = await asks.get()
        # elsewhere an answer could be an order of this key, or be taken for that of another pool
        if asked.reply.startswith(f"{pool_inbox(_pool_of(asked))}."):
            await connection.send([(asked.reply, await _answered(issuer, connection, asked), "")])


def _pool_of(asked: Delivery) -> str:
    return asked.subject.rpartition(".")[2]


async def _answered(issuer: _Issuer, connection: Connection, asked: Delivery) -> bytes:
    from moorage.bus.errors import BusError
    from moorage.bus.join_tokens import AGAIN_S
    from moorage.schemas.codec import encode
    from moorage.schemas.errors import MoorageError, Problem, problem
    from moorage.schemas.joining import decode_ask

    pool = _pool_of(asked)
    answer: JoinGiven | Problem
    try:
        ask = decode_ask(asked.data)
        use = issuer.chosen(ask, pool)
        answer = use if isinstance(use, Problem) else await _recorded(issuer, connection, ask, use, pool)
    except BusError as error:
        words = f"no scheduler records that a machine joins: {error.problem.message}"
        answer = problem("not-leading", words, retry_after_s=AGAIN_S)
    except MoorageError as error:
        answer = error.problem
    except (ValueError, TypeError, msgspec.MsgspecError):  # their words may have parts of what they read
        answer = problem("invalid-argument", "no ask of a machine that wants to join")
    except Exception as error:  # one machine's ask ends no answer to the others; its words may have parts of a key
        log.error("pool %s: a defect, while a machine was answered: %s", pool, type(error).__name__)
        answer = problem("internal", "the joiner failed on this ask")
    if isinstance(answer, Problem):
        log.warning("pool %s: refused: %s", pool, answer.message)
    return encode(answer)


async def _recorded(issuer: _Issuer, connection: Connection, ask: JoinAsk, use: Use, pool: str) -> JoinGiven | Problem:
    """Have the leader record a use, then give the key; where no leader answers, none is given. Raises MoorageError."""
    from moorage.client.asking import decode_act
    from moorage.schemas.codec import encode
    from moorage.schemas.errors import Problem
    from moorage.schemas.roles import JOINER

    order = {"worker": use.worker, "pool": pool, "token": ask.token[:ID_CHARS], "host": use.host, "by": JOINER}
    reply = await connection.request(issuer.subjects.admin("admit", JOINER), encode(order), RECORD_S)
    done = decode_act(reply.data)
    if isinstance(done, Problem):
        return done
    given = issuer.give(ask, use)
    log.info("%s: machine %s has its key, by token %s", use.worker, use.host or "?", ask.token[:ID_CHARS])
    return given

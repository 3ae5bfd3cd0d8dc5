"""`moorage door key`: who may call through the door, and what."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

from moorage.cli.framework.arguments import Parameter
from moorage.cli.framework.console import emit, print_err
from moorage.cli.framework.options import DEFAULTS, Options, guarded
from moorage.client.durations import seconds
from moorage.client.errors import rejected

if TYPE_CHECKING:
    from moorage.cli.door.keys import Key

FILE_DEFAULT: Final = Path("door_keys")
_NAME_CHARS_MAX: Final = 64


def key(
    act: Annotated[Literal["add", "ls", "rm"], Parameter(help="Make a key, list all, or take one back.")],
    name: Annotated[str, Parameter(help="Who has the key, for lists and metrics.")] = "",
    /,
    *,
    keys: Annotated[Path, Parameter(help="The file of the keys, as moorage door --keys reads it.")] = FILE_DEFAULT,
    services: Annotated[
        str, Parameter(help="The services that it is for, with * and ? in their names.", value="NAME[,NAME…]")
    ] = "*",
    priority: Annotated[int, Parameter(help="The highest priority of its calls, 0 to 100.")] = 50,
    at_once: Annotated[int, Parameter(help="Calls at the same time; 0 for any number.")] = 0,
    rate: Annotated[str | None, Parameter(help="Calls that may begin in a minute.", value="N/m")] = None,
    raw: Annotated[bool, Parameter(help="It may also call services by name, at /svc/NAME.")] = False,
    expires: Annotated[str | None, Parameter(help="How long it lasts, such as 30d.", value="DURATION")] = None,
    options: Options = DEFAULTS,
) -> int:
    """Make a key for callers of the door, and print it once; list the keys, or take one back.

    The file has the hash of each key alone. A door that runs reads it again when it changes. A key is of the tenant
    that --tenant or MOORAGE_TENANT names.
    """

    def work() -> int:
        from moorage.cli.door.keys import Key, hash_of, new_key, read_keys, write_keys
        from moorage.client.tenant import find_tenant

        kept = read_keys(keys)
        if act == "ls":
            for each in kept:
                _show(each, json=options.json)
            return 0
        if not name.isprintable() or not 1 <= len(name) <= _NAME_CHARS_MAX:
            raise rejected(
                "invalid-argument", "a key needs a name", found=name[:_NAME_CHARS_MAX],
                allowed=f"1..{_NAME_CHARS_MAX} printable characters", next=f"moorage door key {act} laptop",
            )  # fmt: skip
        if act == "rm":
            _remove(keys, kept, name)
            return 0
        if any(each.name == name for each in kept):
            raise rejected(
                "invalid-argument", f"{keys} has a key {name} already", found=name,
                next=f"take another name, or take that one back: moorage door key rm {name}",
            )  # fmt: skip
        if not 0 <= priority <= 100 or at_once < 0:
            raise rejected(
                "invalid-argument", "a number of the key is out of its bounds", found=f"{priority}, {at_once}",
                allowed="--priority 0..100, --at-once 0 or more", next="moorage door key --help",
            )  # fmt: skip
        shown, tenant = new_key(), find_tenant(options.tenant)
        ends_s = 0.0 if expires is None else time.time() + seconds(expires)
        patterns = tuple(filter(None, services.split(",")))
        made = Key(name, hash_of(shown), tenant, patterns, priority, at_once, _rate(rate), raw, ends_s)
        write_keys(keys, [*kept, made])
        if options.json:
            emit({"kind": "door-key", "name": name, "tenant": tenant, "key": shown})
            return 0
        print_err(f"the key {name} of tenant {tenant}, which is shown this once:")
        print(shown)
        return 0

    return guarded(options, work)


def _remove(path: Path, kept: Sequence[Key], name: str) -> None:
    from moorage.cli.door.keys import write_keys

    left = [each for each in kept if each.name != name]
    if len(left) == len(kept):
        raise rejected(
            "not-found", f"{path} has no key {name}", found=name,
            allowed=", ".join(each.name for each in kept) or "none", next="moorage door key ls",
        )  # fmt: skip
    write_keys(path, left)
    print_err(f"the key {name} is taken back")


def _show(key: Key, *, json: bool) -> None:
    import msgspec

    if json:
        row = {**msgspec.to_builtins(key), "kind": "door-key"}
        row.pop("hash")
        emit(row)
        return
    words = [key.name, key.tenant, ",".join(key.services), f"priority {key.priority}"]
    words += [f"{key.at_once} at once"] if key.at_once else []
    words += [f"{key.per_minute}/m"] if key.per_minute else []
    words += ["raw"] if key.raw else []
    words += [time.strftime("until %Y-%m-%d", time.gmtime(key.expires_s))] if key.expires_s else []
    print("  ".join(words))


def _rate(text: str | None) -> int:
    if text is None:
        return 0
    number, _, per = text.partition("/")
    if number.isascii() and number.isdigit() and per in ("", "m", "min") and int(number) > 0:
        return int(number)
    raise rejected(
        "invalid-argument", f"--rate {text[:40]} is no number a minute", found=text[:40], allowed="as 600/m",
        next="moorage door key --help",
    )  # fmt: skip

#!/usr/bin/env bash
# Behaviour: omit_defaults leaves out a value that is the default object itself, not one that is equal to it.
# Versions: msgspec 0.22.0, CPython 3.11 to 3.13
# Guess: A field that equals its default is left out: equal structs give equal bytes.
# Seen: Fields of 100000, 'some text', 1.0, (1, 2) equal to their defaults are written once they were computed or decoded; small integers, empty lists are left out.
# Date: 2026-11-28
. "$(dirname "$0")/common.sh"

packages msgspec==0.22.0
bounded 60 <<'EOF'
import msgspec
from findings.verdict import verdict


class Settings(msgspec.Struct, omit_defaults=True, frozen=True):
    small: int = 5
    large: int = 100_000
    text: str = "some text"
    real: float = 1.0
    pair: tuple[int, int] = (1, 2)


untouched = Settings()
full = b'{"small":5,"large":100000,"text":"some text","real":1.0,"pair":[1,2]}'
decoded = msgspec.json.decode(full, type=Settings)
first, second = msgspec.json.encode(untouched), msgspec.json.encode(decoded)
verdict(
    untouched == decoded
    and first == b"{}"
    and second == b'{"large":100000,"text":"some text","real":1.0,"pair":[1,2]}',
    {"equal": untouched == decoded, "made by default": first, "decoded": second},
)
EOF

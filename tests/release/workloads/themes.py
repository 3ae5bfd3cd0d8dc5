"""Which kinds of things happen in a case, and how often: a theme by its name."""

from __future__ import annotations

from typing import Final

ALL: Final = {
    "submit": 0.55, "batch": 0.15, "cancel": 0.08, "order": 0.08, "operate": 0.05, "trouble": 0.06, "refuse": 0.06,
    "obey": 0.3, "join late": 0.02, "lead": 0.01, "work": 0.35, "order of a job": 0.5, "window": 0.6,
    "large": 0.02, "mixed host": 0.15, "no memory": 0.1, "label": 0.2, "few modes": 0.15, "few drivers": 0.1,
    "rules": 0.06, "few sharers": 0.15, "not all lent": 0.15, "linked": 0.3,
    "no gpu": 0.15, "many gpus": 0.3, "model": 0.4, "vendor": 0.1, "least memory": 0.1, "share": 0.2, "part": 0.5,
    "slot": 0.3, "gang": 0.15, "spread": 0.1, "priority": 0.3, "limit of time": 0.4, "other driver": 0.05,
    "resources": 0.3, "requires": 0.08, "deadline": 0.05, "start within": 0.05, "reject": 0.05, "keep": 0.1,
}  # fmt: skip
#: what a theme has more or less of than `ALL`: a rare sequence of one kind hardly ever comes where all kinds come
THEMES: Final[dict[str, dict[str, float]]] = {
    "mixed": {},
    "processors alone": {"no gpu": 1.0, "batch": 0.6, "submit": 0.7, "resources": 0.6, "requires": 0.0},
    "shares alone": {"no gpu": 0.0, "share": 1.0, "many gpus": 0.15, "gang": 0.1, "submit": 0.7, "few modes": 0.3},
    "gangs alone": {"no gpu": 0.0, "gang": 1.0, "share": 0.05, "model": 0.1, "trouble": 0.03},
    "backfill": {
        "batch": 0.7, "many gpus": 0.5, "limit of time": 1.0, "own limit of time": 0.5, "refuse": 0.0, "obey": 0.0,
        "model": 0.0, "vendor": 0.0, "share": 0.0, "gang": 0.1, "no gpu": 0.0, "priority": 0.05, "work": 0.2,
        "trouble": 0.0, "order": 0.02, "operate": 0.02, "few drivers": 0.0, "requires": 0.0, "refuse the job": 0.8,
        "resources": 0.0, "other driver": 0.0,
    },
    "orders": {
        "order": 0.3, "order of a job": 0.3, "many gpus": 0.5, "limit of time": 0.2, "model": 0.1, "share": 0.05,
        "work": 0.15, "no gpu": 0.05, "trouble": 0.0, "submit": 0.5,
    },
    "preemption": {
        "many gpus": 0.15, "model": 0.1, "share": 0.05, "gang": 0.05, "priority": 1.0, "work": 0.1, "trouble": 0.0,
        "no gpu": 0.05, "submit": 0.7, "order": 0.05, "refuse": 0.02, "preemptible": 0.3,
    },
    "drains": {"operate": 0.3, "window": 0.9, "limit of time": 0.7, "own limit of time": 0.3, "batch": 0.4},
    "troubles": {"trouble": 0.4, "lead": 0.05, "join late": 0.05, "refuse": 0.15},
    "models nobody has": {"model": 0.9, "vendor": 0.3, "join late": 0.06, "batch": 0.5, "reject": 0.2},
    "ever new shapes": {},
}  # fmt: skip
#: seeds from here on draw themes of `ADDED`, with kinds that those before do not know; these stay as they were
ADDED_FROM: Final = 100_000
ADDED: Final[dict[str, dict[str, float]]] = {
    "exact devices": {
        "exact": 0.5, "many gpus": 0.4, "model": 0.05, "vendor": 0.02, "no gpu": 0.05, "submit": 0.65, "gang": 0.05,
        "label": 0.05, "requires": 0.02, "join late": 0.05, "resources": 0.1,
    },
    "exact devices, preempted": {
        "exact": 0.5, "many gpus": 0.1, "model": 0.05, "share": 0.05, "gang": 0.05, "priority": 1.0, "work": 0.1,
        "trouble": 0.0, "no gpu": 0.05, "submit": 0.7, "order": 0.05, "refuse": 0.02,
    },
    "slices": {
        "slices": 0.7, "profile": 0.4, "least memory": 0.5, "exact": 0.1, "model": 0.1, "submit": 0.65, "gang": 0.2,
        "no gpu": 0.05, "large": 0.0,
    },
    "levels": {
        "levels": 0.7, "enforce": 0.6, "share": 0.7, "part": 0.9, "few modes": 0.2, "other driver": 0.3, "model": 0.1,
        "many gpus": 0.1, "no gpu": 0.1, "submit": 0.6,
    },
    "capability": {"capability": 0.8, "least capability": 0.6, "model": 0.3, "submit": 0.6, "least memory": 0.2},
    "preferred": {
        "share": 1.0, "prefer": 0.8, "no gpu": 0.0, "many gpus": 0.3, "gang": 0.2, "spread": 0.2, "submit": 0.7,
        "model": 0.1, "few sharers": 0.4,
    },
    "kept devices": {
        "slot modes": 0.7, "share": 0.5, "prefer": 0.2, "no gpu": 0.05, "gang": 0.2, "spread": 0.1, "exact": 0.1,
        "mixed host": 0.4, "few modes": 0.1, "model": 0.2, "submit": 0.65, "priority": 0.6, "join late": 0.05,
    },
    "users of a device": {
        "users": 0.8, "user": 0.3, "share": 0.9, "part": 0.7, "prefer": 0.3, "no gpu": 0.05, "model": 0.1, "gang": 0.2,
        "spread": 0.15, "many gpus": 0.1, "submit": 0.7, "join late": 0.06, "lead": 0.03, "slot modes": 0.2,
    },
    "gangs cut short": {
        "gang": 0.9, "no gpu": 0.0, "model": 0.05, "share": 0.05, "operate": 0.45, "window": 0.5, "cancel": 0.2,
        "refuse": 0.15, "obey": 0.6, "lead": 0.04, "trouble": 0.1, "limit of time": 0.6, "submit": 0.5, "work": 0.3,
    },
    "drains and reservations": {
        "operate": 0.35, "window": 0.9, "batch": 0.6, "many gpus": 0.5, "limit of time": 1.0, "own limit of time": 0.5,
        "refuse": 0.0, "model": 0.0, "vendor": 0.0, "share": 0.0, "gang": 0.2, "no gpu": 0.0, "priority": 0.1,
        "work": 0.2, "trouble": 0.0, "order": 0.05, "few drivers": 0.0, "requires": 0.0, "resources": 0.0,
        "other driver": 0.0,
    },
    "resized": {
        "resize": 0.5, "share": 1.0, "part": 0.8, "no gpu": 0.0, "many gpus": 0.2, "gang": 0.1, "submit": 0.5,
        "model": 0.05, "few modes": 0.1, "other driver": 0.2, "lead": 0.03, "refuse": 0.02, "work": 0.2,
    },
    "freezing": {
        "freezing": 0.9, "preemptible": 0.6, "freeze": 0.7, "no gpu": 0.02, "share": 0.05, "gang": 0.05,
        "many gpus": 0.25, "model": 0.1, "submit": 0.65, "work": 0.2, "lead": 0.04, "refuse": 0.03, "cancel": 0.12,
        "slices": 0.05, "large": 0.0, "few modes": 0.03, "exact": 0.05, "keep": 0.15, "limit of time": 0.5,
    },
    "all of it": {
        "exact": 0.15, "slices": 0.2, "profile": 0.1, "levels": 0.3, "enforce": 0.15, "capability": 0.4,
        "least capability": 0.15, "prefer": 0.4, "share": 0.3, "operate": 0.12, "trouble": 0.12, "order": 0.12,
    },
}  # fmt: skip
#: seeds from here on draw themes of `LENT`: frozen jobs, and preemptible ones on their devices
LENT_FROM: Final = 200_000
_LENT: Final = {
    "freezing": 0.95, "preemptible": 0.55, "freeze": 0.3, "idle": 0.4, "use": 0.25, "qos": 0.5, "will not": 0.1,
    "breaks": 0.05,
    "lingers": 0.15, "slow": 0.2, "no gpu": 0.02, "model": 0.05, "vendor": 0.02, "submit": 0.5, "work": 0.2,
    "large": 0.0, "few modes": 0.03, "many gpus": 0.25, "refuse": 0.03, "resources": 0.1, "few drivers": 0.02,
}  # fmt: skip
LENT: Final[dict[str, dict[str, float]]] = {
    "frozen and lent": _LENT | {"keep": 0.15, "limit of time": 0.5, "cancel": 0.15, "lead": 0.05, "exact": 0.05},
    "lent, beside gangs and sharers": _LENT
    | {"gang": 0.25, "share": 0.3, "part": 0.6, "resize": 0.3, "slices": 0.1, "lead": 0.03},
    "lent, preempted": _LENT | {"priority": 1.0, "work": 0.1, "share": 0.02, "gang": 0.05, "order": 0.1},
    "lent, drained": _LENT | {"operate": 0.3, "window": 0.5, "limit of time": 0.6, "own limit of time": 0.3},
    "lent, in trouble": _LENT | {"trouble": 0.4, "lead": 0.1, "keep": 0.3, "no fence": 0.1, "join late": 0.05},
    "lent, by orders": _LENT | {"order": 0.35, "freeze": 0.8, "cancel": 0.15, "deadline": 0.2, "batch": 0.4},
}  # fmt: skip
#: seeds from here on draw themes of `BEHIND`: jobs that start after others
BEHIND_FROM: Final = 250_000
_BEHIND: Final = {
    "after": 0.5, "submit": 0.65, "work": 0.4, "cancel": 0.1, "lead": 0.05, "large": 0.0, "model": 0.1, "vendor": 0.02,
    "few drivers": 0.02, "requires": 0.02, "deadline": 0.1, "start within": 0.1,
}  # fmt: skip
BEHIND: Final[dict[str, dict[str, float]]] = {
    "pipelines": _BEHIND,
    "pipelines, by orders": _BEHIND | {"order": 0.35, "order of a job": 0.7, "batch": 0.3},
    "pipelines of gangs": _BEHIND | {"gang": 0.6, "no gpu": 0.05, "share": 0.05, "limit of time": 0.8},
    "pipelines, preempted": _BEHIND | {"priority": 1.0, "preemptible": 0.4, "no gpu": 0.02},
    "pipelines in trouble": _BEHIND | {"trouble": 0.4, "lead": 0.15, "refuse": 0.15, "keep": 0.2, "reject": 0.2},
}  # fmt: skip
#: seeds from here on draw themes of `RANGES`: jobs of several replicas under numbers of their own, and runs again
RANGES_FROM: Final = 275_000
_RANGES: Final = {
    "numbers": 0.6, "max running": 0.5, "max failed": 0.4, "again": 0.35, "submit": 0.35, "batch": 0.05, "work": 0.5,
    "failing": 0.5, "cancel": 0.1, "lead": 0.05, "large": 0.0, "model": 0.1, "vendor": 0.02, "few drivers": 0.02,
    "requires": 0.02, "gang": 0.05,
}  # fmt: skip
RANGES: Final[dict[str, dict[str, float]]] = {
    "sweeps": _RANGES,
    "sweeps, by orders": _RANGES | {"order": 0.3, "order of a job": 0.7},
    "sweeps, preempted": _RANGES | {"priority": 1.0, "preemptible": 0.4, "no gpu": 0.02},
    "sweeps in trouble": _RANGES | {"trouble": 0.4, "lead": 0.15, "refuse": 0.15, "keep": 0.2, "reject": 0.2},
}  # fmt: skip
#: seeds from here on draw themes of `LABELLED`: GPUs with labels of their own, and jobs that require labels
LABELLED_FROM: Final = 290_000
_LABELLED: Final = {
    "slot labels": 0.8, "label": 0.7, "requires of gpus": 0.6, "requires": 0.0, "submit": 0.6, "no gpu": 0.1,
    "model": 0.1, "vendor": 0.02, "few drivers": 0.02, "join late": 0.05, "large": 0.0, "exact": 0.1,
}  # fmt: skip
LABELLED: Final[dict[str, dict[str, float]]] = {
    "labelled GPUs": _LABELLED,
    "labelled GPUs, shared": _LABELLED
    | {"share": 0.6, "part": 0.6, "prefer": 0.3, "slices": 0.2, "profile": 0.1, "slot modes": 0.3, "spread": 0.2},
    "labelled GPUs, preempted": _LABELLED | {"priority": 1.0, "preemptible": 0.3, "work": 0.1, "no gpu": 0.02},
    "labelled GPUs, of gangs": _LABELLED
    | {"gang": 0.6, "many gpus": 0.4, "operate": 0.2, "limit of time": 0.8, "trouble": 0.1, "lead": 0.04},
    "labelled GPUs, reserved": _LABELLED
    | {"many gpus": 0.5, "limit of time": 1.0, "own limit of time": 0.5, "batch": 0.6, "refuse": 0.0, "work": 0.2},
}  # fmt: skip

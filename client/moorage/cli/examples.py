"""Examples, as each verb's help shows them: cyclopts leaves that part of a docstring out."""

from __future__ import annotations

from typing import Final

EXAMPLES: Final[dict[str, tuple[str, ...]]] = {
    "run": (
        "moorage run --gpu 1xH100 -- nvidia-smi -L",
        "moorage run --gpu 2xH100:80G --time-limit 1h -- python train.py",
        "moorage run --gpu 3x2xA100 --gang -- ./rank.sh",
    ),
    "logs": ("moorage logs train-42",),
    "submit": (
        "moorage submit --gpu 2xH100:80G -- python train.py",
        "moorage submit --gpu 8xA100 --replicas 4 --gang --job train-42 -- ./rank.sh",
        "moorage submit -f request.json",
        'echo \'{"gpu": {}, "run": {"argv": ["nvidia-smi"]}}\' | moorage submit -f -',
    ),
    "show": (
        "moorage show train-42",
        "moorage show train-42 --watch --json",
    ),
    "ls": (
        "moorage ls --state RUNNING --state QUEUED",
        "moorage ls --json | jq -r .data.jobs[].job",
    ),
    "cancel": ("moorage cancel train-42 --reason superseded",),
    "explain": (
        "moorage explain train-42",
        "moorage explain no-match",
    ),
    "fleet": (
        "moorage fleet",
        "moorage fleet --watch",
        "moorage fleet --json | jq '.data.fits_now'",
    ),
    "drain": ("moorage drain n07",),
    "cordon": ("moorage cordon n07",),
    "uncordon": ("moorage uncordon n07",),
    "audit": (
        "moorage audit",
        "moorage audit --quick --json",
    ),
    "scheduler": ("MOORAGE_LEDGER_URL_FILE=/etc/moorage/ledger-url moorage scheduler --nats prod",),
    "worker": (
        "moorage worker --label zone=a",
        "moorage worker --simulate 4x8xH100",
    ),
    "up": (
        "moorage up --simulate 4x8xH100",
        "moorage up --data /var/lib/moorage --port 4333",
    ),
}

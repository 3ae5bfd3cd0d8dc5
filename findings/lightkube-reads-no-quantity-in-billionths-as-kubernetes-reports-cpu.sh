#!/usr/bin/env bash
# Behaviour: lightkube's parse_quantity refuses quantities that Kubernetes takes: billionths and millionths (`137401412n`, as metrics report CPU time) and `1E3`. The official client takes some that Kubernetes refuses.
# Versions: lightkube 1.0.1, kubernetes 37.0.2, kubectl 1.20.2 (kubernetes-client 1.20.5+really1.20.2-1.1+deb12u1)
# Guess: Both clients read the same quantities, those that Kubernetes reads.
# Seen: kubectl and the official client read 137401412n, 100u and 1E3; lightkube says `Invalid unit suffix`. `1K` and `1 Gi` are refused by kubectl and lightkube, and are 1000 and 1 GiB for the official client.
# Date: 2026-11-30
. "$(dirname "$0")/common.sh"

debian_packages 12 kubernetes-client=1.20.5+really1.20.2-1.1+deb12u1
packages lightkube==1.0.1 kubernetes==37.0.2
bounded 60 <<'EOF'
import os
import subprocess
from decimal import Decimal

import kubernetes.utils
import lightkube.utils.quantity
from findings.verdict import verdict

TEXTS = ("500m", "137401412n", "100u", "1E3", "1K", "1 Gi")


def by_kubernetes(text):
    """Return whether Kubernetes' own parser takes a quantity: kubectl has it, and asks no server here."""
    done = subprocess.run(
        [f"{os.environ['DEBIAN_ROOT']}/usr/bin/kubectl", "create", "quota", "any", f"--hard=cpu={text}",
         "--dry-run=client", "--output=name"],
        capture_output=True, text=True, env={"HOME": os.environ["TMPDIR"]},
    )  # fmt: skip
    return done.returncode == 0


def read(parse, text):
    try:
        return Decimal(parse(text))
    except ValueError:
        return None


seen = {
    text: (
        by_kubernetes(text),
        read(lightkube.utils.quantity.parse_quantity, text),
        read(kubernetes.utils.parse_quantity, text),
    )
    for text in TEXTS
}
verdict(
    seen
    == {
        "500m": (True, Decimal("0.5"), Decimal("0.5")),
        "137401412n": (True, None, Decimal("0.137401412")),
        "100u": (True, None, Decimal("0.0001")),
        "1E3": (True, None, Decimal(1000)),
        "1K": (False, None, Decimal(1000)),
        "1 Gi": (False, None, Decimal(2**30)),
    },
    {f"{text!r} taken by Kubernetes, by lightkube, by kubernetes": found for text, found in seen.items()},
)
EOF

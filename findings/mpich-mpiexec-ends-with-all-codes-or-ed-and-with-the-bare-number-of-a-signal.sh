#!/usr/bin/env bash
# Behaviour: MPICH's mpiexec ends with the bits of all ranks' codes together, which may be a code that no rank had; of a rank that a signal ended, with the number of the signal.
# Versions: MPICH 5.0.2 (mpich==5.0.2)
# Guess: The code of the first rank that failed, or the largest; 137 after SIGKILL, as a shell has it and Open MPI does.
# Seen: Ranks with 1 and 2 give 3, 64 and 3 give 67. SIGKILL gives 9 and SIGTERM 15, as a rank that exits with 9 does; beside a signal, the codes of the others are lost. Once in some 80 runs with a signal mpiexec itself fails, with 255.
# Date: 2026-11-29
. "$(dirname "$0")/common.sh"

packages mpich==5.0.2
bounded 120 <<'EOF'
import subprocess
import sys
from pathlib import Path

from findings.verdict import verdict

ITSELF_FAILED = 255
MPIEXEC = str(Path(sys.executable).with_name("mpiexec.hydra"))


def ends(*ranks):
    """Return the code of mpiexec with a rank of each of these shell commands; if it fails itself, it is run again."""
    command = [word for rank in ranks for word in (":", "-n", "1", "sh", "-c", rank)]
    for _ in range(4):
        code = subprocess.run([MPIEXEC, *command[1:]], capture_output=True, timeout=30).returncode
        if code != ITSELF_FAILED:
            break
    return code


seen = {
    "1 and 2": ends("exit 1", "exit 2"),
    "64 and 3": ends("exit 64", "exit 3"),
    "0 and 5": ends("exit 0", "exit 5"),
    "SIGKILL and 0": ends("kill -KILL $$", "exit 0"),
    "SIGTERM and 0": ends("kill -TERM $$", "exit 0"),
    "9 and 0": ends("exit 9", "exit 0"),
    "SIGKILL and 64": ends("kill -KILL $$", "exit 64"),
}
verdict(list(seen.values()) == [3, 67, 5, 9, 15, 9, 9], seen)
EOF

#!/usr/bin/env bash
# Behaviour: `import amdsmi` raises KeyError where ROCm's library is missing, not ImportError or OSError, and prints two lines to standard output first.
# Versions: amdsmi 7.0.2, nvidia-ml-py 13.615.71
# Guess: The import raises ImportError or OSError, which a guarded import catches, or succeeds until amdsmi_init is called, as NVIDIA's binding does.
# Seen: KeyError 'libamd_smi.so' and two lines on standard output. nvidia-ml-py 13.615.71 is imported without a driver, prints nothing, and nvmlInit raises its own error, which is an Exception alone.
# Date: 2026-11-30
. "$(dirname "$0")/common.sh"

[ -z "${ROCM_HOME:-}${ROCM_PATH:-}" ] && [ ! -e /opt/rocm ] && ! ldconfig -p | grep -q -e libamd_smi -e libnvidia-ml ||
    skip "a machine without ROCm and without NVIDIA's driver"
packages amdsmi==7.0.2 nvidia-ml-py==13.615.71
bounded 60 <<'EOF'
import subprocess
import sys

from findings.verdict import verdict

# Prints which errors of the import a guard would catch, and in which order of its kinds.
LOOK = """
import sys
try:
    import {module}
    {begin}
except BaseException as error:
    print([each.__name__ for each in type(error).__mro__ if each is not object], file=sys.stderr)
"""


def looked(module, begin="pass"):
    done = subprocess.run(
        [sys.executable, "-c", LOOK.format(module=module, begin=begin)], capture_output=True, text=True, timeout=30
    )
    return done.returncode, done.stdout.strip(), done.stderr.strip()


seen = {
    "import amdsmi": looked("amdsmi"),
    "import pynvml": looked("pynvml"),
    "nvmlInit": looked("pynvml", "pynvml.nvmlInit()"),
}
verdict(
    seen["import amdsmi"][2].splitlines()[-1:] == ["['KeyError', 'LookupError', 'Exception', 'BaseException']"]
    and len(seen["import amdsmi"][1].splitlines()) == 2
    and seen["import pynvml"] == (0, "", "")
    and seen["nvmlInit"][2] == "['NVMLError_LibraryNotFound', 'NVMLError', 'Exception', 'BaseException']",
    seen,
)
EOF

#!/usr/bin/env bash
# Behaviour: HTCondor's own functions, such as stringListMember, are errors in an expression of classad2, and a requirement that uses one matches nothing, until the process has imported htcondor2.
# Versions: htcondor 25.14.1
# Guess: An expression means the same wherever it is evaluated: the package's ClassAd library has the functions that its manual lists.
# Seen: stringListMember("H100", Models), stringListSize and countMatches are Value.Error; a job that requires the first does not match the machine, without an exception. After `import htcondor2`, in the same process: True, 2, 1, and it matches. versionGE and regexpMember work before.
# Date: 2026-11-30
. "$(dirname "$0")/common.sh"

packages htcondor==25.14.1
bounded 60 <<'EOF'
import importlib
import os

import classad2
from findings.verdict import verdict

os.environ["CONDOR_CONFIG"] = os.devnull
MACHINE = {"Models": "H100, A100", "GPUs": [classad2.ClassAd({"Memory": 80}), classad2.ClassAd({"Memory": 40})]}
EXPRESSIONS = (
    'stringListMember("H100", Models)',
    "stringListSize(Models)",
    "countMatches(Memory > 40, GPUs)",
    'versionGE("12.10", "12.9")',
    'regexpMember("^H", {"A100", "H100"})',
)


def evaluated():
    machine = classad2.ClassAd(MACHINE)
    job = classad2.ClassAd()
    job["Requirements"] = classad2.ExprTree('stringListMember("H100", TARGET.Models)')
    values = [classad2.ExprTree(each).eval(machine) for each in EXPRESSIONS]
    told = ["error" if each is classad2.Value.Error else each for each in values]
    return told, machine.matches(job)  # whether the job's requirements hold for the machine


before = evaluated()
importlib.import_module("htcondor2")
after = evaluated()
verdict(
    before == (["error", "error", "error", True, True], False) and after == ([True, 2, 1, True, True], True),
    {"before": before, "after": after},
)
EOF

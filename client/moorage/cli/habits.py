"""Words of other tools (Slurm, PBS, Kubernetes, Docker, a shell) and the verbs of moorage that do the same: the answer
to an unknown verb."""

from typing import Final

#: a verb of ours, and the words that people who come from elsewhere type for it
_SAID_FOR: Final = {
    "run": "srun",
    "submit": "sbatch qsub create launch enqueue apply sweep",
    "show": "describe inspect info",
    "ls": "squeue qstat sacct queue ps jobs list status",
    "logs": "tail output",
    "attach": "sattach",
    "forward": "port-forward tunnel proxy",
    "shell": "ssh bash login interactive",
    "use": "utilization utilisation nvtop sstat stats",
    "events": "history",
    "follow": "notify alert webhook",
    "explain": "why pending reason",
    "plan": "whatif what-if estimate eta",
    "again": "rerun retry resubmit repeat",
    "cancel": "scancel qdel kill stop delete rm abort terminate",
    "fleet": "sinfo pbsnodes nodes workers hosts gpus nvidia-smi",
    "uncordon": "undrain resume",
    "schedule add": "cron crontab",
    "call": "invoke request req",
    "doctor": "health ping diagnose",
}
OURS: Final = {
    **{word: verb for verb, words in _SAID_FOR.items() for word in words.split()},
    "schedule list": "schedule ls",
    **dict.fromkeys(("schedule rm", "schedule delete", "schedule cancel"), "schedule remove"),
    **dict.fromkeys(("schedule create", "schedule new"), "schedule add"),
}

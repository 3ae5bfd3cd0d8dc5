"""Words of other tools (Slurm, PBS, Kubernetes, Docker, a shell) and the verbs of moorage that do the same: the answer
to an unknown verb."""

from typing import Final

#: a verb of ours, and the words that people who come from elsewhere type for it
_SAID_FOR: Final = {
    "run": "srun exec",
    "submit": "sbatch qsub create launch enqueue apply",
    "show": "describe inspect info",
    "ls": "squeue qstat sacct queue ps jobs list status",
    "logs": "tail output attach",
    "use": "utilization utilisation nvtop sstat stats",
    "events": "follow history",
    "explain": "why pending reason",
    "plan": "whatif what-if estimate eta",
    "cancel": "scancel qdel kill stop delete rm abort terminate",
    "fleet": "sinfo pbsnodes nodes workers hosts gpus nvidia-smi",
    "uncordon": "undrain resume",
    "doctor": "check health ping diagnose",
}
OURS: Final = {word: verb for verb, words in _SAID_FOR.items() for word in words.split()}

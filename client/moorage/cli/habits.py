"""Words of other tools (Slurm, PBS, Kubernetes, Docker, Ray, a shell) and what does the same here: the answer to an
unknown verb or option."""

import re
from typing import Final

_OPTION: Final = re.compile(r"--[a-z-]+")
#: a verb of ours, and the words that people who come from elsewhere type for it
_SAID_FOR: Final = {
    "run": "srun salloc",
    "submit": "qsub create launch enqueue apply sweep",
    "show": "describe inspect info scontrol",
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
    "again": "rerun retry resubmit repeat restart",
    "cancel": "scancel qdel kill stop delete rm abort terminate",
    "fleet": "sinfo pbsnodes nodes workers hosts gpus nvidia-smi",
    "uncordon": "undrain resume",
    "schedule add": "cron crontab",
    "call": "invoke request req",
    "doctor": "health ping diagnose",
    "admin freeze": "pause suspend",
    "admin limit": "quota quotas",
    "admin priority": "prio renice",
}
OURS: Final = {
    **{word: verb for verb, words in _SAID_FOR.items() for word in words.split()},
    "schedule list": "schedule ls",
    **dict.fromkeys(("schedule rm", "schedule delete", "schedule cancel"), "schedule remove"),
    **dict.fromkeys(("schedule create", "schedule new"), "schedule add"),
    **dict.fromkeys(("schedule run", "schedule trigger"), "schedule run-now"),
    **dict.fromkeys(("admin quota", "admin quotas"), "admin limit"),
}
#: words for which a whole line says more than the verb
LINES: Final = {
    "salloc": "moorage run -it --gpu -- bash",
    "qsub": "moorage submit --with job.sh -- bash job.sh",
}
#: the options of sbatch, and those of submit
SBATCH: Final = (
    ("--job-name=train", "--job train: the job's id, of one job only"),
    ("--gpus=2, --gres=gpu:h100:2", "--gpu 2xH100"),
    ("--nodes=4 --gpus-per-node=8", "--hosts 4 --gpu 8xH100: a replica is one start of the command"),
    ("--exclusive", "--gpu 8xH100: a job has the GPUs that it asks for, so ask for all of a host"),
    ("--cpus-per-task=8", "--cpu 8"),
    ("--mem=64G", "--memory 64Gi"),
    ("--time=12:00:00", "--time-limit 12h"),
    ("--array=0-99%8", "--array 0-99%8"),
    ("--dependency=afterok:J", "--after J; afterany: --after J:any; afternotok: --after J:failed"),
    ("--begin=22:00", "--at 22:00"),
    ("--hold", "--hold; moorage change JOB --release"),
    ("--constraint=a100", "--requires LABEL=VALUE"),
    ("--account, --partition", "--tenant NAME"),
    ("--qos, --nice", "--priority 0..100"),
    ("--requeue", "--retries 2; --preemptible"),
    ("--export=NAME", "--env NAME; --env-file FILE; --secret NAME=SECRET"),
    ("--chdir=DIR", "--with DIR brings its content to the job's folder; --cwd /shared/DIR"),
    ("--output, --error", "moorage logs JOB; --keep 'out/**' and moorage get JOB for files"),
    ("--mail-type=END", "moorage follow"),
    ("--wrap='a | b'", "-- sh -c 'a | b'"),
    ("--parsable", "-q"),
    ("--test-only", "moorage plan"),
    ("--signal=USR1@60", "--checkpoint-signal SIGUSR1 --checkpoint-before 60s"),
    ("--ntasks=4", "--replicas 4; with --gang they start together"),
    ("--wait", "moorage run, or moorage wait JOB"),
    ("SLURM_ARRAY_TASK_ID", "MOORAGE_INDEX; the others: MOORAGE_JOB, MOORAGE_ATTEMPT, RANK, WORLD_SIZE"),
)

#: the short options of sbatch whose letters mean nothing else
_SHORT: Final = {
    "-J": "--job-name", "-G": "--gpus", "-N": "--nodes", "-n": "--ntasks", "-c": "--cpus-per-task", "-t": "--time",
    "-a": "--array", "-b": "--begin", "-C": "--constraint", "-A": "--account", "-p": "--partition", "-D": "--chdir",
    "-o": "--output",
}  # fmt: skip
#: options of Ray, docker, kubectl and others, and what to write for them
_ELSEWHERE: Final = {
    "--name": "--job NAME: the job's id",
    **dict.fromkeys(("--num-gpus", "--gpus-per-task"), "--gpu 2xH100"),
    "--num-cpus": "--cpu 8",
    **dict.fromkeys(("--working-dir", "--workdir", "--work-dir"), dict(SBATCH)["--chdir=DIR"]),
    **dict.fromkeys(
        ("--volume", "--mount", "-v"), "--with DIR brings its content to the job's folder; --cwd /shared/DIR"
    ),
    **dict.fromkeys(("--detach", "-d"), "moorage submit, which returns once the job is recorded"),
    "-e": "--env NAME=VALUE",
    "--tag": "--label KEY=VALUE",
    **dict.fromkeys(("--depends", "--depends-on", "--needs"), "--after JOB"),
    "--max-retries": "--retries 2",
    **dict.fromkeys(("--runtime-env", "--pip"), "--setup CMD prepares each worker once; --env NAME=VALUE; --with PATH"),
    "--cron": "moorage schedule add NAME --cron '0 3 * * *' -- COMMAND",
    **dict.fromkeys(
        ("--worker", "--host", "--node", "--nodelist", "-w", "--exclude", "-x"),
        "--requires LABEL=VALUE: a label that the worker has, as moorage worker --label gives it",
    ),
}


def as_elsewhere(option: str) -> str:
    """Return what to write for an option of another tool; "" if it is none, or nothing here is like it."""
    if option in _ELSEWHERE:
        return _ELSEWHERE[option]
    option = _SHORT.get(option, option)
    return next((f"{theirs} of sbatch: {ours}" for theirs, ours in SBATCH if option in _OPTION.findall(theirs)), "")

"""A script for Slurm, read as sbatch reads it: what each of its options is here, and what is none.

Nothing is dropped in silence: each option has a row with what becomes of it, or why nothing does.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from moorage.client.durations import exact
from moorage.client.errors import rejected
from moorage.schemas.names import is_job

#: short options, and the long ones that they are
_SHORT: Final = {
    "J": "job-name", "G": "gpus", "N": "nodes", "n": "ntasks", "c": "cpus-per-task", "t": "time", "a": "array",
    "b": "begin", "C": "constraint", "A": "account", "p": "partition", "D": "chdir", "o": "output", "e": "error",
    "d": "dependency", "q": "qos", "w": "nodelist", "x": "exclude", "i": "input", "L": "licenses", "m": "distribution",
    "M": "clusters", "B": "extra-node-info", "s": "oversubscribe", "O": "overcommit", "k": "no-kill", "H": "hold",
    "I": "immediate", "v": "verbose", "Q": "quiet", "W": "wait", "S": "core-spec", "F": "nodefile",
}  # fmt: skip
#: options without a value
_SWITCHES: Final = frozenset({
    "exclusive", "requeue", "no-requeue", "parsable", "wait", "verbose", "quiet", "hold", "overcommit",
    "oversubscribe", "no-kill", "contiguous", "get-user-env", "ignore-pbs", "spread-job", "use-min-nodes", "test-only",
    "reboot",
})  # fmt: skip
#: what is said of options that have no counterpart
_NONE: Final = {
    "partition": "none: any worker that has what is asked for; --requires LABEL=VALUE names some of them",
    "account": "none: the tenant is that of your key, or --tenant NAME",
    "qos": "none: --priority 0..100 says how soon",
    "nice": "none: --priority 0..100 says how soon",
    "priority": "none: --priority 0..100 says how soon",
    "constraint": "none: --gpu names a model, --requires LABEL=VALUE a label of the worker",
    "nodelist": "none: --requires LABEL=VALUE names workers by a label",
    "exclude": "none: --requires LABEL=VALUE names workers by a label",
    "exclusive": "none: a job has the GPUs that it asks for, and shares the host; --gpu 8xH100 takes all of one",
    "mail-type": "none: moorage follow tells a command or an address what becomes of jobs",
    "mail-user": "none: moorage follow tells a command or an address what becomes of jobs",
    "requeue": "always so where the host is lost; --preemptible lets jobs of a higher priority end it, --retries 2 "
    "runs it again after a failure",
    "open-mode": "none: the output of each attempt is kept by itself",
    "licenses": "none",
    "reservation": "none",
    "comment": "none: --label KEY=VALUE",
    "parsable": "moorage submit prints the id alone with -q",
    "wait": "moorage wait JOB",
    "verbose": "none",
    "quiet": "-q",
    "get-user-env": "none: the job has its worker's environment",
    "test-only": "moorage plan",
}
#: commands of Slurm that a script may call, and why they do not work in a job
_CALLS: Final = {
    "sbatch": "a job submits another one by the Python client or by moorage submit, where its host has a key",
    "squeue": "moorage ls",
    "sacct": "moorage ls --history",
    "sinfo": "moorage fleet",
    "scancel": "moorage cancel",
    "sbcast": "--with brings files to each host",
    "salloc": "moorage run -it",
    "sstat": "moorage use",
    "sattach": "moorage attach",
}
_TIME: Final = re.compile(r"(?:(\d+)-(?=$|\d))?(\d+)?(?::(\d+))?(?::(\d+))?(?:\.\d+)?")
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)([KMGT]?)B?", re.IGNORECASE)
_GPUS: Final = re.compile(r"(?:gpu:)?(?:([\w.-]*[A-Za-z][\w.-]*):)?(\d+)|gpu:([\w.-]*[A-Za-z][\w.-]*)")
_MIG: Final = re.compile(r"\d+g\.\d+gb", re.IGNORECASE)


class Row(NamedTuple):
    """One option: its line, 0 for one of the command line; as it stands there; and what is made of it.

    `is_none` says that nothing is.
    """

    line: int
    theirs: str
    ours: str
    is_none: bool = False


class Converted(NamedTuple):
    """The options of `moorage submit`, a row for each option of the script, and what the script calls itself.

    `needs_names` says whether it reads variables of Slurm or calls `srun`; `env` are those that do not change.
    """

    options: list[str]
    rows: list[Row]
    needs_names: bool
    env: dict[str, str]


class _Option(NamedTuple):
    line: int
    name: str
    value: str

    @property
    def text(self) -> str:
        return f"--{self.name}" + (f"={self.value}" if self.value else "")


def options_in(script: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the words of each line of options, with its number. As sbatch does, read none behind the first command."""
    for number, line in enumerate(script.splitlines(), 1):
        if line.startswith("#SBATCH") and line[7:8].isspace():
            try:
                yield number, shlex.split(line[7:], comments=True)
            except ValueError as error:
                raise _refused(number, line, f"{error}") from None
        elif line.strip() and not line.lstrip().startswith("#"):
            return


def late_options(script: str) -> Iterator[int]:
    """Yield the numbers of lines of options behind the first command, which sbatch does not read."""
    is_over = False
    for number, line in enumerate(script.splitlines(), 1):
        if is_over and re.match(r"#SBATCH\s", line):
            yield number
        is_over = is_over or bool(line.strip() and not line.lstrip().startswith("#"))


def _parsed(line: int, words: Sequence[str]) -> Iterator[_Option]:
    left = list(words)
    while left:
        word = left.pop(0)
        long = re.fullmatch(r"--([a-z][a-z_-]*)(?:=(.*))?", word, re.DOTALL)
        short = re.fullmatch(r"-([A-Za-z])=?(.*)", word, re.DOTALL)
        if long is not None:
            name, value = long[1].replace("_", "-"), long[2]
        elif short is not None and short[1] in _SHORT:
            name, value = _SHORT[short[1]], short[2] or None
        elif word in ("hetjob", "packjob"):
            raise _refused(line, word, "a job of parts with different resources has no counterpart")
        else:
            raise _refused(line, word, "no option of sbatch")
        if value is None and name not in _SWITCHES and left and not left[0].startswith("-"):
            value = left.pop(0)
        yield _Option(line, name, value or "")


def converted(script: str, more: Sequence[str] = ()) -> Converted:
    """Return what a script asks for, with options of the command line that go before its own. Raises `Rejected`."""
    lines = [*options_in(script), (0, list(more))]
    found = {option.name: option for line, words in lines for option in _parsed(line, words)}
    reading = _Reading(found)
    reading.read()
    for number in late_options(script):
        row = Row(number, "#SBATCH", "not read, as sbatch does not: it is behind the first command", is_none=True)
        reading.rows.append(row)
    code = [(at, line) for at, line in enumerate(script.splitlines(), 1) if not line.lstrip().startswith("#")]
    called = re.compile(r"(?:^|[\s;&|(`])(" + "|".join(_CALLS) + r")\s")
    for at, line in code:
        if (call := called.search(line)) is not None:
            reading.rows.append(Row(at, call[1], f"not there in a job: {_CALLS[call[1]]}", is_none=True))
        if (asked := re.search(r"\bscontrol\s+(?!show host)(\w+)", line)) is not None:
            said = f"scontrol {asked[1]}"
            reading.rows.append(Row(at, said, "not there in a job: only scontrol show hostnames is", is_none=True))
        if "--hosts" in reading.words and re.search(r"\bmpi(run|exec)\b", line):
            said = "starts processes on its own host alone, and each host runs the script"
            reading.rows.append(Row(at, "mpirun", said, is_none=True))
    text = "\n".join(line for _, line in code)
    needs = bool(re.search(r"\bSLURM_|\bSLURMD_|(?:^|[\s;&|(`])(srun|scontrol)\s", text))
    return Converted(reading.words, sorted(reading.rows), needs, reading.env if needs else {})


class _Reading:
    """Makes the options of submit from those of sbatch: `read` fills `words`, `rows` and `env`."""

    def __init__(self, options: dict[str, _Option]) -> None:
        self._left = dict(options)
        self.words: list[str] = []
        self.rows: list[Row] = []
        self.env: dict[str, str] = {}

    def read(self) -> None:
        self._nodes_and_gpus()
        each: dict[str, Callable[[str], tuple[list[str], str]]] = {
            "job-name": self._name, "time": self._time, "array": self._array, "dependency": self._after,
            "signal": self._signal, "begin": self._begin, "chdir": self._chdir, "export": self._export,
            "no-requeue": lambda _: (["--no-retry-on", "lost"], ""), "output": self._output, "error": self._output,
            "deadline": self._begin, "container-image": self._image,
        }  # fmt: skip
        for name, make in each.items():
            option = self._left.pop(name, None)
            if option is not None:
                words, note = self._of(option, make)
                self._add(option, words, note)
        for option in self._left.values():
            why = _NONE.get(option.name, "no counterpart")
            self.rows.append(Row(option.line, option.text, why, is_none=True))

    def _of(self, option: _Option, make: Callable[[str], tuple[list[str], str]]) -> tuple[list[str], str]:
        try:
            return make(option.value)
        except ValueError as error:
            raise _refused(option.line, option.text, str(error) or "not as sbatch has it") from None

    def _add(self, option: _Option, words: Sequence[str], note: str = "") -> None:
        self.words += words
        ours = shlex.join(words)
        said = f"{ours}: {note}" if ours and note else ours or note
        self.rows.append(Row(option.line, option.text, said, is_none=not words))

    # ------------------------------------------------------------------------------------------------- what it has

    def _take(self, *names: str) -> list[_Option]:
        return [self._left.pop(name) for name in names if name in self._left]

    def _number(self, name: str) -> int | None:
        option = self._left.get(name)
        if option is None:
            return None
        found = re.match(r"\d+", option.value)
        if found is None or int(found[0]) < 1:
            raise _refused(option.line, option.text, "a number from 1 on")
        return int(found[0])

    def _nodes_and_gpus(self) -> None:
        nodes, tasks = self._number("nodes"), self._number("ntasks")
        per_node, cpus = self._number("ntasks-per-node"), self._number("cpus-per-task")
        if nodes is None and tasks is not None and per_node is not None:
            nodes = math.ceil(tasks / per_node)
        nodes = nodes or 1
        if per_node is None:
            per_node = 1 if tasks is None else math.ceil(tasks / nodes)
        if tasks is not None and tasks != nodes * per_node:
            option = self._left["ntasks"]
            raise _refused(option.line, option.text, f"{nodes} nodes cannot have as many tasks each")
        gpus, model = self._gpus(nodes, per_node)
        memory = self._memory(per_node * (cpus or 1), gpus)
        per_gpu = self._number("cpus-per-gpu")
        shown: list[tuple[_Option, list[str], str]] = []
        token = [f"{gpus}x{model.upper()}" if model else str(gpus)] if gpus else []
        names = ("gres", "gpus", "gpus-per-node", "gpus-per-task")
        shown += [(each, ["--gpu", *token] if at == 0 else [], "") for at, each in enumerate(self._take(*names))]
        hosts = ["--hosts", str(nodes)] if nodes > 1 else []
        runs = "the whole script runs on each of them, and not on the first alone"
        for each in self._take("nodes"):
            shown.append((each, hosts, runs if nodes > 1 else "one host"))
            hosts = []
        for each in self._take("ntasks", "ntasks-per-node"):
            shown.append((each, hosts, f"srun starts {per_node} of them on each host"))
            hosts = []
        wanted = cpus * per_node if cpus is not None else per_gpu and per_gpu * max(gpus, 1)
        for at, each in enumerate(self._take("cpus-per-task", "cpus-per-gpu")):
            shown.append((each, ["--cpu", str(wanted)] if at == 0 else [], ""))
        for each in self._take("mem", "mem-per-cpu", "mem-per-gpu"):
            shown.append((each, ["--memory", f"{memory}Mi"] if memory else [], "" if memory else "no bound"))
        for option, words, note in shown:
            self._add(option, words, note)
        self.env |= {"SLURM_NNODES": str(nodes), "SLURM_NTASKS_PER_NODE": str(per_node)}
        self.env |= {"SLURM_NTASKS": str(nodes * per_node)}
        self.env |= {} if cpus is None else {"SLURM_CPUS_PER_TASK": str(cpus)}
        self.env |= {} if not gpus else {"SLURM_GPUS_ON_NODE": str(gpus)}

    def _gpus(self, nodes: int, per_node: int) -> tuple[int, str]:
        """Return how many GPUs each node gives, and their model."""
        count, model = 0, ""
        for name, by in (("gres", 1), ("gpus-per-node", 1), ("gpus-per-task", per_node), ("gpus", 0)):
            option = self._left.get(name)
            if option is None:
                continue
            text, *others = [part for part in option.value.split(",") if part]
            if others and name == "gres":
                rest = ",".join(others)
                self.rows.append(Row(option.line, rest, "none: only GPUs are resources here", is_none=True))
            text = re.sub(r"\(.*\)$", "", text) if text != "gpu" else "gpu:1"
            found = _GPUS.fullmatch(text)
            if found is None or (name == "gres" and not text.startswith("gpu")):
                raise _refused(option.line, option.text, "only GPUs are resources here, as gpu:h100:2")
            if _MIG.fullmatch(found[1] or found[3] or ""):
                raise _refused(option.line, option.text, "a slice of a GPU: moorage fleet shows what --gpu names it by")
            number = int(found[2] or 1)
            if not by and number % nodes:
                raise _refused(option.line, option.text, f"{nodes} nodes cannot have as many GPUs each")
            count, model = number * by if by else number // nodes, found[1] or found[3] or model
        return count, model

    def _memory(self, cpus: int, gpus: int) -> int | None:
        """Return the MiB of each node; None for no bound."""
        for name, by in (("mem", 1), ("mem-per-cpu", cpus), ("mem-per-gpu", gpus)):
            option = self._left.get(name)
            if option is not None:
                found = _SIZE.fullmatch(option.value)
                if found is None:
                    raise _refused(option.line, option.text, "a size as 64G")
                factor = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}[found[2].upper() or "M"]
                return math.ceil(float(found[1]) * factor * by) or None
        return None

    # ------------------------------------------------------------------------------------------------- each by itself

    def _name(self, value: str) -> tuple[list[str], str]:
        self.env["SLURM_JOB_NAME"] = value
        return ["--label", f"name={value}"], "a job's id is of one job only; --job ID names it"

    def _time(self, value: str) -> tuple[list[str], str]:
        if value.upper() in ("0", "UNLIMITED", "INFINITE"):
            return [], "no limit"
        found = _TIME.fullmatch(value)
        if found is None or not any(found.groups()):
            raise ValueError("a time as 90, 12:00:00 or 1-12")
        days, *others = found.groups()
        numbers = [int(each) for each in others if each is not None]
        if days is not None:
            hours, minutes, seconds = [*numbers, 0, 0, 0][:3]
        else:
            hours, minutes, seconds = {1: (0, numbers[0], 0), 2: (0, *numbers), 3: tuple(numbers)}[len(numbers)]
        return ["--time-limit", exact(((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds)], ""

    def _array(self, value: str) -> tuple[list[str], str]:
        if not re.fullmatch(r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%\d+)?", value):
            raise ValueError("numbers as 0-99%4")
        return ["--array", value], ""

    def _after(self, value: str) -> tuple[list[str], str]:
        words: list[str] = []
        said = ""
        if value == "singleton":
            return [], "no counterpart: --after JOB names the job before"
        if "?" in value:
            raise ValueError("jobs of which any does are not there: --after waits for all of them")
        for part in value.split(","):
            kind, *ids = part.split(":") if ":" in part else ("afterany", part)  # of an id alone
            ends = {"afterok": "", "afterany": ":any", "afternotok": ":failed"}
            if kind not in ends or not ids:
                raise ValueError(f"{kind} has no counterpart: afterok, afterany and afternotok have one")
            for job in ids:
                if not is_job(job):
                    raise ValueError(f"{job[:40]!r} is no job's id: give one that moorage submit printed")
                words += ["--after", f"{job}{ends[kind]}"]
        return words, said

    def _signal(self, value: str) -> tuple[list[str], str]:
        found = re.fullmatch(r"(?:[BR]+:)?(?:SIG)?([A-Z0-9]+)(?:@(\d+))?", value)
        if found is None:
            raise ValueError("a signal as B:USR1@60")
        names = {"10": "USR1", "12": "USR2", "15": "TERM", "2": "INT", "1": "HUP"}
        words = ["--checkpoint-signal", f"SIG{names.get(found[1], found[1])}"]
        return [*words, "--checkpoint-before", f"{found[2] or 60}s"], "before a drain and a preemption, too"

    def _begin(self, value: str) -> tuple[list[str], str]:
        later = re.fullmatch(r"now\+(\d+)(second|minute|hour|day|week)?s?", value)
        if later is not None:
            unit = {"": 1, "second": 1, "minute": 60, "hour": 3600, "day": 86400, "week": 604800}[later[2] or ""]
            return ["--at", exact(int(later[1]) * unit)], ""
        if not re.fullmatch(r"\d{1,2}:\d\d|\d{4}-\d\d-\d\d(T\d\d:\d\d(:\d\d)?)?", value):
            raise ValueError("a time as 22:00, 2026-12-24T18:00 or now+1hour")
        return ["--at", value], ""

    def _chdir(self, value: str) -> tuple[list[str], str]:
        return ["--cwd", value], "it has to be on the workers, too"

    def _export(self, value: str) -> tuple[list[str], str]:
        words: list[str] = []
        for part in value.split(","):
            if part not in ("ALL", "NONE", "NIL"):
                words += ["--env", part]
        said = "" if "ALL" not in value.split(",") else "the variables of this shell do not go with the job"
        return words, said

    def _output(self, value: str) -> tuple[list[str], str]:
        named = {
            "%j": "JOB",
            "%J": "JOB",
            "%A": "JOB",
            "%x": self.env.get("SLURM_JOB_NAME", "JOB"),
            "%a": "N",
            "%%": "%",
        }
        file = re.sub(r"%\d*(\w|%)", lambda found: named.get(f"%{found[1]}", ""), value)
        which = "JOB --replica N" if "%a" in value else "JOB"
        return [], f"kept by the worker: moorage logs {which} >{shlex.quote(file)}"

    def _image(self, value: str) -> tuple[list[str], str]:
        return ["--driver", "docker", "--image", value.replace("#", "/")], ""


def _refused(line: int, theirs: str, why: str) -> Exception:
    where = f"line {line}: " if line else ""
    return rejected(
        "invalid-argument", f"{where}{theirs}: {why}", found=theirs,
        next="mend the line, or write the options of moorage submit: moorage help slurm",
    )  # fmt: skip

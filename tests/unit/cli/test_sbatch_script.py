"""Scripts for Slurm: the forms of options that are met in public scripts, and what each is here."""

from __future__ import annotations

import pytest

from moorage.cli.jobs.sbatch_script import converted
from moorage.client.errors import Rejected

HEAD = "#!/bin/bash\n"


def words(*lines: str) -> list[str]:
    return converted(HEAD + "".join(f"#SBATCH {line}\n" for line in lines) + "python3 train.py\n").options


@pytest.mark.parametrize(
    ("line", "ours"),
    [
        ("--gres=gpu:1", "--gpu 1"),
        ("--gres=gpu:a100:4", "--gpu 4xA100"),
        ("--gres gpu:h200", "--gpu 1xH200"),
        ("--gres=gpu", "--gpu 1"),
        ("--gres=gpu:a100:2(S:0-1)", "--gpu 2xA100"),
        ("-G 1", "--gpu 1"),
        ("-G A100:1", "--gpu 1xA100"),
        ("--gpus-per-node v100:1", "--gpu 1xV100"),
        ("--gpus=2", "--gpu 2"),
        ("-c 8", "--cpu 8"),
        ("-c8", "--cpu 8"),
        ("--mem=64G", "--memory 65536Mi"),
        ("--mem 20gb", "--memory 20480Mi"),
        ("--mem=40000", "--memory 40000Mi"),
        ("--mem=200M", "--memory 200Mi"),
        ("-t 30", "--time-limit 30m"),
        ("-t 5:00", "--time-limit 5m"),
        ("--time=02:00:00", "--time-limit 2h"),
        ("--time=1-12:00:00", "--time-limit 1d12h"),
        ("--time=05-00", "--time-limit 5d"),
        ("-t 2-", "--time-limit 2d"),
        ("-t 0-5:00:00", "--time-limit 5h"),
        ("-a 0-99%4", "--array 0-99%4"),
        ("--array=1,3-5", "--array 1,3-5"),
        ("--dependency=afterok:12:j13", "--after 12 --after j13"),
        ("-d afterany:12,afternotok:13", "--after 12:any --after 13:failed"),
        ("--dependency=114504", "--after 114504:any"),
        ("--signal=B:USR1@120", "--checkpoint-signal SIGUSR1 --checkpoint-before 120s"),
        ("--signal=SIGUSR1@90", "--checkpoint-signal SIGUSR1 --checkpoint-before 90s"),
        ("--signal=USR2", "--checkpoint-signal SIGUSR2 --checkpoint-before 60s"),
        ("--begin=now+2hours", "--at 2h"),
        ("--begin=22:00", "--at 22:00"),
        ("--export=ALL,LX=2", "--env LX=2"),
        ("--no-requeue", "--no-retry-on lost"),
        ("-D /scratch/me", "--cwd /scratch/me"),
        ('--job-name="algal bloom"', "--label 'name=algal bloom'"),
        ("--mem=0", ""),
        ("-t UNLIMITED", ""),
        ("-N 1", ""),
    ],
)
def test_each_form_of_an_option_is_an_option_of_submit(line: str, ours: str) -> None:
    import shlex

    assert shlex.join(words(line)) == ours


@pytest.mark.parametrize(
    ("lines", "ours"),
    [
        (("-N 64 -G 256", "--ntasks-per-node=4 --gpus-per-node=4"), {"--gpu": "4", "--hosts": "64"}),
        (("--ntasks=8", "--ntasks-per-node=4", "--gpus-per-task=1", "-c 3"),
         {"--gpu": "4", "--hosts": "2", "--cpu": "12"}),
        (("-N 2", "--gpus=8"), {"--gpu": "4", "--hosts": "2"}),
        (("-n 4", "--cpus-per-task=2", "--mem-per-cpu=8G"), {"--cpu": "8", "--memory": "65536Mi"}),
        (("--gpus-per-node=2", "--mem-per-gpu=40GB", "--cpus-per-gpu=16"),
         {"--gpu": "2", "--cpu": "32", "--memory": "81920Mi"}),
    ],
)  # fmt: skip
def test_tasks_nodes_and_what_each_has_are_put_together(lines: tuple[str, ...], ours: dict[str, str]) -> None:
    found = words(*lines)
    assert dict(zip(found[::2], found[1::2], strict=True)) == ours


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("--gres=shard:2", "only GPUs are resources here"),
        ("-G 1g.20gb:1", "a slice of a GPU"),
        ("--array=a-b", "numbers as 0-99%4"),
        ("--time=soon", "a time as 90"),
        ("--mem=much", "a size as 64G"),
        ("--dependency=afterok:1?afterok:2", "after waits for all of them"),
        ("--dependency=aftercorr:1", "aftercorr has no counterpart"),
        ("-N 3 --gpus=4", "3 nodes cannot have as many GPUs each"),
        ("--nodes=two", "a number from 1 on"),
        ("hetjob", "parts with different resources"),
        ("what", "no option of sbatch"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_its_line(line: str, why: str) -> None:
    with pytest.raises(Rejected, match=f"line 2: .*{why}"):
        words(line)


def test_nothing_of_a_script_is_dropped_in_silence() -> None:
    script = HEAD + "\n".join(
        [
            "#SBATCH --job-name=x --partition=long   # which queue",
            "##SBATCH --time=1:00",
            "# SBATCH --time=2:00",
            "#SBATCH --mem_bind=local",
            "#SBATCH --image=nersc/pytorch:21",
            "#SBATCH --gres=gpu:2,VramPerGpu:24GB",
            "#SBATCH --output=logs/%x_%A_%a.out",
            "#SBATCH -N 2",
            "module load cuda",
            "#SBATCH --time=3:00",
            "scontrol requeue $SLURM_JOB_ID",
            "# sbatch other.sh",
            "if true; then sbatch next.sh; fi",
            "mpirun -np 8 ./a.out",
        ]
    )
    found = converted(script, ["--account=me"])
    none = {(row.line, row.theirs): row.ours for row in found.rows if row.is_none}
    assert set(none) == {
        (0, "--account=me"),
        (2, "--partition=long"),
        (5, "--mem-bind=local"),
        (6, "--image=nersc/pytorch:21"),
        (7, "VramPerGpu:24GB"),
        (8, "--output=logs/%x_%A_%a.out"),
        (11, "#SBATCH"),
        (12, "scontrol requeue"),
        (14, "sbatch"),
        (15, "mpirun"),
    }
    assert none[8, "--output=logs/%x_%A_%a.out"] == (
        "kept by the worker: moorage logs JOB --replica N >logs/x_JOB_N.out"
    )
    assert found.options == ["--gpu", "2", "--hosts", "2", "--label", "name=x"]
    assert found.needs_names
    assert found.env["SLURM_NNODES"] == "2"


def test_options_of_the_command_line_go_before_those_of_the_script() -> None:
    found = converted(HEAD + "#SBATCH -t 10\n#SBATCH -c 2\ntrue\n", ["--time=20", "-c", "4"])
    assert found.options == ["--cpu", "4", "--time-limit", "20m"]
    assert not found.needs_names

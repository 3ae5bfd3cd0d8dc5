"""`moorage sbatch`: scripts for Slurm run on a real node, with the variables that they read and srun inside."""

from __future__ import annotations

import json
from pathlib import Path

from tests.system.cli.node import Node, moorage

GANG = """#!/bin/bash
#SBATCH --job-name=trainer --partition=long
#SBATCH --nodes=2 --ntasks-per-node=2
#SBATCH --gres=gpu:h100:2
#SBATCH --time=10:00
set -e
master=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
echo "node $SLURM_NODEID of $SLURM_NNODES, $SLURM_JOB_NAME, $(test -n "$master" && echo has a master)"
srun --label -c 1 sh task.sh all
srun -n 1 sh task.sh one
srun -n 2 sh -c 'exit $((SLURM_PROCID == 1 ? 7 : 0))'
"""
ARRAY = """#!/bin/bash
#SBATCH --array=1-2%1
echo "task $SLURM_ARRAY_TASK_ID of $SLURM_ARRAY_TASK_COUNT with $1 and $(cat data.txt)"
"""
PLAIN = "#!/bin/sh\n#SBATCH -c 1\necho plain $1 in $(basename $PWD)\n"


async def test_a_script_of_two_nodes_starts_a_process_a_task(node: Node, unique: str, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(GANG)
    (tmp_path / "task.sh").write_text('echo "$1 $SLURM_PROCID/$SLURM_NTASKS $RANK $LOCAL_RANK"\n')
    said = await moorage("sbatch", "job.sh", "--json", env=node.env(unique), cwd=tmp_path)
    told = json.loads(said.out)
    assert said.code == 0, said.err
    assert [row["theirs"] for row in told["options"] if row["is_none"]] == ["--partition=long", "--ntasks-per-node=2"]
    ran = await moorage("sbatch", "job.sh", "--submit", "-q", env=node.env(unique), cwd=tmp_path)
    assert ran.code == 0, ran.err
    job = ran.out.strip()
    ended = await node.run("wait", job, tenant=unique)
    assert ended.code == 7, ended.err  # of a task of the second host
    out = (await node.run("logs", job, tenant=unique)).out
    lines = sorted(line.partition("] ")[2] for line in out.splitlines())
    assert lines == [
        "all 0/4 0 0", "all 1/4 1 1", "all 2/4 2 0", "all 3/4 3 1",
        "node 0 of 2, trainer, has a master", "node 1 of 2, trainer, has a master", "one 0/1 0 0",
    ]  # fmt: skip


async def test_arrays_arguments_and_files_of_the_folder_are_there(node: Node, unique: str, tmp_path: Path) -> None:
    (tmp_path / "array.sh").write_text(ARRAY)
    (tmp_path / "data.txt").write_text("data\n")
    words = ("sbatch", "array.sh", "--submit", "--job", "tasks", "-q", "--", "0.1")
    ran = await moorage(*words, env=node.env(unique), cwd=tmp_path)
    assert (ran.code, ran.out, ran.err) == (0, "tasks\n", "")
    out = (await node.run("logs", ran.out.strip(), tenant=unique)).out
    assert sorted(out.splitlines()) == [f"[{task}] task {task} of 2 with 0.1 and data" for task in (1, 2)]
    (tmp_path / "plain.sh").write_text(PLAIN)
    shared = await moorage(
        "sbatch", "plain.sh", "--shared", "--submit", "-q", "--", "x", env=node.env(unique), cwd=tmp_path
    )
    assert shared.code == 0, shared.err
    assert (await node.run("logs", shared.out.strip(), tenant=unique)).out == f"plain x in {tmp_path.name}\n"


async def test_what_srun_cannot_do_is_refused_by_name(node: Node, unique: str, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text("#!/bin/bash\nsrun --mpi=pmix ./a.out\n")
    ran = await moorage("sbatch", "job.sh", "--submit", "-q", env=node.env(unique), cwd=tmp_path)
    ended = await node.run("wait", ran.out.strip(), tenant=unique)
    assert ended.code == 64
    assert "srun: --mpi has no counterpart" in (await node.run("logs", ran.out.strip(), tenant=unique)).err
    (tmp_path / "none.sh").write_text("#SBATCH -c 1\n")
    for name in ("none.sh", "absent.sh"):
        refused = await moorage("sbatch", name, env=node.env(unique), cwd=tmp_path)
        assert (refused.code, f"{name}" in refused.err) == (2, True)

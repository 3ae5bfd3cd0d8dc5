"""What a job takes from the shell of its submit: variables, the active environment's Python, and no #SBATCH lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from moorage.cli.jobs.from_shell import (
    own_program,
    variables,
    warn_of_sbatch,
    warn_of_timeout,
)
from moorage.client import Rejected
from moorage.client.request_builder import build_request
from moorage.schemas.reserved_variables import shown_secrets


def test_env_takes_a_value_or_the_one_that_is_here_over_those_of_env_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    file = tmp_path / "job.env"
    file.write_text("# of the sweep\n\nSEED=1\nNOTE= a = b \n WANDB_MODE\nEMPTY=\n")
    found = variables(["SEED=2", "WANDB_MODE", "A="], [str(file)])
    assert found == {"SEED": "2", "NOTE": "a = b", "WANDB_MODE": "offline", "EMPTY": "", "A": ""}


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("A=two words", "two words"),
        ("export A=1", "1"),
        ("export\tA='1'", "1"),
        ("\ufeffA=1", "1"),
        ("A=1\r", "1"),
        ("A='it # is $HOME'", "it # is $HOME"),
        ('A="a \\"b\\" \\\\ c\\nd"', 'a "b" \\ c\nd'),
        ("A='b' # a comment", "b"),
        ("A=#1", "#1"),
        ("A=", ""),
        ('A=""', ""),
        ("A==b=", "=b="),
        ("A=it's", "it's"),
    ],
)
def test_an_env_file_is_read_as_a_shell_reads_it(line: str, value: str, tmp_path: Path) -> None:
    (tmp_path / "job.env").write_text(f"{line}\n", encoding="utf-8")
    assert variables([], [str(tmp_path / "job.env")]) == {"A": value}


@pytest.mark.parametrize(
    "line", ["A=1 # b", "A='1", 'A="1', 'A="1\\"', "A='1'2", "1A=1", "A B=1", "=1", "export A B=1", "A-B=1"]
)
def test_an_env_file_refuses_what_is_not_clear_by_its_line(line: str, tmp_path: Path) -> None:
    (tmp_path / "job.env").write_text(f"# one\n{line}\n")
    with pytest.raises(Rejected, match=r"job.env, line 2: "):
        variables([], [str(tmp_path / "job.env")])


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "WANDB_API_KEY", "aws_secret_access_key", "APIKEY", "API_KEYS", "DB_PASSWORD2", "API-KEY"]
)
def test_a_secret_is_refused_by_name_and_in_an_env_file_and_warned_of_with_its_value(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "very secret")
    (tmp_path / "job.env").write_text(f"{name}=very secret\n")
    for env, files in (([name], []), ([], [str(tmp_path / "job.env")])):
        with pytest.raises(Rejected, match="looks like a secret") as refused:
            variables(env, files)
        assert f"--secret {name}={name.lower().replace('_', '-')}" in str(refused.value.fixes)
        assert "very secret" not in str(refused.value)
    given = variables(
        [f"{name}=very secret", "MAX_TOKENS=5", "PAD_TOKEN=0", "MONKEY=x", "TOKENIZERS_PARALLELISM=0", "KEYBOARD=de"],
        [],
    )
    [said] = shown_secrets(given)  # which the scheduler answers
    assert said.startswith(f"secret: the value of {name} is in the request")


@pytest.mark.parametrize("env", ["NO_SUCH_VARIABLE", "", "=x"])
def test_env_refuses_a_name_that_is_not_set(env: str, tmp_path: Path) -> None:
    with pytest.raises(Rejected, match=r"not set here|without a name"):
        variables([env], [])
    with pytest.raises(Rejected, match="cannot be read"):
        variables([], [str(tmp_path / "none.env")])


def test_a_python_of_the_active_environment_is_named_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """So are scripts that it runs. What only lies beside it is the worker's own, as in a conda environment."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("python", ""), ("torchrun", f"#!{folder}/python3.11\n"), ("bash", "#!/bin/sh\n"), ("odd", "")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o644 if name == "odd" else 0o755)
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    assert own_program(["python", "a.py"], None, None) == ["python", "a.py"]
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        with monkeypatch.context() as active:
            active.setenv(variable, str(tmp_path))
            assert own_program(["python", "a.py"], None, None) == [f"{folder}/python", "a.py"]
            assert own_program(["python", "a.py"], None, "true") == ["python", "a.py"], "the setup's own"
            assert own_program(["torchrun"], "process", None) == [f"{folder}/torchrun"]
            assert f"torchrun is {folder}/torchrun, of the environment that is active here" in capsys.readouterr().err
            for command in (["bash"], ["odd"], ["/usr/bin/python"], ["sh", "-c", "python"], []):
                assert own_program(command, None, None) == command
            assert own_program(["python"], "docker", None) == ["python"]
    assert capsys.readouterr().err == ""


def test_a_script_for_sbatch_is_told_that_its_options_are_comments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.sh").write_text("#!/bin/bash\n#SBATCH --gres=gpu:2\npython train.py\n")
    Path("plain.sh").write_text("echo '#SBATCH is for Slurm'\n")
    warn_of_sbatch(build_request(["sh", "plain.sh"]))
    assert capsys.readouterr().err == ""
    warn_of_sbatch(build_request(["bash", "job.sh"]))
    assert "warning[sbatch]: the #SBATCH lines of job.sh are comments here" in capsys.readouterr().err


def test_a_time_out_that_was_meant_for_the_job_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    for timeout, limit in ((None, None), ("2m", None), ("1h", "1h"), ("soon", None)):
        warn_of_timeout(timeout, limit)
    assert capsys.readouterr().err == ""
    warn_of_timeout("1h", None)
    said = "warning[timeout]: --timeout 1h bounds the wait for answers; the job's own: --time-limit 1h\n"
    assert capsys.readouterr().err == said

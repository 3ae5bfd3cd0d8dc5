"""`--data` from the command to the process: a folder of this machine is sent once, and shared read-only there."""

from __future__ import annotations

from pathlib import Path

from tests.system.cli.node import Node, moorage


async def test_a_folder_of_this_machine_is_sent_once_and_its_content_is_what_jobs_read(
    node: Node, unique: str, tmp_path: Path
) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.csv").write_text("1\n2\n")
    env = node.env(unique)
    script = 'cat "$MOORAGE_DATA_SET/a.csv"'
    words = ("run", "--data", "set=./set", "--job")
    for job in ("first", "second"):
        ran = await moorage(*words, job, "--", "sh", "-c", script, env=env, cwd=tmp_path)
        assert (ran.code, ran.out) == (0, "1\n2\n"), ran.err
    shown = await moorage("show", "second", env=env)
    assert "set=object:" in shown.out
    refused = await moorage(*words, "third", "--data", "m=s3://me:secret@b/k", "--", "true", env=env, cwd=tmp_path)
    assert refused.code == 2
    assert "a source has no password in it" in refused.err
    assert "secret@" not in refused.err.replace("s3://me:secret@b/k", "")
    absent = await moorage("run", "--data", "set=./none", "--", "true", env=env, cwd=tmp_path)
    assert absent.code == 2, absent.err

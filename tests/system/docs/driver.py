"""Runs a page of the docs as its reader would: its blocks in order, in a folder of its own, on real terminals."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec
import pytest

from moorage.cli.framework.settings import the_file
from moorage.schemas import frames
from moorage.schemas.codec import Decoder, decode_request
from moorage.schemas.errors import Refused
from tests.containers import why_no_docker
from tests.engines import engine, why_no_dockerd
from tests.guests import why_no_vm
from tests.podmans import PodmanHome, why_no_podman
from tests.system.docs.terminal import Terminal
from tests.unit.docs.markdown import Block, Page, first_missing, lines_of

ROOT: Final = Path(__file__).resolve().parents[3]
HERE: Final = "terminal 2"
#: nats.go as Debian packages it
GOPATH: Final = "/usr/share/gocode"
GO_PACKAGES: Final = {"nats.go": "github.com/nats-io/nats.go"}
#: kinds of blocks that are shown for the eye alone
SHOWN: Final = {"help"}
#: commands that change nothing: what they show may take a moment to come, and a scheduler to answer them
LOOKS: Final = tuple(f"moorage {verb}" for verb in ("show", "ls", "explain", "fleet"))
#: of the tests' own variables: what the commands of a page find things by
KEPT: Final = ("LANG", "PYTHONPATH", "SSL_CERT_FILE", "DOCKER_HOST", "VM_KERNEL")
LOOK_AGAIN_S_MAX: Final = 60.0
END_S_MAX: Final = 30.0
#: engines that pages start by their own words, which `played.py` plays
PLAYED: Final = ("ollama", "tritonserver", "comfy")
FILES: Final = {"python", "js", "go", "sh", "toml", "ini", "jsonl", "csv", "yaml", "docker"}


def environment(folder: Path, **extra: str) -> dict[str, str]:
    """A newcomer's: an empty home, nothing said of NATS; `moorage`, this `python` and the tests' `nats` are found."""
    commands = folder / ".commands"
    commands.mkdir(exist_ok=True)
    nats = commands / "nats"
    if not nats.exists():
        nats.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{ROOT}/tests/system/docs/nats_command.py" "$@"\n')
        nats.chmod(0o755)
        python = commands / "python"
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')  # a link would leave the virtual environment
        python.chmod(0o755)
        for name in PLAYED:
            engine = commands / name
            engine.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{ROOT}/tests/system/docs/played.py" {name} "$@"\n')
            engine.chmod(0o755)
    podman = PodmanHome(folder / ".podman").configured() if has("podman") else {}
    path = [str(commands), str(Path(sys.executable).parent), *os.environ["PATH"].split(os.pathsep)]
    keep = {name: os.environ[name] for name in KEPT if name in os.environ}
    return {
        **keep,
        **podman,
        "PATH": os.pathsep.join(path),
        "HOME": str(folder),
        "NO_COLOR": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "GO111MODULE": "off",
        "GOPATH": GOPATH,
        "GOCACHE": os.environ.get("GOCACHE") or str(Path.home() / ".cache" / "go-build"),
        **{name: os.environ[name] for name in os.environ if name.lower().startswith("npm_config_")},
        **extra,
    }


def has(tool: str) -> bool:
    """Whether a command, or one of `GO_PACKAGES`, is here."""
    if tool in GO_PACKAGES:
        return (Path(GOPATH) / "src" / GO_PACKAGES[tool]).is_dir()
    if tool == "docker" and why_no_docker() and why_no_dockerd():
        return False
    if tool.startswith("qemu-") and why_no_vm():
        return False
    if tool == "podman" and why_no_podman():
        return False
    return shutil.which(tool) is not None


def skip_without(page: Page) -> None:
    """Skip where a command that the page needs is not here; in CI that is a failure."""
    missing = [name for name in page.needs if not has(name)]
    if missing and os.environ.get("CI"):
        pytest.fail(f"{page.name} needs {', '.join(missing)}: .ci/run installs it")
    if missing:
        pytest.skip(f"{page.name} needs {', '.join(missing)}")


@contextmanager
def engine_for(page: Page) -> Iterator[dict[str, str]]:
    """Give the variables by which a page finds a Docker engine, if it needs one: of its own where none answers."""
    if "docker" not in page.needs or not why_no_docker():
        yield {}
        return
    with engine() as made:
        yield {"DOCKER_HOST": f"unix://{made.socket}"}


def run(page: Page, folder: Path, env: dict[str, str]) -> None:
    """All blocks of a page; nothing of it runs on. Raises AssertionError that names page and line."""
    with ExitStack() as stack:
        stack.callback(end_all, folder)
        terminals: dict[str, Terminal] = {}

        def terminal(name: str) -> Terminal:
            if name not in terminals:
                terminals[name] = made = Terminal(folder, env)
                stack.callback(made.close)
            return terminals[name]

        for block, expected in with_expectation(page.blocks):
            try:
                _run_block(block, expected, folder, terminal)
            except (AssertionError, Refused) as error:
                raise AssertionError(f"{page.name}:{block.line}: {error}") from None
        for name, each in reversed(terminals.items()):  # a server is ended after its clients
            if each.busy:
                each.interrupt()
                failed = each.finish()
                assert failed == "", f"{page.name}: {name}, after Ctrl-C: {failed} failed\n{each.output}"


def end_all(folder: Path) -> None:
    """End whatever still runs with `folder` as its home: a worker's supervisor outlives it, and a page may fail."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in at_home_in(folder):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        ends = time.monotonic() + END_S_MAX
        while (left := at_home_in(folder)) and time.monotonic() < ends:
            time.sleep(0.05)
    assert left == [], f"cannot be ended: {left}"


def at_home_in(folder: Path) -> list[int]:
    """The processes that were started from a terminal of this page: by their home, or by their words, since a
    supervisor clears its environment. So pages name their folders in full."""
    home, found = f"HOME={folder}".encode(), []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and (
                home in (entry / "environ").read_bytes().split(b"\0")
                or f"{folder}/".encode() in (entry / "cmdline").read_bytes()
            ):
                found.append(int(entry.name))
    return found


def with_expectation(blocks: list[Block]) -> Iterator[tuple[Block, Block | None]]:
    """Each block with the output shown right below it; an output alone comes as a block, to be refused."""
    for at, block in enumerate(blocks):
        below = blocks[at + 1] if at + 1 < len(blocks) else None
        if at > 0 and block.kind == "text" and not block.title and blocks[at - 1].kind in ("sh", "python"):
            continue
        yield block, below if below is not None and below.kind == "text" and not below.title else None


def _run_block(block: Block, expected: Block | None, folder: Path, terminal: Callable[[str], Terminal]) -> None:
    if block.not_run or block.kind in SHOWN:
        return
    if block.kind == "json":
        decode(block)
        return
    if block.kind == "toml":
        (folder / (block.title or "moorage.toml")).write_text(block.body)
        the_file(folder / (block.title or "moorage.toml"), env={})
    elif block.title and not block.title.startswith("terminal") and block.kind in FILES:
        (folder / block.title).write_text(block.body)
    elif block.kind == "text":
        assert block.title, "an output that stands below no block that is run"
        there = terminal(block.title)
        there.until(lambda found: first_missing(block.body, found) == "", f"{block.body.strip()!r} in {block.title}")
    elif block.kind in ("sh", "python"):
        here = terminal(block.title or HERE)
        text = block.body if block.kind == "sh" else f"python - <<'PAGE'\n{block.body}\nPAGE\n"
        if block.title != "":
            here.type(text)
            if expected is not None:
                here.until(lambda found: first_missing(expected.body, found) == "", expected.body.strip())
            elif "moorage worker " in text:  # whoever reads on sees it, too
                here.until(lambda found: "joined as" in found, "the worker joins")
            return
        ends = time.monotonic() + LOOK_AGAIN_S_MAX
        while True:
            here.type(text)
            failed = here.finish()
            missing = first_missing(expected.body, here.output) if expected is not None else ""
            if not ((failed or missing) and only_looks(block) and time.monotonic() < ends):
                break
        assert failed == "", f"{failed} failed:\n{here.output}"
        assert missing == "", f"not in the output: {missing!r}\nfound\n" + "\n".join(lines_of(here.output))
    else:
        raise AssertionError(f"no rule for a block of {block.kind!r} with the title {block.title!r}")


def only_looks(block: Block) -> bool:
    """Whether a reader could type it again until the fleet has come so far."""
    return all(line.startswith(LOOKS) for line in block.body.splitlines() if line.strip())


def decode(block: Block) -> None:
    """JSON with the title `request` or the name of a frame. Raises AssertionError."""
    if block.title == "request":
        decode_request(block.body.encode())
        return
    kind = getattr(frames, block.title, None)
    assert kind is not None, f"the title of a json block is neither request nor a frame: {block.title!r}"
    assert issubclass(kind, msgspec.Struct)
    decoder: Decoder[msgspec.Struct] = Decoder(kind)
    decoder(block.body.encode())

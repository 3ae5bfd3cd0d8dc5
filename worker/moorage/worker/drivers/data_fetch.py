"""Fetches one source into a folder, as a program of its own that needs the standard library alone.

It runs as the job's user, with the job's variables and secrets. Its last line on stderr says why it failed. Exit code
75 is for what may pass, or go well elsewhere.

    python data_fetch.py NAME SOURCE FOLDER
"""

import hashlib
import os
import shutil
import socket
import sys
import urllib.error
import urllib.parse
import urllib.request

PASSES = 75
NAME = ""
PIECE = 1 << 20


def fail(why: str, code: int = 1) -> None:
    print(f"data {NAME}: {why}", file=sys.stderr)
    sys.exit(code)


def save(stream, path: str, wanted: str) -> None:  # type: ignore[no-untyped-def]
    digest = hashlib.sha256()
    with open(path, "xb") as file:
        while piece := stream.read(PIECE):
            digest.update(piece)
            file.write(piece)
    if wanted and digest.hexdigest() != wanted:
        fail(f"its SHA-256 is {digest.hexdigest()}, not {wanted}")


def from_web(source: str, folder: str, wanted: str) -> None:
    name = os.path.basename(urllib.parse.urlsplit(source).path) or "data"
    request = urllib.request.Request(source)
    if token := os.environ.get("DATA_TOKEN"):
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            save(answer, os.path.join(folder, name), wanted)
    except urllib.error.HTTPError as error:
        fail(f"its server answers {error.code} {error.reason}", PASSES if error.code >= 500 else 1)
    except (urllib.error.URLError, OSError) as error:
        fail(f"its server cannot be reached from here: {getattr(error, 'reason', error)}{alone()}", PASSES)


def alone() -> str:
    """Return that there is no network here, as in a container without one; "" if there is."""
    if any(name != "lo" for _, name in socket.if_nameindex()):
        return ""
    return "; there is no network here: containers have one if their operator sets network"


def from_hub(source: str, folder: str) -> None:
    try:
        from huggingface_hub import snapshot_download  # type: ignore[import-not-found]
        from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError  # type: ignore[import-not-found]
    except ImportError:
        fail(f"huggingface_hub is not installed for {sys.executable}")
    name, _, revision = source.partition("@")
    kind = "dataset" if name.startswith("datasets/") else "model"
    try:
        snapshot_download(
            name.removeprefix("datasets/"), repo_type=kind, revision=revision or None, local_dir=folder,
            cache_dir=os.path.join(folder, ".cache"),
        )  # fmt: skip
    except RepositoryNotFoundError:
        fail("there is no such repository, or the job has no HF_TOKEN for it")
    except (HfHubHTTPError, OSError) as error:
        fail(f"the hub cannot be reached from here: {type(error).__name__}{alone()}", PASSES)
    shutil.rmtree(os.path.join(folder, ".cache"), ignore_errors=True)


def from_store(source: str, folder: str, wanted: str) -> None:
    try:
        import fsspec  # type: ignore[import-not-found]
    except ImportError:
        fail(f"fsspec is not installed for {sys.executable}")
    try:
        store, path = fsspec.core.url_to_fs(source)
        if store.isdir(path):
            store.get(path.rstrip("/") + "/", folder + "/", recursive=True)
            return
        with store.open(path, "rb") as stream:
            save(stream, os.path.join(folder, os.path.basename(path)), wanted)
    except FileNotFoundError:
        fail("there is no such object")
    except PermissionError:
        fail("the job may not read it: give it the keys with --secret")
    except Exception as error:  # of any store
        fail(f"{type(error).__name__}: {error}{alone()}", PASSES)


def main(source: str, folder: str) -> None:
    source, _, wanted = source.partition("#sha256=")
    if source.startswith("hf:"):
        from_hub(source.removeprefix("hf:"), folder)
    elif source.startswith(("https://", "http://")):
        from_web(source, folder, wanted)
    else:
        from_store(source, folder, wanted)


if __name__ == "__main__":
    NAME = sys.argv[1]
    main(*sys.argv[2:])

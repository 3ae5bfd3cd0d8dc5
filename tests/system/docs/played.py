"""An engine of a page, played by `moorage.testing.fake_engine`: `python played.py NAME WORDS`, with the words and the
variables that the engine's own documentation has."""

from __future__ import annotations

import os
import sys

from moorage.testing.fake_engine import main


def _behind(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


def _played(name: str, words: list[str]) -> list[str]:
    """The words of the fake engine. Fails for words that the engine itself would not take."""
    if name == "ollama":
        assert words == ["serve"], words
        host, _, port = os.environ["OLLAMA_HOST"].partition(":")
        assert host == "127.0.0.1"
        return [port, "--like", "ollama", "--model", "llama3.2"]
    if name == "tritonserver":
        assert {"--model-repository", "--allow-grpc"} <= set(words), words
        return [_behind(words, "--http-port"), "--like", "triton"]
    assert words[:1] == ["launch"], words
    return [_behind(words, "--port"), "--like", "comfyui"]


if __name__ == "__main__":
    main(_played(sys.argv[1], sys.argv[2:]))

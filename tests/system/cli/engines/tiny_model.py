"""Write a model of half a megabyte as llama.cpp reads it, with made-up weights: `python tiny_model.py FILE`.

It needs `gguf` and `numpy`. It knows bytes as tokens, so any text goes in, and what comes out has no sense.
"""

from __future__ import annotations

import sys
from typing import Any

import gguf
import numpy as np

WIDTH, LAYERS, HEADS, INNER = 64, 2, 4, 128


def write(path: str) -> None:
    dice = np.random.default_rng(1)
    kinds = gguf.TokenType
    words = [b"<unk>", b"<s>", b"</s>", *(b"<0x%02X>" % byte for byte in range(256)), "▁".encode()]
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.BYTE] * 256, kinds.NORMAL]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_file_type(0)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * len(words))
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")

    def weights(*shape: int) -> np.ndarray[Any, Any]:
        return (dice.standard_normal(shape) * 0.02).astype(np.float32)

    ones = np.ones(WIDTH, np.float32)
    writer.add_tensor("token_embd.weight", weights(len(words), WIDTH))
    writer.add_tensor("output.weight", weights(len(words), WIDTH))
    writer.add_tensor("output_norm.weight", ones)
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            writer.add_tensor(f"{block}{name}.weight", weights(WIDTH, WIDTH))
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"{block}{name}.weight", ones)
        for name in ("ffn_gate", "ffn_up"):
            writer.add_tensor(f"{block}{name}.weight", weights(INNER, WIDTH))
        writer.add_tensor(f"{block}ffn_down.weight", weights(WIDTH, INNER))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    write(sys.argv[1])

"""Convert a llama2.c model (.bin) and its SentencePiece tokenizer to a Hugging Face checkpoint directory.

    python scripts/convert_llama2c.py MODEL.bin --tokenizer TOKENIZER.model --output DIR

Reads versions 0 and 1 (fp32) as karpathy/llama2.c's export.py writes them; the order of the tensors is the format.
"""

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint import CheckpointWriter, parse_config
from command import Parser, run
from convert_meta import special_ids
from rotary import half_split

MAGIC = 0x616B3432  # "ak42": begins every version but 0
HEADER_BYTES = 256  # of version 1


@dataclass(frozen=True)
class Header:
    dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    seq_len: int
    shared: bool  # the head is the embedding table
    version: int
    start: int  # of the tensors, in bytes

    def layout(self) -> Iterator[tuple[str, int, tuple[int, ...]]]:
        """(name, repetitions, shape) of each run of tensors; a name of "" is skipped."""
        head_dim = self.dim // self.n_heads
        kv = head_dim * self.n_kv_heads
        square = (self.dim, self.dim)
        norms = [
            ("input_layernorm", self.n_layers, (self.dim,)),
            ("post_attention_layernorm", self.n_layers, (self.dim,)),
        ]
        attention = [
            ("self_attn.q_proj", self.n_layers, square),
            ("self_attn.k_proj", self.n_layers, (kv, self.dim)),
            ("self_attn.v_proj", self.n_layers, (kv, self.dim)),
            ("self_attn.o_proj", self.n_layers, square),
        ]
        mlp = [
            ("mlp.gate_proj", self.n_layers, (self.hidden_dim, self.dim)),
            ("mlp.down_proj", self.n_layers, (self.dim, self.hidden_dim)),
            ("mlp.up_proj", self.n_layers, (self.hidden_dim, self.dim)),
        ]
        embeddings, norm = ("model.embed_tokens", 0, (self.vocab_size, self.dim)), ("model.norm", 0, (self.dim,))
        if self.version == 0:  # the angles of the rotary embedding come last
            yield from (embeddings, norms[0], *attention, norms[1], *mlp, norm, ("", 0, (self.seq_len, head_dim)))
        else:
            yield from (*norms, norm, embeddings, *attention, *mlp)
        if not self.shared:
            yield "lm_head", 0, (self.vocab_size, self.dim)


def read_header(path: Path) -> Header:
    if not path.is_file():
        raise ValueError(f"{path}: file not found")
    with path.open("rb") as file:
        content = file.read(HEADER_BYTES)
    if len(content) < 28:
        raise ValueError(f"{path}: too short for a llama2.c model")
    magic, version = struct.unpack("<Ii", content[:8])
    if magic != MAGIC:
        *sizes, vocab, length = struct.unpack("<7i", content[:28])
        header = Header(*sizes, abs(vocab), length, shared=vocab > 0, version=0, start=28)
    elif version == 1 and len(content) == HEADER_BYTES:
        header = Header(*struct.unpack("<7i", content[8:36]), shared=content[36] != 0, version=1, start=HEADER_BYTES)
    else:
        raise ValueError(f"{path}: llama2.c version {version} is not supported (the fp32 versions 0 and 1 are)")
    if min(header.dim, header.n_heads, header.n_kv_heads, header.n_layers) < 1 or header.dim % header.n_heads:
        raise ValueError(f"{path}: the header holds impossible sizes")
    expected = header.start + 4 * sum(max(1, count) * math.prod(shape) for _, count, shape in header.layout())
    if path.stat().st_size != expected:
        raise ValueError(f"{path}: {path.stat().st_size} bytes long, by its header it is {expected}")
    return header


def translate_config(header: Header) -> dict[str, Any]:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": header.vocab_size,
        "hidden_size": header.dim,
        "intermediate_size": header.hidden_dim,
        "num_hidden_layers": header.n_layers,
        "num_attention_heads": header.n_heads,
        "num_key_value_heads": header.n_kv_heads,
        "max_position_embeddings": header.seq_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": header.shared,
        "dtype": "float32",
    }
    parse_config(config)  # refuses what cannot be run
    return config


def read_tensors(path: Path, header: Header) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor) one at a time, memory-mapped."""
    values = torch.from_file(str(path), shared=False, size=path.stat().st_size // 4, dtype=torch.float32)
    heads = {"self_attn.q_proj": header.n_heads, "self_attn.k_proj": header.n_kv_heads}
    at = header.start // 4
    for name, count, shape in header.layout():
        for layer in range(max(1, count)):
            tensor = values[at : at + math.prod(shape)].view(shape)
            at += tensor.numel()
            if name in heads:
                tensor = half_split(tensor, heads[name])
            if name:
                yield f"model.layers.{layer}.{name}.weight" if count else f"{name}.weight", tensor


def convert(source: Path, tokenizer: Path, output: Path, force: bool) -> None:
    """Write the checkpoint directory `output`, whole or not at all."""
    if not tokenizer.is_file():
        raise ValueError(f"{tokenizer}: file not found")
    header = read_header(source)
    config = {**translate_config(header), **special_ids(tokenizer)}
    with CheckpointWriter(output, source=source, force=force) as writer:
        writer.copy(tokenizer, "tokenizer.model")
        writer.write_json("config.json", config)
        for name, tensor in read_tensors(source, header):
            writer.add(name, tensor)


def main() -> None:
    parser = Parser(description="Convert a llama2.c model to a Hugging Face checkpoint directory.")
    parser.add_argument("source", type=Path, metavar="FILE", help="the .bin file")
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="FILE", help="its SentencePiece .model file")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="the directory to make")
    parser.add_argument("--force", action="store_true", help="replace an existing checkpoint directory")
    arguments = parser.parse_args()
    convert(arguments.source, arguments.tokenizer, arguments.output, arguments.force)


if __name__ == "__main__":
    run(main)

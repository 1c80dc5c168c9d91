"""Convert Meta's original layout (consolidated.*.pth, params.json) to a Hugging Face checkpoint directory.

    python scripts/convert_meta.py DIR --output DIR

The files are loaded as tensors only (`weights_only`), memory-mapped, and the parts of a model-parallel checkpoint are
joined one tensor at a time. Names and splits are those of meta-llama/llama's llama/model.py: the inputs of wo and w2
are split, the outputs of the other projections; embeddings by width in Llama 2 and by vocabulary in Llama 3.
"""

import pickle
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint import CheckpointWriter, parse_config, read_json
from command import Parser, run
from rotary import half_split

TENSORS = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
SPLIT_INPUTS = ("attention.wo", "feed_forward.w2")
TOP_TENSORS = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
PARAMS = frozenset(
    """
    dim n_layers n_heads n_kv_heads vocab_size multiple_of ffn_dim_multiplier norm_eps rope_theta max_seq_len
    max_batch_size use_scaled_rope rope_scaling_factor
    """.split()
)


class MetaCheckpoint:
    """The parts of a checkpoint, joined when a tensor is asked for."""

    def __init__(self, directory: Path) -> None:
        self.params = read_json(directory, "params.json")
        if unknown := sorted(self.params.keys() - PARAMS):
            raise ValueError(f"{directory / 'params.json'}: {unknown[0]!r} is not understood and may change results")
        paths = sorted(directory.glob("consolidated.*.pth"))
        if not paths:
            raise ValueError(f"{directory / 'consolidated.00.pth'}: file not found")
        self.parts = [load_tensors(path) for path in paths]
        if any(part.keys() != self.parts[0].keys() for part in self.parts):
            raise ValueError(f"{directory}: the parts hold different tensors")
        self.names = [name for name in self.parts[0] if name != "rope.freqs"]

    def tensor(self, name: str) -> Tensor:
        parts, key = [part[name] for part in self.parts], name.removesuffix(".weight")
        if len(parts) == 1 or parts[0].dim() == 1:  # every part holds the norms whole
            return parts[0]
        if key == "tok_embeddings":
            return torch.cat(parts, dim=1 if parts[0].shape[1] * len(parts) == self.params.get("dim") else 0)
        return torch.cat(parts, dim=1 if key.endswith(SPLIT_INPUTS) else 0)


def load_tensors(path: Path) -> Mapping[str, Tensor]:
    try:
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path}: not a file of tensors alone, so it is not loaded ({reason[:200]})") from error
    if not isinstance(loaded, dict) or not all(isinstance(tensor, Tensor) for tensor in loaded.values()):
        raise ValueError(f"{path}: not a dictionary of tensors")
    return loaded


def translate_config(source: MetaCheckpoint, context: int | None, factor: float | None) -> dict[str, Any]:
    """config.json out of params.json and the shapes of the tensors."""
    params, ff = source.params, "layers.0.feed_forward.w1.weight"
    for name in ("tok_embeddings.weight", ff):
        if name not in source.names:
            raise ValueError(f"tensor {name} is missing")
    embeddings = source.tensor("tok_embeddings.weight")
    head = source.tensor("output.weight") if "output.weight" in source.names else embeddings
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": embeddings.shape[0],
        "hidden_size": params.get("dim"),
        "intermediate_size": sum(part[ff].shape[0] for part in source.parts),
        "num_hidden_layers": params.get("n_layers"),
        "num_attention_heads": params.get("n_heads"),
        "num_key_value_heads": params.get("n_kv_heads", params.get("n_heads")),
        "max_position_embeddings": context or params.get("max_seq_len"),
        "rms_norm_eps": params.get("norm_eps"),
        "rope_theta": params.get("rope_theta", 10000.0),
        "tie_word_embeddings": torch.equal(head, embeddings),
        "dtype": str(embeddings.dtype).removeprefix("torch."),
    }
    if config["max_position_embeddings"] is None:
        raise ValueError(
            "params.json has no max_seq_len: give --context-length (2048 Llama, 4096 Llama 2, 16384 CodeLlama, "
            "8192 Llama 3, 131072 Llama 3.1 and 3.2)"
        )
    if params.get("use_scaled_rope"):
        factor = factor or params.get("rope_scaling_factor")
        if factor is None:
            raise ValueError("params.json does not say how far: give --rope-factor (8 for Llama 3.1, 32 for Llama 3.2)")
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    parse_config(config)  # refuses what cannot be run
    return config


def translate_tensors(source: MetaCheckpoint, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor) one at a time."""
    heads = {"attention.wq": config["num_attention_heads"], "attention.wk": config["num_key_value_heads"]}
    for name in source.names:
        match = re.fullmatch(r"(?:layers\.(\d+)\.)?([\w.]+)\.weight", name)
        layer, part = match.groups() if match else (None, "")
        target = (TOP_TENSORS if layer is None else TENSORS).get(part)
        if target is None:
            raise ValueError(f"tensor {name!r} is not understood")
        if target == "lm_head" and config["tie_word_embeddings"]:
            continue
        tensor = source.tensor(name)
        if part in heads:
            tensor = half_split(tensor, heads[part])
        yield f"model.layers.{layer}.{target}.weight" if layer is not None else f"{target}.weight", tensor


def special_ids(tokenizer: Path) -> dict[str, Any]:
    """The ids that begin and end a text. Llama 3's file lists ranked byte strings only, so its special tokens are known
    by where they come: after the list, in the order of meta-llama/llama3's llama/tokenizer.py."""
    content = tokenizer.read_bytes()
    if re.match(rb"[A-Za-z0-9+/=]+ \d+\n", content):
        first = len(content.splitlines())
        return {"bos_token_id": first, "eos_token_id": [first + 1, first + 8, first + 9]}
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor(model_file=str(tokenizer))
    return {"bos_token_id": processor.bos_id(), "eos_token_id": processor.eos_id()}


def convert(directory: Path, output: Path, context: int | None, factor: float | None, force: bool) -> None:
    """Write the checkpoint directory `output`, whole or not at all."""
    tokenizer = directory / "tokenizer.model"
    if not tokenizer.is_file():
        raise ValueError(f"{tokenizer}: file not found")
    source = MetaCheckpoint(directory)
    config = translate_config(source, context, factor)
    special = special_ids(tokenizer)
    with CheckpointWriter(output, source=directory, force=force) as writer:
        writer.copy(tokenizer)
        writer.write_json("config.json", {**config, **special})
        writer.write_json("generation_config.json", special)
        for name, tensor in translate_tensors(source, config):
            writer.add(name, tensor)


def main() -> None:
    parser = Parser(description="Convert Meta's original layout to a Hugging Face checkpoint directory.")
    parser.add_argument(
        "source", type=Path, metavar="DIR", help="with consolidated.*.pth, params.json, tokenizer.model"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="the directory to make")
    parser.add_argument("--context-length", type=int, metavar="N", help="where params.json does not say it")
    parser.add_argument("--rope-factor", type=float, metavar="F", help="where params.json has use_scaled_rope alone")
    parser.add_argument("--force", action="store_true", help="replace an existing checkpoint directory")
    arguments = parser.parse_args()
    convert(arguments.source, arguments.output, arguments.context_length, arguments.rope_factor, arguments.force)


if __name__ == "__main__":
    run(main)

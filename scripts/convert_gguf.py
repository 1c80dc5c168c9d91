"""Convert a GGUF file of a Llama-shaped model to a Hugging Face checkpoint directory, dequantised.

    python scripts/convert_gguf.py MODEL.gguf --output DIR

The `gguf` package reads and dequantises. What the file says about the architecture and the tokenizer is translated;
what cannot be translated is refused by name. The names of metadata and tensors are llama.cpp's
(gguf-py/gguf/constants.py).
"""

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from checkpoint import CheckpointWriter, parse_config
from command import Parser, run
from gguf_tokenizer import write_tokenizer
from rotary import half_split

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
PAIRED = ("llama", "granite", "smollm3")  # these hold q and k in the order of interleaved rotary
CONFIG_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
OTHER_KEYS = ("vocab_size", "rope.dimension_count", "attention.value_length")  # read where they are checked
TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROTARY_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
LLAMA3_ROTARY = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
CHUNK_VALUES = 2**24  # dequantised at a time


class GgufFile:
    """Metadata as plain values, tensors one at a time."""

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ImportError as error:
            raise ImportError("reading GGUF needs the gguf package: pip install '.[gguf]'") from error
        if not path.is_file():
            raise ValueError(f"{path}: file not found")
        try:
            self.reader = gguf.GGUFReader(path)
            self.metadata = {key: field.contents() for key, field in self.reader.fields.items()}
        except (ValueError, KeyError, IndexError, OverflowError, MemoryError, TypeError) as error:
            raise ValueError(f"{path}: not a whole GGUF file ({error})") from error
        self.path, self.dequantize = path, gguf.quants.dequantize
        self.infos = {tensor.name: tensor for tensor in self.reader.tensors}
        self.architecture = str(self.metadata.get("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            raise ValueError(
                f"{path}: architecture {self.architecture!r} is not supported ({', '.join(ARCHITECTURES)} are)"
            )
        if self.metadata.get("split.count", 1) > 1:
            raise ValueError(
                f"{path}: one of {self.metadata['split.count']} parts: merge them first (llama-gguf-split)"
            )

    def architecture_values(self) -> dict[str, Any]:
        """The architecture's own metadata, without the prefix."""
        prefix = f"{self.architecture}."
        return {key.removeprefix(prefix): value for key, value in self.metadata.items() if key.startswith(prefix)}

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """Dequantised to dtype, in the shape [out, in]. Takes little more memory than the result."""
        info = self.infos[name]
        shape = [int(size) for size in reversed(info.shape)]
        rows, width = (1, shape[0]) if len(shape) == 1 else (shape[0], shape[1])
        result = torch.empty(shape, dtype=dtype)
        step = max(1, CHUNK_VALUES // width)
        data = info.data.reshape(rows, -1)
        try:
            for start in range(0, rows, step):
                values = torch.from_numpy(self.dequantize(data[start : start + step], info.tensor_type).copy())
                result.view(rows, width)[start : start + step] = values
        except NotImplementedError as error:
            raise ValueError(f"{self.path}: tensor {name}: {error}") from error
        return result


def translate_config(file: GgufFile) -> dict[str, Any]:
    """config.json out of the metadata."""
    family, values = file.architecture, file.architecture_values()
    config: dict[str, Any] = {"architectures": [ARCHITECTURES[family]], "model_type": family, "hidden_act": "silu"}
    for key, value in values.items():
        if key in CONFIG_KEYS:
            config[CONFIG_KEYS[key]] = _plain(key, value)
        elif key not in OTHER_KEYS and not key.startswith("rope.scaling.") and value not in (0, 0.0, False, ""):
            raise ValueError(f"{file.path}: metadata {family}.{key} is not understood and may change results")
    if family == "llama" and "sliding_window" in config:
        config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    heads = config.get("num_attention_heads")
    if not isinstance(heads, int) or heads < 1 or "hidden_size" not in config:
        raise ValueError(f"{file.path}: metadata {family}.attention.head_count or embedding_length is missing")
    config.setdefault("head_dim", config["hidden_size"] // heads)
    config.setdefault("num_key_value_heads", heads)
    if values.get("attention.value_length", config["head_dim"]) != config["head_dim"]:
        raise ValueError(f"{file.path}: keys and values of different lengths are not supported")
    if "token_embd.weight" not in file.infos:
        raise ValueError(f"{file.path}: tensor token_embd.weight is missing")
    config["vocab_size"] = int(file.infos["token_embd.weight"].shape[1])
    config["tie_word_embeddings"] = "output.weight" not in file.infos
    biases = {name.split(".")[2] for name in file.infos if name.startswith("blk.0.") and name.endswith(".bias")}
    if family != "qwen2":
        config |= {"attention_bias": True} if "attn_q" in biases else {}
        config |= {"mlp_bias": True} if "ffn_up" in biases else {}
    config |= _translate_rotary(file, values, config)
    parse_config(config)  # refuses what cannot be run
    return config


def _plain(key: str, value: Any) -> Any:
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise ValueError(f"metadata {key} differs between layers, which is not supported")
        value = value[0]
    return float(f"{value:.7g}") if isinstance(value, float) else value  # fp32 in the file: 1e-5 as it was written


def _translate_rotary(file: GgufFile, values: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The keys of config.json that say how positions rotate."""
    result: dict[str, Any] = {}
    rotated = values.get("rope.dimension_count", config["head_dim"])
    if rotated != config["head_dim"]:
        result["partial_rotary_factor"] = rotated / config["head_dim"]
    scaling = {key.removeprefix("rope.scaling."): value for key, value in values.items() if "rope.scaling." in key}
    kind, factor = scaling.get("type", "none"), scaling.get("factor")
    original = scaling.get("original_context_length")
    if "rope_factors_long.weight" in file.infos:
        factors = {
            f"{kind}_factor": file.tensor(f"rope_factors_{kind}.weight", torch.float32).tolist()
            for kind in ("short", "long")
        }
        result |= {"rope_scaling": {"rope_type": "longrope", **factors}, "original_max_position_embeddings": original}
        if scaling.get("attn_factor"):
            result["rope_scaling"]["attention_factor"] = scaling["attn_factor"]
    elif "rope_freqs.weight" in file.infos:
        result["rope_scaling"] = _recognise_llama3(file, config)
    elif kind == "linear":
        result["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        extra = {"beta_fast": scaling.get("yarn_beta_fast"), "beta_slow": scaling.get("yarn_beta_slow")}
        result["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            **extra,
        }
    elif kind != "none":
        raise ValueError(f"{file.path}: rope scaling {kind!r} is not supported")
    return result


def _recognise_llama3(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp stores Llama 3.1's scaling as a divisor per frequency. Its parameters are known but for the factor,
    which is the largest divisor; other divisors are refused."""
    divisors = file.tensor("rope_freqs.weight", torch.float32)
    dim = 2 * divisors.numel()
    scaling = {"rope_type": "llama3", "factor": round(divisors.max().item(), 3), **LLAMA3_ROTARY}
    wavelengths = 2 * torch.pi * config.get("rope_theta", 10000.0) ** (torch.arange(0, dim, 2) / dim)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = ((scaling["original_max_position_embeddings"] / wavelengths - low) / (high - low)).clamp(0, 1)
    if not torch.allclose(divisors, 1 / ((1 - smooth) / scaling["factor"] + smooth), rtol=1e-3):
        raise ValueError(
            f"{file.path}: tensor rope_freqs.weight is not Llama 3.1's scaling, which is the one supported"
        )
    return scaling


def translate_tensors(file: GgufFile, config: dict[str, Any], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor) one at a time."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name in file.infos:
        if name in ROTARY_TENSORS:
            continue
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
        if match is None or match[2] not in TENSORS:
            raise ValueError(f"{file.path}: tensor {name!r} is not understood")
        layer, part, suffix = match.groups()
        target = TENSORS[part]
        if file.architecture == "phi3" and part == "ffn_up":
            target = "mlp.gate_up_proj"
        tensor = file.tensor(name, dtype)
        if part in heads and file.architecture in PAIRED:
            tensor = half_split(tensor, heads[part])
        yield f"{f'model.layers.{layer}.' if layer is not None else ''}{target}.{suffix}", tensor


def convert(source: Path, output: Path, dtype: torch.dtype, force: bool = False) -> None:
    """Write the checkpoint directory `output`, whole or not at all."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy, about overflow in values that are replaced
        file = GgufFile(source)
        config = translate_config(file)
        with CheckpointWriter(output, source=source, force=force) as writer:
            special = write_tokenizer(file.metadata, writer)
            writer.write_json("config.json", {**config, **special, "dtype": str(dtype).removeprefix("torch.")})
            writer.write_json("generation_config.json", special)
            tensors = translate_tensors(file, config, dtype)
            for name, tensor in tqdm(tensors, total=len(file.infos), desc="converting", delay=2):
                writer.add(name, tensor)


def main() -> None:
    parser = Parser(description="Convert a GGUF file to a Hugging Face checkpoint directory.")
    parser.add_argument("source", type=Path, metavar="FILE", help="the .gguf file")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="the directory to make")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the weights written (default: bf16)")
    parser.add_argument("--force", action="store_true", help="replace an existing checkpoint directory")
    arguments = parser.parse_args()
    convert(arguments.source, arguments.output, DTYPES[arguments.dtype], arguments.force)


if __name__ == "__main__":
    run(main)

"""A checkpoint directory in Hugging Face's layout: to a configuration and named tensors, and back.

Reads config.json, generation_config.json and safetensors (one file, or shards with an index), and believes none of
them: a file that lies, lacks something or points outside its directory is a CheckpointError of one line. A key that
config.json leaves out means what transformers' config class of the family says. Knows nothing of tokenizers, devices,
or of what a quantisation record means: that is plain data here.
"""

import json
import math
import os
import shutil
import stat
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from model import ModelConfig, RotaryConfig

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
QUANT_METHOD = "nearroof"  # the one value of quantization_config.quant_method that is read here
JSON_BYTES = 64 * 2**20  # no configuration or index comes near
HEADER_BYTES = 32 * 2**20  # of one safetensors file: hundreds of thousands of tensors


class CheckpointError(ValueError):
    """What is wrong with a checkpoint, and where, in one line."""


# ---------------------------------------------------------------------------------------------------- configuration

_COMMON: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_parameters": None,
    "original_max_position_embeddings": None,
    "layer_types": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN: dict[str, Any] = {
    **_COMMON,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "bos_token_id": None,
    "eos_token_id": None,
}
# Per family: every key that is understood, with the value that transformers (5.24) supplies when it is absent.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**_COMMON, "attention_bias": False, "mlp_bias": False},
    "mistral": {
        **_COMMON,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128, "attention_bias": False},
    "smollm3": {
        **_COMMON,
        "vocab_size": 128256,
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "rope_theta": 2000000.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    "phi3": {
        **_COMMON,
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 1.0,
        "sliding_window": None,
        "eos_token_id": 32000,
    },
    "granite": {
        **_COMMON,
        "attention_bias": False,
        "mlp_bias": False,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
}
# Keys that a family may carry only with the value that its transformers class has built in.
_FIXED: dict[str, Any] = {
    "add_cross_attention": False,
    "attention_bias": False,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "is_llama_config": True,
    "lm_head_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "pruned_heads": {},
    "rope_interleaved": False,
    "use_mrope": False,
    "use_sliding_window": False,
}
# Keys that do not change the logits: bookkeeping, training, and defaults of generation that are not read from here.
_HARMLESS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _flash_attn_2_enabled _name_or_path architectures
    attention_dropout attn_implementation auto_map chunk_size_feed_forward cross_attention_hidden_size dtype embd_pdrop
    finetuning_task id2label initializer_range label2id max_sequence_length max_window_layers model_type name_or_path
    num_labels output_attentions output_hidden_states pad_token_id prefix pretraining_tp problem_type
    quantization_config resid_pdrop return_dict sep_token_id task_specific_params tf_legacy_loss tie_encoder_decoder
    tokenizer_class torch_dtype torchscript transformers.js_config transformers_version unk_token_id unsloth_fixed
    unsloth_version use_bfloat16 use_cache use_flash_attn bad_words_ids begin_suppress_tokens decoder_start_token_id
    diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty
    forced_bos_token_id forced_eos_token_id length_penalty max_length max_new_tokens min_length min_p
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores remove_invalid_values
    repetition_penalty return_dict_in_generate suppress_tokens temperature top_k top_p typical_p
    """.split()
)
_ROTARY_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),  # without a factor it is the ratio of the two context lengths
    "longrope": ("short_factor", "long_factor"),
}
_ROTARY_KEYS = frozenset(RotaryConfig.__dataclass_fields__) | {"type", "finetuned"}


def _shown(value: object) -> str:
    """A value out of a file, safe to print in one line."""
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


def _is_number(value: object, above: float = 0.0) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and above < value < 1e30


class _Fields:
    """Typed access to the values of one JSON object; `where` names it in errors."""

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self.values, self.where = values, where

    def _refuse(self, key: str, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.where}{key} is {_shown(self.values.get(key))}, not {expected}")

    def integer(self, key: str, most: int = 2**24, least: int = 1) -> int:
        value = self.values.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self._refuse(key, f"a whole number from {least} to {most}")
        return value

    def number(self, key: str, above: float = 0.0) -> float:
        value = self.values.get(key)
        if not _is_number(value, above):
            raise self._refuse(key, f"a number above {above:g}")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.values.get(key)
        if not isinstance(value, bool):
            raise self._refuse(key, "true or false")
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self._refuse(key, "an object")
        return dict(value or {})

    def sequence(self, key: str, length: int, fits: Callable[[Any], bool], expected: str) -> list[Any]:
        value = self.values.get(key)
        if not isinstance(value, list) or len(value) != length or not all(map(fits, value)):
            raise self._refuse(key, f"a list of {length} {expected}")
        return value

    def given(self, key: str) -> bool:
        return self.values.get(key) is not None


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """config.json as a ModelConfig. An unknown family, activation or rotary type, and any key that could change the
    numbers and is not understood, is a CheckpointError that names it."""
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise CheckpointError(f"model_type {_shown(family)} is not supported (these are: {', '.join(FAMILIES)})")
    _refuse_unknown_keys(family, raw)
    fields = _Fields({**FAMILIES[family], **{key: raw[key] for key in FAMILIES[family] if key in raw}})
    if fields.values["hidden_act"] not in ("silu", "swish"):
        raise CheckpointError(f"hidden_act {_shown(fields.values['hidden_act'])} is not supported (silu is)")
    layers, hidden, heads = (
        fields.integer("num_hidden_layers", 4096),
        fields.integer("hidden_size"),
        fields.integer("num_attention_heads", 2**16),
    )
    kv_heads = fields.integer("num_key_value_heads", 2**16) if fields.given("num_key_value_heads") else heads
    if heads % kv_heads:
        raise CheckpointError(f"num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}")
    if not fields.given("head_dim") and hidden % heads:
        raise CheckpointError(f"num_attention_heads {heads} does not divide hidden_size {hidden}")
    head_dim = fields.integer("head_dim", 2**16) if fields.given("head_dim") else hidden // heads
    bias = family == "qwen2" or ("attention_bias" in fields.values and fields.flag("attention_bias"))
    granite = family == "granite"
    return ModelConfig(
        model_type=family,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=fields.integer("max_position_embeddings", 2**31 - 1),
        rms_norm_eps=fields.number("rms_norm_eps"),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        rotary=_parse_rotary(family, fields, head_dim),
        attention_bias=bias,
        attention_output_bias=bias and family != "qwen2",
        mlp_bias="mlp_bias" in fields.values and fields.flag("mlp_bias"),
        qk_norm=family == "qwen3",
        sliding_windows=_parse_windows(family, fields, layers),
        rotary_layers=_parse_rotary_layers(fields, layers),
        embedding_multiplier=fields.number("embedding_multiplier") if granite else 1.0,
        attention_multiplier=fields.number("attention_multiplier") if granite else None,
        residual_multiplier=fields.number("residual_multiplier") if granite else 1.0,
        logits_scaling=fields.number("logits_scaling") if granite else 1.0,
    )


def _refuse_unknown_keys(family: str, raw: Mapping[str, Any]) -> None:
    fixed = {**_FIXED, "attention_bias": True} if family == "qwen2" else _FIXED
    for key, value in raw.items():
        if value is None or key in FAMILIES[family] or key in _HARMLESS:
            continue
        if key not in fixed:
            raise CheckpointError(f"key {_shown(key)} is not understood for model_type {family} and may change results")
        if value != fixed[key]:
            raise CheckpointError(f"{key} {_shown(value)} is not supported for model_type {family}")
    names = raw.get("architectures")
    if isinstance(names, list) and names and f"{family}forcausallm" not in [str(name).lower() for name in names]:
        raise CheckpointError(f"architectures {_shown(names)} is no causal language model of family {family}")


def _parse_rotary(family: str, fields: _Fields, head_dim: int) -> RotaryConfig:
    """`rope_parameters` as transformers 5 writes it, or the older `rope_scaling` beside `rope_theta`."""
    table = fields.mapping("rope_scaling") or fields.mapping("rope_parameters")
    table = {key: value for key, value in table.items() if value is not None}
    if unknown := sorted(map(str, set(table) - _ROTARY_KEYS)):
        raise CheckpointError(f"rotary key {_shown(unknown[0])} is not understood and may change results")
    for key in ("rope_theta", "partial_rotary_factor"):
        if fields.given(key):
            table.setdefault(key, fields.values[key])
    table.setdefault("rope_theta", FAMILIES[family]["rope_theta"])
    kind = _rotary_type(family, table)
    rotary = _Fields(table, "rotary ")
    values: dict[str, Any] = {"rope_type": kind, "rope_theta": rotary.number("rope_theta", above=1.0)}
    if "partial_rotary_factor" in table:
        values["partial_rotary_factor"] = rotary.number("partial_rotary_factor")
        if values["partial_rotary_factor"] > 1 or (family != "phi3" and values["partial_rotary_factor"] != 1):
            raise CheckpointError(f"partial_rotary_factor {_shown(table['partial_rotary_factor'])} is not supported")
    dim = int(head_dim * values.get("partial_rotary_factor", 1.0))
    if dim % 2 or dim < (4 if kind == "dynamic" else 2):
        raise CheckpointError(f"rotary embedding over {dim} of {head_dim} dimensions of a head is not possible")
    if missing := [key for key in _ROTARY_NEEDS[kind] if key not in table]:
        raise CheckpointError(f"rotary type {kind} needs {missing[0]}")
    if kind in ("llama3", "yarn", "longrope"):
        values |= _original_length(fields, table)
    used = {"linear": ("factor",), "dynamic": ("factor",), "llama3": _ROTARY_NEEDS["llama3"]}.get(kind, ())
    if kind == "yarn":
        used = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")
        values |= {"truncate": rotary.flag("truncate")} if "truncate" in table else {}
    if kind == "longrope":
        used = ("factor", "attention_factor")
        for key in ("short_factor", "long_factor"):
            values[key] = tuple(map(float, rotary.sequence(key, dim // 2, _is_number, "positive numbers")))
    values |= {key: rotary.number(key) for key in used if key in table}
    if kind == "llama3" and values["low_freq_factor"] >= values["high_freq_factor"]:
        raise CheckpointError("rotary low_freq_factor is not below high_freq_factor")
    return RotaryConfig(**values)


def _rotary_type(family: str, table: Mapping[str, Any]) -> str:
    aliases = {"su": "longrope", "yarn": "longrope"} if family == "phi3" else {}
    given = [str(table[key]) for key in ("rope_type", "type") if key in table]
    kinds = {aliases.get(kind, kind) for kind in given} or {"default"}
    if len(kinds) > 1 or not kinds <= _ROTARY_NEEDS.keys():
        known = ", ".join(_ROTARY_NEEDS)
        raise CheckpointError(f"rotary type {_shown(' and '.join(given))} is not supported (these are: {known})")
    return kinds.pop()


def _original_length(fields: _Fields, table: Mapping[str, Any]) -> dict[str, Any]:
    """The context before it was stretched, and the factor of the stretch where only the lengths say it."""
    key = "original_max_position_embeddings"
    extended = fields.integer("max_position_embeddings", 2**31 - 1)
    given = fields.values[key] or table.get(key, extended)
    original = _Fields({key: given}).integer(key, 2**31 - 1, least=2)
    return {key: original, "factor": extended / original}


def _parse_windows(family: str, fields: _Fields, layers: int) -> tuple[int | None, ...]:
    window = fields.integer("sliding_window", 2**31 - 1) if fields.given("sliding_window") else None
    if "use_sliding_window" in fields.values and not fields.flag("use_sliding_window"):
        window = None
    if window is None:
        windowed = [False] * layers
    elif family in ("qwen2", "qwen3"):
        first = fields.integer("max_window_layers", least=0)
        windowed = [layer >= first for layer in range(layers)]
    elif family == "smollm3":
        windowed = [not rotates for rotates in _parse_rotary_layers(fields, layers) or [True] * layers]
    else:
        windowed = [True] * layers
    if fields.given("layer_types"):
        kinds = ("full_attention", "sliding_attention")
        named = fields.sequence("layer_types", layers, lambda kind: kind in kinds, f"values out of {kinds}")
        listed = [kind == "sliding_attention" for kind in named]
        obeyed = family in ("qwen2", "qwen3", "smollm3") and (window is not None or not any(listed))
        if listed != windowed and not obeyed:
            raise CheckpointError(f"layer_types does not agree with sliding_window {window}")
        windowed = listed
    return tuple(window if here else None for here in windowed) if any(windowed) else ()


def _parse_rotary_layers(fields: _Fields, layers: int) -> tuple[bool, ...]:
    if "no_rope_layers" not in fields.values:
        return ()
    if fields.given("no_rope_layers"):
        key = "no_rope_layers"  # which, despite its name, holds 1 for a layer that rotates; it may be too long
        given = fields.values[key]
        fields = _Fields({key: given[:layers] if isinstance(given, list) else given})
        rotates = tuple(map(bool, fields.sequence(key, layers, lambda flag: flag in (0, 1), "zeros and ones")))
    else:
        interval = fields.integer("no_rope_layer_interval")
        rotates = tuple((layer + 1) % interval != 0 for layer in range(layers))
    return () if all(rotates) else rotates


# -------------------------------------------------------------------------------------------------------------- reading

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_PLAIN_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_TOKENIZER_FILES = (  # read elsewhere; that they are files of the directory is checked here
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_COMPUTED = (".rotary_emb.inv_freq",)  # old files hold tables that the model computes


@dataclass(frozen=True)
class TensorInfo:
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Checkpoint:
    """What a directory holds, from its JSON files and tensor headers alone."""

    directory: Path
    config: ModelConfig
    dtype: torch.dtype  # the floating dtype of most weights in the files
    quantization: Mapping[str, Any] | None  # the record of this project's own quantised directories, plain data
    eos_token_ids: tuple[int, ...]  # generation_config.json's first, then config.json's
    bos_token_id: int | None
    raw_config: Mapping[str, Any]
    infos: Mapping[str, TensorInfo]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) one at a time, memory-mapped: a tensor takes private memory only when it is copied."""
        for file in sorted({info.file for info in self.infos.values()}):
            with _open_shard(file) as shard:
                yield from ((name, shard.get_tensor(name)) for name in shard.keys() if name in self.infos)  # noqa: SIM118


def open_checkpoint(directory: Path) -> Checkpoint:
    """Check everything that JSON and headers can show; loads no weights. CheckpointError says what is wrong, where."""
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory")
    raw = read_json(directory, "config.json")
    for name in _TOKENIZER_FILES:
        if os.path.lexists(directory / name):
            _checked_file(directory, name)
    try:
        config = parse_config(raw)
        quantization = _quantization_record(raw)
    except CheckpointError as error:
        raise CheckpointError(f"{directory / 'config.json'}: {error}") from error
    infos = _read_infos(directory)
    layers = len({name.split(".")[2] for name in infos if name.startswith("model.layers.")})
    if layers != config.num_hidden_layers:
        raise CheckpointError(f"{directory}: config.json has {config.num_hidden_layers} layers, the files {layers}")
    if config.tie_word_embeddings and "lm_head.weight" in infos:
        if _same_tensor(infos, "lm_head.weight", "model.embed_tokens.weight"):
            del infos["lm_head.weight"]
        else:  # as transformers does: what the files hold outranks what config.json says
            config = replace(config, tie_word_embeddings=False)
    sizes: Counter[torch.dtype] = Counter()
    for info in infos.values():
        sizes[info.dtype] += info.nbytes if info.dtype in _PLAIN_FLOATS else 0
    eos, bos = _special_ids(directory, raw)
    return Checkpoint(directory, config, max(sizes, key=sizes.__getitem__), quantization, eos, bos, raw, infos)


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """The JSON object in a file of a checkpoint directory."""
    path = _checked_file(directory, name)
    if path.stat().st_size > JSON_BYTES:
        raise CheckpointError(f"{path}: too large for a JSON file of a checkpoint")
    try:
        value = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({_one_line(error)})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def _checked_file(directory: Path, name: str) -> Path:
    """A regular file of the directory. Links may only lead to files of the directory itself or, in the cache of Hugging
    Face's hub (models--X/snapshots/REVISION), to the blobs beside the snapshots."""
    path = directory / name
    root = directory.resolve()
    roots = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    try:
        real = path.resolve(strict=True)
        regular = stat.S_ISREG(real.stat().st_mode)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: file not found") from error
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a name that no file can have
        raise CheckpointError(f"{str(path)!r}: cannot be opened ({_one_line(error)})") from error
    if not any(real.is_relative_to(allowed) for allowed in roots):
        raise CheckpointError(f"{path}: leads out of the checkpoint directory, to {real}")
    if not regular:
        raise CheckpointError(f"{path}: not a regular file")
    return path


def _open_shard(path: Path) -> Any:
    with open(path, "rb") as file:
        if int.from_bytes(file.read(8), "little") > HEADER_BYTES:
            raise CheckpointError(f"{path}: not a safetensors file (its header's length is out of range)")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a whole safetensors file ({_one_line(error)})") from error


def _read_infos(directory: Path) -> dict[str, TensorInfo]:
    """Every tensor of the single file, or of the shards that the index names."""
    if (directory / SINGLE_FILE).exists():
        listed, shards = None, [SINGLE_FILE]
    elif (directory / INDEX_FILE).exists():
        listed = _read_index(directory)
        shards = sorted(set(listed.values()))
    else:
        raise _no_weights(directory)
    infos: dict[str, TensorInfo] = {}
    for shard in shards:
        path = _checked_file(directory, shard)
        found = _read_header(path)
        if twice := sorted(found.keys() & infos.keys()):
            raise CheckpointError(f"{path}: tensor {_shown(twice[0])} is in another shard too")
        if listed is not None:
            expected = {name for name, file in listed.items() if file == shard}
            if odd := sorted(expected ^ found.keys()):
                raise CheckpointError(f"{path}: the shard and {INDEX_FILE} disagree about tensor {_shown(odd[0])}")
        infos |= found
    infos = {name: info for name, info in infos.items() if not name.endswith(_COMPUTED)}
    if not any(info.dtype in _PLAIN_FLOATS for info in infos.values()):
        raise CheckpointError(f"{directory}: the files hold no floating-point tensor")
    return infos


def _read_index(directory: Path) -> dict[str, str]:
    path, listed = directory / INDEX_FILE, read_json(directory, INDEX_FILE).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{path}: weight_map is missing or empty")
    for file in listed.values():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(f"{path}: {_shown(file)} is not the name of a safetensors file in this directory")
    return listed


def _read_header(path: Path) -> dict[str, TensorInfo]:
    infos = {}
    with _open_shard(path) as shard:
        for name in shard.keys():  # noqa: SIM118 (no mapping)
            tensor = shard.get_slice(name)
            if (code := tensor.get_dtype()) not in _DTYPES:
                raise CheckpointError(f"{path}: tensor {_shown(name)} has the unsupported dtype {code}")
            infos[name] = TensorInfo(tuple(tensor.get_shape()), _DTYPES[code], path)
    return infos


def _no_weights(directory: Path) -> CheckpointError:
    others = sorted(
        path.name for path in directory.iterdir() if path.suffix in (".bin", ".pth", ".pt", ".gguf", ".safetensors")
    )
    instead = f" ({_shown(others[0])} is not read: see scripts/ for converters)" if others else ""
    return CheckpointError(f"{directory / SINGLE_FILE}: file not found, nor {INDEX_FILE}{instead}")


def _same_tensor(infos: Mapping[str, TensorInfo], first: str, second: str) -> bool:
    one, other = infos[first], infos.get(second)
    if other is None or (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    with _open_shard(one.file) as left, _open_shard(other.file) as right:
        return torch.equal(left.get_tensor(first), right.get_tensor(second))


def _quantization_record(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    record = raw.get("quantization_config")
    if record is None:
        return None
    method = record.get("quant_method") if isinstance(record, dict) else record
    if not isinstance(record, dict) or method != QUANT_METHOD:
        raise CheckpointError(f"quantization_config by {_shown(method)} is not supported: use the plain checkpoint")
    return record


def _special_ids(directory: Path, raw: Mapping[str, Any]) -> tuple[tuple[int, ...], int | None]:
    """(ends of sequence, beginning), the family's own only where no file says any."""
    sources = [raw]
    if (directory / "generation_config.json").exists():
        sources.insert(0, read_json(directory, "generation_config.json"))
    found: dict[str, list[int]] = {}
    for key in ("eos_token_id", "bos_token_id"):
        given = [source[key] for source in sources if key in source] or [FAMILIES[raw["model_type"]][key]]
        lists = [value if isinstance(value, list) else [value] for value in given if value is not None]
        ids = [token for tokens in lists for token in tokens]
        if not all(isinstance(token, int) and not isinstance(token, bool) and abs(token) < 1 << 31 for token in ids):
            raise CheckpointError(f"{directory}: {key} is {_shown(given)}, not a token id or a list of them")
        found[key] = list(dict.fromkeys(ids))
    return tuple(found["eos_token_id"]), next(iter(found["bos_token_id"]), None)


# -------------------------------------------------------------------------------------------------------------- loading


def check_targets(checkpoint: Checkpoint, targets: Mapping[str, Tensor]) -> None:
    """Refuse missing and leftover names, wrong shapes and dtypes that do not convert. Targets may be on the meta
    device, so that no memory is taken before this is known."""
    infos = checkpoint.infos
    missing, leftover = targets.keys() - infos.keys(), infos.keys() - targets.keys()
    for fault, names in (("missing from", missing), ("left over in", leftover)):
        if names:
            shown = ", ".join(map(_shown, sorted(names)[:3])) + (", ..." if len(names) > 3 else "")
            raise CheckpointError(f"{checkpoint.directory}: {len(names)} tensor(s) {fault} the files: {shown}")
    for name, target in targets.items():
        info = infos[name]
        if info.shape != tuple(target.shape):
            raise CheckpointError(
                f"{info.file}: tensor {name} has shape {list(info.shape)}, by config.json it is {list(target.shape)}"
            )
        if info.dtype != target.dtype and not {info.dtype, target.dtype} <= set(_PLAIN_FLOATS):
            raise CheckpointError(f"{info.file}: tensor {name} is {info.dtype}, where {target.dtype} is needed")


@torch.no_grad()
def load_weights(checkpoint: Checkpoint, targets: Mapping[str, Tensor], progress: bool) -> None:
    """Copy each tensor of the files into its target, in the target's dtype and on its device, one at a time."""
    check_targets(checkpoint, targets)
    total = sum(info.nbytes for info in checkpoint.infos.values())
    with tqdm(total=total, desc="loading", unit="B", unit_scale=True, delay=2, disable=not progress) as bar:
        for name, tensor in checkpoint.tensors():
            target = targets[name]
            target.copy_(tensor)
            narrowed = target.dtype == torch.float16 and tensor.dtype != torch.float16
            if narrowed and not target.isfinite().all():
                raise CheckpointError(f"{checkpoint.directory}: tensor {name} exceeds fp16's range: use bf16 or fp32")
            bar.update(tensor.nbytes)


# -------------------------------------------------------------------------------------------------------------- writing


class CheckpointWriter:
    """Writes a checkpoint directory that appears, whole, when the `with` block ends; on any error nothing is left.

    Tensors are gathered to files of at most `shard_bytes`, so that is the most memory that it takes. A directory that
    exists is replaced only when `force` is given and it holds a checkpoint; an empty one is used.
    """

    def __init__(
        self, output: Path, *, source: Path | None = None, force: bool = False, shard_bytes: int = 2 * 10**9
    ) -> None:
        self.output, self.force, self.shard_bytes = Path(output).resolve(), force, shard_bytes
        if source is not None and Path(source).resolve().is_relative_to(self.output):
            raise CheckpointError(f"{output}: holds {source}, which would be replaced with it")
        self._require_free()
        self.shard: dict[str, Tensor] = {}
        self.shards: list[list[str]] = []
        self.bytes = 0

    def _require_free(self) -> None:
        if not self.output.exists() or (self.output.is_dir() and not any(self.output.iterdir())):
            return
        if not self.force:
            raise CheckpointError(f"{self.output}: already exists")
        if not _looks_like_a_checkpoint(self.output):
            raise CheckpointError(f"{self.output}: not a checkpoint directory, so it is not replaced")

    def __enter__(self) -> Self:
        parent = self.output.parent
        parent.mkdir(parents=True, exist_ok=True)
        self.directory = Path(tempfile.mkdtemp(prefix=f".{self.output.name}.", dir=parent))
        return self

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor, which must not change afterwards."""
        if any(name in shard for shard in (self.shard, *self.shards)):
            raise CheckpointError(f"tensor {name} is given twice")
        if self.shard and sum(held.nbytes for held in self.shard.values()) + tensor.nbytes > self.shard_bytes:
            self._write_shard()
        shares = tensor.untyped_storage().nbytes() != tensor.nbytes  # the file format has no views
        self.shard[name] = tensor.clone().contiguous() if shares else tensor.contiguous()
        self.bytes += tensor.nbytes

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        (self.directory / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def copy(self, source: Path, name: str | None = None) -> None:
        """Take a file that belongs beside the weights, as a tokenizer's."""
        shutil.copyfile(source, self.directory / (name or source.name))

    def _write_shard(self) -> None:
        self.shards.append(list(self.shard))
        try:
            save_file(self.shard, self.directory / f"{len(self.shards)}.part", metadata={"format": "pt"})
        except SafetensorError as error:
            raise RuntimeError(f"{self.output}: could not be written: {error}") from error
        self.shard = {}

    def _finish(self) -> None:
        self._write_shard()
        count, weight_map = len(self.shards), {}
        for number, names in enumerate(self.shards, 1):
            file = SINGLE_FILE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
            (self.directory / f"{number}.part").rename(self.directory / file)
            (self.directory / file).chmod(0o666 & ~_umask())
            weight_map |= dict.fromkeys(names, file)
        if count > 1:
            self.write_json(INDEX_FILE, {"metadata": {"total_size": self.bytes}, "weight_map": weight_map})
        self.directory.chmod(0o777 & ~_umask())
        self._require_free()  # again: it may have come into being meanwhile
        if self.output.exists() and any(self.output.iterdir()):
            replaced = Path(tempfile.mkdtemp(prefix=f".{self.output.name}.old.", dir=self.directory.parent))
            self.output.rename(replaced)
            self.directory.rename(self.output)
            shutil.rmtree(replaced)
        else:
            self.directory.rename(self.output)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            shutil.rmtree(self.directory, ignore_errors=True)


def _looks_like_a_checkpoint(directory: Path) -> bool:
    """Whether nothing but a checkpoint seems to lie there: its configuration, weights, and no directories."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    files = list(directory.iterdir())
    weights = any(file.suffix == ".safetensors" for file in files)
    return isinstance(config, dict) and "model_type" in config and weights and not any(map(Path.is_dir, files))


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

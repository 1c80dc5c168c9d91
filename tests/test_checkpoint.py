"""checkpoint.py: config.json of every family, files that lie, loading into targets, writing."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import checkpoint
from checkpoint import (
    FAMILIES,
    Checkpoint,
    CheckpointError,
    CheckpointWriter,
    check_targets,
    load_weights,
    open_checkpoint,
    parse_config,
    read_json,
)
from model import RotaryConfig

TINY: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def tiny_tensors(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """All tensors of a model of shape TINY."""
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (32, 16), "model.norm.weight": (16,)}
    shapes |= {"lm_head.weight": (32, 16)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}self_attn.{name}_proj.weight": (rows, 16)
            for name, rows in {"q": 16, "k": 8, "v": 8, "o": 16}.items()
        }
        shapes |= {f"{prefix}mlp.{name}_proj.weight": (24, 16) for name in ("gate", "up")}
        shapes |= {f"{prefix}mlp.down_proj.weight": (16, 24)}
        shapes |= {f"{prefix}{name}_layernorm.weight": (16,) for name in ("input", "post_attention")}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def write(directory: Path, config: dict[str, Any] | None = None, tensors: dict[str, Tensor] | None = None) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(TINY if config is None else config))
    save_file(tiny_tensors() if tensors is None else tensors, directory / "model.safetensors")
    return directory


def write_sharded(directory: Path, **index_changes: str) -> Path:
    """Two shards and an index, with some of its entries changed."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(TINY))
    tensors = tiny_tensors()
    names = sorted(tensors)
    shards = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, directory / file)
    weight_map = {name: file for file, held in shards.items() for name in held} | index_changes
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def targets_like(found: Checkpoint, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: torch.empty(info.shape, dtype=dtype) for name, info in found.infos.items()}


def assert_refused(directory: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as refusal:
        open_checkpoint(directory)
    message = str(refusal.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


# ----------------------------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("as_written", ["defaults left out", "defaults written"])
def test_defaults_are_those_of_the_transformers_config_class(family: str, as_written: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoConfig.for_model(family)
    theirs.save_pretrained(tmp_path)
    raw = read_json(tmp_path, "config.json")
    ours = parse_config({"model_type": family} if as_written == "defaults left out" else raw)
    assert (ours.vocab_size, ours.hidden_size, ours.intermediate_size) == (
        theirs.vocab_size,
        theirs.hidden_size,
        theirs.intermediate_size,
    )
    assert (ours.num_attention_heads, ours.num_key_value_heads) == (
        theirs.num_attention_heads,
        theirs.num_key_value_heads,
    )
    assert ours.num_hidden_layers == theirs.num_hidden_layers
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.rotary.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.rotary.rope_type == theirs.rope_parameters["rope_type"]
    sliding = getattr(theirs, "sliding_window", None)
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention" if sliding else "full_attention"] * 99
    for layer in range(ours.num_hidden_layers):
        assert ours.window(layer) == (sliding if kinds[layer] == "sliding_attention" else None)
        assert ours.rotates(layer) == bool(getattr(theirs, "no_rope_layers", [1] * 99)[layer])
    if family == "granite":
        assert ours.attention_multiplier == theirs.attention_multiplier


def test_defaults_of_special_ids_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    for family, defaults in FAMILIES.items():
        theirs = transformers.AutoConfig.for_model(family)
        assert (defaults["bos_token_id"], defaults["eos_token_id"]) == (theirs.bos_token_id, theirs.eos_token_id)


def test_every_field_of_a_config_is_read() -> None:
    config = parse_config({**TINY, "head_dim": 6, "rms_norm_eps": 1e-3, "tie_word_embeddings": True, "mlp_bias": True})
    assert (config.head_dim, config.rms_norm_eps, config.tie_word_embeddings) == (6, 1e-3, True)
    assert (config.mlp_bias, config.attention_bias, config.attention_output_bias) == (True, False, False)
    config = parse_config({**TINY, "attention_bias": True, "num_key_value_heads": None})
    assert (config.attention_bias, config.attention_output_bias, config.num_key_value_heads) == (True, True, 4)
    qwen2 = parse_config({**TINY, "model_type": "qwen2"})
    assert (qwen2.attention_bias, qwen2.attention_output_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = parse_config({**TINY, "model_type": "qwen3"})
    assert (qwen3.attention_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)
    multipliers = {"embedding_multiplier": 12, "attention_multiplier": 0.5, "residual_multiplier": 0.2}
    granite = parse_config({**TINY, "model_type": "granite", **multipliers, "logits_scaling": 8.0})
    assert (granite.embedding_multiplier, granite.attention_multiplier) == (12.0, 0.5)
    assert (granite.residual_multiplier, granite.logits_scaling) == (0.2, 8.0)


def test_windows_follow_the_family_and_layer_types() -> None:
    assert parse_config({**TINY, "model_type": "mistral", "sliding_window": None}).sliding_windows == ()
    assert parse_config({**TINY, "model_type": "mistral", "sliding_window": 8}).sliding_windows == (8, 8)
    qwen = {**TINY, "model_type": "qwen2", "sliding_window": 8, "max_window_layers": 1}
    assert parse_config(qwen).sliding_windows == ()
    assert parse_config({**qwen, "use_sliding_window": True}).sliding_windows == (None, 8)
    kinds = {"layer_types": ["sliding_attention", "full_attention"]}
    assert parse_config({**qwen, "use_sliding_window": True, **kinds}).sliding_windows == (8, None)
    with pytest.raises(CheckpointError, match="layer_types"):
        parse_config({**qwen, **kinds})
    with pytest.raises(CheckpointError, match="layer_types"):
        parse_config({**TINY, **kinds})
    with pytest.raises(CheckpointError, match="chunked_attention"):
        parse_config({**qwen, "layer_types": ["chunked_attention"] * 2})


def test_smollm3_layers_without_rotary() -> None:
    smollm3 = {**TINY, "model_type": "smollm3"}
    assert parse_config(smollm3).rotary_layers == ()
    assert parse_config({**smollm3, "no_rope_layer_interval": 2}).rotary_layers == (True, False)
    assert parse_config({**smollm3, "no_rope_layers": [0, 1, 1]}).rotary_layers == (False, True)
    windowed = {"use_sliding_window": True, "sliding_window": 8, "no_rope_layers": [0, 1]}
    assert parse_config({**smollm3, **windowed}).sliding_windows == (8, None)
    with pytest.raises(CheckpointError, match="no_rope_layers"):
        parse_config({**smollm3, "no_rope_layers": [1]})


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_rotary_parameters_in_old_and_new_spelling(spelling: str, key: str) -> None:
    scaling = {key: "linear", "factor": 4}
    raw = {**TINY, spelling: scaling, "rope_theta": 5000}
    assert parse_config(raw).rotary == RotaryConfig("linear", 5000.0, factor=4.0)
    within = {**TINY, spelling: {**scaling, "rope_theta": 7000.0}}
    assert parse_config(within).rotary.rope_theta == 7000.0


def test_rotary_parameters_absent_or_null_are_the_default() -> None:
    for nothing in ({}, {"rope_scaling": None}, {"rope_parameters": None, "rope_scaling": {}}):
        assert parse_config({**TINY, **nothing, "rope_theta": 500000.0}).rotary == RotaryConfig("default", 500000.0)


def test_rotary_types_keep_their_parameters() -> None:
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rotary = parse_config({**TINY, "rope_scaling": {**llama3, "original_max_position_embeddings": 512}}).rotary
    assert (rotary.factor, rotary.original_max_position_embeddings) == (8.0, 512)
    assert parse_config({**TINY, "rope_scaling": llama3}).rotary.original_max_position_embeddings == 2048
    yarn = {"type": "yarn", "original_max_position_embeddings": 512, "beta_fast": 16, "truncate": False}
    rotary = parse_config({**TINY, "rope_scaling": yarn}).rotary
    assert (rotary.rope_type, rotary.factor, rotary.beta_fast, rotary.truncate) == ("yarn", 4.0, 16.0, False)
    phi3 = {**TINY, "model_type": "phi3", "head_dim": 8, "partial_rotary_factor": 0.5}
    factors = {"short_factor": [1, 1.5], "long_factor": [2.0, 3.0]}
    for name in ("su", "longrope"):
        rotary = parse_config({**phi3, "rope_scaling": {"type": name, **factors}}).rotary
        assert (rotary.rope_type, rotary.long_factor, rotary.partial_rotary_factor) == ("longrope", (2.0, 3.0), 0.5)
        assert (rotary.original_max_position_embeddings, rotary.factor) == (4096, 1.0)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown family": ({"model_type": "gpt_neox"}, "gpt_neox"),
    "no family": ({"model_type": None}, "model_type"),
    "family of an odd type": ({"model_type": ["llama"]}, "model_type"),
    "activation": ({"hidden_act": "gelu"}, "gelu"),
    "rotary type": ({"rope_scaling": {"type": "mystery", "factor": 2.0}}, "mystery"),
    "two rotary types": ({"rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 2.0}}, "linear"),
    "rotary key": ({"rope_scaling": {"type": "linear", "factor": 2.0, "twist": 1}}, "twist"),
    "rotary factor missing": ({"rope_scaling": {"type": "linear"}}, "factor"),
    "rotary factor of an odd type": ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor"),
    "rotary list": ({"rope_scaling": ["linear"]}, "rope_scaling"),
    "longrope of the wrong length": (
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
        "short_factor",
    ),
    "rotary per layer type": ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
    "partial rotary": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "interleaved rotary": ({"rope_interleaved": True}, "rope_interleaved"),
    "experts": ({"num_local_experts": 8}, "num_local_experts"),
    "soft cap": ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    "a window in a family without": ({"sliding_window": 128}, "sliding_window"),
    "unknown key": ({"flux": 1}, "flux"),
    "another tool's quantisation": ({"quantization_config": {"quant_method": "awq"}}, "awq"),
    "another model class": ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    "heads that do not divide": ({"num_key_value_heads": 3}, "num_key_value_heads"),
    "hidden size that does not divide": ({"num_attention_heads": 5, "num_key_value_heads": 5}, "hidden_size"),
    "odd head_dim": ({"head_dim": 5}, "5"),
    "negative size": ({"hidden_size": -16}, "hidden_size"),
    "huge size": ({"hidden_size": 2**80}, "hidden_size"),
    "size as text": ({"vocab_size": "32"}, "vocab_size"),
    "size as true": ({"num_hidden_layers": True}, "num_hidden_layers"),
    "null size": ({"hidden_size": None}, "hidden_size"),
    "a billion layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
    "flag as number": ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_config_that_would_change_the_numbers_is_refused_by_name(case: str, tmp_path: Path) -> None:
    changes, word = REFUSED[case]
    assert_refused(write(tmp_path, {**TINY, **changes}), word, "config.json")


def test_keys_that_do_not_change_the_numbers_are_accepted() -> None:
    harmless = {
        "_name_or_path": "x",
        "architectures": ["LlamaForCausalLM"],
        "attention_dropout": 0.1,
        "auto_map": {},
        "dtype": "float16",
        "flux": None,
        "initializer_range": 0.02,
        "pretraining_tp": 2,
        "rope_interleaved": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.0",
        "use_cache": True,
    }
    assert parse_config({**TINY, **harmless}) == parse_config(TINY)


# What the configurations of published models hold beside the sizes.
PUBLISHED: dict[str, dict[str, Any]] = {
    "SmolLM2": {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {}, "rope_theta": 100000},
    "Vicuna": {"max_sequence_length": 2048, "pad_token_id": 0, "pretraining_tp": 1},
    "Phi-4-mini": {
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "attention_bias": False,
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
        "full_attn_mod": 1,
        "interpolate_factor": 1,
        "lm_head_bias": False,
        "mlp_bias": False,
        "embd_pdrop": 0.0,
        "sliding_window": 262144,
    },
    "Qwen2.5": {"model_type": "qwen2", "max_window_layers": 21, "sliding_window": 131072, "use_sliding_window": False},
    "R1-Distill": {"model_type": "qwen2", "use_mrope": False, "sliding_window": 4096, "use_sliding_window": False},
    "Qwen3": {"model_type": "qwen3", "attention_bias": False, "sliding_window": None, "use_sliding_window": False},
    "SmolLM3": {"model_type": "smollm3", "max_window_layers": 28, "bos_token_id": None, "no_rope_layers": [1, 0]},
    "Granite": {"model_type": "granite", "attention_dropout": 0.1, "attention_multiplier": 0.015625},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_configurations_of_published_models_are_understood(name: str) -> None:
    assert parse_config({**TINY, **PUBLISHED[name]}).hidden_size == 16


@pytest.mark.parametrize("name", ["int8", "model-int4", "llama-3-chat", "Qwen3"])
def test_the_name_of_the_folder_says_nothing(name: str, tmp_path: Path) -> None:
    found, plain = open_checkpoint(write(tmp_path / name)), open_checkpoint(write(tmp_path / "plain"))
    assert (found.config, found.dtype, found.quantization) == (plain.config, plain.dtype, None)


# ------------------------------------------------------------------------------------------------------------- files


def test_single_file_without_index_and_shards_give_the_same_tensors(tmp_path: Path) -> None:
    single, sharded = open_checkpoint(write(tmp_path / "one")), open_checkpoint(write_sharded(tmp_path / "two"))
    ours, theirs = dict(single.tensors()), dict(sharded.tensors())
    assert ours.keys() == theirs.keys() == tiny_tensors().keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_bin_beside_safetensors_is_not_read(tmp_path: Path) -> None:
    (write(tmp_path) / "pytorch_model.bin").write_bytes(b"not a pickle")
    assert open_checkpoint(tmp_path).infos.keys() == tiny_tensors().keys()


def test_bin_alone_is_refused_by_name(tmp_path: Path) -> None:
    (write(tmp_path) / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"not a pickle")
    assert_refused(tmp_path, "model.safetensors", "pytorch_model.bin")


def test_missing_directory_config_and_weights_are_named(tmp_path: Path) -> None:
    assert_refused(tmp_path / "nowhere", "nowhere", "no such directory")
    assert_refused(tmp_path, "config.json", "file not found")
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    assert_refused(tmp_path, "model.safetensors", "file not found")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"a": NaN}',
        b"\xff\xfe",
        b"[" * 200_000,
        b'{"a":' * 100_000,
        b'{"a": ' + b"9" * 10_000 + b"}",
    ],
    ids=["empty", "cut", "list", "nan", "bytes", "deep list", "deep object", "long number"],
)
def test_json_that_is_no_object_is_refused(content: bytes, tmp_path: Path) -> None:
    (write(tmp_path) / "config.json").write_bytes(content)
    assert_refused(tmp_path, "config.json")


@pytest.mark.parametrize("shard", ["../a.safetensors", "/etc/passwd", "sub/a.safetensors", "a.bin", "..", ""])
def test_index_that_names_no_file_of_the_directory_is_refused(shard: str, tmp_path: Path) -> None:
    directory = write_sharded(tmp_path / "inner", **{"model.norm.weight": shard})
    save_file(tiny_tensors(), tmp_path / "a.safetensors")
    assert_refused(directory, "index.json", "safetensors file")


def test_index_that_lists_a_missing_shard_is_refused(tmp_path: Path) -> None:
    (write_sharded(tmp_path) / "b.safetensors").unlink()
    assert_refused(tmp_path, "b.safetensors", "file not found")


def test_index_and_shard_that_disagree_are_refused(tmp_path: Path) -> None:
    assert_refused(write_sharded(tmp_path / "moved", **{"model.norm.weight": "a.safetensors"}), "model.norm.weight")
    assert_refused(write_sharded(tmp_path / "extra", **{"model.more.weight": "a.safetensors"}), "model.more.weight")


def test_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    save_file({**tiny_tensors()}, write_sharded(tmp_path) / "b.safetensors")
    assert_refused(tmp_path, "another shard")


def test_truncated_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path) / "model.safetensors"
    whole = path.read_bytes()
    for length in (0, 4, 8, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert_refused(tmp_path, "model.safetensors")


@pytest.mark.parametrize(
    "header",
    [
        b'{"x":{"dtype":"F32","shape":[1099511627776,1099511627776],"data_offsets":[0,4]}}',
        b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}',
        b'{"x":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}',
        b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
        b'{"x":{"dtype":"F4","shape":[8],"data_offsets":[0,4]}}',
        b'{"x":{"dtype":"I32","shape":[1],"data_offsets":[0,4]}}',
        b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        b"[" * 100_000,
        b"{}",
    ],
    ids=["huge", "size", "negative", "hole", "dtype", "no floats", "twice", "deep", "empty"],
)
def test_header_that_lies_is_refused(header: bytes, tmp_path: Path) -> None:
    content = len(header).to_bytes(8, "little") + header + b"\0" * 4
    (write(tmp_path) / "model.safetensors").write_bytes(content)
    assert_refused(tmp_path, str(tmp_path))


def test_header_longer_than_any_real_one_is_refused_unread(tmp_path: Path) -> None:
    path = write(tmp_path) / "model.safetensors"
    for length in (checkpoint.HEADER_BYTES + 1, 2**63):
        path.write_bytes(length.to_bytes(8, "little") + b"{}")
        assert_refused(tmp_path, "model.safetensors", "header")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.model", "chat_template.jinja"])
def test_link_that_leaves_the_directory_is_refused(name: str, tmp_path: Path) -> None:
    directory = write(tmp_path / "inner")
    (directory / name).touch()
    (directory / name).rename(tmp_path / name)
    (directory / name).symlink_to(tmp_path / name)
    assert_refused(directory, name, "leads out")


def test_link_within_the_directory_and_a_link_to_the_directory_are_followed(tmp_path: Path) -> None:
    directory = write(tmp_path / "inner")
    (directory / "model.safetensors").rename(directory / "weights")
    (directory / "model.safetensors").symlink_to("weights")
    (tmp_path / "link").symlink_to(directory)
    assert open_checkpoint(tmp_path / "link").config == parse_config(TINY)


def test_links_of_the_hub_cache_are_followed_to_its_blobs_only(tmp_path: Path) -> None:
    snapshot = write(tmp_path / "models--x" / "snapshots" / "1234")
    blobs = tmp_path / "models--x" / "blobs"
    blobs.mkdir()
    for path in list(snapshot.iterdir()):
        path.rename(blobs / path.name)
        path.symlink_to(Path("..", "..", "blobs", path.name))
    assert open_checkpoint(snapshot).config == parse_config(TINY)
    (blobs / "config.json").rename(tmp_path / "models--x" / "config.json")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(Path("..", "..", "config.json"))
    assert_refused(snapshot, "leads out")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_what_is_no_regular_file_is_refused_and_not_waited_for(name: str, tmp_path: Path) -> None:
    path = write(tmp_path) / name
    path.unlink()
    os.mkfifo(path)
    assert_refused(tmp_path, name, "regular file")
    path.unlink()
    path.symlink_to(name)
    assert_refused(tmp_path, name)


def test_number_of_layers_that_the_files_do_not_have_is_refused(tmp_path: Path) -> None:
    assert_refused(write(tmp_path, {**TINY, "num_hidden_layers": 4000}), "4000 layers")


def test_end_and_begin_ids_come_from_both_files(tmp_path: Path) -> None:
    directory = write(tmp_path, {**TINY, "eos_token_id": 7, "bos_token_id": 3})
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7, 8], "bos_token_id": 4}))
    found = open_checkpoint(directory)
    assert (found.eos_token_ids, found.bos_token_id) == ((9, 7, 8), 4)
    (directory / "generation_config.json").unlink()
    assert open_checkpoint(directory).eos_token_ids == (7,)
    assert open_checkpoint(write(tmp_path)).eos_token_ids == (2,)
    assert open_checkpoint(write(tmp_path, {**TINY, "eos_token_id": None})).eos_token_ids == ()
    assert_refused(write(tmp_path, {**TINY, "eos_token_id": "</s>"}), "eos_token_id")


def test_dtype_is_that_of_most_weights(tmp_path: Path) -> None:
    tensors = tiny_tensors(torch.float16)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    assert open_checkpoint(write(tmp_path, tensors=tensors)).dtype == torch.float16


def test_own_quantisation_record_is_passed_on(tmp_path: Path) -> None:
    record = {"quant_method": "nearroof", "layers": {"a": 1}}
    assert open_checkpoint(write(tmp_path, {**TINY, "quantization_config": record})).quantization == record


# ----------------------------------------------------------------------------------------------------------- loading


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_weights_are_converted_to_the_dtype_of_the_target(dtype: torch.dtype, tmp_path: Path) -> None:
    found = open_checkpoint(write(tmp_path))
    targets = targets_like(found, dtype)
    load_weights(found, targets, progress=False)
    assert all(torch.equal(targets[name], tensor.to(dtype)) for name, tensor in tiny_tensors().items())


def test_fp16_files_load_into_bf16_and_fp32(tmp_path: Path) -> None:
    found = open_checkpoint(write(tmp_path, tensors=tiny_tensors(torch.float16)))
    for dtype in (torch.float32, torch.bfloat16):
        targets = targets_like(found, dtype)
        load_weights(found, targets, progress=False)
        assert torch.equal(targets["model.norm.weight"], tiny_tensors(torch.float16)["model.norm.weight"].to(dtype))


def test_values_beyond_the_range_of_fp16_are_refused(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    tensors["model.norm.weight"][0] = 1e6
    found = open_checkpoint(write(tmp_path, tensors=tensors))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*bf16"):
        load_weights(found, targets_like(found, torch.float16), progress=False)


def test_missing_leftover_and_misshapen_tensors_are_named_before_anything_is_loaded(tmp_path: Path) -> None:
    found = open_checkpoint(write(tmp_path))
    targets = {name: tensor.to("meta") for name, tensor in targets_like(found).items()}
    check_targets(found, targets)
    norm = targets.pop("model.norm.weight")
    with pytest.raises(CheckpointError, match=r"left over.*model\.norm\.weight"):
        check_targets(found, targets)
    with pytest.raises(CheckpointError, match=r"missing.*model\.more\.weight"):
        check_targets(found, {**targets, "model.norm.weight": norm, "model.more.weight": norm})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \[16\].*\[17\]"):
        check_targets(found, {**targets, "model.norm.weight": torch.empty(17, device="meta")})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is torch\.float32, where torch\.int8"):
        check_targets(found, {**targets, "model.norm.weight": norm.to(torch.int8)})


def test_fp8_weights_without_a_record_do_not_pass_for_numbers(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].to(torch.float8_e4m3fn)
    found = open_checkpoint(write(tmp_path, tensors=tensors))
    with pytest.raises(CheckpointError, match="float8_e4m3fn"):
        check_targets(found, targets_like(found))


def test_tied_embeddings_with_and_without_a_head_in_the_file(tmp_path: Path) -> None:
    tied, tensors = {**TINY, "tie_word_embeddings": True}, tiny_tensors()
    different = open_checkpoint(write(tmp_path / "different", tied, tensors))
    assert not different.config.tie_word_embeddings  # as transformers: the files outrank the flag
    assert "lm_head.weight" in different.infos
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    equal = open_checkpoint(write(tmp_path / "equal", tied, tensors))
    assert equal.config.tie_word_embeddings
    assert "lm_head.weight" not in equal.infos | dict(equal.tensors())
    del tensors["lm_head.weight"]
    absent = open_checkpoint(write(tmp_path / "absent", tied, tensors))
    assert absent.infos.keys() == equal.infos.keys()


def test_computed_tables_in_old_files_are_passed_over(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    found = open_checkpoint(write(tmp_path, tensors={**tiny_tensors(), name: torch.ones(2)}))
    assert name not in found.infos | dict(found.tensors())


MEASURE_LOADING = """
import sys, torch
from pathlib import Path
from checkpoint import load_weights, open_checkpoint
def private():
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) * 1024
before = private()
found = open_checkpoint(Path(sys.argv[1]))
targets = {name: torch.empty(info.shape, dtype=torch.float32) for name, info in found.infos.items()}
load_weights(found, targets, progress=False)
print(private() - before, sum(target.nbytes for target in targets.values()))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to see private memory")
def test_loading_takes_little_private_memory_beyond_the_weights(tmp_path: Path, root: Path) -> None:
    tensors = {f"model.layers.{layer}.x.weight": torch.ones(8, 2**20) for layer in range(2)}
    for dtype in (torch.float32, torch.float16):
        write(tmp_path, tensors={name: tensor.to(dtype) for name, tensor in tensors.items()})
        command = [sys.executable, "-c", MEASURE_LOADING, str(tmp_path)]
        taken, weights = map(int, subprocess.check_output(command, cwd=root, text=True).split())
        assert taken < weights + 20 * 2**20


def test_progress_goes_to_stderr_and_only_on_long_loads(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = open_checkpoint(write(tmp_path))
    load_weights(found, targets_like(found), progress=True)
    assert capfd.readouterr() == ("", "")


# ----------------------------------------------------------------------------------------------------------- writing


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    for shard_bytes, files in ((10**9, 1), (2000, 13)):
        output = tmp_path / f"{files}"
        with CheckpointWriter(output, shard_bytes=shard_bytes) as writer:
            writer.write_json("config.json", TINY)
            for name, tensor in tiny_tensors().items():
                writer.add(name, tensor)
        assert len(list(output.glob("*.safetensors"))) == files
        assert (output / "model.safetensors.index.json").exists() == (files > 1)
        read = dict(open_checkpoint(output).tensors())
        assert all(torch.equal(read[name], tensor) for name, tensor in tiny_tensors().items())
        assert list(tmp_path.glob(".*")) == []


def test_views_and_transposes_are_written_as_they_are_seen(tmp_path: Path) -> None:
    base = torch.arange(12.0).view(3, 4)
    with CheckpointWriter(tmp_path / "new") as writer:
        writer.write_json("config.json", {**TINY, "num_hidden_layers": 1})
        writer.add("model.layers.0.rows", base[1:])
        writer.add("model.layers.0.turned", base.T)
    read = dict(open_checkpoint(tmp_path / "new").tensors())
    assert torch.equal(read["model.layers.0.rows"], base[1:])
    assert torch.equal(read["model.layers.0.turned"], base.T)


def test_interrupted_writing_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), CheckpointWriter(tmp_path / "new", shard_bytes=100) as writer:
        for name, tensor in tiny_tensors().items():
            writer.add(name, tensor)
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_existing_directory_is_replaced_only_when_forced_and_a_checkpoint(tmp_path: Path) -> None:
    existing = write(tmp_path / "old")
    with pytest.raises(CheckpointError, match="already exists"):
        CheckpointWriter(existing)
    with CheckpointWriter(existing, force=True) as writer:
        writer.write_json("config.json", TINY)
        writer.add("model.layers.0.x", torch.ones(1))
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert list(dict(open_checkpoint_of_one_layer(existing).tensors())) == ["model.layers.0.x"]
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "diary.txt").touch()
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        CheckpointWriter(tmp_path / "home", force=True)
    (tmp_path / "empty").mkdir()
    CheckpointWriter(tmp_path / "empty")


def open_checkpoint_of_one_layer(directory: Path) -> Checkpoint:
    (directory / "config.json").write_text(json.dumps({**TINY, "num_hidden_layers": 1}))
    return open_checkpoint(directory)


def test_written_files_have_the_modes_that_the_umask_gives(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "new") as writer:
        writer.write_json("config.json", TINY)
        writer.add("x", torch.ones(1))
    plain = tmp_path / "plain"
    plain.touch()
    assert (tmp_path / "new" / "model.safetensors").stat().st_mode == plain.stat().st_mode
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o777 & ~(0o666 & ~(plain.stat().st_mode & 0o777))


def test_the_same_name_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="twice"), CheckpointWriter(tmp_path / "new") as writer:
        writer.add("x", torch.ones(1))
        writer.add("x", torch.ones(1))
    assert not (tmp_path / "new").exists()


def test_real_weights_open(smollm2: Path) -> None:
    found = open_checkpoint(smollm2)
    assert (found.config.num_hidden_layers, found.config.tie_word_embeddings) == (30, True)
    assert (found.dtype, found.eos_token_ids) == (torch.bfloat16, (2,))


def test_nothing_but_a_checkpoint_is_replaced(tmp_path: Path) -> None:
    directory = write(tmp_path / "home", {"name": "webapp"})
    with pytest.raises(CheckpointError, match="not a checkpoint directory"):
        CheckpointWriter(directory, force=True)
    (tmp_path / "outer" / "inner").mkdir(parents=True)
    for file in write(tmp_path / "whole", TINY, tiny_tensors()).iterdir():
        (tmp_path / "outer" / file.name).write_bytes(file.read_bytes())
    with pytest.raises(CheckpointError, match="not a checkpoint directory"):
        CheckpointWriter(tmp_path / "outer", force=True)
    with pytest.raises(CheckpointError, match=r"holds .*inner, which would be replaced"):
        CheckpointWriter(tmp_path / "outer", source=tmp_path / "outer" / "inner", force=True)


def test_an_output_that_comes_into_being_meanwhile_is_kept(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="already exists"), CheckpointWriter(tmp_path / "new") as writer:
        writer.add("a", torch.ones(1))
        (tmp_path / "new").mkdir()
        (tmp_path / "new" / "thesis.txt").write_text("mine")
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["thesis.txt"]

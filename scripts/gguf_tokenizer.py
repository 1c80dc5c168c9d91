"""The tokenizer inside a GGUF file, as the files that Hugging Face's layout has for it.

A byte-level BPE becomes tokenizer.json; a SentencePiece vocabulary becomes tokenizer.model. GGUF names the rule that
cuts text into words instead of holding it, so the rules of the known names are here, as the original tokenizer.json
files state them; an unknown name is refused. Token types are SentencePiece's.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import Any

from checkpoint import CheckpointWriter

UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LETTERS_UP, LETTERS_DOWN = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
WORD_RULES = {
    "gpt-2": None,
    "single digits": None,
    "llama-bpe": CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "tekken": (
        rf"[^\r\n\p{{L}}\p{{N}}]?{LETTERS_UP}*{LETTERS_DOWN}+|[^\r\n\p{{L}}\p{{N}}]?{LETTERS_UP}+{LETTERS_DOWN}*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
ALIASES = {
    "smollm": "single digits",
    "starcoder": "single digits",
    "refact": "single digits",
    "command-r": "single digits",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "smaug-bpe": "llama-bpe",
    "deepseek-r1-qwen": "qwen2",
}
WHOLE_WORDS_FIRST = ("llama-bpe", "tekken")  # a word that is a token is not merged up; these also begin with BOS


def write_tokenizer(metadata: Mapping[str, Any], writer: CheckpointWriter) -> dict[str, Any]:
    """Write the tokenizer's files and return the ids that config.json and generation_config.json repeat."""
    values = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    tokens, types = values.get("tokens"), values.get("token_type")
    if not isinstance(tokens, list) or not isinstance(types, list) or len(types) != len(tokens):
        raise ValueError("the GGUF file holds no tokenizer (tokenizer.ggml.tokens and token_type)")
    model = values.get("model")
    if model == "gpt2":
        rule = ALIASES.get(str(values.get("pre")), str(values.get("pre")))
        if rule not in WORD_RULES:
            raise ValueError(f"tokenizer.ggml.pre {values.get('pre')!r} is not supported")
        adds_bos = bool(values.get("add_bos_token", rule in WHOLE_WORDS_FIRST))
        writer.write_json("tokenizer.json", byte_level_bpe(values, rule, adds_bos))
    elif model == "llama":
        adds_bos = bool(values.get("add_bos_token", True))
        (writer.directory / "tokenizer.model").write_bytes(sentencepiece_model(values))
    else:
        raise ValueError(f"tokenizer.ggml.model {model!r} is not supported (gpt2 and llama are)")
    ends = [values.get(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    ends = list(dict.fromkeys(token for token in ends if token is not None))
    special = {"bos_token_id": values.get("bos_token_id"), "eos_token_id": ends[0] if len(ends) == 1 else ends}
    special["pad_token_id"] = values.get("padding_token_id")
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    named = {key: _token(tokens, values.get(f"{name}_token_id")) for key, name in names.items()}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast" if model == "gpt2" else "LlamaTokenizer",
        "add_bos_token": adds_bos,
        "add_eos_token": bool(values.get("add_eos_token", False)),
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {str(entry.pop("id")): entry for entry in added_tokens(tokens, types)},
        **{key: token for key, token in named.items() if token is not None},
    }
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    writer.write_json("tokenizer_config.json", config)
    return {key: value for key, value in special.items() if value not in (None, [])}


def _token(tokens: Sequence[str], index: int | None) -> str | None:
    return tokens[index] if index is not None and 0 <= index < len(tokens) else None


def added_tokens(tokens: Sequence[str], types: Sequence[int]) -> list[dict[str, Any]]:
    """Those that are matched before the text is cut into words."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": index, "content": token, **flags, "special": kind == CONTROL}
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]


def byte_level_bpe(values: Mapping[str, Any], rule: str, adds_bos: bool) -> dict[str, Any]:
    """The content of tokenizer.json."""
    tokens, types = values["tokens"], values["token_type"]
    expression = WORD_RULES[rule]
    if expression is not None:
        split = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
        cutting = [split, {**BYTE_LEVEL, "use_regex": False}]
    else:
        cutting = [{"type": "Digits", "individual_digits": True}] if rule == "single digits" else []
        cutting = [*cutting, BYTE_LEVEL]
    vocabulary = {token: index for index, token in enumerate(tokens) if types[index] != UNUSED}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens(tokens, types),
        "normalizer": {"type": "NFC"} if rule == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": cutting},
        "post_processor": _begins_with(tokens, values.get("bos_token_id")) if adds_bos else None,
        "decoder": {**BYTE_LEVEL, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": rule in WHOLE_WORDS_FIRST,
            "vocab": vocabulary,
            "merges": values.get("merges", []),
        },
    }


def _begins_with(tokens: Sequence[str], bos: int | None) -> dict[str, Any]:
    token = _token(tokens, bos)
    if token is None:
        raise ValueError("tokenizer.ggml.bos_token_id is missing, though the text is to begin with it")
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    a, b = ({"Sequence": {"id": name, "type_id": number}} for number, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [first, a],
        "pair": [first, a, {"SpecialToken": {"id": token, "type_id": 1}}, b],
        "special_tokens": {token: {"id": token, "ids": [bos], "tokens": [token]}},
    }


def sentencepiece_model(values: Mapping[str, Any]) -> bytes:
    """A serialised ModelProto (field numbers: google/sentencepiece, src/sentencepiece_model.proto)."""
    tokens, types = values["tokens"], values["token_type"]
    scores = values.get("scores", [0.0] * len(tokens))
    pieces = b"".join(
        _field(1, _field(1, token.encode()) + _field(2, float(score)) + _field(3, kind))
        for token, score, kind in zip(tokens, scores, types, strict=True)
    )
    named = {
        45: types.index(UNKNOWN) if UNKNOWN in types else None,
        46: values.get("bos_token_id"),
        47: values.get("eos_token_id"),
    }
    trainer = _field(3, 2) + _field(4, len(tokens)) + _field(35, int(BYTE in types))  # BPE, size, byte fallback
    for number, index in named.items():
        token = _token(tokens, index)
        trainer += _field(number, token.encode()) if token is not None else b""
    normaliser = _field(1, b"identity") + _field(3, int(values.get("add_space_prefix", True)))
    normaliser += _field(4, int(values.get("remove_extra_whitespaces", False))) + _field(5, 1)
    return pieces + _field(2, trainer) + _field(3, normaliser)


def _field(number: int, value: bytes | int | float) -> bytes:
    """One protobuf field: length-delimited, varint or 32-bit float."""
    if isinstance(value, bytes):
        return _varint(number << 3 | 2) + _varint(len(value)) + value
    if isinstance(value, float):
        return _varint(number << 3 | 5) + struct.pack("<f", value)
    return _varint(number << 3) + _varint(value)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])

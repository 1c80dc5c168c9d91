"""A complete checkpoint of random weights that a test makes in a moment: a byte-level tokenizer with a chat template,
so that any text can be asked and any bytes come back."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from checkpoint import parse_config
from model import build, randomize

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 264,  # padded beyond the tokenizer's 259
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}


@cache
def _tokenizer_json() -> str:
    """One id a byte: bytes after the special tokens, in the order of byte-level tokenizers' alphabet."""
    names = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    library = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(SPECIAL)
    return library.to_str()


def weights(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """All tensors that a model of this config.json has, under their names in a file."""
    model = build(parse_config(config), torch.device("cpu"), dtype)
    randomize(model)
    return {name: target.clone() for name, target in model.named_targets().items()}


def write(directory: Path, dtype: torch.dtype = torch.float32, template: str | None = TEMPLATE, **changes: Any) -> Path:
    """The checkpoint, with changes to its config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    config = CONFIG | changes
    (directory / "config.json").write_text(json.dumps(config))
    save_file(weights(config, dtype), directory / "model.safetensors")
    (directory / "tokenizer.json").write_text(_tokenizer_json())
    settings = {"eos_token": "<|im_end|>"} | ({} if template is None else {"chat_template": template})
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory

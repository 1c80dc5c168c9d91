"""The model against transformers, and against itself: cached, chunked, batched."""

from pathlib import Path

import pytest
import torch

from attention import FlexAttention, ReducedAttention, SlicedAttention
from checkpoint import load_weights, open_checkpoint
from model import RANDOM_SHAPES, Transformer, build, randomize

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.05 * i for i in range(8)],
    "long_factor": [1.5 + 0.5 * i for i in range(8)],
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}

# name -> (configuration class, what it changes). Prompts have 48 tokens: longer than every window and original length.
VARIANTS: dict[str, tuple[str, dict]] = {
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama-one-kv-head": ("LlamaConfig", {"num_key_value_heads": 1}),
    "llama-no-groups": ("LlamaConfig", {"num_key_value_heads": 4}),
    "llama-three-to-one": ("LlamaConfig", {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}),
    "llama-wide-heads": ("LlamaConfig", {"head_dim": 40}),
    "llama-theta": ("LlamaConfig", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "llama-linear": ("LlamaConfig", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    "llama-dynamic": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, "max_position_embeddings": 40},
    ),
    "llama-llama3": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("LlamaConfig", {"rope_parameters": YARN}),
    "llama-yarn-mscale": (
        "LlamaConfig",
        {"rope_parameters": YARN | {"mscale": 0.8, "mscale_all_dim": 1.2, "beta_fast": 16.0}},
    ),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral-window": ("MistralConfig", {"sliding_window": 9}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-window": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 24}),
    "qwen3-bias": ("Qwen3Config", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0, 1]}),
    "phi3": ("Phi3Config", {"sliding_window": None}),
    "phi3-partial": ("Phi3Config", {"partial_rotary_factor": 0.5, "sliding_window": 9}),
    "phi3-longrope": (
        "Phi3Config",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32, "max_position_embeddings": 128},
    ),
    "granite": (
        "GraniteConfig",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
            "attention_bias": True,
        },
    ),
}


def save_reference(variant: str, directory: Path) -> torch.nn.Module:
    """A tiny random transformers model of this variant, saved to the directory."""
    name, changes = VARIANTS[variant]
    torch.manual_seed(len(variant))
    config = getattr(transformers, name)(**(SMALL | changes))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms of one and biases of zero would hide mistakes
                parameter.normal_(0.0 if parameter_name.endswith("bias") else 1.0, 0.3)
            else:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5)
    model.save_pretrained(directory)
    return model


def load(directory: Path, batch: int = 1, capacity: int = 64, rotary_length: int | None = None) -> Transformer:
    checkpoint = open_checkpoint(directory)
    model = build(checkpoint.config, torch.device("cpu"), torch.float32)
    load_weights(checkpoint, model.named_targets(), progress=False)
    model.allocate(batch, capacity, rotary_length)
    return model


def prompt(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, SMALL["vocab_size"], (1, length), generator=torch.Generator().manual_seed(seed))


def places(length: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + length).unsqueeze(0)


def random_model(name: str = "tiny", batch: int = 1, capacity: int = 256) -> Transformer:
    model = build(RANDOM_SHAPES[name], torch.device("cpu"), torch.float32)
    randomize(model)
    model.allocate(batch, capacity)
    return model


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_logits_equal_transformers_whole_and_cached(variant: str, tmp_path: Path) -> None:
    reference = save_reference(variant, tmp_path)
    ids = prompt(48)
    expected = reference(ids, use_cache=False).logits
    model = load(tmp_path, rotary_length=48)
    whole = model.logits(model(ids, places(48), kv_length=48))
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-4)

    model.allocate(1, 64, 48)
    parts = [model.logits(model(ids[:, :20], places(20), kv_length=20))]
    parts.append(model.logits(model(ids[:, 20:37], places(17, 20), kv_length=37)))
    parts += [model.logits(model(ids[:, i : i + 1], places(1, i), kv_length=i + 1)) for i in range(37, 48)]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("variant", ["llama-three-to-one", "mistral-window", "smollm3"])
@pytest.mark.parametrize("attention", [ReducedAttention, FlexAttention])
@torch.no_grad()
def test_every_attention_reads_the_cache_alike(variant: str, attention: type, tmp_path: Path) -> None:
    save_reference(variant, tmp_path)
    ids, steps = prompt(48), range(30, 48)

    def run(model: Transformer, host_knows: bool) -> torch.Tensor:
        model(ids[:, :30], places(30), kv_length=30)
        lengths = [i + 1 if host_knows else None for i in steps]
        return torch.cat(
            [model(ids[:, i : i + 1], places(1, i), kv_length=n) for i, n in zip(steps, lengths, strict=True)], 1
        )

    expected = run(load(tmp_path), True)
    model = load(tmp_path)
    model.attention = attention()
    torch.testing.assert_close(run(model, False), expected, rtol=0, atol=2e-5)


@torch.no_grad()
def test_flex_block_table_covers_what_is_visible_and_little_else() -> None:
    for window in (None, 100, 300):
        for start in (0, 1, 127, 128, 129, 500, 1000):
            plan = FlexAttention().plan(torch.tensor([[start]]), 1152, window, None)
            count = int(plan.kv_num_blocks)
            blocks = plan.kv_indices[0, 0, 0, :count].tolist()
            first = 0 if window is None else max(0, start - window + 1)
            assert blocks == list(range(first // 128, start // 128 + 1))


@torch.no_grad()
def test_a_row_of_a_batch_equals_its_solo_run() -> None:
    prompts = [prompt(length, length) for length in (3, 17, 40)]
    batched = random_model(batch=3)
    for row, ids in enumerate(prompts):
        batched(ids, places(ids.shape[1]), torch.tensor([row]), ids.shape[1])
    following = torch.tensor([[5], [6], [7]])
    at = torch.tensor([[ids.shape[1]] for ids in prompts])
    together = batched(following, at, kv_length=41)
    for row, ids in enumerate(prompts):
        solo = random_model()
        solo(ids, places(ids.shape[1]), kv_length=ids.shape[1])
        alone = solo(following[row : row + 1], at[row : row + 1], kv_length=ids.shape[1] + 1)
        torch.testing.assert_close(together[row : row + 1], alone, rtol=0, atol=1e-5)


@torch.no_grad()
def test_what_lies_beyond_the_position_is_never_read() -> None:
    ids = prompt(20)
    clean, poisoned = random_model(), random_model()
    for block in poisoned.blocks():
        block.self_attn.cache.k.fill_(float("nan"))
        block.self_attn.cache.v.fill_(1e30)
    for length in (7, 8):
        expected = clean(ids[:, :length], places(length), kv_length=length)
        torch.testing.assert_close(poisoned(ids[:, :length], places(length), kv_length=length), expected)


def test_targets_are_views_that_cover_every_weight_once() -> None:
    model = random_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for target in model.named_targets().values():
            target += 1
    assert all(bool((parameter == 1).all()) for parameter in model.parameters())


@torch.no_grad()
def test_stories260k_gives_the_right_logits(shared_data: Path) -> None:
    directory = shared_data / "stories260K-hf"
    reference = transformers.AutoModelForCausalLM.from_pretrained(directory).float().eval()
    ids = torch.tensor([[1, 403, 407, 261, 378]])
    model = load(directory)
    torch.testing.assert_close(
        model.logits(model(ids, places(5), kv_length=5)), reference(ids).logits, rtol=0, atol=1e-4
    )


def test_the_sliced_way_is_the_default() -> None:
    assert isinstance(random_model().attention, SlicedAttention)

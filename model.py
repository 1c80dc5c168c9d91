"""A Llama-shaped transformer with a static KV cache: eager, single-device, plain torch.

Knows nothing of files, tokenizers, sampling, compilation or quantisation. Speed comes from outside: the attention over
the cache and the call of a block are exchangeable (`Transformer.attention`, `run_block`), and a `Linear` may be swapped
for anything with its interface.

Legend: B batch, T tokens, H hidden_size, Hq query heads, Hkv key/value heads, D head_dim, S cache slots, V vocabulary.

Rotary order is half-split and tensor names are Hugging Face's, so no weight is permuted. Weights that are read together
lie together: `qkv_proj` and `gate_up_proj` are one tensor each, and `named_targets` maps the names in the files to
rows.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention import CacheAttention, SlicedAttention

SLOT_MULTIPLE = 128  # caches are a whole number of attention blocks


@dataclass(frozen=True)
class RotaryConfig:
    """Rotary position embedding, in the terms of Hugging Face's `rope_parameters`."""

    rope_type: str = "default"  # default, linear, dynamic, llama3, yarn, longrope
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn
    attention_factor: float | None = None  # yarn, longrope
    short_factor: tuple[float, ...] = ()  # longrope
    long_factor: tuple[float, ...] = ()  # longrope


@dataclass(frozen=True)
class ModelConfig:
    """The architecture, field by field as config.json names it. Per-layer tuples are empty where all layers agree."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rotary: RotaryConfig = RotaryConfig()
    attention_bias: bool = False  # on q, k and v
    attention_output_bias: bool = False  # on o
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of q and k
    sliding_windows: tuple[int | None, ...] = ()  # (): no layer has one
    rotary_layers: tuple[bool, ...] = ()  # (): every layer rotates
    embedding_multiplier: float = 1.0
    attention_multiplier: float | None = None  # scale of the scores; None: head_dim ** -0.5
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0  # a divisor

    def window(self, layer: int) -> int | None:
        return self.sliding_windows[layer] if self.sliding_windows else None

    def rotates(self, layer: int) -> bool:
        return self.rotary_layers[layer] if self.rotary_layers else True

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.attention_multiplier is None else self.attention_multiplier

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.rotary.partial_rotary_factor)

    @property
    def length_dependent_rotary(self) -> bool:
        """Whether the rotary frequencies depend on how long the conversation may become."""
        return self.rotary.rope_type in ("dynamic", "longrope")


def _llama3_rotary(factor: float) -> RotaryConfig:
    return RotaryConfig("llama3", 500000.0, factor=factor, original_max_position_embeddings=8192)


# Shapes of published models, for runs on random weights (`--random NAME`): no file is needed to measure speed.
RANDOM_SHAPES: dict[str, ModelConfig] = {
    "llama-3.1-8b": ModelConfig("llama", 128256, 4096, 14336, 32, 32, 8, 128, 131072, 1e-5, rotary=_llama3_rotary(8.0)),
    "llama-3.1-70b": ModelConfig(
        "llama", 128256, 8192, 28672, 80, 64, 8, 128, 131072, 1e-5, rotary=_llama3_rotary(8.0)
    ),
    "llama-3.2-1b": ModelConfig("llama", 128256, 2048, 8192, 16, 32, 8, 64, 131072, 1e-5, True, _llama3_rotary(32.0)),
    "llama-3.2-3b": ModelConfig("llama", 128256, 3072, 8192, 28, 24, 8, 128, 131072, 1e-5, True, _llama3_rotary(32.0)),
    "llama-2-7b": ModelConfig("llama", 32000, 4096, 11008, 32, 32, 32, 128, 4096, 1e-5),
    "mistral-7b": ModelConfig(
        "mistral", 32768, 4096, 14336, 32, 32, 8, 128, 32768, 1e-5, rotary=RotaryConfig(rope_theta=1e6)
    ),
    "qwen3-8b": ModelConfig(
        "qwen3", 151936, 4096, 12288, 36, 32, 8, 128, 40960, rotary=RotaryConfig(rope_theta=1e6), qk_norm=True
    ),
    "qwen3-0.6b": ModelConfig(
        "qwen3", 151936, 1024, 3072, 28, 16, 8, 128, 40960, 1e-6, True, RotaryConfig(rope_theta=1e6), qk_norm=True
    ),
    "smollm2-135m": ModelConfig(
        "llama", 49152, 576, 1536, 30, 9, 3, 64, 8192, 1e-5, True, RotaryConfig(rope_theta=1e5)
    ),
    "tiny": ModelConfig("llama", 512, 128, 352, 2, 4, 2, 32, 2048, 1e-5, True),
}


class Linear(nn.Module):
    """y = x W^T + b. `weight` is [out_features, in_features]."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        self.as_reduction = False  # one row as a product and a sum, which Inductor turns into one streaming loop

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]."""
        return self.in_parts(x, slice(None))[0]

    def in_parts(self, x: Tensor, *parts: slice) -> list[Tensor]:
        """The product with each of these parts of the rows. As reductions they read the same stored input, so that
        Inductor makes one loop of parts of one size."""
        if not self.reduces(x):
            return [F.linear(x, self.weight[rows], self._bias(rows)) for rows in parts]
        # as_strided makes Inductor store x: it would be recomputed for every output row otherwise.
        row = x.as_strided((self.in_features,), (1,)).float()
        products = [(self.weight[rows].float() * row).sum(-1) for rows in parts]
        return [self._finished(product, x, rows) for product, rows in zip(products, parts, strict=True)]

    def _bias(self, rows: slice) -> Tensor | None:
        return None if self.bias is None else self.bias[rows]

    def _finished(self, product: Tensor, x: Tensor, rows: slice) -> Tensor:
        """A product as a reduction gives it, fp32 [N] -> [..., N] in x's precision, with the bias."""
        bias = self._bias(rows)
        return (product if bias is None else product + bias).to(x.dtype).view(*x.shape[:-1], -1)

    def reduces(self, x: Tensor) -> bool:
        return self.as_reduction and x.numel() == self.in_features

    def parts(self, rows: slice) -> dict[str, Tensor]:
        """The tensors, by the suffix of their name in a file, that hold these rows: views to copy a checkpoint into."""
        return {name: tensor[rows] for name, tensor in self.named_parameters()}


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x of any precision -> the same in the weight's, computed in fp32."""
        return (F.rms_norm(x.float(), self.weight.shape, eps=self.eps) * self.weight).to(self.weight.dtype)


class RotaryTable(nn.Module):
    """cos and sin of every slot's angles, fp32 [S, rotary_dim / 2]."""

    cos: Tensor
    sin: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cos", torch.empty(0), persistent=False)
        self.register_buffer("sin", torch.empty(0), persistent=False)

    def fill(self, config: ModelConfig, length: int) -> None:
        """Write the angles in place, so that whatever holds these tensors sees them. `length` is the longest that the
        conversation may become: dynamic and longrope frequencies depend on it."""
        frequencies, scale = rotary_frequencies(config, length)
        angles = torch.outer(torch.arange(self.cos.shape[0], dtype=torch.float32), frequencies)
        self.cos.copy_(angles.cos() * scale)
        self.sin.copy_(angles.sin() * scale)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [B, T] -> cos [B, 1, T, 1, rotary_dim / 2], and sin [B, 1, T, 2, rotary_dim / 2], negative for the
        first half: a pair (x, y) becomes (x cos - y sin, y cos + x sin)."""
        at = positions[:, None, :, None]
        signs = torch.arange(-1, 2, 2, device=positions.device).unsqueeze(-1)
        return self.cos[at], self.sin[at] * signs


def rotary_frequencies(config: ModelConfig, length: int) -> tuple[Tensor, float]:
    """-> (angle per position [rotary_dim / 2], factor on cos and sin), as transformers' modeling_rope_utils defines
    them.

    linear and dynamic (NTK): u/kaiokendev, u/bloc97 and u/emozilla; yarn: Peng et al. 2023, arXiv 2309.00071;
    longrope: Ding et al. 2024, arXiv 2402.13753; llama3: Llama 3.1's wavelength bands.
    """
    rotary, dim = config.rotary, config.rotary_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    original = rotary.original_max_position_embeddings or config.max_position_embeddings
    theta = rotary.rope_theta
    match rotary.rope_type:
        case "default":
            return 1.0 / theta**exponents, 1.0
        case "linear":
            return 1.0 / theta**exponents / rotary.factor, 1.0
        case "dynamic":
            stretch = rotary.factor * max(length, config.max_position_embeddings) / config.max_position_embeddings
            theta *= (stretch - (rotary.factor - 1)) ** (dim / (dim - 2))
            return 1.0 / theta**exponents, 1.0
        case "llama3":
            return _llama3_frequencies(1.0 / theta**exponents, rotary, original), 1.0
        case "yarn":
            return _yarn_frequencies(theta**exponents, rotary, original, dim), _yarn_attention_factor(rotary)
        case "longrope":
            factors = torch.tensor(rotary.long_factor if length > original else rotary.short_factor)
            scale = rotary.attention_factor
            if scale is None:
                scale = math.sqrt(1 + math.log(rotary.factor) / math.log(original)) if rotary.factor > 1 else 1.0
            return 1.0 / (factors * theta**exponents), scale
    raise ValueError(f"unknown rotary type {rotary.rope_type!r}")


def _llama3_frequencies(frequencies: Tensor, rotary: RotaryConfig, original: int) -> Tensor:
    wavelengths = 2 * math.pi / frequencies
    smooth = (original / wavelengths - rotary.low_freq_factor) / (rotary.high_freq_factor - rotary.low_freq_factor)
    blended = (1 - smooth) * frequencies / rotary.factor + smooth * frequencies
    slow = torch.where(wavelengths > original / rotary.low_freq_factor, frequencies / rotary.factor, blended)
    return torch.where(wavelengths < original / rotary.high_freq_factor, frequencies, slow)


def _yarn_frequencies(periods: Tensor, rotary: RotaryConfig, original: int, dim: int) -> Tensor:
    def dimension_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rotary.rope_theta))

    low, high = dimension_of(rotary.beta_fast), dimension_of(rotary.beta_slow)
    if rotary.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2).float() - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return ramp / (rotary.factor * periods) + (1 - ramp) / periods


def _yarn_attention_factor(rotary: RotaryConfig) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(rotary.factor) + 1.0 if rotary.factor > 1 else 1.0

    if rotary.attention_factor is not None:
        return rotary.attention_factor
    if rotary.mscale and rotary.mscale_all_dim:
        return mscale(rotary.mscale) / mscale(rotary.mscale_all_dim)
    return mscale(1.0)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotary over the leading rotary_dim of x [B, heads, T, D]; cos, sin as `RotaryTable.at` gives them."""
    size = 2 * cos.shape[-1]
    pairs = x[..., :size].unflatten(-1, (2, -1)).float()
    # One expression for both halves: a compiler would store parts that are joined, and read them back.
    turned = (pairs * cos + pairs.flip(-2) * sin).flatten(-2).to(x.dtype)
    return turned if size == x.shape[-1] else torch.cat((turned, x[..., size:]), dim=-1)


class KVCache(nn.Module):
    """Keys and values of one layer, [B, Hkv, S, D]; the slot is the logical position. Buffers of a module, since
    Inductor skips CUDA graphs over mutated inputs that are plain tensors."""

    k: Tensor
    v: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("k", torch.empty(0), persistent=False)
        self.register_buffer("v", torch.empty(0), persistent=False)

    def write(self, k: Tensor, v: Tensor, positions: Tensor, row: Tensor | None) -> tuple[Tensor, Tensor]:
        """Store k, v [B, Hkv, T, D] at positions [B, T] of the given row (all rows in order when None) and return the
        rows' whole caches."""
        rows = torch.arange(self.k.shape[0], device=k.device) if row is None else row
        at = (rows.unsqueeze(1), slice(None), positions)
        self.k[at] = k.transpose(1, 2)
        self.v[at] = v.transpose(1, 2)
        return (self.k, self.v) if row is None else (self.k.index_select(0, row), self.v.index_select(0, row))


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim
        self.window, self.rotary = config.window(layer), config.rotates(layer)
        self.scale = config.score_scale
        self.qkv_proj = Linear(config.hidden_size, (heads + 2 * kv_heads) * dim, config.attention_bias)
        self.o_proj = Linear(heads * dim, config.hidden_size, config.attention_output_bias)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(dim, config.rms_norm_eps) if config.qk_norm else None
        self.cache = KVCache()

    def forward(self, x: Tensor, shared: "SharedInputs") -> Tensor:
        batch, tokens, _ = x.shape
        qkv = self.qkv_proj(x).view(batch, tokens, -1, self.head_dim).transpose(1, 2)  # [B, Hq + 2 Hkv, T, D]
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary:
            q, k = rotate(q, *shared.rotation), rotate(k, *shared.rotation)
        k, v = self.cache.write(k, v, shared.positions, shared.row)
        mixed = shared.attention.attend(q, k, v, shared.plans[self.window], self.scale)  # [B, Hq, T, D]
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, tokens, -1))


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        proj = self.gate_up_proj
        if proj.reduces(x):  # two reductions over the same columns fuse, with the product behind them
            half = proj.out_features // 2
            gate, up = proj.in_parts(x, slice(half), slice(half, None))
        else:
            gate, up = proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)
        self.residual_multiplier = config.residual_multiplier

    def forward(self, x: Tensor, shared: "SharedInputs") -> Tensor:
        x = x + scaled(self.self_attn(self.input_layernorm(x), shared), self.residual_multiplier)
        return x + scaled(self.mlp(self.post_attention_layernorm(x)), self.residual_multiplier)


def scaled(x: Tensor, multiplier: float) -> Tensor:
    return x if multiplier == 1.0 else x * multiplier


@dataclass
class SharedInputs:
    """What all layers of one forward pass share."""

    positions: Tensor  # [B, T]
    row: Tensor | None  # [1]: the cache row of a single prompt; None: row i of the batch is row i of the cache
    rotation: tuple[Tensor, Tensor]  # cos and sin, as `RotaryTable.at` gives them
    attention: CacheAttention
    plans: dict[int | None, object]  # by window


class Transformer(nn.Module):
    """Embeddings, blocks, final norm, head. Built on the current default device with uninitialised weights."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        # Made without initial values: drawing them on the meta device imports torch's compiler, which takes a second.
        self.embed_tokens = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.rope = RotaryTable()
        self.attention: CacheAttention = SlicedAttention()
        self.run_block: Callable[[Block, Tensor, SharedInputs], Tensor] = Block.__call__
        self.capacity = 0  # positions that a conversation may use; the caches hold more

    def blocks(self) -> Iterator[Block]:
        for block in self.layers:
            assert isinstance(block, Block)
            yield block

    def allocate(self, batch: int, capacity: int, rotary_length: int | None = None) -> None:
        """Allocate zeroed caches for `batch` rows of `capacity` positions, in the weights' dtype and on their
        device, and the rotary table. Slot `capacity` is scratch: padding and finished rows write there."""
        weight = self.embed_tokens.weight
        slots = cache_slots(capacity)
        shape = (batch, self.config.num_key_value_heads, slots, self.config.head_dim)
        for block in self.blocks():
            cache = block.self_attn.cache
            cache.k, cache.v = weight.new_zeros(shape), weight.new_zeros(shape)
        half = (slots, self.config.rotary_dim // 2)
        self.rope.cos = weight.new_empty(half, dtype=torch.float32)
        self.rope.sin = weight.new_empty(half, dtype=torch.float32)
        self.rope.fill(self.config, rotary_length or capacity)
        self.capacity = capacity

    def forward(
        self, tokens: Tensor, positions: Tensor, row: Tensor | None = None, kv_length: int | None = None
    ) -> Tensor:
        """tokens, positions [B, T] -> hidden states after the final norm [B, T, H]; writes the caches.

        Positions of a row rise by one, up to the scratch slot for padding. `row` [1] picks the cache row of a single
        prompt (B = 1). `kv_length` is the host's bound on the slots in use (last position + 1): the eager path reads
        no further; None reads what the plan says."""
        windows = {block.self_attn.window for block in self.blocks()}
        slots = self.layers[0].self_attn.cache.k.shape[2]
        shared = SharedInputs(
            positions,
            row,
            self.rope.at(positions),
            self.attention,
            {window: self.attention.plan(positions, slots, window, kv_length) for window in windows},
        )
        # The residual stays in fp32: rounding it after every layer is half of what bf16 costs in accuracy.
        x = scaled(self.embed_tokens(tokens).float(), self.config.embedding_multiplier)
        for block in self.blocks():
            x = self.run_block(block, x, shared)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] -> fp32 [..., V]."""
        logits = self.lm_head(hidden).float()
        return logits if self.config.logits_scaling == 1.0 else logits / self.config.logits_scaling

    def named_targets(self) -> dict[str, Tensor]:
        """Hugging Face tensor name -> view of the parameter that it fills. A tied head has no target of its own."""
        config = self.config
        q, kv, ff = (
            config.num_attention_heads * config.head_dim,
            config.num_key_value_heads * config.head_dim,
            config.intermediate_size,
        )
        qkv_rows = {"q_proj": slice(0, q), "k_proj": slice(q, q + kv), "v_proj": slice(q + kv, q + 2 * kv)}
        gate_up_rows = {"gate_proj": slice(0, ff), "up_proj": slice(ff, 2 * ff)}
        if config.model_type == "phi3":
            qkv_rows, gate_up_rows = {"qkv_proj": slice(None)}, {"gate_up_proj": slice(None)}
        targets: dict[str, Tensor] = {
            "model.embed_tokens.weight": self.embed_tokens.weight,
            "model.norm.weight": self.norm.weight,
        }

        def add(prefix: str, module: Linear, rows: slice = slice(None)) -> None:
            targets.update({f"{prefix}.{suffix}": part for suffix, part in module.parts(rows).items()})

        for index, block in enumerate(self.blocks()):
            name, attention, mlp = f"model.layers.{index}", block.self_attn, block.mlp
            for projection, rows in qkv_rows.items():
                add(f"{name}.self_attn.{projection}", attention.qkv_proj, rows)
            for projection, rows in gate_up_rows.items():
                add(f"{name}.mlp.{projection}", mlp.gate_up_proj, rows)
            add(f"{name}.self_attn.o_proj", attention.o_proj)
            add(f"{name}.mlp.down_proj", mlp.down_proj)
            norms = {
                "input_layernorm": block.input_layernorm,
                "post_attention_layernorm": block.post_attention_layernorm,
            }
            norms |= (
                {"self_attn.q_norm": attention.q_norm, "self_attn.k_norm": attention.k_norm} if config.qk_norm else {}
            )
            targets.update({f"{name}.{norm}.weight": module.weight for norm, module in norms.items()})
        if getattr(self.lm_head, "weight", None) is not self.embed_tokens.weight:
            add("lm_head", self.lm_head)
        return targets


def cache_slots(capacity: int) -> int:
    """Slots of a cache of this capacity: one more for scratch, then whole blocks."""
    return -(-(capacity + 1) // SLOT_MULTIPLE) * SLOT_MULTIPLE


@torch.no_grad()
def build(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Transformer:
    """A transformer with uninitialised weights on the device, one copy of them."""
    return materialize(skeleton(config, dtype), device)


def skeleton(config: ModelConfig, dtype: torch.dtype) -> Transformer:
    """A transformer of shapes without memory."""
    with torch.device("meta"):
        return Transformer(config).to(dtype)


def materialize(model: Transformer, device: torch.device) -> Transformer:
    """A skeleton with memory for its weights, uninitialised, one copy of them; a tied head stays tied."""
    tied = getattr(model.lm_head, "weight", None) is model.embed_tokens.weight
    model.to_empty(device=device)
    if tied:  # to_empty gives each name a tensor of its own
        model.lm_head.weight = model.embed_tokens.weight
    return model.eval()


@torch.no_grad()
def randomize(model: Transformer, seed: int = 0) -> None:
    """Fill with random weights that keep activations of order one: matrices of standard deviation
    in_features ** -0.5, norms near one, biases small."""
    generator = torch.Generator(model.embed_tokens.weight.device).manual_seed(seed)
    for name, tensor in model.named_targets().items():
        if tensor.dim() == 2:
            tensor.normal_(0.0, tensor.shape[1] ** -0.5, generator=generator)
        elif name.endswith("bias"):
            tensor.normal_(0.0, 0.1, generator=generator)
        else:
            tensor.normal_(1.0, 0.1, generator=generator)

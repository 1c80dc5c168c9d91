"""The fused decode step: the chain of `decode_kernels` over a Transformer's own weights, caches and state. Same meaning
and same signature as `decoding.DecodeStep`, for one row; no second copy of any weight. Knows nothing of compilation or
of who launches it.

Legend: H hidden_size, Hq query heads, Hkv key/value heads, D head_dim, V vocabulary.
"""

import torch
from torch import Tensor, nn

import decode_kernels as kernels
from decoding import DecodeState
from model import Linear, Transformer
from sampling import choose

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def unsupported(model: Transformer, state: DecodeState, device: torch.device) -> str | None:
    """Why a fused step cannot serve this model and batch on this device, or None where it can."""
    config, dtype, rows = model.config, model.embed_tokens.weight.dtype, state.token.shape[0]
    if device.type != "cuda":
        return f"the fused kernels need an NVIDIA GPU, not {device.type}"
    if not kernels.INSTALLED:
        return "Triton is not installed"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"the fused kernels need compute capability 8.0, and {torch.cuda.get_device_name(device)} has less"
    if rows > 1:
        return f"batch {rows}: the compiled path is faster"
    if dtype not in DTYPES:
        return f"the fused kernels do not know weights in {dtype}"
    if config.head_dim > 256:
        return f"the fused kernels serve head_dim up to 256, not {config.head_dim}"
    linears = [module for module in model.modules() if type(module).__name__.endswith("Linear")]
    other = next((type(module).__name__ for module in linears if not isinstance(module, Linear)), None)
    return f"the fused kernels do not know {other}" if other else _unsupported_weights(linears, device)


def _unsupported_weights(linears: list[Linear], device: torch.device) -> str | None:
    packed = [linear for linear in linears if weights(linear)[1] is not None]
    if any(linear.qweight.shape[1] % 4 for linear in packed):
        return "the fused kernels serve quantised rows of a multiple of 4 bytes"
    fp8 = any(linear.qweight.dtype == torch.float8_e4m3fn for linear in packed)
    if fp8 and torch.cuda.get_device_capability(device) < (8, 9):
        return f"fp8 weights need compute capability 8.9, and {torch.cuda.get_device_name(device)} has less"
    return None


def weights(linear: Linear) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The weights as the kernels take them, with scales and perhaps zeros where they are quantised."""
    if not hasattr(linear, "qweight"):
        return linear.weight, None, None
    return linear.qweight, linear.scale, getattr(linear, "zero", None)


class FusedStep(nn.Module):
    """One token for one row, in place. Its buffers are what the kernels hand to each other."""

    x: Tensor
    scaled: Tensor
    squares: Tensor
    squares_between: Tensor
    qkv: Tensor
    mixed: Tensor
    partial: Tensor
    stats: Tensor
    arrivals: Tensor
    inner: Tensor
    logits: Tensor
    maxima: Tensor
    listed: Tensor

    def __init__(self, model: Transformer, state: DecodeState) -> None:
        super().__init__()
        self.model, self.state = model, state
        config, weight = model.config, model.embed_tokens.weight
        hidden, dim, vocab = config.hidden_size, config.head_dim, config.vocab_size
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        slots = model.layers[0].self_attn.cache.k.shape[2]
        splits = kernels.spread(heads, kv_heads, dim, slots).splits

        def blocks(linear: Linear) -> int:
            weight, scale, _ = weights(linear)
            shape = kernels.tile(linear.out_features, linear.in_features, scheme=kernels.scheme(weight, scale))
            return -(-linear.out_features // shape.rows)

        def add(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
            self.register_buffer(name, torch.zeros(shape, dtype=dtype, device=weight.device), persistent=False)

        add("x", (1, hidden))  # the residual
        add("scaled", (1, hidden), weight.dtype)  # x * the gain of the norm that comes next
        add("squares", (1, blocks(model.layers[0].mlp.down_proj)))  # sums of x * x, as embed and down leave them
        add("squares_between", (1, blocks(model.layers[0].self_attn.o_proj)))  # as o leaves them
        add("qkv", (1, (heads + 2 * kv_heads) * dim))
        add("mixed", (1, heads * dim), weight.dtype)  # what attention returns
        add("partial", (kv_heads, splits, heads // kv_heads, dim))
        add("stats", (kv_heads, splits, 2, heads // kv_heads))
        add("arrivals", (kv_heads,), torch.int32)
        add("inner", (1, config.intermediate_size), weight.dtype)  # what down reads
        add("logits", (1, vocab))
        add("maxima", (1, blocks(model.lm_head)))
        add("listed", (1, blocks(model.lm_head)), torch.int32)

    def forward(self, sampler: str, kv_length: int | None = None) -> None:
        """`kv_length` is of no use here: the kernels read the positions."""
        model, state, config = self.model, self.state, self.model.config
        eps, multiplier = config.rms_norm_eps, config.residual_multiplier
        x, scaled, squares, between = self.x, self.scaled, self.squares, self.squares_between
        gains = [block.input_layernorm.weight for block in model.blocks()]
        gains.append(model.norm.weight)
        table = model.embed_tokens.weight
        kernels.embed(state.token, table, gains[0], config.embedding_multiplier, x, scaled, squares)
        for block, next_gain in zip(model.blocks(), gains[1:], strict=True):
            attention, mlp = block.self_attn, block.mlp
            project, output = attention.qkv_proj, attention.o_proj
            weight, *scales = weights(project)
            k_cache, v_cache, window = attention.cache.k, attention.cache.v, attention.window or 0
            kernels.project(scaled, squares, weight, project.bias, eps, self.qkv, *scales)
            kernels.attend(
                self.qkv,
                None if attention.q_norm is None else attention.q_norm.weight,
                None if attention.k_norm is None else attention.k_norm.weight,
                model.rope.cos if attention.rotary else None,
                model.rope.sin if attention.rotary else None,
                state.position,
                state.done,
                k_cache,
                v_cache,
                attention.scale,
                eps,
                window,
                model.capacity,
                self.mixed,
                self.partial,
                self.stats,
                self.arrivals,
            )
            gain = block.post_attention_layernorm.weight
            weight, *scales = weights(output)
            kernels.project_residual(self.mixed, weight, output.bias, gain, multiplier, x, scaled, between, *scales)
            gate_up, down = mlp.gate_up_proj, mlp.down_proj
            weight, *scales = weights(gate_up)
            kernels.project_gated(scaled, between, weight, gate_up.bias, eps, self.inner, *scales)
            weight, *scales = weights(down)
            kernels.project_residual(self.inner, weight, down.bias, next_gain, multiplier, x, scaled, squares, *scales)
        weight, *scales = weights(model.lm_head)
        divisor = 1.0 / config.logits_scaling
        kernels.project_logits(scaled, squares, weight, eps, divisor, self.logits, self.maxima, *scales)
        if sampler == "full":  # as generated code: it is asked for seldom
            state.advance(choose(sampler, self.logits, state.settings, state.position + 1, state.seen))
            return
        kernels.select(
            self.logits,
            self.maxima,
            sampler == "greedy",
            state.temperature,
            state.top_k,
            state.min_p,
            state.seed,
            state.limit,
            state.eos,
            state.token,
            state.position,
            state.done,
            state.ring,
            state.count,
            state.seen,
            self.listed,
        )

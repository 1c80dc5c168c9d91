"""The Triton kernels of the fused decode step, as custom ops that write into buffers given to them, each beside its
plain torch reference. Knows tensors and their shapes; knows nothing of models, nor of who allocates the buffers.

A step is one chain of launches: embed; per layer project (q, k, v), attend, project_residual (o), project_gated,
project_residual (down); then project_logits and select. Decoding is a stream of weights, and all else hides behind it:

- Programmatic dependent launch. A kernel starts while the one before still runs, asks for its first weights, lets the
  next kernel start, and only then waits (`_await`). Before the wait a kernel loads nothing that an earlier kernel
  of the step writes and stores nothing; a program that leaves without waiting does
  neither, and another of its kernel waits, so that a wait covers the whole chain before it. The first kernel of a step
  is launched without it: a step begins when the one before is over.
- RMSNorm is cut in three. Whoever produces the residual x leaves x * gain, the input of the next product, and sums of
  x * x over as many rows as one of its programs has; whoever consumes them scales after the product, by 1 / rms.
- No float atomics, and fixed orders of summation: a replay is equal to the bit. The one integer atomic counts arrivals.

On CPU tensors an op runs its reference, or, where TRITON_INTERPRET=1, its kernel in Triton's interpreter.

One row: the leading 1 of the shapes is the batch.

Legend: N outputs, K inputs of a product, H hidden_size, Hq query heads, Hkv key/value heads, G = Hq / Hkv, D head_dim,
S cache slots, V vocabulary, P parts of a sum of squares, M blocks of logits.
"""

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sampling import INVALID, Settings, choose

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:  # torch for CPUs comes without it: the references are left, the kernels are plain functions
    INSTALLED = INTERPRETED = False
    tl = SimpleNamespace(constexpr=bool)

    def jit(function: Callable[..., None] | None = None, **options: Any) -> Any:
        return function or (lambda function: function)
else:
    INSTALLED, INTERPRETED = True, triton.knobs.runtime.interpret
    jit = triton.jit

PTX = tl.constexpr(not INTERPRETED)  # the interpreter knows no assembly
DELAY_NS = 20_000
delayed: str | None = None  # tests name a kernel here that is to dawdle, so that a missing wait shows


@cache
def chained(device: torch.device) -> bool:
    """Whether kernels on this device overlap by programmatic dependent launch (Hopper and newer)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def _launch(kernel: Any, programs: int, *args: Any, first: bool = False, **options: Any) -> None:
    device = next(arg.device for arg in args if isinstance(arg, Tensor))
    if chained(device) and not first:
        options["launch_pdl"] = True
    late = DELAY_NS if delayed == kernel.__name__ else 0
    kernel[(programs,)](*args, CHAIN=chained(device), DELAY=late, **options)


def _runs_kernel(tensor: Tensor) -> bool:
    return tensor.is_cuda or INTERPRETED


def power_of_two(n: int) -> int:
    """The least power of two that is n or more."""
    return 1 << (n - 1).bit_length()


@jit
def _await(CHAIN: tl.constexpr, DELAY: tl.constexpr):
    """Let the next kernel start; go on when all kernels before have ended and their stores are visible."""
    if CHAIN:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if DELAY > 0:
        tl.inline_asm_elementwise("nanosleep.u32 $1; mov.u32 $0, 0;", "=r,r", [DELAY], tl.int32, is_pure=False, pack=1)


@jit
def _prefetch(base, size, piece, LANES: tl.constexpr):
    """Ask for `size` bytes at `base` to be brought into L2, `piece` or more at a time (all multiples of 16); LANES is
    the program's threads."""
    share = tl.maximum(piece, (size + LANES * 16 - 1) // (LANES * 16) * 16)
    start = tl.arange(0, LANES) * share
    length = tl.minimum(share, size - start)
    asm: tl.constexpr = """{ .reg .pred some; setp.gt.s32 some, $2, 0;
        @some cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }"""
    tl.inline_asm_elementwise(asm, "=r,l,r", [base.to(tl.int64) + start, length], tl.int32, is_pure=False, pack=1)


# --- Embedding


@jit
def _embed_kernel(
    token, table, gain, x, scaled, squares, multiplier,
    H: tl.constexpr, P: tl.constexpr, UNIT: tl.constexpr, UNITS: tl.constexpr, CHAIN: tl.constexpr, DELAY: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    at = unit[:, None] * UNIT + tl.arange(0, UNIT)[None, :]  # [UNITS, UNIT]
    _await(CHAIN, DELAY)
    row = tl.load(table + tl.load(token) * H + at, mask=at < H, other=0.0).to(tl.float32) * multiplier
    tl.store(x + at, row, mask=at < H)
    tl.store(scaled + at, row * tl.load(gain + at, mask=at < H, other=0.0), mask=at < H)
    tl.store(squares + unit, tl.sum(row * row, 1), mask=unit < P)


@torch.library.custom_op("nearroof::embed", mutates_args=("x", "scaled", "squares"))
def embed(
    token: Tensor, table: Tensor, gain: Tensor, multiplier: float, x: Tensor, scaled: Tensor, squares: Tensor
) -> None:
    """The first residual: x fp32 [B, H] = table[token] * multiplier, scaled [B, H] = x * gain, squares fp32 [B, P]."""
    if not _runs_kernel(x):
        return embed_reference(token, table, gain, multiplier, x, scaled, squares)
    hidden, parts = x.shape[1], squares.shape[1]
    unit = block_size(hidden, parts)
    units = max(1, 1024 // unit)
    _launch(
        _embed_kernel, -(-parts // units), token, table, gain, x, scaled, squares, multiplier, first=True,
        H=hidden, P=parts, UNIT=unit, UNITS=units, num_warps=4,
    )  # fmt: skip
    return None


def embed_reference(
    token: Tensor, table: Tensor, gain: Tensor, multiplier: float, x: Tensor, scaled: Tensor, squares: Tensor
) -> None:
    x.copy_(table[token].float() * multiplier)
    _leave_normed(x, gain, scaled, squares)


def block_size(size: int, blocks: int) -> int:
    """The power of two that cuts `size` into this many blocks."""
    return power_of_two(-(-size // blocks))


def _blocks(x: Tensor, blocks: int, fill: float) -> Tensor:
    """[B, size] -> [B, blocks, block]."""
    block = block_size(x.shape[1], blocks)
    return F.pad(x, (0, blocks * block - x.shape[1]), value=fill).view(x.shape[0], blocks, block)


def _leave_normed(x: Tensor, gain: Tensor, scaled: Tensor, squares: Tensor) -> None:
    scaled.copy_(x * gain)
    squares.copy_(_blocks(x * x, squares.shape[1], 0.0).sum(-1))


# --- Products with a weight matrix. One kernel, four ends.


class Tile(NamedTuple):
    """How one program of a product works: `rows` outputs, `columns` inputs at a time, `ahead` of those asked for at
    once."""

    rows: int
    columns: int
    warps: int
    ahead: int = 1


# By (outputs, inputs, whether gated) of a product, with 16-bit weights on an H200.
TILES: dict[tuple[int, int, bool], Tile] = {
    (14336, 4096, True): Tile(2, 1024, 2),  # Llama 3.1 8B
    (4096, 14336, False): Tile(8, 2048, 8, 2),
    (128256, 4096, False): Tile(8, 2048, 8, 2),
    (6144, 4096, False): Tile(2, 1024, 1, 2),
    (4096, 4096, False): Tile(8, 2048, 8),
    (8192, 2048, True): Tile(4, 512, 1),  # Llama 3.2 1B
    (2048, 8192, False): Tile(4, 2048, 8, 2),
    (128256, 2048, False): Tile(16, 512, 2),
    (3072, 2048, False): Tile(2, 512, 1, 3),
    (2048, 2048, False): Tile(8, 1024, 4, 2),
    (3072, 1024, True): Tile(1, 512, 1),  # Qwen3 0.6B
    (1024, 3072, False): Tile(4, 1024, 4, 2),
    (151936, 1024, False): Tile(16, 256, 1),
    (4096, 1024, False): Tile(4, 1024, 1),
    (1024, 2048, False): Tile(8, 1024, 4),
}


# The same with packed weights, by their scheme first.
PACKED_TILES: dict[tuple[str, int, int, bool], Tile] = {
    ("int8", 14336, 4096, True): Tile(4, 2048, 4),  # Llama 3.1 8B
    ("int8", 4096, 14336, False): Tile(8, 8192, 8),
    ("int8", 128256, 4096, False): Tile(16, 4096, 8),
    ("int8", 6144, 4096, False): Tile(8, 2048, 4),
    ("int8", 4096, 4096, False): Tile(4, 2048, 4),
    ("fp8", 14336, 4096, True): Tile(4, 2048, 4),
    ("fp8", 4096, 14336, False): Tile(8, 4096, 4),
    ("fp8", 128256, 4096, False): Tile(16, 4096, 8),
    ("fp8", 6144, 4096, False): Tile(8, 2048, 2),
    ("fp8", 4096, 4096, False): Tile(4, 2048, 4),
    ("int4", 14336, 4096, True): Tile(8, 4096, 4),
    ("int4", 4096, 14336, False): Tile(8, 4096, 4),
    ("int4", 6144, 4096, False): Tile(8, 2048, 2),
    ("int4", 4096, 4096, False): Tile(16, 4096, 4),
    ("int8", 2048, 8192, False): Tile(4, 4096, 8),  # Llama 3.2 1B
    ("int8", 128256, 2048, False): Tile(16, 2048, 4),
    ("int8", 2048, 2048, False): Tile(4, 2048, 4),
    ("fp8", 2048, 8192, False): Tile(4, 4096, 4),
    ("fp8", 128256, 2048, False): Tile(16, 2048, 4),
    ("fp8", 2048, 2048, False): Tile(4, 2048, 4),
    ("int4", 2048, 8192, False): Tile(4, 4096, 4),
    ("int4", 2048, 2048, False): Tile(4, 2048, 2),
}


def tile(outputs: int, inputs: int, gated: bool = False, scheme: str = "") -> Tile:
    """The tile for a product of this shape; `rows` is also how many outputs a part of `squares` or `maxima` covers."""
    if scheme:
        unit = UNITS[scheme]
        warps = max(1, min(4, power_of_two(inputs) // (32 * unit)))
        default = Tile(4 if gated else 8, max(unit, min(power_of_two(inputs), 32 * unit * warps)), warps)
        return PACKED_TILES.get((scheme, outputs, inputs, gated), default)
    warps = 4 if inputs >= 1024 else 2 if inputs >= 512 else 1
    columns = min(power_of_two(inputs), 256 * warps)
    return TILES.get((outputs, inputs, gated)) or Tile(4 if gated else 8, columns, warps)


@jit
def _reduce_vectors(x, VECTOR: tl.constexpr):
    """Sum each thread's own vector: what is left to add up costs few registers."""
    rows: tl.constexpr = x.shape[0]
    return tl.sum(tl.reshape(x, (rows, x.shape[1] // VECTOR, VECTOR)), 2)


@jit
def _columns(at, step: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr, HINT: tl.constexpr):
    """Step's columns of the rows whose first columns the pointers `at` [ROWS, COLUMNS] point to; zero past K."""
    if K % COLUMNS == 0:
        return tl.load(at + step * COLUMNS, eviction_policy=HINT)
    mask = (tl.arange(0, COLUMNS) < K - step * COLUMNS)[None, :]
    return tl.load(at + step * COLUMNS, mask=mask, other=0.0, eviction_policy=HINT)


# Packed weights: int8 or float8_e4m3fn [N, K] with a scale a row, [N]; or int4 as uint8 [N, K / 2], K filled up to
# whole groups of 32 or a multiple, with a scale and perhaps a zero a group, [N, groups]: a byte holds 8 + the code of a
# column of the first half of a group, low, and of the second, high. The kernel reads them as words of 32 bits.
#
# To convert each weight to fp32 would take more instructions than there is time for. So the inputs are brought to the
# weights' form, once for all rows of a program, by units: the columns whose weights a thread loads at once, 16 bytes. A
# unit is scaled by a power of two; then, for int8 and int4, inputs are rounded to 15 bits, whose high and low bytes
# `dp4a` multiplies with four weights at a time, exactly; for fp8 inputs are rounded to halves, as the GPU converts such
# weights to halves in pairs, and a unit is summed in halves.

SCHEMES = {torch.int8: "int8", torch.float8_e4m3fn: "fp8", torch.uint8: "int4"}
UNITS = {"int8": 16, "fp8": 16, "int4": 32}


def scheme(weight: Tensor, scale: Tensor | None) -> str:
    """What the weights are packed as; "" where they are not."""
    return "" if scale is None else SCHEMES[weight.dtype]


def unpacked(weight: Tensor, scale: Tensor | None = None, zero: Tensor | None = None) -> Tensor:
    """fp32 [N, K], the weights that `weight` and its scales stand for."""
    if scale is None:
        return weight.float()
    if weight.dtype != torch.uint8:
        return weight.float() * scale.float().view(-1, 1)
    pairs = weight.view(*scale.shape, -1)
    codes = torch.cat((pairs & 15, pairs >> 4), -1).float() - 8  # [N, groups, group]
    if zero is not None:
        codes -= zero.float().unsqueeze(-1)
    return (codes * scale.float().unsqueeze(-1)).flatten(1)


@jit
def _quarters(x):
    """[A, B, 4], each thread's own four, as four of [A, B]."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@jit
def _eighths(x):
    """[A, 8], each thread's own eight, as eight of [A]."""
    a, b, c, d = _quarters(tl.reshape(x, (x.shape[0], 2, 4)))  # [A, 2]
    p, t = tl.split(a)
    q, u = tl.split(b)
    r, v = tl.split(c)
    s, w = tl.split(d)
    return p, q, r, s, t, u, v, w


@jit
def _bytes_of(a, b, c, d):
    """The high bytes, and the low ones, of the lower halves of four words, as words."""
    if PTX:
        asm: tl.constexpr = """{ .reg .b32 p, q; prmt.b32 p, $2, $3, 0x5410; prmt.b32 q, $4, $5, 0x5410;
            prmt.b32 $0, p, q, 0x7531; prmt.b32 $1, p, q, 0x6420; }"""
        two: tl.constexpr = (tl.int32, tl.int32)
        high, low = tl.inline_asm_elementwise(asm, "=&r,=&r,r,r,r,r", [a, b, c, d], two, is_pure=True, pack=1)
    else:
        high = ((a >> 8) & 0xFF) | (b & 0xFF00) | ((c & 0xFF00) << 8) | ((d & 0xFF00) << 16)
        low = (a & 0xFF) | ((b & 0xFF) << 8) | ((c & 0xFF) << 16) | (d << 24)
    return high, low


@jit
def _halves(a, b):
    """Two of fp32 as words of two halves, a below b."""
    if PTX:
        asm: tl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"
        words = tl.inline_asm_elementwise(asm, "=r,f,f", [a, b], tl.int32, is_pure=True, pack=1)
    else:
        words = b.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16
        words |= a.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return words


@jit
def _dot4(weights, inputs, acc, TYPES: tl.constexpr):
    """acc plus the product of four bytes with four, both words of these types, "u32" or "s32"."""
    if PTX:
        asm: tl.constexpr = "dp4a." + TYPES + " $0, $1, $2, $3;"
        acc = tl.inline_asm_elementwise(asm, "=r,r,r,r", [weights, inputs, acc], tl.int32, is_pure=True, pack=1)
    else:
        for i in tl.static_range(0, 32, 8):
            w = (weights << (24 - i)) >> 24 if TYPES[0] == "s" else (weights >> i) & 0xFF
            acc += w * ((inputs << (24 - i)) >> 24 if TYPES[4] == "s" else (inputs >> i) & 0xFF)
    return acc


@jit
def _fma_e4m3(weights, low, high, acc):
    """acc plus the products of the lower two and of the upper two weights of words with pairs of halves."""
    if PTX:
        asm: tl.constexpr = """{ .reg .b16 a, b; .reg .b32 p, q; mov.b32 {a, b}, $1; cvt.rn.f16x2.e4m3x2 p, a;
            cvt.rn.f16x2.e4m3x2 q, b; fma.rn.f16x2 p, p, $2, $4; fma.rn.f16x2 $0, q, $3, p; }"""
        acc = tl.inline_asm_elementwise(asm, "=r,r,r,r,r", [weights, low, high, acc], tl.int32, is_pure=True, pack=1)
    else:
        even, odd = _pair(acc)
        for i in tl.static_range(2):
            word = weights >> (16 * i)
            bits = ((word & 0x80) << 8) | ((word & 0x7F) << 7) | ((word & 0x8000) << 16) | ((word & 0x7F00) << 15)
            first, second = _pair(bits)  # their exponents are 8 too low
            p, q = _pair(high if i == 1 else low)
            even += first * p * 256.0
            odd += second * q * 256.0
        acc = _halves(even, odd)
    return acc


@jit
def _pair(words):
    """Words of two halves as two of fp32."""
    return (words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32),
            (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32))  # fmt: skip


@jit
def _packed_inputs(
    h, step: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, SCHEME: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """The step's columns of h in the form of the weights, per unit: the power of two that they are to be multiplied
    with, their sum, and two tuples of words for the weights' words in turn: high and low bytes, or halves."""
    unit = step * (COLUMNS // UNIT) + tl.arange(0, COLUMNS // UNIT)[:, None]
    begin = unit * UNIT
    if SCHEME == "int4":  # 16 columns of the first half of a group, 16 of the second
        begin = unit // (GROUP // UNIT) * GROUP + unit % (GROUP // UNIT) * 16
    MAGIC: tl.constexpr = 12582912.0  # 1.5 * 2 ** 23: what is added to it is rounded to whole numbers, in its low bits
    x = ()
    largest = tl.zeros((COLUMNS // UNIT,), tl.int32)
    for i in tl.static_range(UNIT // 8):  # so much of 16-bit inputs a thread loads at once
        column = begin + i % 2 * 8 + i // 2 * (GROUP // 2) + tl.arange(0, 8)[None, :]
        part = tl.load(h + column, mask=column < K, other=0.0, eviction_policy="evict_last")
        x += (part.to(tl.float32),)
        largest = tl.maximum(largest, tl.max(part.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1))
    BITS: tl.constexpr = 0 if SCHEME == "fp8" else 13
    exponent = tl.maximum(largest >> 23, BITS + 1)
    inverse = ((254 + BITS - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    power = ((exponent - BITS) << 23).to(tl.float32, bitcast=True)
    power = tl.where(largest < 0x7F800000, power, float("nan"))  # infinities and NaN are not to get lost
    total = tl.zeros((COLUMNS // UNIT,), tl.int32)
    first, second = (), ()
    for i in tl.static_range(UNIT // 8):
        if SCHEME == "fp8":
            e = _eighths(x[i] * inverse)
            first += (_halves(e[0], e[1]), _halves(e[4], e[5]))
            second += (_halves(e[2], e[3]), _halves(e[6], e[7]))
        else:
            whole = (x[i] * inverse + MAGIC).to(tl.int32, bitcast=True)
            e = _eighths(whole)
            p, q = _bytes_of(e[0], e[1], e[2], e[3])
            r, s = _bytes_of(e[4], e[5], e[6], e[7])
            if SCHEME == "int4":
                total += tl.sum(whole - 0x4B400000, 1)
            first += (p, r)
            second += (q, s)
    return power, total.to(tl.float32), first, second


@jit
def _packed_product(weights, inputs, SCHEME: tl.constexpr):
    """What `_weights` gives times what `_packed_inputs` gives: fp32 [ROWS, units]."""
    w, scale, zero = weights
    w = _quarters(tl.reshape(w, (w.shape[0], w.shape[1] // 4, 4)))
    power, total, first, second = inputs
    acc = tl.zeros(w[0].shape, tl.int32)
    if SCHEME == "fp8":
        for i in tl.static_range(4):
            acc = _fma_e4m3(w[i], first[i][None, :], second[i][None, :], acc)
        even, odd = _pair(acc)
        y = even + odd
    elif SCHEME == "int8":
        for i in tl.static_range(4):
            acc = _dot4(w[i], first[i][None, :], acc, "s32.s32")
        acc *= 256
        for i in tl.static_range(4):
            acc = _dot4(w[i], second[i][None, :], acc, "s32.u32")
        y = acc.to(tl.float32)
    else:
        low, upper, upper_low = acc, acc, acc  # the weights in upper halves of bytes stay 16-fold
        for i in tl.static_range(4):
            acc = _dot4(w[i] & 0x0F0F0F0F, first[i][None, :], acc, "u32.s32")
            low = _dot4(w[i] & 0x0F0F0F0F, second[i][None, :], low, "u32.u32")
            upper = _dot4(w[i] & -0x0F0F0F10, first[4 + i][None, :], upper, "u32.s32")
            upper_low = _dot4(w[i] & -0x0F0F0F10, second[4 + i][None, :], upper_low, "u32.u32")
        acc = (acc * 16 + upper) * 256 + (low * 16 + upper_low)
        y = (acc.to(tl.float32) * 0.0625 - total[None, :] * zero) * scale
    return y * power[None, :]


@jit
def _weights(
    at, scale, zero, step: tl.constexpr, WORDS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The step's weights [ROWS, WIDTH], and a scale and a zero a unit, [ROWS, units], where `scale` points to some."""
    w = _columns(at, step, WORDS, WIDTH, "evict_first")
    if scale is None:
        scales, zeros = 1.0, 0.0
    else:
        word = step * WIDTH + tl.arange(0, WIDTH // 4)[None, :] * 4
        scales = tl.load(scale + word * 8 // GROUP, mask=word < WORDS, other=0.0).to(tl.float32)
        zeros = 8.0
        if zero is not None:
            zeros += tl.load(zero + word * 8 // GROUP, mask=word < WORDS, other=0.0).to(tl.float32)
    return w, scales, zeros


@jit
def _project_kernel(
    h, squares, weight, scale, zero, bias, gain, x, out, parts, eps, multiplier,
    END: tl.constexpr, SCHEME: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, SQUARES: tl.constexpr, SQUARES_PADDED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, AHEAD: tl.constexpr, CHAIN: tl.constexpr, DELAY: tl.constexpr,
):  # fmt: skip
    VECTOR: tl.constexpr = 128 // weight.dtype.element_ty.primitive_bitwidth  # what a thread loads at once
    PACK: tl.constexpr = 1 if SCHEME == "" else 8 if SCHEME == "int4" else 4  # weights in an element of `weight`
    UNIT: tl.constexpr = VECTOR * PACK
    WIDTH: tl.constexpr = COLUMNS // PACK
    STEPS: tl.constexpr = (WORDS + WIDTH - 1) // WIDTH
    GATED: tl.constexpr = END == "gated"
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    inner = row < N
    lines = tl.arange(0, ROWS)
    if N % ROWS != 0:
        lines = tl.minimum(lines, N - 1 - first)
    at = weight + first.to(tl.int64) * WORDS + lines[:, None] * WORDS + tl.arange(0, WIDTH)[None, :]

    # What no earlier kernel of the step writes may be asked for before the wait.
    if bias is not None:
        offset = tl.load(bias + row, mask=inner, other=0.0).to(tl.float32)
        if GATED:
            up_offset = tl.load(bias + N + row, mask=inner, other=0.0).to(tl.float32)
    if END == "residual":
        weight_of_norm = tl.load(gain + row, mask=inner, other=0.0).to(tl.float32)
    if scale is not None and SCHEME != "int4":
        row_scale = tl.load(scale + row, mask=inner, other=0.0).to(tl.float32)
        if GATED:
            up_row_scale = tl.load(scale + N + row, mask=inner, other=0.0).to(tl.float32)
    at_scale, at_zero, at_up_scale, at_up_zero = None, None, None, None
    if GROUP > 0:
        groups = (first + lines)[:, None] * GROUPS
        at_scale, at_up_scale = scale + groups, scale + N * GROUPS + groups
        if zero is not None:
            at_zero, at_up_zero = zero + groups, zero + N * GROUPS + groups
    w, v = (), ()
    for step in tl.static_range(AHEAD):
        w += (_weights(at, at_scale, at_zero, step, WORDS, WIDTH, GROUP),)
        if GATED:
            v += (_weights(at + N * WORDS, at_up_scale, at_up_zero, step, WORDS, WIDTH, GROUP),)
    _await(CHAIN, DELAY)

    if END == "residual":
        before = tl.load(x + row, mask=inner, other=0.0)
    if squares is not None:
        part = tl.arange(0, SQUARES_PADDED)
        sums = tl.load(squares + part, mask=part < SQUARES, other=0.0)
    y = tl.zeros((ROWS, COLUMNS // UNIT), tl.float32)
    z = tl.zeros((ROWS, COLUMNS // UNIT), tl.float32)
    for step in tl.static_range(STEPS):
        if SCHEME == "":
            inputs = _columns(h + tl.arange(0, COLUMNS)[None, :], step, K, COLUMNS, "evict_last").to(tl.float32)
        else:
            inputs = _packed_inputs(h, step, K, COLUMNS, GROUP, SCHEME, UNIT)
        if step + AHEAD < STEPS:  # later weights are on their way while these are used
            w += (_weights(at, at_scale, at_zero, step + AHEAD, WORDS, WIDTH, GROUP),)
            if GATED:
                up = _weights(at + N * WORDS, at_up_scale, at_up_zero, step + AHEAD, WORDS, WIDTH, GROUP)
                v += (up,)
        if SCHEME == "":
            y += _reduce_vectors(w[step][0].to(tl.float32) * inputs, VECTOR)
            if GATED:
                z += _reduce_vectors(v[step][0].to(tl.float32) * inputs, VECTOR)
        else:
            y += _packed_product(w[step], inputs, SCHEME)
            if GATED:
                z += _packed_product(v[step], inputs, SCHEME)
    y, z = tl.sum(y, 1), tl.sum(z, 1)
    if SCHEME == "int8" or SCHEME == "fp8":
        y *= row_scale
        if GATED:
            z *= up_row_scale

    if squares is not None:
        inverse_rms = tl.rsqrt(tl.sum(sums, 0) / K + eps)
        y *= inverse_rms
        z *= inverse_rms
    if bias is not None:
        y += offset
        if GATED:
            z += up_offset
    if GATED:
        y = y / (1 + tl.exp(-y)) * z
    if END == "residual":
        y = before + y * multiplier
        tl.store(x + row, y, mask=inner)
        tl.store(parts + tl.program_id(0), tl.sum(tl.where(inner, y * y, 0.0), 0))
        y *= weight_of_norm
    if END == "logits":
        y *= multiplier
        largest = tl.max(tl.where(inner, y, float("-inf")), 0)
        broken = tl.max((inner & (y != y)).to(tl.int32), 0) > 0  # a maximum leaves NaN out
        tl.store(parts + tl.program_id(0), tl.where(broken, float("nan"), largest))
    tl.store(out + row, y, mask=inner)


def _project(
    end: str, h: Tensor, weight: Tensor, scale: Tensor | None, zero: Tensor | None, out: Tensor, *,
    squares: Tensor | None = None, bias: Tensor | None = None, gain: Tensor | None = None, x: Tensor | None = None,
    parts: Tensor | None = None, eps: float = 0.0, multiplier: float = 1.0,
) -> None:  # fmt: skip
    inputs, outputs = h.shape[1], out.shape[1]
    packing = scheme(weight, scale)
    shape = tile(outputs, inputs, end == "gated", packing)
    words = weight.view(torch.int32) if packing else weight
    groups = scale.shape[1] if scale is not None and scale.ndim == 2 else 0
    rows = shape.rows if parts is None else block_size(outputs, parts.shape[1])
    sums = 1 if squares is None else squares.shape[1]
    _launch(
        _project_kernel, -(-outputs // rows), h, squares, words, scale, zero, bias, gain, x, out, parts, eps,
        multiplier, END=end, SCHEME=packing, N=outputs, K=inputs, WORDS=words.shape[1],
        GROUP=2 * weight.shape[1] // groups if groups else 0, GROUPS=groups,
        SQUARES=sums, SQUARES_PADDED=power_of_two(sums), ROWS=rows, COLUMNS=shape.columns,
        AHEAD=min(shape.ahead, -(-inputs // shape.columns)), num_warps=shape.warps,
    )  # fmt: skip


def _product_reference(
    h: Tensor, weight: Tensor, bias: Tensor | None, squares: Tensor | None, eps: float, scale: Tensor | None,
    zero: Tensor | None,
) -> Tensor:  # fmt: skip
    y = h.float() @ unpacked(weight, scale, zero).T[: h.shape[1]]
    if squares is not None:
        y *= torch.rsqrt(squares.sum(-1, keepdim=True) / h.shape[1] + eps)
    return y if bias is None else y + bias.float()


@torch.library.custom_op("nearroof::project", mutates_args=("out",))
def project(
    h: Tensor, squares: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor,
    scale: Tensor | None = None, zero: Tensor | None = None,
) -> None:  # fmt: skip
    """out fp32 [B, N] = RMSNorm'd input @ weight^T + bias. h [B, K] is x * gain, squares [B, P] sum to x * x.

    Here and below: with `scale`, and perhaps `zero`, `weight` is packed (see above)."""
    if not _runs_kernel(h):
        return project_reference(h, squares, weight, bias, eps, out, scale, zero)
    return _project("plain", h, weight, scale, zero, out, squares=squares, bias=bias, eps=eps)


def project_reference(
    h: Tensor, squares: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor,
    scale: Tensor | None = None, zero: Tensor | None = None,
) -> None:  # fmt: skip
    out.copy_(_product_reference(h, weight, bias, squares, eps, scale, zero))


@torch.library.custom_op("nearroof::project_gated", mutates_args=("out",))
def project_gated(
    h: Tensor, squares: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor,
    scale: Tensor | None = None, zero: Tensor | None = None,
) -> None:  # fmt: skip
    """out [B, N] = silu(gate) * up, where weight [2 N, K] holds the rows of gate, then those of up. As `project`."""
    if not _runs_kernel(h):
        return project_gated_reference(h, squares, weight, bias, eps, out, scale, zero)
    return _project("gated", h, weight, scale, zero, out, squares=squares, bias=bias, eps=eps)


def project_gated_reference(
    h: Tensor, squares: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor,
    scale: Tensor | None = None, zero: Tensor | None = None,
) -> None:  # fmt: skip
    gate, up = _product_reference(h, weight, bias, squares, eps, scale, zero).chunk(2, dim=-1)
    out.copy_(F.silu(gate) * up)


@torch.library.custom_op("nearroof::project_residual", mutates_args=("x", "scaled", "squares"))
def project_residual(
    h: Tensor, weight: Tensor, bias: Tensor | None, gain: Tensor, multiplier: float, x: Tensor, scaled: Tensor,
    squares: Tensor, scale: Tensor | None = None, zero: Tensor | None = None,
) -> None:  # fmt: skip
    """x fp32 [B, N] += (h [B, K] @ weight^T + bias) * multiplier; leaves x * gain and squares for the next norm."""
    if not _runs_kernel(h):
        return project_residual_reference(h, weight, bias, gain, multiplier, x, scaled, squares, scale, zero)
    return _project(
        "residual", h, weight, scale, zero, scaled, bias=bias, gain=gain, x=x, parts=squares, multiplier=multiplier
    )


def project_residual_reference(
    h: Tensor, weight: Tensor, bias: Tensor | None, gain: Tensor, multiplier: float, x: Tensor, scaled: Tensor,
    squares: Tensor, scale: Tensor | None = None, zero: Tensor | None = None,
) -> None:  # fmt: skip
    x += _product_reference(h, weight, bias, None, 0.0, scale, zero) * multiplier
    _leave_normed(x, gain, scaled, squares)


@torch.library.custom_op("nearroof::project_logits", mutates_args=("logits", "maxima"))
def project_logits(
    h: Tensor, squares: Tensor, weight: Tensor, eps: float, multiplier: float, logits: Tensor, maxima: Tensor,
    scale: Tensor | None = None, zero: Tensor | None = None,
) -> None:  # fmt: skip
    """logits fp32 [B, V] = `project` times multiplier; maxima fp32 [B, M]: the largest of each block of logits."""
    if not _runs_kernel(h):
        return project_logits_reference(h, squares, weight, eps, multiplier, logits, maxima, scale, zero)
    return _project(
        "logits", h, weight, scale, zero, logits, squares=squares, parts=maxima, eps=eps, multiplier=multiplier
    )


def project_logits_reference(
    h: Tensor, squares: Tensor, weight: Tensor, eps: float, multiplier: float, logits: Tensor, maxima: Tensor,
    scale: Tensor | None = None, zero: Tensor | None = None,
) -> None:  # fmt: skip
    logits.copy_(_product_reference(h, weight, None, squares, eps, scale, zero) * multiplier)
    maxima.copy_(_blocks(logits, maxima.shape[1], float("-inf")).amax(-1))


# --- Attention over the cache, one query a row.


class Spread(NamedTuple):
    """How the slots of one KV head are spread over programs: at most `splits` of them, each with `least` slots or more,
    `block` at a time; with `stages` above 1 the blocks come through shared memory, so many of them at once. What a
    program will read is asked for in pieces of `piece` bytes."""

    splits: int
    least: int = 256
    block: int = 128
    warps: int = 8
    stages: int = 1
    piece: int = 8192


# By (query heads, KV heads, head_dim), for short caches on an H200, where the rule below does worse.
SPREADS: dict[tuple[int, int, int], Spread] = {
    (16, 8, 128): Spread(2, stages=3),  # Qwen3 0.6B
}


def spread(heads: int, kv_heads: int, dim: int, slots: int) -> Spread:
    """For a cache of this shape. Long ones have two programs or more on a multiprocessor, each with few registers;
    short ones, one with all the data in registers."""
    if slots > 2048:
        splits = min(32 if dim <= 128 else 16, power_of_two(256 // kv_heads or 1))
        return Spread(splits, block=128 if dim <= 64 else 64, warps=4 if dim <= 128 else 8)
    if found := SPREADS.get((heads, kv_heads, dim)):
        return found
    splits = min(32 if dim <= 64 else 16, power_of_two(128 // kv_heads or 1), -(-slots // 256))
    return Spread(max(1, splits), block=128 if dim <= 128 else 64, warps=4 if dim <= 64 else 8)


@jit
def _heads(at, real, gain, partner_gain, cos, sin, eps, D: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr):
    """Heads of q or k, at pointers [heads, 1], normalised and rotated: fp32 [heads, WIDTH]."""
    d = tl.arange(0, WIDTH)[None, :]
    own = tl.load(at + d, mask=real & (d < D), other=0.0)
    if gain is not None:
        scale = tl.rsqrt(tl.sum(own * own, 1) / D + eps)[:, None]
        own *= scale * gain
    if HALF > 0:
        partner = tl.where(d < HALF, d + HALF, d - HALF)
        other = tl.load(at + partner, mask=real & (d < 2 * HALF), other=0.0)
        if gain is not None:
            other *= scale * partner_gain
        own = own * cos + other * sin
    return own


@jit
def _absorb(q, k, v, seen, scale, top, total, mixed):
    """One block of slots into the running softmax of [GROUP] queries."""
    scores = tl.where(seen[None, :], tl.dot(q, tl.trans(k), input_precision="ieee") * scale, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    shrink = tl.exp2(top - higher)
    weights = tl.exp2(scores - higher[:, None])
    mixed = tl.dot(weights.to(v.dtype), v, mixed * shrink[:, None], input_precision="ieee")
    return higher, total * shrink + tl.sum(weights, 1), mixed


@jit(do_not_specialize=["capacity", "splits", "least", "piece"])
def _attend_kernel(
    qkv, q_gain, k_gain, cos, sin, position, done, k_cache, v_cache, out, partial, stats, arrivals,
    scale, eps, capacity, splits, least, piece, WINDOW: tl.constexpr, HQ: tl.constexpr, HKV: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr, SLOTS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, LANES: tl.constexpr, CHAIN: tl.constexpr,
    DELAY: tl.constexpr,
):  # fmt: skip
    G: tl.constexpr = HQ // HKV
    dtype: tl.constexpr = k_cache.dtype.element_ty
    ROW_BYTES: tl.constexpr = D * dtype.primitive_bitwidth // 8
    kv, split = tl.program_id(0) % HKV, tl.program_id(0) // HKV

    # The slots of earlier steps that this program reads: [start, end).
    finished = tl.load(done) != 0
    slot = tl.where(finished, capacity, tl.load(position)).to(tl.int32)
    first = tl.maximum(slot - WINDOW + 1, 0) if WINDOW > 0 else 0
    earlier = tl.where(finished, 0, slot - first)
    share = tl.maximum(least, tl.cdiv(earlier, splits))
    active = tl.maximum(1, tl.cdiv(earlier, share))
    if split >= active:  # make room for the next kernel at once: the first split's programs wait for the whole chain
        return
    start = first + split * share
    end = tl.minimum(start + share, first + earlier)
    t = tl.arange(0, BLOCK)
    d = tl.arange(0, WIDTH)[None, :]
    cache = kv.to(tl.int64) * (SLOTS * D)
    at = cache + (start + t)[:, None] * D + d  # [BLOCK, WIDTH]
    if STAGES == 1:
        inside = (start + t < end)[:, None] & (d < D)
        k = tl.load(k_cache + at, mask=inside, other=0.0)
        v = tl.load(v_cache + at, mask=inside, other=0.0)
        asked = BLOCK
    else:
        asked = 0
    if CHAIN and LANES > 0 and ROW_BYTES % 16 == 0:
        rest = (end - start - asked) * ROW_BYTES
        _prefetch(k_cache + cache + (start + asked) * D, rest, piece, LANES)
        _prefetch(v_cache + cache + (start + asked) * D, rest, piece, LANES)
    cosine, sine, q_own, q_other, k_own, k_other = None, None, None, None, None, None
    partner = tl.where(d < HALF, d + HALF, d - HALF)
    if HALF > 0:
        cosine = tl.load(cos + slot * HALF + d % HALF, mask=d < 2 * HALF, other=1.0)
        sine = tl.load(sin + slot * HALF + d % HALF, mask=d < 2 * HALF, other=0.0)
        sine = tl.where(d < HALF, -sine, sine)
    if q_gain is not None:
        q_own = tl.load(q_gain + d, mask=d < D, other=0.0).to(tl.float32)
        k_own = tl.load(k_gain + d, mask=d < D, other=0.0).to(tl.float32)
        q_other = tl.load(q_gain + partner, mask=d < 2 * HALF, other=0.0).to(tl.float32)
        k_other = tl.load(k_gain + partner, mask=d < 2 * HALF, other=0.0).to(tl.float32)
    _await(CHAIN, DELAY)

    g = tl.arange(0, GROUP)
    one = tl.arange(0, 1)[:, None]
    q = _heads(qkv + (kv * G + g)[:, None] * D, (g < G)[:, None], q_own, q_other, cosine, sine, eps, D, WIDTH, HALF).to(
        dtype
    )
    new_k = _heads(qkv + (HQ + kv + one) * D, one == 0, k_own, k_other, cosine, sine, eps, D, WIDTH, HALF).to(
        dtype
    )  # [1, WIDTH]
    new_v = tl.load(qkv + (HQ + HKV + kv) * D + d, mask=d < D, other=0.0).to(dtype)
    newest = split == 0  # this program has the step's own slot too
    if newest:
        tl.store(k_cache + cache + slot * D + d, new_k, mask=d < D)
        tl.store(v_cache + cache + slot * D + d, new_v, mask=d < D)
    score = tl.sum(q.to(tl.float32) * new_k.to(tl.float32), 1) * scale
    top = tl.where(newest, score, float("-inf"))  # [GROUP], in powers of two
    total = tl.where(newest, tl.full((GROUP,), 1.0, tl.float32), 0.0)
    mixed = tl.where(newest, tl.zeros((GROUP, WIDTH), tl.float32) + new_v.to(tl.float32), 0.0)
    if STAGES == 1:
        for block in range(start, end, BLOCK):
            at += BLOCK * D
            inside = (block + BLOCK + t < end)[:, None] & (d < D)
            next_k = tl.load(k_cache + at, mask=inside, other=0.0)
            next_v = tl.load(v_cache + at, mask=inside, other=0.0)
            top, total, mixed = _absorb(q, k, v, block + t < end, scale, top, total, mixed)
            k, v = next_k, next_v
    else:
        for block in tl.range(start, end, BLOCK, num_stages=STAGES):
            inside = (block + t < end)[:, None] & (d < D)
            at = cache + (block + t)[:, None] * D + d
            k = tl.load(k_cache + at, mask=inside, other=0.0)
            v = tl.load(v_cache + at, mask=inside, other=0.0)
            top, total, mixed = _absorb(q, k, v, block + t < end, scale, top, total, mixed)

    to = kv * (G * D)  # of this group in out
    if active == 1:
        tl.store(out + to + g[:, None] * D + d, mixed / total[:, None], mask=(g < G)[:, None] & (d < D))
    else:
        part = kv * splits + split
        tl.store(partial + part * (G * D) + g[:, None] * D + d, mixed, mask=(g < G)[:, None] & (d < D))
        tl.store(stats + part * (2 * G) + g, top, mask=g < G)
        tl.store(stats + part * (2 * G) + G + g, total, mask=g < G)
        tl.debug_barrier()  # all threads' stores come before the count
        if tl.atomic_add(arrivals + kv, 1, sem="acq_rel") == active - 1:  # the last to arrive combines, in order
            tl.store(arrivals + kv, 0)
            _combine(out + to, partial, stats, kv * splits, active, G, D, WIDTH, SPLITS_PADDED)


@jit
def _combine(
    out, partial, stats, part, active, G: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr
):
    s = (part + tl.arange(0, SPLITS))[:, None]
    d = tl.arange(0, WIDTH)[None, :]
    real = s < part + active
    for start in tl.static_range(0, G, 4):  # four heads at once: few round trips, and registers enough
        g = start + tl.arange(0, 4)[None, :]
        # .cg: past the L1 cache, which may hold what an earlier layer left there
        at = stats + s * (2 * G) + g
        top = tl.load(at, mask=real & (g < G), other=float("-inf"), cache_modifier=".cg")
        total = tl.load(at + G, mask=real & (g < G), other=0.0, cache_modifier=".cg")
        at = partial + s[:, :, None] * (G * D) + g[:, :, None] * D + d[:, None, :]  # [SPLITS, 4, WIDTH]
        inside = real[:, :, None] & (g < G)[:, :, None] & (d < D)[:, None, :]
        mixed = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
        weight = tl.exp2(top - tl.maximum(tl.max(top, 0), -1e30)[None, :])
        mixed = tl.sum(mixed * weight[:, :, None], 0) / tl.sum(total * weight, 0)[:, None]
        h = start + tl.arange(0, 4)[:, None]
        tl.store(out + h * D + d, mixed, mask=(h < G) & (d < D))


@torch.library.custom_op("nearroof::attend", mutates_args=("k_cache", "v_cache", "out", "partial", "stats", "arrivals"))
def attend(
    qkv: Tensor, q_gain: Tensor | None, k_gain: Tensor | None, cos: Tensor | None, sin: Tensor | None, position: Tensor,
    done: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, eps: float, window: int, capacity: int, out: Tensor,
    partial: Tensor, stats: Tensor, arrivals: Tensor,
) -> None:  # fmt: skip
    """out [1, Hq * D] = attention of the row's query over its cache, [1, Hkv, S, D], up to its position.

    qkv fp32 [1, (Hq + 2 Hkv) * D]; q and k are normalised (q_gain, k_gain [D]) and rotated (cos, sin fp32 [S, half])
    first, and k and v stored at the position, or at `capacity` where the row is done (whose output means nothing).
    `window` 0: none. partial fp32 [Hkv, splits, G, D], stats fp32 [Hkv, splits, 2, G] are room; arrivals int32 [Hkv] is
    zero before and after."""
    if not _runs_kernel(qkv):
        return attend_reference(
            qkv, q_gain, k_gain, cos, sin, position, done, k_cache, v_cache, scale, eps, window, capacity, out
        )
    _, kv_heads, slots, dim = k_cache.shape
    heads = out.shape[1] // dim
    plan = spread(heads, kv_heads, dim, slots)
    splits = partial.shape[1]
    _launch(
        _attend_kernel, kv_heads * splits, qkv, q_gain, k_gain, cos, sin, position, done, k_cache, v_cache, out,
        partial, stats, arrivals, scale * 1.4426950408889634, eps, capacity, splits, plan.least, plan.piece,
        WINDOW=window, HQ=heads, HKV=kv_heads, D=dim, WIDTH=max(16, power_of_two(dim)),
        HALF=0 if cos is None else cos.shape[1], GROUP=max(16, power_of_two(heads // kv_heads)), SLOTS=slots,
        SPLITS_PADDED=power_of_two(splits), BLOCK=plan.block, STAGES=plan.stages, LANES=32 * plan.warps,
        num_warps=plan.warps,
    )  # fmt: skip
    return None


def attend_reference(
    qkv: Tensor, q_gain: Tensor | None, k_gain: Tensor | None, cos: Tensor | None, sin: Tensor | None, position: Tensor,
    done: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, eps: float, window: int, capacity: int, out: Tensor,
) -> None:  # fmt: skip
    batch, kv_heads, slots, dim = k_cache.shape
    at = torch.where(done, capacity, position)
    heads = qkv.view(batch, -1, dim)
    q, k, v = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    if q_gain is not None and k_gain is not None:
        q, k = F.rms_norm(q, (dim,), q_gain.float(), eps), F.rms_norm(k, (dim,), k_gain.float(), eps)
    if cos is not None and sin is not None:
        q, k = (_rotate(x, cos[at].unsqueeze(1), sin[at].unsqueeze(1)) for x in (q, k))
    rows = torch.arange(batch, device=qkv.device)
    k_cache[rows, :, at] = k.to(k_cache.dtype)
    v_cache[rows, :, at] = v.to(v_cache.dtype)
    slot, at = torch.arange(slots, device=qkv.device), at.view(-1, 1, 1, 1)
    seen = (slot <= at) & (slot > at - (window or slots))
    q = q.to(k_cache.dtype).float().view(batch, kv_heads, -1, dim)  # [B, Hkv, G, D]
    weights = (q @ k_cache.float().transpose(2, 3) * scale).masked_fill(~seen, float("-inf")).softmax(-1)
    out.copy_((weights @ v_cache.float()).reshape(out.shape))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    low, high, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1)


# --- Choice of the next token, and the end of the step.


@jit
def _finalize(h):
    h ^= h >> 16
    h *= 0x85EBCA6B
    h ^= h >> 13
    h *= 0xC2B2AE35
    return h ^ (h >> 16)


@jit
def _gumbel(seed, position, token_ids):
    """The noise of `sampling.gumbel`, in uint32, whose shifts are logical."""
    GOLDEN: tl.constexpr = 0x9E3779B9
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    first = _finalize(_finalize(low ^ _finalize(high)) + position.to(tl.uint32) * GOLDEN)
    second = _finalize(first ^ 0x5BD1E995)
    mixed = _finalize(_finalize(token_ids.to(tl.uint32) ^ first) ^ second)
    uniform = ((mixed >> 9).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(uniform))


@jit
def _listed(i, blocks, listed, logits, top, heat, UNIT: tl.constexpr, ENTRIES: tl.constexpr, V: tl.constexpr):
    """Tokens of the listed blocks from the i-th on: ids, scaled logits [ENTRIES, UNIT], -inf where there is none."""
    entry = i + tl.arange(0, ENTRIES)
    block = tl.load(listed + entry, mask=entry < blocks, other=V)
    ids = block[:, None] * UNIT + tl.arange(0, UNIT)[None, :]
    logit = tl.load(logits + ids, mask=ids < V, other=float("-inf"))
    return ids, tl.div_rn(logit - top, heat)


@jit
def _better(ids, scaled, low, dropped, least, cold, key, at, chosen, score, V: tl.constexpr):
    """The token with the best score, noise added, of these that are left, and of `chosen` with its `score`."""
    noisy = tl.where(cold, scaled, scaled + _gumbel(key, at + 1, ids))
    left = (scaled >= low) & (scaled > dropped) & (scaled >= least) & (ids < V)
    best = tl.max(tl.where(left, noisy, float("-inf")))
    of_best = tl.min(tl.where(left & (noisy == best), ids, V - 1))
    better = (best > score) | ((best == score) & (of_best < chosen))
    return tl.where(better, of_best, chosen), tl.where(better, best, score)


@jit
def _select_kernel(
    logits, maxima, listed, temperature, top_k, min_p, seed, token, position, done, limit, ring, count, eos, seen,
    GREEDY: tl.constexpr, V: tl.constexpr, M: tl.constexpr, M_PADDED: tl.constexpr, UNIT: tl.constexpr,
    GROUPED: tl.constexpr, ENTRIES: tl.constexpr, RING: tl.constexpr, EOS: tl.constexpr, INVALID: tl.constexpr,
    CHAIN: tl.constexpr, DELAY: tl.constexpr,
):  # fmt: skip
    block = tl.arange(0, M_PADDED)
    at, over, steps, end = tl.load(position), tl.load(done) != 0, tl.load(count), tl.load(limit)
    before = tl.load(token)
    ends = tl.load(eos + tl.arange(0, EOS))
    if not GREEDY:
        heat, least, key = tl.load(temperature), tl.log(tl.load(min_p)), tl.load(seed)
        k = tl.minimum(tl.maximum(tl.load(top_k), 1), V).to(tl.int32)
        cold = heat == 0
        heat = tl.where(cold, 1.0, heat)
    _await(CHAIN, DELAY)
    largest = tl.load(maxima + block, mask=block < M, other=float("-inf"))
    top = tl.max(largest, 0)
    possible = (top > float("-inf")) & (tl.max((largest != largest).to(tl.int32), 0) == 0)
    if GREEDY:
        best = tl.min(tl.where(largest == top, block, M - 1), 0) * UNIT + tl.arange(0, UNIT)
        found = tl.load(logits + best, mask=best < V, other=float("-inf")) == top
        chosen = tl.min(tl.where(found, best, V - 1), 0)
    else:
        possible &= top < float("inf")
        # A bound that k logits reach: k groups of blocks have a maximum that does. Any will do that leaves few blocks.
        # Groups are neighbours that a thread has to itself: fewer to go through in each round, and nearly as telling.
        peaks = tl.where(block < M, tl.div_rn(largest - top, heat), float("-inf"))
        summits = tl.max(tl.reshape(peaks, (M_PADDED // GROUPED, GROUPED)), 1)
        finite = summits > float("-inf")
        reaching = tl.sum(finite.to(tl.int32), 0)
        narrow = k < reaching
        low = tl.where(narrow, tl.min(tl.where(finite, summits, 0.0), 0), float("-inf"))
        middle, high = 0.0, 1.0
        while narrow & (reaching > k + k // 8 + 8) & (low < middle) & (middle < high) & (low < 0):
            above = tl.sum((summits >= middle).to(tl.int32), 0)
            low, reaching, high = (
                tl.where(above >= k, middle, low),
                tl.where(above >= k, above, reaching),
                tl.where(above >= k, high, middle),
            )
            middle = (low + high) * 0.5
        hit = (peaks > float("-inf")) & (peaks >= low)
        blocks = tl.sum(hit.to(tl.int32), 0)
        tl.store(listed + tl.cumsum(hit.to(tl.int32), 0) - 1, block, mask=hit)
        tl.debug_barrier()
        # What would be drawn from all that reach the bound is drawn from the k largest if it is one of them: if less
        # than k are larger. Else it and all that are no larger drop out.
        own_ids, own = _listed(0, blocks, listed, logits, top, heat, UNIT, ENTRIES, V)  # all there are, most often
        chosen, score, dropped, larger = 0, 0.0, float("-inf"), k
        while (larger >= k) & (score > float("-inf")):
            chosen, score = _better(own_ids, own, low, dropped, least, cold, key, at, 0, float("-inf"), V)
            for i in range(ENTRIES, blocks, ENTRIES):
                ids, scaled = _listed(i, blocks, listed, logits, top, heat, UNIT, ENTRIES, V)
                chosen, score = _better(ids, scaled, low, dropped, least, cold, key, at, chosen, score, V)
            dropped = tl.div_rn(tl.load(logits + chosen) - top, heat)
            larger = tl.sum((own > dropped).to(tl.int32))
            for i in range(ENTRIES, blocks, ENTRIES):
                _, scaled = _listed(i, blocks, listed, logits, top, heat, UNIT, ENTRIES, V)
                larger += tl.sum((scaled > dropped).to(tl.int32))

    # As `DecodeState.advance`.
    tl.store(ring + steps % RING, tl.where(over, -1, tl.where(possible, chosen, INVALID)))
    chosen = tl.where(possible, chosen, 0)
    tl.store(seen + chosen, 1)
    following = at + tl.where(over, 0, 1)
    tl.store(token, tl.where(over, before, chosen))
    tl.store(position, following)
    tl.store(done, over | (tl.max((ends == chosen).to(tl.int32), 0) > 0) | (following >= end))
    tl.store(count, steps + 1)


@torch.library.custom_op(
    "nearroof::select", mutates_args=("listed", "token", "position", "done", "ring", "count", "seen")
)
def select(
    logits: Tensor, maxima: Tensor, greedy: bool, temperature: Tensor, top_k: Tensor, min_p: Tensor, seed: Tensor,
    limit: Tensor, eos: Tensor, token: Tensor, position: Tensor, done: Tensor, ring: Tensor, count: Tensor,
    seen: Tensor, listed: Tensor,
) -> None:  # fmt: skip
    """Draw the row's next token ("greedy" or "top_k" of `sampling`) and advance, as `decoding.DecodeState` does.

    logits fp32 [1, V] with the maxima of their blocks, fp32 [1, M]; listed int32 [1, M] is room; the rest are the
    buffers of a DecodeState of one row."""
    if not _runs_kernel(logits):
        return select_reference(
            logits, greedy, temperature, top_k, min_p, seed, limit, eos, token, position, done, ring, count, seen
        )
    vocab, blocks = logits.shape[1], maxima.shape[1]
    unit = block_size(vocab, blocks)
    padded = power_of_two(blocks)
    _launch(
        _select_kernel, 1, logits, maxima, listed, temperature, top_k, min_p, seed, token, position, done, limit, ring,
        count, eos, seen, GREEDY=greedy, V=vocab, M=blocks, M_PADDED=padded, UNIT=unit, GROUPED=min(4, padded),
        ENTRIES=min(256, padded), RING=ring.shape[0], EOS=eos.shape[0], INVALID=INVALID,
        num_warps=min(32, max(4, padded // 512)),
    )  # fmt: skip
    return None


def select_reference(
    logits: Tensor, greedy: bool, temperature: Tensor, top_k: Tensor, min_p: Tensor, seed: Tensor, limit: Tensor,
    eos: Tensor, token: Tensor, position: Tensor, done: Tensor, ring: Tensor, count: Tensor, seen: Tensor,
) -> None:  # fmt: skip
    off = torch.ones_like(temperature)
    settings = Settings(temperature, top_k, off, min_p, off, seed)
    chosen = choose("greedy" if greedy else "top_k", logits, settings, position + 1, seen)
    ring[count % ring.shape[0]] = torch.where(done, -1, chosen)
    chosen = chosen.clamp(min=0)
    seen.scatter_(1, chosen.unsqueeze(1), True)
    token.copy_(torch.where(done, token, chosen))
    position += ~done
    done |= (chosen.unsqueeze(1) == eos).any(1) | (position >= limit)
    count += 1

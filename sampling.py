"""Logits to token ids: pure functions of tensors, and the noise they draw from. Knows nothing of models or of state.

These are the plain reference of every sampling kernel, and what the compiled decoders compile.

Legend: B rows, V vocabulary.

Three kinds of sampler, hence at most three decode graphs, whatever the settings:
- "greedy": the largest logit; of equal ones the lowest id.
- "top_k": temperature, top-k (or none), min-p, noise.
- "full": the same after a repetition penalty, and with top-p.
All settings are tensors, so that no value of one recompiles anything.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

SAMPLERS = ("greedy", "top_k", "full")
_BLOCK = 1024
INVALID = -2  # the "id" drawn where no token can be: the logits hold NaN, or nothing but -inf


@dataclass(frozen=True)
class Settings:
    """One value a row, each [B]. A temperature of 0 means: no noise, the largest score wins."""

    temperature: Tensor  # fp32
    top_k: Tensor  # int64; V or more: off
    top_p: Tensor  # fp32; 1: off
    min_p: Tensor  # fp32; 0: off
    penalty: Tensor  # fp32; 1: off
    seed: Tensor  # int64


def choose(kind: str, logits: Tensor, settings: Settings, position: Tensor, seen: Tensor) -> Tensor:
    """logits fp32 [B, V], position int64 [B] (of the token to come), seen bool [B, V] -> ids int64 [B]."""
    ranked = logits if kind == "greedy" else scores(kind, logits, settings, position, seen)
    best = first_of_largest(ranked)
    possible = ranked.gather(-1, best.unsqueeze(-1)).squeeze(-1) > float("-inf")
    return torch.where(possible, best, INVALID)


def first_of_largest(x: Tensor, wide: bool | None = None) -> Tensor:
    """argmax of x [B, V]: the lowest index of equals; NaN counts as largest. -> int64 [B]. `wide`: as for
    `largest_threshold`."""
    if not (x.is_cuda if wide is None else wide):
        return x.argmax(dim=-1)
    blocks = in_blocks(x, float("-inf"))
    block = blocks.amax(dim=-1).argmax(dim=-1, keepdim=True)
    return (block * _BLOCK + blocks.argmax(dim=-1).gather(-1, block)).squeeze(-1)


def in_blocks(x: Tensor, filler: float) -> Tensor:
    """x [..., V] -> [..., blocks, _BLOCK], filled up: a reduction in two steps. Inductor leaves an argmax over the
    vocabulary to one program (63 us at V = 128k on an H200) and splits a few counts over too few (20 us a pass)."""
    vocab = x.shape[-1]
    ids = torch.arange(-(-vocab // _BLOCK) * _BLOCK, device=x.device)
    # Not by F.pad, which becomes a kernel that loads nothing: see `engine.unawaiting_kernels`.
    return x[..., ids.clamp(max=vocab - 1)].masked_fill(ids >= vocab, filler).unflatten(-1, (-1, _BLOCK))


def scores(kind: str, logits: Tensor, settings: Settings, position: Tensor, seen: Tensor) -> Tensor:
    """The perturbed scores whose argmax is the draw (the Gumbel-max trick: Gumbel 1954; Maddison et al. 2014): fp32
    [B, V], -inf for tokens that a filter takes out or that have probability zero."""
    if kind == "full":
        logits = penalize(logits, seen, settings.penalty)
    cold = settings.temperature == 0
    largest = logits.amax(dim=-1, keepdim=True)
    scaled = (logits - largest) / torch.where(cold, 1.0, settings.temperature).unsqueeze(-1)  # <= 0: no overflow
    keep = at_least_kth(scaled, settings.top_k)
    keep &= scaled >= settings.min_p.log().unsqueeze(-1)  # p_i >= min_p * p_max
    if kind == "full":
        keep &= within_mass(scaled, keep, settings.top_p)
    noise = gumbel(row_keys(settings.seed, position), torch.arange(logits.shape[-1], device=logits.device))
    return torch.where(cold.unsqueeze(-1), scaled, scaled + noise).masked_fill(~keep, float("-inf"))


def penalize(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Divide the positive and multiply the negative logits of tokens seen before (Keskar et al. 2019, CTRL)."""
    factor = penalty.unsqueeze(-1)
    return torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)


# --- Filters, as thresholds: no sort. A sort of a whole vocabulary costs more than all else here, `topk` wants a k
# that is known beforehand, and a search by bits is exact, as its keys order as the floats do.


def ordered_bits(x: Tensor) -> Tensor:
    """fp32 -> int32 that sorts as the floats do (-0.0 below 0.0)."""
    bits = x.view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def at_least_kth(x: Tensor, k: Tensor) -> Tensor:
    """x fp32 [B, V], k [B] -> bool [B, V]: the k largest of each row, with all that equal the smallest of them."""
    keys = ordered_bits(x)
    return keys >= largest_threshold(keys, None, k.clamp(1, x.shape[-1])).unsqueeze(-1)


_LEAST = -(1 << 31)
MASS_ONE = 1 << 30  # masses are integers, so that their sum does not depend on the order of addition


def within_mass(scaled: Tensor, keep: Tensor, top_p: Tensor) -> Tensor:
    """Nucleus (Holtzman et al. 2020) of the kept tokens: those that more probable ones leave short of the mass `top_p`,
    and ties. scaled fp32 [B, V] with maximum 0, keep bool [B, V], top_p fp32 [B] -> bool [B, V]."""
    mass = (scaled.exp() * MASS_ONE).to(torch.int64).masked_fill(~keep, 0)
    total = mass.sum(dim=-1)
    share = (top_p * (1 << 24)).to(torch.int64)  # in integers, as not every device has fp64
    wanted = ((total >> 24) * share + ((total & 0xFFFFFF) * share >> 24)).clamp(min=1).minimum(total)
    keys = ordered_bits(scaled)
    return keys >= largest_threshold(keys, mass, wanted).unsqueeze(-1)


def largest_threshold(keys: Tensor, weights: Tensor | None, wanted: Tensor, wide: bool | None = None) -> Tensor:
    """The largest int32 t [B] for which the weights of keys >= t add up to `wanted` at least: t is one of the keys.

    keys int32 [B, V]; weights integer [B, V] (None: each counts one); wanted int64 [B], at most the sum. Each pass
    fixes the next bits by trying all their values at once: one bit, which is the least work and best on CPU, or where
    `wide` (None: on a GPU) four, since lanes are to spare there, and passes cost launches."""
    wide = keys.is_cuda if wide is None else wide
    bits = 4 if wide else 1
    values = torch.arange(1, 1 << bits, dtype=torch.int32, device=keys.device)
    keys = stored(in_blocks(keys, _LEAST)) if wide else keys.unsqueeze(1)  # [B, blocks, N]; no trial counts the filler
    if weights is not None:
        weights = (stored(in_blocks(weights, 0)) if wide else weights.unsqueeze(1)).unsqueeze(1)
    found = torch.full_like(wanted, _LEAST, dtype=torch.int32)
    # 32, read off `wanted` where it is a tensor: see `engine.unawaiting_kernels` for kernels that load nothing.
    shift: Tensor | int = (wanted > 0).to(torch.int32) << 5 if wide else 32
    for _ in range(32 // bits):
        # As stored tensors, found and shift make all passes but the first the same to Inductor: it compiles one.
        shift = stored(shift - bits) if isinstance(shift, Tensor) else shift - bits
        # Exclusive or stands for a sum that wraps: C++ may do what it likes with an int32 sum that overflows, and did.
        trials = found.unsqueeze(-1) ^ (values << (shift.unsqueeze(-1) if isinstance(shift, Tensor) else shift))
        above = keys.unsqueeze(1) >= trials[:, :, None, None]  # [B, 2**bits - 1, blocks, N]
        counts = (above if weights is None else weights * above).sum(dim=-1)
        # A sum for each trial: Inductor makes one kernel of sums of one size, with what follows from them.
        fitting = sum((count.sum(dim=-1) >= wanted).to(torch.int32) for count in counts.unbind(1))
        found = found ^ (fitting << shift)  # the sums fall as trials rise
        found = stored(found) if wide else found
    return found


def stored(x: Tensor) -> Tensor:
    """x in a form that makes Inductor store it, where it would compute it anew for every use."""
    return x.as_strided(x.shape, x.stride())


# --- Noise: an integer hash of (seed, position, token id), so that a draw depends on nothing else: not on the
# device, the batch, or how the vocabulary is cut into tiles.


def row_keys(seed: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """seed, position int64 [B] -> int32 [B] twice: two words that key the noise of one row at one position."""
    low, high = seed.to(torch.int32), (seed >> 32).to(torch.int32)
    at = position.to(torch.int32)
    first = finalize(finalize(low ^ finalize(high)) + at * _GOLDEN)
    return first, finalize(first ^ _SECOND_KEY)


def gumbel(keys: tuple[Tensor, Tensor], token_ids: Tensor) -> Tensor:
    """keys int32 [B] twice, token_ids [N] -> standard Gumbel noise fp32 [B, N], in (-2.9, 16.7): never infinite."""
    # Exclusive or, not a sum or a product: of those Inductor makes index arithmetic, which overflows in C++ and holds
    # constants that Triton's int32 cannot.
    first, second = (key.unsqueeze(-1) for key in keys)
    mixed = finalize(token_ids.to(torch.int32) ^ first)
    mixed = finalize(mixed ^ second)
    uniform = (((mixed >> 9) & 0x7FFFFF).float() + 0.5) * 2.0**-23  # 24 bits: exact, and neither 0 nor 1
    return -(-uniform.log()).log()


_GOLDEN = 0x9E3779B9 - (1 << 32)  # 2**32 / golden ratio, as int32
_SECOND_KEY = 0x5BD1E995
_MIX = (0x85EBCA6B - (1 << 32), 0xC2B2AE35 - (1 << 32))


def finalize(h: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finaliser (Appleby 2011) in wrapping int32 arithmetic; shifts are logical."""
    h = h ^ ((h >> 16) & 0xFFFF)
    h = h * _MIX[0]
    h = h ^ ((h >> 13) & 0x7FFFF)
    h = h * _MIX[1]
    return h ^ ((h >> 16) & 0xFFFF)

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
import torch.nn.functional as F
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


def first_of_largest(x: Tensor) -> Tensor:
    """argmax of x [B, V]: the lowest index of equals; NaN counts as largest. -> int64 [B]."""
    if not x.is_cuda:
        return x.argmax(dim=-1)
    blocks = in_blocks(x, float("-inf"))
    block = blocks.amax(dim=-1).argmax(dim=-1, keepdim=True)
    return (block * _BLOCK + blocks.argmax(dim=-1).gather(-1, block)).squeeze(-1)


def in_blocks(x: Tensor, filler: float) -> Tensor:
    """x [..., V] -> [..., blocks, _BLOCK]: a reduction in two steps. Inductor leaves an argmax over the vocabulary
    to one program (63 us at V = 128k on an H200) and splits a few counts over too few (20 us a pass)."""
    return F.pad(x, (0, -x.shape[-1] % _BLOCK), value=filler).unflatten(-1, (-1, _BLOCK))


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
    wanted = (total * top_p.double()).to(torch.int64).clamp(min=1).minimum(total)
    keys = ordered_bits(scaled)
    return keys >= largest_threshold(keys, mass, wanted).unsqueeze(-1)


def largest_threshold(keys: Tensor, weights: Tensor | None, wanted: Tensor, bits: int | None = None) -> Tensor:
    """The largest int32 t [B] for which the weights of keys >= t add up to `wanted` at least: t is one of the keys.

    keys int32 [B, V]; weights integer [B, V] (None: each counts one); wanted int64 [B], at most the sum. Each pass
    fixes the next `bits` bits by trying all their values at once. One bit a pass is the least work, which is best on
    CPU; a GPU has lanes to spare, and passes cost it launches."""
    bits = bits or (4 if keys.is_cuda else 1)
    found = torch.full_like(wanted, _LEAST, dtype=torch.int32)
    values = torch.arange(1, 1 << bits, dtype=torch.int32, device=keys.device)
    keys = in_blocks(keys, _LEAST) if keys.is_cuda else keys.unsqueeze(1)  # [B, blocks, N]; the filler is never counted
    if weights is not None:
        weights = in_blocks(weights, 0) if keys.is_cuda else weights.unsqueeze(1)
        weights = weights.unsqueeze(1)
    for shift in range(32 - bits, -1, -bits):
        # Exclusive or stands for a sum that wraps: C++ may do what it likes with an int32 sum that overflows, and did.
        trials = found.unsqueeze(-1) ^ (values << shift)  # [B, 2**bits - 1]
        above = keys.unsqueeze(1) >= trials[:, :, None, None]  # [B, 2**bits - 1, blocks, N]
        reached = (above if weights is None else weights * above).sum(dim=-1).sum(dim=-1)
        fitting = (reached >= wanted.unsqueeze(-1)).sum(dim=-1)  # reached falls as trials rise
        found = found ^ (fitting.to(torch.int32) << shift)
    return found


# --- Noise: an integer hash of (seed, position, token id), so that a draw depends on nothing else: not on the
# device, the batch, or how the vocabulary is cut into tiles.


def row_keys(seed: Tensor, position: Tensor) -> Tensor:
    """seed, position int64 [B] -> int32 [B, 2]: two words that key the noise of one row at one position."""
    low, high = seed.to(torch.int32), (seed >> 32).to(torch.int32)
    at = position.to(torch.int32)
    first = finalize(finalize(low ^ finalize(high)) + at * _GOLDEN)
    return torch.stack((first, finalize(first ^ _SECOND_KEY)), dim=-1)


def gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """keys int32 [B, 2], token_ids [N] -> standard Gumbel noise fp32 [B, N], in (-2.9, 16.7): never infinite."""
    # Exclusive or, not a sum or a product: of those Inductor makes index arithmetic, which overflows in C++ and holds
    # constants that Triton's int32 cannot.
    mixed = finalize(token_ids.to(torch.int32) ^ keys[:, :1])
    mixed = finalize(mixed ^ keys[:, 1:])
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

"""The three ways a query reads the static KV cache. Knows nothing of weights, configurations or sampling.

Legend: B batch, T query tokens, Hq query heads, Hkv key/value heads, G = Hq / Hkv, S cache slots, D head_dim.

A slot of the cache is a logical position, so slot `s` is visible to the query at position `p` iff `s <= p` and, under a
sliding window `w`, `s > p - w`. What lies beyond `p` may be anything: it is never read.

Each way is a pair: `plan` derives from the positions, once per forward pass, what every layer shares (a mask or a block
table); `attend` uses that plan in each layer.
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

FLEX_BLOCK = 128  # slots per block of the flex block table; flex's own default


class CacheAttention(Protocol):
    def plan(self, positions: Tensor, slots: int, window: int | None, kv_length: int | None) -> Any:
        """positions [B, T] -> what `attend` needs; `kv_length` is the host's bound on the slots in use, if it knows
        one."""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: Any, scale: float) -> Tensor:
        """q [B, Hq, T, D], k and v [B, Hkv, S, D] -> [B, Hq, T, D]."""
        ...


def visible(positions: Tensor, slots: Tensor, window: int | None) -> Tensor:
    """positions [B, T], slots [S] -> bool [B, T, S]: which slots each query may read."""
    at = positions.unsqueeze(-1)
    mask = slots <= at
    return mask if window is None else mask & (slots > at - window)


class SlicedAttention:
    """`scaled_dot_product_attention` over the slots in use. The plain reference, and the eager path: it needs a host
    that knows how far the cache is filled, and costs in proportion to that."""

    def plan(
        self, positions: Tensor, slots: int, window: int | None, kv_length: int | None
    ) -> tuple[int, bool, Tensor | None]:
        length = slots if kv_length is None else min(kv_length, slots)
        batch, queries = positions.shape
        unwindowed = window is None or window >= length
        if kv_length is not None and unwindowed and (queries == 1 and batch == 1):
            return length, False, None  # one query at the last slot in use sees all of them
        if kv_length == queries and unwindowed:
            return length, True, None  # a prompt's first chunk: plain causal
        return length, False, visible(positions, torch.arange(length, device=positions.device), window).unsqueeze(1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: tuple[int, bool, Tensor | None], scale: float) -> Tensor:
        length, causal, mask = plan
        k, v = k[:, :, :length], v[:, :, :length]
        if q.shape[2] == 1:  # the heads that share a KV head become the queries of one head
            grouped = q.view(q.shape[0], k.shape[1], -1, q.shape[3])
            return F.scaled_dot_product_attention(grouped, k, v, mask, scale=scale).reshape(q.shape)
        return F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )


class ReducedAttention:
    """One query a row, as products and sums that Inductor on CPU fuses into loops; it calls no library. Costs in
    proportion to `kv_length`, which may be symbolic. Prefill goes the sliced way, always with a mask: to ask whether it
    could do without would make a constant of the symbol."""

    def __init__(self) -> None:
        self.sliced = SlicedAttention()

    def plan(self, positions: Tensor, slots: int, window: int | None, kv_length: int | None) -> Any:
        length = slots if kv_length is None else kv_length
        mask = visible(positions, torch.arange(length, device=positions.device), window)
        return (length, mask) if positions.shape[1] == 1 else (length, False, mask.unsqueeze(1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: Any, scale: float) -> Tensor:
        if q.shape[2] > 1:
            return self.sliced.attend(q, k, v, plan, scale)
        length, mask = plan
        group = q.shape[1] // k.shape[1]
        # As many heads as there are queries, in name only: threads share out heads, and 9 divide better than 3.
        k, v = (x[:, :, None, :length].expand(-1, -1, group, -1, -1).flatten(1, 2).float() for x in (k, v))
        # Stored, or each slot would rotate the query anew, and each element of a value divide its weight.
        query = _stored(q.float() * scale)
        scores = (query * k).sum(-1)  # [B, Hq, S]
        weights = _stored(torch.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1))
        return (weights.unsqueeze(-1) * v).sum(-2).view(q.shape)  # fp32, as the next product wants it


def _stored(x: Tensor) -> Tensor:
    """x, contiguous, in a form that makes Inductor store it, where it would compute it anew for every use."""
    return x.as_strided(x.shape, x.stride())


class FlexAttention:
    """Compiled flex attention whose block table lives on the device: a step reads the blocks up to its own position
    and no others, in one graph for every position. Where the host knows the length, nothing is compiled (an eager
    prefill beside a compiled step) and flex would write out all scores: that goes the sliced way."""

    def __init__(self) -> None:
        self.sliced = SlicedAttention()

    def plan(self, positions: Tensor, slots: int, window: int | None, kv_length: int | None) -> Any:
        if kv_length is not None:
            return self.sliced.plan(positions, slots, window, kv_length)
        batch, queries = positions.shape
        query_blocks = -(-queries // FLEX_BLOCK)
        starts = positions[:, ::FLEX_BLOCK]  # positions of a row rise by one, so a block's first and last bound it
        last = (starts + min(FLEX_BLOCK, queries) - 1) // FLEX_BLOCK
        first = (starts - (window or slots) + 1).clamp(min=0) // FLEX_BLOCK
        blocks = -(-slots // FLEX_BLOCK)
        last = last.clamp(max=blocks - 1)
        counts = (last - first + 1).to(torch.int32).view(batch, 1, query_blocks)
        offsets = torch.arange(blocks, device=positions.device)
        indices = (first.unsqueeze(-1) + offsets).clamp(max=blocks - 1).to(torch.int32)

        def mask_mod(b: Tensor, h: Tensor, query: Tensor, slot: Tensor) -> Tensor:
            at = positions[b, query]
            return slot <= at if window is None else (slot <= at) & (slot > at - window)

        return BlockMask.from_kv_blocks(
            counts,
            indices.view(batch, 1, query_blocks, blocks),
            BLOCK_SIZE=FLEX_BLOCK,
            mask_mod=mask_mod,
            seq_lengths=(queries, slots),
            compute_q_blocks=False,  # those serve the backward pass
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: Any, scale: float) -> Tensor:
        if isinstance(plan, tuple):
            return self.sliced.attend(q, k, v, plan, scale)
        batch, heads, queries, dim = q.shape
        group = heads // k.shape[1]
        padded = 1 << (group - 1).bit_length()  # flex decoding wants powers of two
        if padded != group:
            # With copies of a group's last head; zeros would come from a kernel that loads nothing, which must not be:
            # see `engine.unawaiting_kernels`.
            members = torch.arange(padded, device=q.device).clamp(max=group - 1)
            q = q.view(batch, -1, group, queries, dim)[:, :, members].flatten(1, 2)
        out = flex_attention(q, k, v, block_mask=plan, scale=scale, enable_gqa=padded > 1)
        assert isinstance(out, Tensor)
        return out if padded == group else out.view(batch, -1, padded, queries, dim)[:, :, :group].flatten(1, 2)

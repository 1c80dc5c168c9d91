"""One decode step as a module without inputs or outputs: model, sampling, bookkeeping, all in buffers on the device.

A step reads the last token of every row, writes its keys and values, draws the next token and advances; the host
launches steps and reads tokens from a ring, behind the device. Since nothing is passed in, a captured step can be
replayed for any prompt, position, seed and setting. Knows nothing of compilation, text, or of who launches it.

Legend: B rows, V vocabulary, R ring length.
"""

from typing import Protocol

import torch
from torch import Tensor, nn

from model import Transformer
from sampling import Settings, choose

RING = 64  # steps whose tokens the device keeps; the host reads at most a few steps behind
EOS_CAPACITY = 32
NO_TOKEN = -1  # what a finished row produces, and the padding of the list of EOS ids


class DecodeState(nn.Module):
    """The rows' state and settings, mutated in place by a step and between generations."""

    token: Tensor
    position: Tensor
    done: Tensor
    limit: Tensor
    ring: Tensor
    count: Tensor
    eos: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    penalty: Tensor
    seed: Tensor
    seen: Tensor

    def __init__(self, batch: int, vocab_size: int, device: torch.device) -> None:
        super().__init__()

        def add(name: str, shape: tuple[int, ...], dtype: torch.dtype, value: float = 0) -> None:
            self.register_buffer(name, torch.full(shape, value, dtype=dtype, device=device), persistent=False)

        add("token", (batch,), torch.int64)  # what the next step reads
        add("position", (batch,), torch.int64)  # the slot that the next step writes
        add("done", (batch,), torch.bool)
        add("limit", (batch,), torch.int64)  # a row is done when its next position would reach this
        add("ring", (RING, batch), torch.int64)  # step s leaves its tokens in ring[s % R]
        add("count", (1,), torch.int64)  # steps taken
        add("eos", (EOS_CAPACITY,), torch.int64, NO_TOKEN)
        add("temperature", (batch,), torch.float32, 1)
        add("top_k", (batch,), torch.int64, vocab_size)
        add("top_p", (batch,), torch.float32, 1)
        add("min_p", (batch,), torch.float32)
        add("penalty", (batch,), torch.float32, 1)
        add("seed", (batch,), torch.int64)
        add("seen", (batch, vocab_size), torch.bool)  # tokens of the prompt and the output, for the penalty

    @property
    def settings(self) -> Settings:
        return Settings(self.temperature, self.top_k, self.top_p, self.min_p, self.penalty, self.seed)

    def slots(self, capacity: int) -> Tensor:
        """[B]: the cache slot that the coming step writes; finished rows write to the scratch slot."""
        return torch.where(self.done, capacity, self.position)

    def advance(self, chosen: Tensor) -> None:
        """Record the ids drawn, int64 [B], and move every unfinished row on by one."""
        self.ring[self.count % self.ring.shape[0]] = torch.where(self.done, NO_TOKEN, chosen)
        chosen = chosen.clamp(min=0)  # an invalid draw is the host's to report; the device must not trip over it
        self.seen[torch.arange(len(chosen), device=chosen.device), chosen] = True
        following = self.position + (~self.done)
        ended = (chosen.unsqueeze(-1) == self.eos).any(dim=-1) | (following >= self.limit)
        self.token.copy_(torch.where(self.done, self.token, chosen))
        self.position.copy_(following)
        self.done |= ended
        self.count += 1


class Step(Protocol):
    """What a decoder launches: one token for every unfinished row."""

    def __call__(self, sampler: str, kv_length: int | None = None) -> None: ...


class DecodeStep(nn.Module):
    """The plain step, of the model's own forward pass: eager as it stands, or compiled."""

    def __init__(self, model: Transformer, state: DecodeState) -> None:
        super().__init__()
        self.model, self.state = model, state

    def forward(self, sampler: str, kv_length: int | None = None) -> None:
        """`kv_length`: the host's bound on the slots in use, if it knows one (see `Transformer.forward`)."""
        state = self.state
        hidden = self.model(state.token.unsqueeze(1), state.slots(self.model.capacity).unsqueeze(1), None, kv_length)
        logits = self.model.logits(hidden[:, 0])
        state.advance(choose(sampler, logits, state.settings, state.position + 1, state.seen))

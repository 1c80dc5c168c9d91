"""The decode step's bookkeeping: what moves, what ends, and that a finished row writes to scratch alone."""

from dataclasses import fields

import pytest
import torch

import decoding
from decoding import EOS_CAPACITY, NO_TOKEN, RING, DecodeState, DecodeStep
from model import RANDOM_SHAPES, Transformer, build, randomize
from sampling import INVALID, Settings, choose

CPU = torch.device("cpu")


def state_of(batch: int = 3, vocab: int = 20, limit: int = 100) -> DecodeState:
    state = DecodeState(batch, vocab, CPU)
    state.limit.fill_(limit)
    state.position.copy_(torch.arange(batch) + 5)
    return state


def tiny(batch: int, capacity: int = 50) -> Transformer:
    model = build(RANDOM_SHAPES["tiny"], CPU, torch.float32)
    randomize(model)
    model.allocate(batch, capacity)
    return model


def test_advance_moves_every_unfinished_row_by_one() -> None:
    state = state_of()
    state.done[1] = True
    state.token.copy_(torch.tensor([7, 8, 9]))
    state.advance(torch.tensor([11, 12, 13]))
    assert state.token.tolist() == [11, 8, 13]
    assert state.position.tolist() == [6, 6, 8]
    assert state.ring[0].tolist() == [11, NO_TOKEN, 13]
    assert state.count.item() == 1
    assert state.seen[0].nonzero().flatten().tolist() == [11]


def test_a_row_is_done_after_any_eos_or_at_its_limit() -> None:
    state = state_of(limit=8)  # rows stand at 5, 6 and 7
    state.eos[[0, EOS_CAPACITY - 1]] = torch.tensor([3, 4])
    state.advance(torch.tensor([4, 5, 5]))
    assert state.done.tolist() == [True, False, True]
    state.advance(torch.tensor([5, 3, 5]))
    assert state.done.all()
    assert state.ring[:2].tolist() == [[4, 5, 5], [NO_TOKEN, 3, NO_TOKEN]], "the token that ends is still recorded"


def test_the_padding_of_the_eos_list_ends_nothing() -> None:
    state = state_of()
    state.advance(torch.tensor([INVALID, 0, 19]))
    assert not state.done.any()
    assert state.ring[0].tolist() == [INVALID, 0, 19] and state.token.tolist() == [0, 0, 19]


def test_the_ring_goes_round() -> None:
    state = state_of(batch=1, limit=10**6)
    for step in range(RING + 3):
        state.advance(torch.tensor([step % 20]))
    assert state.ring[2].item() == (RING + 2) % 20 and state.ring[3].item() == 3


def test_everything_mutates_in_place() -> None:
    """A captured step is replayed on these very tensors."""
    state = state_of()
    before = {name: buffer.data_ptr() for name, buffer in state.named_buffers()}
    state.advance(torch.tensor([1, 2, 3]))
    assert {name: buffer.data_ptr() for name, buffer in state.named_buffers()} == before
    assert state.settings == Settings(*(getattr(state, field.name) for field in fields(Settings)))
    assert not state.state_dict(), "nothing of it belongs into a file"


@pytest.mark.parametrize("sampler", ["greedy", "top_k", "full"])
@torch.no_grad()
def test_a_finished_row_writes_to_the_scratch_slot_alone(sampler: str) -> None:
    model, state = tiny(batch=3), DecodeState(3, 512, CPU)
    step = DecodeStep(model, state)
    state.limit.fill_(50)
    state.position.copy_(torch.tensor([4, 9, 30]))
    state.done[1] = True
    caches = [cache for block in model.blocks() for cache in (block.self_attn.cache.k, block.self_attn.cache.v)]
    for cache in caches:
        cache.fill_(0.5)
    step(sampler, 51)
    for cache in caches:
        written = (cache != 0.5).any(dim=(1, 3))  # [B, S]
        assert [row.nonzero().flatten().tolist() for row in written] == [[4], [50], [30]]
    state.done.fill_(True)
    for cache in caches:
        cache.fill_(0.5)
    step(sampler, 51)
    for cache in caches:
        assert (cache != 0.5).any(dim=(1, 3)).nonzero()[:, 1].tolist() == [50, 50, 50]
    assert state.ring[1].tolist() == [NO_TOKEN] * 3 and state.position.tolist() == [5, 9, 31]


@torch.no_grad()
def test_a_step_draws_for_the_position_that_it_fills(monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise is that of the token's own position: the one after its input's."""
    model, state = tiny(batch=1), DecodeState(1, 512, CPU)
    state.limit.fill_(50)
    positions: list[int] = []

    def recording(kind: str, logits: torch.Tensor, settings: Settings, at: torch.Tensor, *seen: object) -> torch.Tensor:
        positions.append(int(at))
        return choose(kind, logits, settings, at, *seen)

    monkeypatch.setattr(decoding, "choose", recording)
    step = DecodeStep(model, state)
    step("top_k", 1)
    step("top_k", 2)
    assert positions == [1, 2]

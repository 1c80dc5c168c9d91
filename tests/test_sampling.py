"""Sampling against sorts, against its promised distribution, and its noise against its definition."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sampling import (
    INVALID,
    MASS_ONE,
    Settings,
    at_least_kth,
    choose,
    first_of_largest,
    gumbel,
    largest_threshold,
    penalize,
    row_keys,
    scores,
    within_mass,
)

VOCAB = 61


def rows(batch: int = 1, **values: float) -> Settings:
    """Settings of a batch: everything off unless named."""
    given_values = {"temperature": 1.0, "top_k": VOCAB, "top_p": 1.0, "min_p": 0.0, "penalty": 1.0, "seed": 0} | values
    integers = ("top_k", "seed")
    return Settings(
        **{
            name: torch.full((batch,), value, dtype=torch.int64 if name in integers else torch.float32)
            for name, value in given_values.items()
        }
    )


def kept(kind: str, logits: torch.Tensor, **values: float) -> set[int]:
    """Ids that can be drawn."""
    seen = torch.zeros(1, logits.shape[-1], dtype=torch.bool)
    result = scores(kind, logits.unsqueeze(0), rows(**values), torch.zeros(1, dtype=torch.int64), seen)
    return set(torch.nonzero(result[0] > -math.inf).flatten().tolist())


def random_logits(seed: int, size: int = VOCAB) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 3


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=40), st.integers(1, 50))
def test_top_k_keeps_the_k_largest_and_their_equals(values: list[float], k: int) -> None:
    x = torch.tensor(values)
    smallest = x.sort(descending=True).values[min(k, len(values)) - 1]
    # the search orders the two zeros apart, a comparison of floats does not
    expected = (x >= smallest) | ((x == 0) & (smallest == 0) & (x.signbit() <= smallest.signbit()))
    mask = at_least_kth(x.unsqueeze(0), torch.tensor([k]))[0]
    assert (mask == expected)[x != 0].all()
    assert mask.sum() >= min(k, len(values))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 3000), st.booleans())
def test_the_search_that_a_gpu_makes_finds_the_same(seed: int, vocab: int, weighted: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randint(-(1 << 31), 1 << 31, (2, vocab), generator=generator).to(torch.int32) >> seed % 31
    weights = torch.randint(0, MASS_ONE, (2, vocab), generator=generator) if weighted else None
    total = torch.full((2,), vocab) if weights is None else weights.sum(-1)
    wanted = (total * torch.rand(2, generator=generator).double()).long().clamp(min=1).minimum(total)
    found = largest_threshold(keys, weights, wanted, wide=True)
    assert torch.equal(found, largest_threshold(keys, weights, wanted, wide=False))
    scores = keys.float()
    assert torch.equal(first_of_largest(scores, wide=True), first_of_largest(scores, wide=False))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.01, 1.0), st.integers(1, VOCAB))
def test_top_p_keeps_the_smallest_set_that_reaches_the_mass(seed: int, top_p: float, top_k: int) -> None:
    logits = random_logits(seed)
    scaled = (logits - logits.max()).unsqueeze(0)
    keep = at_least_kth(scaled, torch.tensor([top_k]))
    mask = within_mass(scaled, keep, torch.tensor([top_p]))[0]
    probabilities = torch.softmax(scaled[0].masked_fill(~keep[0], -math.inf).double(), -1)
    ordered, order = probabilities.sort(descending=True)
    before = ordered.cumsum(0) - ordered
    certain = (before - top_p).abs() > 1e-6  # at the edge either answer is right
    assert (mask[order] == ((before < top_p) & keep[0][order]))[certain].all()


def test_min_p_is_relative_to_the_most_probable() -> None:
    logits = torch.tensor([0.0, math.log(0.5), math.log(0.25), math.log(0.1)])
    assert kept("top_k", logits, min_p=0.2) == {0, 1, 2}
    assert kept("top_k", logits, min_p=1.0) == {0}
    assert kept("top_k", logits, min_p=0.0) == {0, 1, 2, 3}


@pytest.mark.parametrize(("top_k", "count"), [(1, 1), (5, 5), (VOCAB, VOCAB), (10 * VOCAB, VOCAB)])
def test_top_k_counts(top_k: int, count: int) -> None:
    assert len(kept("top_k", random_logits(1), top_k=top_k)) == count


def test_greedy_takes_the_lowest_id_of_equal_logits() -> None:
    logits = torch.tensor([[1.0, 7.0, 7.0, 7.0, 0.0]])
    at = torch.zeros(1, dtype=torch.int64)
    assert choose("greedy", logits, rows(), at, torch.zeros(1, 5, dtype=torch.bool)).item() == 1


def test_temperature_zero_under_the_full_sampler_is_the_penalised_argmax() -> None:
    logits = torch.tensor([[4.0, 3.5, -1.0]])
    seen = torch.tensor([[True, False, False]])
    chosen = choose("full", logits, rows(temperature=0.0, penalty=2.0), torch.zeros(1, dtype=torch.int64), seen)
    assert chosen.item() == 1


@pytest.mark.parametrize("temperature", [1e-38, 1e-6, 0.8, 50.0])
def test_a_token_of_probability_zero_is_never_drawn(temperature: float) -> None:
    logits = torch.tensor([[0.0, -math.inf, 1.0, -math.inf]])
    nothing = torch.zeros(1, 4, dtype=torch.bool)
    for position in range(300):
        for kind in ("top_k", "full"):
            drawn = choose(kind, logits, rows(temperature=temperature, top_k=4), torch.tensor([position]), nothing)
            assert drawn.item() in (0, 2)


@pytest.mark.parametrize("kind", ["greedy", "top_k", "full"])
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_logits_that_are_not_numbers_are_reported(kind: str, bad: float) -> None:
    logits = torch.full((1, VOCAB), bad)
    nothing = torch.zeros(1, VOCAB, dtype=torch.bool)
    assert choose(kind, logits, rows(), torch.zeros(1, dtype=torch.int64), nothing).item() == INVALID


def test_penalty_is_that_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    logits, ids = random_logits(3).unsqueeze(0), torch.tensor([[3, 5, 5, 60]])
    expected = transformers.RepetitionPenaltyLogitsProcessor(1.3)(ids, logits.clone())
    seen = torch.zeros(1, VOCAB, dtype=torch.bool).scatter_(1, ids, True)
    torch.testing.assert_close(penalize(logits, seen, torch.tensor([1.3])), expected)


def test_draws_follow_the_softmax() -> None:
    """Chi-squared over 20,000 positions: the draws of one seed are distributed as the probabilities say."""
    logits, draws = random_logits(5, 12), 20_000
    batch = logits.expand(draws, -1)
    chosen = choose(
        "top_k",
        batch,
        rows(draws, temperature=0.7, top_k=12, seed=123),
        torch.arange(draws),
        torch.zeros(draws, 12, dtype=torch.bool),
    )
    expected = torch.softmax(logits / 0.7, -1) * draws
    observed = torch.bincount(chosen, minlength=12).double()
    frequent = expected > 5
    statistic = ((observed - expected) ** 2 / expected)[frequent].sum().item()
    degrees = int(frequent.sum()) - 1
    assert statistic < degrees + 6 * math.sqrt(2 * degrees)


def test_noise_depends_on_seed_position_and_id_alone() -> None:
    ids = torch.arange(1000)
    keys = row_keys(torch.tensor([7, 7, 8]), torch.tensor([3, 4, 3]))
    noise = gumbel(keys, ids)
    assert torch.equal(noise[:, 500:], gumbel(keys, ids[500:]))
    assert torch.equal(noise[1:2], gumbel(row_keys(torch.tensor([7]), torch.tensor([4])), ids))
    correlations = torch.corrcoef(noise)
    assert (correlations - torch.eye(3)).abs().max() < 0.12
    low, high = (row_keys(torch.tensor([seed]), torch.tensor([0])) for seed in (1, 1 + (1 << 32)))
    assert not torch.equal(torch.cat(low), torch.cat(high))


def test_noise_is_the_stated_integer_hash() -> None:
    """Against the definition in plain Python integers."""

    def mix(h: int) -> int:
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            h = ((h ^ (h >> shift)) * factor) & 0xFFFFFFFF
        return h ^ (h >> 16)

    seed, position = 0x123456789ABCDEF, 77
    first = mix((mix((seed & 0xFFFFFFFF) ^ mix(seed >> 32)) + position * 0x9E3779B9) & 0xFFFFFFFF)
    second = mix(first ^ 0x5BD1E995)
    noise = gumbel(row_keys(torch.tensor([seed]), torch.tensor([position])), torch.arange(50))[0]
    for token in range(50):
        h = mix(mix(token ^ first) ^ second)
        uniform = ((h >> 9) + 0.5) * 2.0**-23
        assert noise[token].item() == pytest.approx(-math.log(-math.log(uniform)), abs=2e-6)


def test_noise_is_standard_gumbel() -> None:
    noise = gumbel(row_keys(torch.tensor([1]), torch.tensor([2])), torch.arange(200_000))
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.std().item() == pytest.approx(math.pi / math.sqrt(6), abs=0.01)
    assert noise.isfinite().all()

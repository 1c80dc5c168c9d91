"""Whole generations: the same tokens on every path, nothing compiled twice, ends, faults, and what is left behind."""

import gc
import inspect
import itertools
import math
import os
import random
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.fx import GraphModule

from engine import PREFILL_CHUNKS, Generator, SamplingParams, inductor_options, most_positions, unawaiting_kernels
from model import ModelConfig, RotaryConfig, Transformer, build, randomize
from profiling import GraphProof

LLAMA = ModelConfig("llama", 97, 48, 64, 2, 4, 2, 12, 512)
LONGROPE = RotaryConfig(
    "longrope",
    factor=4.0,
    original_max_position_embeddings=64,
    short_factor=(1.0, 1.1, 1.2, 1.3, 1.4, 1.5),
    long_factor=(2.0, 2.5, 3.0, 3.5, 4.0, 4.5),
)
LLAMA3 = RotaryConfig("llama3", factor=8.0, original_max_position_embeddings=64)
FAMILIES = {
    "llama": LLAMA,
    "llama-3": replace(LLAMA, num_key_value_heads=1, tie_word_embeddings=True, rotary=LLAMA3),
    "mistral": replace(LLAMA, model_type="mistral", sliding_windows=(9, 9)),
    "qwen2": replace(LLAMA, model_type="qwen2", attention_bias=True),
    "qwen3": replace(LLAMA, model_type="qwen3", qk_norm=True, head_dim=16),
    "smollm3": replace(LLAMA, model_type="smollm3", rotary_layers=(True, False)),
    "phi3": replace(LLAMA, model_type="phi3", num_attention_heads=6, rotary=RotaryConfig(partial_rotary_factor=0.5)),
    "granite": replace(
        LLAMA,
        model_type="granite",
        embedding_multiplier=3.0,
        attention_multiplier=0.2,
        residual_multiplier=0.5,
        logits_scaling=2.0,
        mlp_bias=True,
    ),
}
GREEDY = SamplingParams(temperature=0)
TOP_K = SamplingParams(temperature=0.9, top_k=40, min_p=0.01, seed=11)
FULL = SamplingParams(temperature=1.2, top_k=0, top_p=0.9, repetition_penalty=1.2, seed=12)
SAMPLERS = {params.sampler: params for params in (GREEDY, TOP_K, FULL)}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model_of(config: ModelConfig = LLAMA) -> Transformer:
    """The same random weights every time."""
    model = build(config, CPU, torch.float32)
    randomize(model)
    return model


def generator_of(config: ModelConfig = LLAMA, **settings: Any) -> Generator:
    return Generator(model_of(config), **{"max_seq_len": 256, "note": lambda line: None, **settings})


def ids_of(length: int, vocab: int = LLAMA.vocab_size) -> list[int]:
    return random.Random(length).choices(range(vocab), k=length)


def tokens_of(
    generator: Generator,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams = GREEDY,
    count: int = 12,
    **more: Any,
) -> list[list[int]]:
    completions = generator.generate_ids(prompts, max_new_tokens=count, params=params, **more)
    return [completion.tokens for completion in completions]


# --- The same tokens on every path


@pytest.mark.parametrize(
    ("family", "batch", "sampler"),
    [
        (family, batch, sampler)
        for number, family in enumerate(FAMILIES)
        for batch, sampler in zip(
            (1, 3), list(itertools.islice(itertools.cycle(SAMPLERS), number, number + 2)), strict=True
        )
    ],
)
def test_compiled_gives_the_tokens_of_eager(family: str, batch: int, sampler: str) -> None:
    prompts = [ids_of(length) for length in (17, 1, 40)[:batch]]
    with generator_of(FAMILIES[family], batch=batch) as eager:
        expected = tokens_of(eager, prompts, SAMPLERS[sampler])
    with generator_of(FAMILIES[family], batch=batch, compile=True, backend="eager") as compiled:
        assert compiled.decoder == "compiled"
        assert tokens_of(compiled, prompts, SAMPLERS[sampler]) == expected
    assert all(len(tokens) == 12 for tokens in expected)


@pytest.mark.parametrize(("family", "batch", "sampler"), [("llama", 1, "full"), ("mistral", 8, "top_k")])
def test_inductor_gives_the_tokens_of_eager(family: str, batch: int, sampler: str) -> None:
    prompts = [ids_of(length) for length in (1, 2, 15, 16, 17, 18, 40, 150)[-batch:]]
    with generator_of(FAMILIES[family], batch=batch) as eager:
        expected = tokens_of(eager, prompts, SAMPLERS[sampler])
    with generator_of(FAMILIES[family], batch=batch, compile=True, kernels="inductor") as compiled:
        assert tokens_of(compiled, prompts, SAMPLERS[sampler]) == expected
        assert compiled.graphs == "none", "no graphs on a CPU, and no failure"
        assert compiled.compile_s > 0


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_row_depends_neither_on_its_mates_nor_on_padding(sampler: str) -> None:
    prompts = [ids_of(length) for length in (3, 1, 64, 17, 2, 128, 33)]  # one row of eight stays idle
    with generator_of() as alone, generator_of(batch=8) as together:
        expected = [tokens_of(alone, [prompt], SAMPLERS[sampler])[0] for prompt in prompts]
        assert tokens_of(together, prompts, SAMPLERS[sampler]) == expected
        assert tokens_of(together, prompts[::-1], SAMPLERS[sampler]) == expected[::-1]


def test_a_row_that_has_ended_leaves_the_others_alone() -> None:
    prompts = [ids_of(length) for length in (5, 30, 9)]
    with generator_of() as alone, generator_of(batch=3) as together:
        expected = [tokens_of(alone, [prompt], TOP_K, 20)[0] for prompt in prompts]
        end = expected[0][3]
        together.eos_token_ids = (end,)
        ended = [list(itertools.takewhile(lambda token: token != end, tokens)) for tokens in expected]
        assert tokens_of(together, prompts, TOP_K, 20) == ended


@pytest.mark.parametrize("length", [1, 2, 15, 17, 127, 130, 241, 255, 256])
def test_compiled_prefill_with_padding_equals_eager_prefill(length: int, padded: Generator) -> None:
    with generator_of() as plain:
        assert tokens_of(padded, [ids_of(length)], TOP_K) == tokens_of(plain, [ids_of(length)], TOP_K)
        used = slice(0, length)
        for ours, theirs in zip(padded.model.blocks(), plain.model.blocks(), strict=True):
            torch.testing.assert_close(
                ours.self_attn.cache.k[:, :, used], theirs.self_attn.cache.k[:, :, used], rtol=1e-4, atol=1e-5
            )


@pytest.fixture(scope="module")
def padded() -> Iterator[Generator]:
    with generator_of(compile=True, backend="eager", compile_prefill=True) as generator:
        yield generator


def test_prefill_by_inductor_writes_the_cache() -> None:
    """Its result is of no use to anyone, its writes are."""
    with generator_of(compile_prefill=True, compile=True, max_seq_len=64) as generator, generator_of() as plain:
        assert tokens_of(generator, [ids_of(15)], TOP_K) == tokens_of(plain, [ids_of(15)], TOP_K)


def test_compiled_prefill_on_cpu_does_not_read_the_empty_part_of_the_cache(padded: Generator) -> None:
    prompt = ids_of(100)
    expected = tokens_of(padded, [prompt], TOP_K, 1)
    for block in padded.model.blocks():
        block.self_attn.cache.v[:, :, PREFILL_CHUNKS[1] :] = float("nan")  # 0 times this would not be 0
    padded._cached[0].clear()
    assert tokens_of(padded, [prompt], TOP_K, 1) == expected
    for block in padded.model.blocks():
        block.self_attn.cache.v.zero_()


def test_prefill_is_compiled_once_per_chunk_size(padded: Generator) -> None:
    for length in range(1, 256, 7):
        tokens_of(padded, [ids_of(length)], TOP_K, 1)
    before = counters["stats"]["unique_graphs"]
    for length in range(1, 256):
        tokens_of(padded, [ids_of(length)], TOP_K, 1)
    assert counters["stats"]["unique_graphs"] == before
    assert set(padded._compiled_prefills) <= set(PREFILL_CHUNKS)


def test_greedy_text_does_not_depend_on_how_much_is_asked_for() -> None:
    with generator_of() as generator:
        assert tokens_of(generator, [ids_of(9)], count=20)[0] == tokens_of(generator, [ids_of(9)], count=40)[0][:20]


# --- Nothing is compiled twice


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def test_two_hundred_prompts_of_all_settings_compile_three_steps() -> None:
    draw = random.Random(0)
    with generator_of(compile=True, backend="eager", eos_token_ids=(3,)) as generator:
        first = counters["stats"]["unique_graphs"]
        for params in SAMPLERS.values():
            tokens_of(generator, [ids_of(4)], params, 3)
        compiled = counters["stats"]["unique_graphs"]
        assert compiled - first == 3
        for length in range(1, 201):
            params = SamplingParams(
                temperature=draw.choice([0, 1e-4, 0.8, 5.0]),
                top_k=draw.choice([0, 1, 50, 1000]),
                top_p=draw.choice([1.0, 0.5]),
                min_p=draw.choice([0.0, 0.1]),
                repetition_penalty=draw.choice([1.0, 1.3]),
                seed=draw.randrange(-(1 << 63), 1 << 63),
            )
            tokens_of(
                generator, [ids_of(length)], params, draw.choice([1, 2, 5]), ignore_eos=draw.choice([True, False])
            )
            if length == 20:
                tensors = live_tensors()
        assert counters["stats"]["unique_graphs"] == compiled
        assert len(generator._compiled_steps) == 3
        assert live_tensors() <= tensors


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_grad_mode_of_the_caller_changes_nothing(mode: Any, kept: Generator) -> None:
    expected = tokens_of(kept, [ids_of(6)], TOP_K)
    before = counters["stats"]["unique_graphs"]
    with mode():
        assert tokens_of(kept, [ids_of(6)], TOP_K) == expected
        with generator_of() as made_inside:
            assert tokens_of(made_inside, [ids_of(6)], TOP_K) == expected
    assert counters["stats"]["unique_graphs"] == before


@pytest.fixture(scope="module")
def kept() -> Iterator[Generator]:
    """A compiled Generator that several tests use one after the other."""
    with generator_of(compile=True, backend="eager") as generator:
        yield generator


def test_a_recompilation_is_an_error_that_names_the_reason() -> None:
    with generator_of(compile=True, backend="eager") as generator:
        tokens_of(generator, [ids_of(3)])
        generator.state.eos = generator.state.eos.to(torch.int32)
        with pytest.raises(RuntimeError, match=r"(?s)did not run as promised.*compiled 1 times.*eos"):
            tokens_of(generator, [ids_of(3)])


def test_a_step_that_does_not_compile_is_one_clear_error() -> None:
    def broken(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        raise OSError("no room for the compiler")

    with generator_of(compile=True, backend=broken) as generator:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"^the compiled decode step \(greedy\) did not compile: .*no room"):
                tokens_of(generator, [ids_of(3)])


@pytest.mark.parametrize(("rotary_layers", "kinds"), [((), 1), ((True, False, True, True, False, True), 2)])
def test_blocks_that_are_alike_are_compiled_once(rotary_layers: tuple[bool, ...], kinds: int) -> None:
    compiled: list[GraphModule] = []

    def backend(graph: GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward

    config = replace(LLAMA, num_hidden_layers=6, sliding_windows=(8, None) * 3, rotary_layers=rotary_layers)
    with generator_of(config, compile=True, backend=backend) as generator:
        tokens = tokens_of(generator, [ids_of(20)])
    calls = [node for node in compiled[0].graph.nodes if node.target is torch.ops.higher_order.invoke_subgraph]
    assert len(calls) == 6 and len({call.args[0].target for call in calls}) == kinds
    with generator_of(config) as eager:
        assert tokens_of(eager, [ids_of(20)]) == tokens


class FakeWatch:
    """Claims that graphs were skipped."""

    def start(self, function: object = None) -> None: ...

    def close(self) -> None: ...

    def stop(self, steps: int) -> GraphProof:
        return GraphProof("unverified", ("skipping cudagraphs due to mutated inputs",), True)

    aside = torch.no_grad


@pytest.mark.parametrize("allowed", [False, True])
def test_skipped_graphs_are_an_error_unless_allowed(allowed: bool) -> None:
    with generator_of(compile=True, backend="eager", allow_no_graphs=allowed) as generator:
        generator._watch = FakeWatch()
        if allowed:
            tokens_of(generator, [ids_of(3)])
        else:
            with pytest.raises(RuntimeError, match="skipping cudagraphs due to mutated inputs"):
                tokens_of(generator, [ids_of(3)])
            generator.begin([1], [0], GREEDY)
            with pytest.raises(RuntimeError, match="skipping cudagraphs"):
                generator.run_steps(2)
        assert generator.graphs == "unverified"


def test_settings_of_inductor_know_every_mode() -> None:
    for mode in ("reduce-overhead", "default", "max-autotune", "max-autotune-no-cudagraphs"):
        options = inductor_options(CPU, mode)
        assert bool(options.get("triton.cudagraphs")) == (mode in ("reduce-overhead", "max-autotune"))


GENERATED = """
{name} = async_compile.triton('{name}', '''
@triton_heuristics.pointwise(triton_meta={{'signature': {{}}, 'launch_pdl': {chained}}})
def {name}(out, xnumel):
    {body}
''', device_str='cuda')
"""


def generated(path: Path, *kernels: tuple[str, bool, str]) -> ModuleType:
    """A module as Inductor writes it, of kernels (name, launched dependently, body)."""
    module = ModuleType("generated")
    module.__file__ = str(path)
    path.write_text("".join(GENERATED.format(name=name, chained=chained, body=body) for name, chained, body in kernels))
    return module


def test_the_number_of_new_tokens_is_whole() -> None:
    with generator_of() as generator, pytest.raises(ValueError, match="whole number"):
        generator.start([ids_of(3)], max_new_tokens=2.5)  # type: ignore[arg-type]


def test_what_is_compiled_later_has_the_same_settings() -> None:
    with generator_of(compile=True) as generator:
        settings = dict(generator.options or {})
        assert "guard_filter_fn" in settings
        generator._compile("double", lambda x: x * 2, torch.ones(3))  # torch.compile takes this setting out
        assert generator.options == settings


def test_kernels_that_would_not_wait_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wait = "tl.extra.cuda.gdc_wait(); tl.load(x)"
    first = generated(tmp_path / "first.py", ("triton_poi_0", True, wait), ("triton_poi_1", True, "tl.store(out, 0)"))
    second = generated(tmp_path / "second.py", ("triton_red_0", False, "tl.store(out, 0)"))
    monkeypatch.setattr("torch._inductor.codecache.PyCodeCache.modules", [first, second, ModuleType("gone"), first])
    assert unawaiting_kernels() == ["triton_poi_1"]


def test_what_would_not_wait_is_compiled_without_dependent_launch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = generated(tmp_path / "kernels.py", ("triton_poi_0", True, "tl.store(out, 0)"))
    notes: list[str] = []
    with generator_of(compile=True, note=notes.append) as generator:
        assert generator.options is not None
        generator.options["triton.enable_pdl"] = True
        double = generator._compile("double", lambda x: x * 2, torch.ones(3))
        assert generator.options["triton.enable_pdl"] and len(notes) == 2
        monkeypatch.setattr("torch._inductor.codecache.PyCodeCache.modules", [module])
        triple = generator._compile("triple", lambda x: x * 3, torch.ones(3))
        assert not generator.options["triton.enable_pdl"] and "triton_poi_0 waits for no other kernel" in notes[4]
        assert double(torch.ones(3)).tolist() == [2, 2, 2] and triple(torch.ones(3)).tolist() == [3, 3, 3]


# --- Ends


def test_eos_as_the_first_token_is_an_empty_answer() -> None:
    with generator_of() as generator:
        first = tokens_of(generator, [ids_of(5)])[0][0]
        generator.eos_token_ids = (96, first)
        (ended,) = generator.generate_ids([ids_of(5)], max_new_tokens=9, params=GREEDY)
        assert (ended.tokens, ended.finish_reason, ended.new_tokens) == ([], "eos", 0)
        assert ended.time_to_first_token_s and ended.decode_tok_per_s is None
        (going_on,) = generator.generate_ids([ids_of(5)], max_new_tokens=9, params=GREEDY, ignore_eos=True)
        assert going_on.tokens[0] == first and going_on.finish_reason == "length"


def test_any_of_several_eos_ids_ends_and_is_not_returned() -> None:
    with generator_of() as generator:
        whole = tokens_of(generator, [ids_of(5)], TOP_K, 20)[0]
        for end in whole[1:6]:
            generator.eos_token_ids = (95, end, 96)
            (completion,) = generator.generate_ids([ids_of(5)], max_new_tokens=20, params=TOP_K)
            assert completion.tokens == whole[: whole.index(end)] and completion.finish_reason == "eos"


@pytest.mark.parametrize("count", [1, 2, 7])
def test_the_number_of_new_tokens_is_the_one_asked_for(count: int) -> None:
    with generator_of() as generator:
        (completion,) = generator.generate_ids([ids_of(5)], max_new_tokens=count, params=TOP_K)
        assert completion.new_tokens == count and completion.finish_reason == "length"
        assert (completion.decode_tok_per_s is None) == (count == 1)
        assert all(map(math.isfinite, (completion.prefill_tok_per_s, completion.decode_tok_per_s or 0.0)))


@pytest.mark.parametrize("compile", [False, True])
def test_a_prompt_may_fill_the_context_exactly_and_no_more(compile: bool) -> None:
    with generator_of(max_seq_len=40, compile=compile, backend="eager") as generator, generator_of() as roomy:
        for length, count in ((40, 1), (39, 2), (30, 11)):
            (completion,) = generator.generate_ids([ids_of(length)], max_new_tokens=100, params=TOP_K)
            assert (completion.new_tokens, completion.finish_reason) == (count, "length")
            assert completion.tokens == tokens_of(roomy, [ids_of(length)], TOP_K, count)[0]
        with pytest.raises(ValueError, match="the prompt has 41 tokens, the context 40"):
            generator.generate_ids([ids_of(41)], max_new_tokens=1)


def test_rows_reach_the_end_of_the_context_at_different_times() -> None:
    with generator_of(max_seq_len=40, batch=3) as generator, generator_of() as roomy:
        prompts = [ids_of(length) for length in (40, 38, 5)]
        completions = generator.generate_ids(prompts, max_new_tokens=10, params=TOP_K)
        assert [completion.new_tokens for completion in completions] == [1, 3, 10]
        expected = [
            tokens_of(roomy, [prompt], TOP_K, count)[0] for prompt, count in zip(prompts, (1, 3, 10), strict=True)
        ]
        assert [completion.tokens for completion in completions] == expected


def test_what_cannot_be_served_is_refused() -> None:
    with generator_of(batch=2) as generator:
        for prompts, count, message in (
            ([], 5, "0 prompts"),
            ([[1], [2], [3]], 5, "3 prompts: this generator serves 1 to 2"),
            ([[1], []], 5, "the prompt has no tokens"),
            ([[1]], 0, "max-new-tokens must be a whole number, 1 or more, not 0"),
            ([[97]], 5, "outside the vocabulary of 97"),
            ([[-1]], 5, "outside the vocabulary of 97"),
        ):
            with pytest.raises(ValueError, match=message):
                generator.generate_ids(prompts, max_new_tokens=count)
        assert len(tokens_of(generator, [[1]])[0]) == 12, "and serves on"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": 0}, "batch and max-seq-len must be 1 or more"),
        ({"max_seq_len": 0}, "batch and max-seq-len must be 1 or more"),
        ({"max_seq_len": 513}, "max-seq-len 513: the model knows 512 positions"),
        ({"compile": True, "compile_mode": "fast"}, "unknown compile mode 'fast'"),
        ({"kernels": "cuda"}, "unknown kernels 'cuda'"),
        ({"compile": True, "kernels": "triton"}, "kernels triton: .*need"),
        ({"eos_token_ids": range(33)}, "33 EOS ids: at most 32"),
    ],
)
def test_settings_that_cannot_be_served_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generator_of(**settings)


def test_stretched_positions_count() -> None:
    assert most_positions(LLAMA) == 512
    assert most_positions(replace(LLAMA, rotary=RotaryConfig("yarn", factor=4.0))) == 2048
    assert most_positions(replace(LLAMA, rotary=LLAMA3)) == 512
    stretched = RotaryConfig("yarn", factor=4.0, original_max_position_embeddings=128)  # to the 512 of the config
    assert most_positions(replace(LLAMA, rotary=stretched)) == 512


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"repetition_penalty": 0.0},
        {"seed": 1 << 63},
    ],
)
def test_sampling_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings)).replace("_", "[- ]")):
        SamplingParams(**settings)


def test_rows_of_prompts_that_need_different_rotary_frequencies_are_refused() -> None:
    config = replace(LLAMA, rotary=LONGROPE)
    with generator_of(config) as alone, generator_of(config, batch=2) as together:
        short, long = ids_of(20), ids_of(100)
        expected = [tokens_of(alone, [prompt], TOP_K)[0] for prompt in (short, long)]
        assert tokens_of(together, [short], TOP_K)[0] == expected[0]
        with pytest.raises(ValueError, match="prompts of 20 and of 100 tokens need different rotary frequencies"):
            tokens_of(together, [short, long], TOP_K)
        assert tokens_of(together, [long, ids_of(99)], TOP_K)[0] == expected[1]
        with generator_of(config, batch=2, rotary_length=256) as given:
            assert tokens_of(given, [short, long], TOP_K)[1] == expected[1]


# --- Seeds


def test_a_seed_repeats_and_another_differs() -> None:
    with generator_of() as generator:
        once = tokens_of(generator, [ids_of(4)], TOP_K, 30)
        assert tokens_of(generator, [ids_of(4)], TOP_K, 30) == once
        assert tokens_of(generator, [ids_of(4)], replace(TOP_K, seed=99), 30) != once


def test_a_random_seed_is_reported_and_repeats() -> None:
    with generator_of() as generator:
        (drawn,) = generator.generate_ids([ids_of(4)], max_new_tokens=20)
        (again,) = generator.generate_ids([ids_of(4)], max_new_tokens=20, params=SamplingParams(seed=drawn.seed))
        (other,) = generator.generate_ids([ids_of(4)], max_new_tokens=20)
        assert again.tokens == drawn.tokens and other.seed != drawn.seed


def test_repetition_penalty_covers_prompt_and_output() -> None:
    prompt = [5] * 8 + [7]
    with generator_of() as generator:
        strong = SamplingParams(temperature=0, repetition_penalty=100.0)
        tokens = tokens_of(generator, [prompt], strong, 30)[0]
        assert len(set(tokens)) == 30 and not set(tokens) & {5, 7}


def test_top_k_of_one_is_greedy_at_any_temperature() -> None:
    with generator_of() as generator:
        expected = tokens_of(generator, [ids_of(4)], GREEDY, 20)
        assert tokens_of(generator, [ids_of(4)], SamplingParams(temperature=3.0, top_k=1, seed=1), 20) == expected
        assert tokens_of(generator, [ids_of(4)], SamplingParams(temperature=1e-30, top_k=0, seed=1), 20) == expected


# --- Faults on the way, and what comes after them


@pytest.mark.parametrize("compile", [False, True])
def test_logits_that_are_not_numbers_end_the_run_and_the_next_is_right(compile: bool) -> None:
    with generator_of(batch=2, compile=compile, backend="eager") as generator:
        prompts = [ids_of(30), ids_of(5)]
        expected = tokens_of(generator, prompts, TOP_K)
        gains = [block.input_layernorm.weight for block in generator.model.blocks()]
        healthy = [gain.clone() for gain in gains]
        for gain in gains:
            gain.fill_(math.nan)
        with pytest.raises(RuntimeError, match="the logits of row 0 are not numbers after 0 new tokens"):
            tokens_of(generator, [ids_of(80), ids_of(70)], TOP_K)
        for gain, values in zip(gains, healthy, strict=True):
            gain.copy_(values)
        assert tokens_of(generator, prompts, TOP_K) == expected, "NaN left in the cache reaches no later run"


@pytest.mark.parametrize("compile", [False, True])
def test_an_exception_in_the_callback_leaves_the_next_call_right(compile: bool) -> None:
    def failing(row: int, token: int) -> None:
        if len(seen) == 3:
            raise LookupError("the caller's own")
        seen.append(token)

    with generator_of(compile=compile, backend="eager") as generator:
        expected = tokens_of(generator, [ids_of(9)], TOP_K)
        seen: list[int] = []
        with pytest.raises(LookupError):
            tokens_of(generator, [ids_of(50)], TOP_K, on_token=failing)
        assert len(seen) == 3
        assert tokens_of(generator, [ids_of(9)], TOP_K) == expected
        assert tokens_of(generator, [ids_of(9)], FULL), "another sampler still compiles"


def test_what_a_run_has_yielded_stays_as_it_was(kept: Generator) -> None:
    run = kept.start([ids_of(7)], TOP_K, max_new_tokens=10)
    yielded = list(run)
    copies = [list(step) for step in yielded]
    tokens_of(kept, [ids_of(70)], TOP_K)
    assert yielded == copies == [[token] for token in run.completions[0].tokens]


def test_a_run_is_iterated_once_and_not_after_a_newer_one(kept: Generator) -> None:
    old = kept.start([ids_of(7)], TOP_K, max_new_tokens=10)
    steps = iter(old)
    next(steps)
    expected = tokens_of(kept, [ids_of(8)], TOP_K)
    with pytest.raises(RuntimeError, match="another generation has begun"):
        next(steps)
    run = kept.start([ids_of(8)], TOP_K, max_new_tokens=12)
    assert [token for (token,) in run] == expected[0]
    with pytest.raises(RuntimeError, match="iterated once"):
        list(run)


def test_the_reader_of_the_tokens_may_compile_and_generate_meanwhile(kept: Generator) -> None:
    expected = tokens_of(kept, [ids_of(7)], TOP_K)[0]
    with generator_of(FAMILIES["qwen3"], compile=True, backend="eager") as other:
        seen = []
        for number, (token,) in enumerate(kept.start([ids_of(7)], TOP_K, max_new_tokens=12)):
            seen.append(token)
            if number == 3:
                tokens_of(other, [ids_of(3)], FULL)
                torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
        assert seen == expected


def test_a_broken_off_prefill_is_not_taken_for_a_cached_one(monkeypatch: pytest.MonkeyPatch) -> None:
    history, question = ids_of(40), ids_of(30)
    with generator_of() as generator, generator_of() as fresh:
        tokens_of(generator, [history], TOP_K)
        with monkeypatch.context() as patched:
            patched.setattr("engine.PREFILL_CHUNKS", (8,))
            chunks, real = [], generator._prefill_chunk

            def interrupted(*arguments: Any) -> None:
                if len(chunks) == 2:
                    raise KeyboardInterrupt
                chunks.append(arguments)
                real(*arguments)

            patched.setattr(generator, "_prefill_chunk", interrupted)
            with pytest.raises(KeyboardInterrupt):
                generator.start([question], TOP_K, max_new_tokens=5)
        run = generator.start([history], TOP_K, max_new_tokens=12, reuse=True)
        assert [token for (token,) in run] == tokens_of(fresh, [history], TOP_K)[0]


def test_only_what_is_new_of_a_prompt_is_prefilled(monkeypatch: pytest.MonkeyPatch) -> None:
    with generator_of() as generator, generator_of() as fresh:
        sizes: list[int] = []
        real = generator.prefill
        monkeypatch.setattr(generator, "prefill", lambda ids, *rest: (sizes.append(len(ids)), real(ids, *rest)))
        prompt = ids_of(50)
        answer = [token for (token,) in generator.start([prompt], TOP_K, max_new_tokens=10, reuse=True)]
        longer = [*prompt, *answer, *ids_of(6)]
        again = [token for (token,) in generator.start([longer], TOP_K, max_new_tokens=10, reuse=True)]
        assert sizes == [49, 6], "of the second, what follows the last token but one of the answer"
        assert again == tokens_of(fresh, [longer], TOP_K, 10)[0]
        forked = [*longer[:20], *ids_of(9)]
        assert [t for (t,) in generator.start([forked], TOP_K, max_new_tokens=10, reuse=True)] == tokens_of(
            fresh, [forked], TOP_K, 10
        )[0]


# --- Several Generators, threads, processes, and the end


def test_a_second_generator_and_a_larger_batch_work_beside_the_first(kept: Generator) -> None:
    expected = tokens_of(kept, [ids_of(7)], TOP_K)
    with generator_of(batch=3, compile=True, backend="eager") as larger:
        assert tokens_of(larger, [ids_of(7), ids_of(3), ids_of(90)], TOP_K)[:1] == expected
        assert tokens_of(kept, [ids_of(7)], TOP_K) == expected
    assert tokens_of(kept, [ids_of(7)], TOP_K) == expected, "closing one leaves the other"


def test_a_model_serves_its_latest_generator() -> None:
    model = model_of()
    first = Generator(model, max_seq_len=64, compile=True, backend="eager", note=lambda line: None)
    expected = tokens_of(first, [ids_of(7)], TOP_K)
    second = Generator(model, max_seq_len=128, batch=2)
    assert tokens_of(second, [ids_of(7)], TOP_K) == expected
    assert type(model.attention).__name__ == "SlicedAttention", "the eager forms are back"
    with pytest.raises(RuntimeError, match="another Generator has been made of this model"):
        tokens_of(first, [ids_of(7)], TOP_K)
    first.begin([1], [0], TOP_K)
    with pytest.raises(RuntimeError, match="another Generator has been made of this model"):
        first.run_steps(1)


def test_a_closed_generator_says_so() -> None:
    generator = generator_of()
    run = generator.start([ids_of(3)], max_new_tokens=5)
    generator.close()
    generator.close()
    with pytest.raises(RuntimeError, match="closed"):
        tokens_of(generator, [ids_of(3)])
    with pytest.raises(RuntimeError, match="closed"):
        list(run)


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_ten_generators_in_a_row_leave_nothing(how: str) -> None:
    left: list[weakref.ref] = []
    for number in range(10):
        generator = generator_of(compile=number % 4 == 0, backend="eager", compile_prefill=number % 4 == 0)
        tokens_of(generator, [ids_of(5)], TOP_K, 3)
        tensors = [*generator.model.parameters(), *generator.model.buffers(), *generator.state.buffers()]
        compiled = [*generator._compiled_steps.values(), *generator._compiled_prefills.values()]
        left += map(weakref.ref, tensors)
        if number:  # of equal code objects torch keeps the first in a table
            left += (weakref.ref(inspect.unwrap(function).__code__) for function in compiled)
        del tensors, compiled
        if how == "closed":
            generator.close()
        del generator
    gc.collect()
    assert [ref() for ref in left if ref() is not None] == []


def test_threads_with_generators_of_their_own_get_right_tokens() -> None:
    with generator_of() as alone:
        expected = tokens_of(alone, [ids_of(20)], TOP_K, 30)[0]
    results: dict[int, list[int]] = {}

    def work(number: int) -> None:
        with generator_of(compile=number > 1, backend="eager") as generator:
            for _ in range(3):
                results[number] = tokens_of(generator, [ids_of(20)], TOP_K, 30)[0]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(4), expected)


def test_a_generator_moves_between_threads_but_serves_one_at_a_time(kept: Generator) -> None:
    expected = tokens_of(kept, [ids_of(20)], TOP_K)
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(tokens_of(kept, [ids_of(20)], TOP_K)))
    thread.start()
    thread.join()
    assert results == [expected]
    with kept._at_work(), pytest.raises(RuntimeError, match="at work in another thread"):
        tokens_of(kept, [ids_of(20)], TOP_K)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_after_a_fork_the_child_gets_a_clear_error(kept: Generator) -> None:
    tokens_of(kept, [ids_of(5)], TOP_K)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            tokens_of(kept, [ids_of(5)], TOP_K)
            os.write(writing, b"served")
        except RuntimeError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert b"made before the process forked" in pipe.read()
    os.waitpid(child, 0)


# --- Sizes


def test_bytes_of_a_step_are_those_counted_by_hand() -> None:
    generator = generator_of(batch=2)
    hidden, inner, heads, kv, dim, vocab = 48, 64, 4, 2, 12, 97
    layer = hidden * (heads + 2 * kv) * dim + heads * dim * hidden + 3 * hidden * inner + 2 * hidden
    weights = 2 * layer + hidden + vocab * hidden  # two layers, the last norm, the head
    rows = 2 * hidden  # of the embedding table
    cache = 2 * 2 * 2 * kv * dim * 51  # rows, layers, keys and values, up to position 50
    assert generator.bytes_per_step(50) == 4 * (weights + rows + cache) + 2 * vocab * 4


def test_bytes_of_a_step_with_windows_a_tied_head_and_biases() -> None:
    plain = generator_of(replace(LLAMA, tie_word_embeddings=True))
    untied = generator_of(LLAMA)
    assert plain.bytes_per_step(7) == untied.bytes_per_step(7), "the head is read either way, the other table is not"
    biased = generator_of(replace(LLAMA, attention_bias=True))
    assert biased.bytes_per_step(7) - untied.bytes_per_step(7) == 2 * (4 + 2 * 2) * 12 * 4
    windowed = generator_of(replace(LLAMA, sliding_windows=(9, None)))
    assert untied.bytes_per_step(100) - windowed.bytes_per_step(100) == 2 * 2 * 12 * 4 * (101 - 9)
    assert untied.bytes_per_step(5) == windowed.bytes_per_step(5)

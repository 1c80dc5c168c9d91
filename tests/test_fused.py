"""The fused step against the plain one: by its references, in Triton's interpreter, and on the GPU in its graph."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import decode_kernels as kernels
import fused
from decoding import DecodeState, DecodeStep
from engine import Generator, SamplingParams
from fused import FusedStep
from model import ModelConfig, RotaryConfig, Transformer, build, randomize
from sampling import SAMPLERS, scores

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
LLAMA = ModelConfig("llama", 199, 64, 96, 3, 4, 2, 16, 128)
FAMILIES: dict[str, dict] = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
    "qk_norm": {"qk_norm": True},
    "windows": {"sliding_windows": (5, None, 1)},
    "no rotary": {"rotary_layers": (True, False, True)},
    "partial rotary": {"rotary": RotaryConfig(partial_rotary_factor=0.5)},
    "multipliers": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.1,
        "residual_multiplier": 0.4,
        "logits_scaling": 2.5,
    },
    "one KV head": {"num_key_value_heads": 1},
    "three to one": {"num_attention_heads": 6},
    "odd sizes": {"hidden_size": 60, "intermediate_size": 100, "head_dim": 12, "num_attention_heads": 2},
}
CAPACITY = 40


def model_of(config: ModelConfig, dtype: torch.dtype = torch.float32, device: torch.device = DEVICE) -> Transformer:
    model = build(config, device, dtype)
    randomize(model)
    return model


@torch.no_grad()
def begin(model: Transformer, prompt: list[int], slots: int = CAPACITY, **settings: float) -> DecodeState:
    """A state whose caches hold all of the prompt but its last id."""
    device = model.embed_tokens.weight.device
    model.allocate(1, slots)
    if prompt[1:]:
        model(torch.tensor([prompt[:-1]], device=device), torch.arange(len(prompt) - 1, device=device)[None])
    state = DecodeState(1, model.config.vocab_size, device)
    for name, value in {
        "token": prompt[-1],
        "position": len(prompt) - 1,
        "limit": slots,
        "seed": 5,
        **settings,
    }.items():
        getattr(state, name).fill_(value)
    return state


def compare_steps(config: ModelConfig, sampler: str, steps: int, prompt: list[int], **settings: float) -> None:
    compare_steps_of(model_of(config), sampler, steps, prompt, **settings)


@torch.no_grad()
def compare_steps_of(model: Transformer, sampler: str, steps: int, prompt: list[int], **settings: float) -> None:
    """Both steps, from the same state on, leave the same tokens and the same caches."""
    left = []
    for step in (DecodeStep, FusedStep):
        state = begin(model, prompt, **settings)
        step_of = step(model, state)
        for _ in range(steps):
            step_of(sampler)
        caches = [cache for block in model.blocks() for cache in (block.self_attn.cache.k, block.self_attn.cache.v)]
        left.append((state, [cache[:, :, :CAPACITY] for cache in caches]))
    (plain, theirs), (own, ours) = left
    for name, buffer in plain.named_buffers():
        if name == "seen" and plain.done:  # what a finished row draws means nothing
            continue
        assert torch.equal(getattr(own, name), buffer), (name, getattr(own, name), buffer)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


HOT = {"temperature": 0.9, "top_k": 20, "min_p": 0.01}


@pytest.mark.parametrize("family", FAMILIES)
def test_references_draw_the_same_tokens(family: str) -> None:
    config = replace(LLAMA, **FAMILIES[family])
    prompt = [7, 3, 11, 2, 9, 150, 31]
    for sampler in SAMPLERS:
        more = {"top_p": 0.9, "penalty": 1.2} if sampler == "full" else {}
        compare_steps(config, sampler, 8, prompt, **HOT, **more)
    compare_steps(config, "top_k", 4, [5], **HOT)
    compare_steps(config, "greedy", 5, prompt, limit=9)  # two tokens, then done


@pytest.mark.skipif(not kernels.INSTALLED or ON_GPU, reason="Triton's interpreter is for machines without a GPU")
def test_kernels_draw_the_same_tokens() -> None:
    """In the interpreter, which wants an environment variable at import and hence a process of its own."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, __file__],
        env=environment | {"PYTHONPATH": f"{root}:{root}/tests"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def interpret() -> None:
    import test_decode_kernels  # noqa: F401  # mends the interpreter

    small = replace(LLAMA, vocab_size=67, hidden_size=24, intermediate_size=40, num_hidden_layers=2, head_dim=8)
    compare_steps(small, "greedy", 2, [5], temperature=0)
    compare_steps(small, "top_k", 3, [5, 9, 2], **HOT, limit=4)
    everything = {"attention_bias": True, "mlp_bias": True, "qk_norm": True, "sliding_windows": (2, None)}
    others = {
        "rotary_layers": (True, False),
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
        "num_key_value_heads": 1,
    }
    compare_steps(replace(small, **everything, **others), "full", 3, [5, 9, 2, 8], **HOT)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_logits_that_are_no_numbers_are_reported(sampler: str) -> None:
    model = model_of(LLAMA)
    model.norm.weight.fill_(float("nan"))
    state = begin(model, [1, 2])
    FusedStep(model, state)(sampler)
    assert state.ring[0, 0] == -2 and state.token[0] == 0


def test_what_it_cannot_serve_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model, gpu = model_of(LLAMA, device=torch.device("cpu")), torch.device("cuda")

    def reason(rows: int = 1, device: torch.device = gpu) -> str | None:
        return fused.unsupported(model, DecodeState(rows, 199, torch.device("cpu")), device)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a GPU")
    monkeypatch.setattr(kernels, "INSTALLED", True)
    assert reason() is None
    assert "NVIDIA GPU" in str(reason(device=torch.device("cpu")))
    assert "batch 2" in str(reason(rows=2))
    layer = model.layers[0].mlp.down_proj
    model.layers[0].mlp.down_proj = type("StrangeLinear", (nn.Module,), {})()
    assert "StrangeLinear" in str(reason())
    model.layers[0].mlp.down_proj = layer
    model.to(torch.float64)
    assert "float64" in str(reason())
    model.to(torch.bfloat16)
    monkeypatch.setattr(kernels, "INSTALLED", False)
    assert reason() == "Triton is not installed"
    monkeypatch.setattr(kernels, "INSTALLED", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert "8.0" in str(reason())


# --- On the GPU

MEDIUM = ModelConfig("llama", 5003, 512, 1408, 4, 8, 2, 64, 2048, rotary=RotaryConfig(rope_theta=5e5))


def captured(step: FusedStep, sampler: str) -> Callable[[], None]:
    """A replay of one step; its buffers hold NaN before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        step(sampler)  # compiles
        for buffer in step.buffers(recurse=False):
            if buffer.is_floating_point():
                buffer.fill_(float("nan"))
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step(sampler)
    torch.cuda.synchronize()
    return graph.replay


def put(state: DecodeState, token: int, position: int) -> None:
    for name, value in {"token": token, "position": position, "done": False, "count": 0}.items():
        getattr(state, name).fill_(value)


# Token, position: in rising order, so that what a place leaves in the caches is the same whenever all are visited.
PLACES = [(4, 0), (7, 20), (900, 33), (31, CAPACITY - 1)]


def logits_at(replay: Callable[[], None], step: FusedStep) -> list[Tensor]:
    found = []
    for place in PLACES:  # one after the other, so that stale buffers hold something else
        put(step.state, *place)
        replay()
        found.append(step.logits.clone())
    torch.cuda.synchronize()
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_poisoned_buffers_are_written_before_they_are_read(dtype: torch.dtype) -> None:
    model = model_of(MEDIUM, dtype)
    step = FusedStep(model, begin(model, list(range(30)), **HOT))
    for (token, position), ours in zip(PLACES, logits_at(captured(step, "top_k"), step), strict=True):
        at = torch.tensor([[position]], device=DEVICE)
        with torch.no_grad():
            theirs = model.logits(model(torch.tensor([[token]], device=DEVICE), at))[:, 0]
        assert (ours - theirs).norm() < 0.05 * theirs.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("late", ["_embed_kernel", "_project_kernel", "_attend_kernel", "_select_kernel"])
def test_a_late_kernel_is_waited_for(monkeypatch: pytest.MonkeyPatch, late: str) -> None:
    model = model_of(MEDIUM, torch.bfloat16)
    step = FusedStep(model, begin(model, list(range(30)), **HOT))
    expected = logits_at(captured(step, "top_k"), step)
    monkeypatch.setattr(kernels, "delayed", late)
    for ours, theirs in zip(logits_at(captured(step, "top_k"), step), expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.gpu
def test_a_thousand_replays_are_equal() -> None:
    model = model_of(MEDIUM, torch.bfloat16)
    step = FusedStep(model, begin(model, list(range(30)), **HOT))
    replay = captured(step, "top_k")
    first, equal = None, torch.ones((), dtype=torch.bool, device=DEVICE)
    for _ in range(1000):
        put(step.state, 7, 30)
        replay()
        first = step.logits.clone() if first is None else first
        equal &= (step.logits == first).all() & (step.state.position == 31).all()
    assert equal


MIXED = replace(MEDIUM, qk_norm=True, sliding_windows=(16, None, 16, 3), num_attention_heads=6)


@pytest.mark.gpu
def test_the_eager_decoder_draws_the_same_tokens() -> None:
    hold_against_eager(lambda: model_of(MIXED, torch.bfloat16))


def hold_against_eager(make: Callable[[], Transformer]) -> None:
    """Teacher-forced: where the eager decoder would choose otherwise, both choices are all but equally good. Filters
    are open: at the edge of one, rounding lets a token in or out, whatever its score; kernels' own tests hold them."""
    model = make()
    params, prompt = SamplingParams(temperature=0.8, top_k=0, seed=3), list(range(40, 60))
    with Generator(model, kernels="triton", max_seq_len=256) as generator:
        assert generator.decoder == "fused"
        ours = generator.generate_ids([prompt], max_new_tokens=100, params=params, ignore_eos=True)[0].tokens
        assert generator.graphs == "verified"
    model = make()  # closing a Generator frees its model; these weights are the same
    state = begin(model, prompt, slots=256, temperature=0.8, top_k=model.config.vocab_size, seed=3)
    step, differing = DecodeStep(model, state), 0
    for position, chosen in enumerate(ours, len(prompt) - 1):
        put(state, ([*prompt, *ours])[position], position)
        with torch.no_grad():
            step("top_k")
        if int(state.token) == chosen:
            continue
        differing += 1
        put(state, ([*prompt, *ours])[position], position)
        with torch.no_grad():
            at = state.position.unsqueeze(1)
            logits = model.logits(model(state.token.unsqueeze(1), at))[:, 0]
        ranked = scores("top_k", logits, state.settings, state.position + 1, state.seen)[0]
        assert ranked.max() - ranked[chosen] < 0.1, (position, chosen)
    assert differing < 15


@pytest.mark.gpu
def test_a_step_is_our_kernels_alone() -> None:
    """In particular no copy of a cache, which a custom op that writes into it could have asked for."""
    from torch.profiler import ProfilerActivity, profile

    model = model_of(MEDIUM, torch.bfloat16)
    params = SamplingParams(seed=1)
    with Generator(model, kernels="triton", max_seq_len=256) as generator:
        generator.warm_up(params)
        generator.begin([1], [0], params)
        generator.run_steps(3)
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            generator.run_steps(3)
    names = {event.name for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA}
    strange = {name for name in names if not name.startswith(("_embed", "_project", "_attend", "_select"))}
    assert len(names) > len(strange) and not strange, strange


@pytest.mark.gpu
@pytest.mark.skipif("NEARROOF_MEMCHECK" not in os.environ, reason="takes minutes: NEARROOF_MEMCHECK=1 asks for it")
def test_memory_is_used_as_allowed() -> None:
    pytest_here = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [
            *("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", *pytest_here),
            f"{__file__}::test_poisoned_buffers_are_written_before_they_are_read",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]


if __name__ == "__main__":
    interpret()

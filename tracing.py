"""Every path of one model in one process: timed first, traced after that, then reported.

Knows what a fair comparison takes: the same weights, tokens and positions on every path, no timing after the first
profiler, and choices compared token by token. Knows nothing of how a trace is recorded (`profiling`), of what it shows
(`trace_report`), or of text and checkpoints.
"""

import copy
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import trace_report
from bench import machine
from bench.bandwidth import read_bandwidth
from engine import DECODERS, Generator, SamplingParams, hot_loop
from model import Transformer
from profiling import RunFacts, SameWork, Step, StepFacts, capture
from sampling import scores

OWN_FILES = (
    *(f"trace_{path}.json{suffix}" for path in DECODERS for suffix in ("", ".gz")),
    *("report.md", "report.json", "report.html"),
)
CAPACITY = 1024  # positions, where nothing else is asked for: enough to tell late steps from early ones
LEAST_CAPACITY = 32
PROMPT = 128  # tokens of the traced prefill at least: a handful shows little
TRACED = 3  # steps at each position
TIMED = 32  # steps of one unprofiled run, from the same position on
COMPARED = 8  # choices at each position
REPETITIONS, LEAST_REPETITIONS, SECONDS = 10, 3, 3.0  # of a timing, unless it takes longer than this
NEAR_TIE = 4  # rounding steps of the largest logit: two scores this close may come out in either order


@dataclass(frozen=True)
class Work:
    """What every path does."""

    ids: list[int]  # one for each position; the first `prompt_tokens` are the traced prefill
    prompt_tokens: int
    positions: tuple[int, int]  # early and late in the cache
    params: SamplingParams

    @classmethod
    def of(cls, prompt: Sequence[int], capacity: int, vocab_size: int, params: SamplingParams) -> "Work":
        """The prompt, and random ids after it. Raises ValueError where the context is too short."""
        if capacity < LEAST_CAPACITY:
            raise ValueError(f"a profile needs a context of {LEAST_CAPACITY} positions at least, not {capacity}")
        length = min(max(len(prompt), PROMPT), capacity // 2)
        draw = random.Random(0)
        ids = [*prompt, *(draw.randrange(vocab_size) for _ in range(capacity))][:capacity]
        return cls(ids, length, (length, max(length + TRACED + 1, capacity - TIMED)), params)


def sharing_weights(model: Transformer) -> Transformer:
    """A second tree of modules over the same tensors: a path changes its modules and allocates caches of its own."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def profile(
    model: Transformer,
    prompt: Sequence[int],
    directory: Path,
    *,
    params: SamplingParams,
    settings: dict[str, Any],
    facts: RunFacts,
    compress: bool = False,
    nvtx: bool = False,
    note: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> bool:
    """Time and trace prefill and decode on every path that serves this model; write traces and report.

    model: as it was built or loaded (no Generator has it). settings: of the Generators; the path overrides its own.
    facts: what only the caller knows (model, quantization, command). -> whether all that the report claims is verified.

    Raises:
        ValueError: the context is too short.
        RuntimeError: a path failed, or the files could not be written.
    """
    device = model.embed_tokens.weight.device
    facts = _facts_of_run(model, device, params) | facts
    with ExitStack() as stack:
        paths: list[tuple[Generator, RunFacts]] = []
        for path, own in DECODERS.items():
            try:
                generator = Generator(
                    sharing_weights(model), **{**settings, "allow_no_graphs": True, "note": note, **own}
                )
            except ValueError as reason:
                if path != "fused":
                    raise
                note(f"no fused path: {reason}")
                continue
            stack.callback(generator.close)
            work = Work.of(prompt, generator.capacity, model.config.vocab_size, params)
            note(f"timing the {path} path ...")
            paths.append((generator, facts | _measure(generator, work, facts.get("model", ""))))
        margins = paths[0][1]["same_work"]  # of the eager path, which alone shows its scores
        for _, found in paths[1:]:
            found["same_work"] |= {"margins": margins["margins"], "tolerance": margins["tolerance"]}
        # From here on nothing is timed: a profiler slows its process for good.
        try:
            for name in OWN_FILES:
                (directory / name).unlink(missing_ok=True)
            files = []
            for generator, found in paths:
                note(f"tracing the {found['decoder']} path ...")
                files.append(directory / f"trace_{found['decoder']}.json{'.gz' if compress else ''}")
                with hot_loop(generator.decoder != "eager"):
                    capture(files[-1], _steps(generator, work), found, device, nvtx)
            return trace_report.write(files, directory).verified
        except OSError as error:
            raise RuntimeError(f"{directory}: {error}") from error


def _facts_of_run(model: Transformer, device: torch.device, params: SamplingParams) -> RunFacts:
    """What all paths share."""
    return {
        "dtype": str(model.embed_tokens.weight.dtype).removeprefix("torch."),
        "device": device.type,
        "device_name": machine.device_name(device),
        "torch": torch.__version__,
        "triton": machine.package_version("triton") or "none",
        "cuda": torch.version.cuda or "none",
        "commit": machine.commit_name() or "unknown",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "sampling": asdict(params),
        "read_bandwidth_bytes_per_s": read_bandwidth(device).median,
    }


def _measure(generator: Generator, work: Work, weights: str) -> RunFacts:
    """Warm one path up, and all that is known of it without a profiler."""
    on_cpu = generator.device.type == "cpu"  # there a trace shows Inductor's functions
    with torch._inductor.config.patch({"cpp.enable_kernel_profile": on_cpu}):
        generator.warm_up(work.params)
        compiled, recorded = generator.compile_s, generator.record_s
        _fill_caches(generator, work)
    facts: RunFacts = {
        "decoder": generator.decoder,
        "batch": generator.batch,
        "capacity": generator.capacity,
    }
    if generator.decoder != "eager":
        facts["compile_mode"] = str(generator.compile_mode)
        facts["settings"] = {name: value for name, value in (generator.options or {}).items() if not callable(value)}
        facts["compilation"] = generator.compilation()
        facts["warm_up"] = {
            "compile_s": compiled - recorded,
            "record_s": recorded,
            "prefill_s": generator.compile_s - compiled,
        }
    prefill: StepFacts = {
        "unprofiled_us": _repeated(lambda: _timed_prefill(generator, work)),
        "tokens": generator.batch * work.prompt_tokens,
    }
    facts["steps"], proofs = {"prefill": prefill}, []
    for start in work.positions:
        times = _repeated(lambda start=start: _timed_decode(generator, work, start))
        proofs.append(generator.proof)
        for position in range(start, start + TRACED):
            facts["steps"][f"decode[{position}]"] = {
                "unprofiled_us": times,
                "tokens": generator.batch,
                "bytes": _bytes_by_kind(generator, position),
            }
    facts["graphs"] = asdict(next((proof for proof in proofs if proof.failed), proofs[-1]))
    facts |= machine.gpu_facts(generator.device, lambda: _timed_decode(generator, work, work.positions[-1]))
    facts["same_work"] = _choices(generator, work, weights)
    return facts


def _fill_caches(generator: Generator, work: Work) -> None:
    """Keys and values at every position, in pieces of the traced prefill's size: another would compile again."""
    size, last = work.prompt_tokens, generator.capacity - work.prompt_tokens
    for start in (*range(0, last, size), last):
        for row in range(generator.batch):
            generator.prefill(work.ids[start : start + size], row, start)


def _prefill(generator: Generator, work: Work) -> None:
    for row in range(generator.batch):
        generator.prefill(work.ids[: work.prompt_tokens], row)


def _begin(generator: Generator, work: Work, position: int, params: SamplingParams | None = None) -> None:
    rows = generator.batch
    generator.begin([work.ids[position]] * rows, [position] * rows, params or work.params)


def _repeated(measure: Callable[[], float]) -> list[float]:
    """Microseconds of several measurements (in seconds), after one that does not count."""
    measure()
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < REPETITIONS and (len(times) < LEAST_REPETITIONS or time.perf_counter() - began < SECONDS):
        times.append(1e6 * measure())
    return times


def _timed_prefill(generator: Generator, work: Work) -> float:
    generator.synchronize()
    began = time.perf_counter()
    _prefill(generator, work)
    generator.synchronize()
    return time.perf_counter() - began


def _timed_decode(generator: Generator, work: Work, position: int) -> float:
    """Seconds a step."""
    steps = min(TIMED, generator.capacity - position)
    _begin(generator, work, position)
    return generator.run_steps(steps) / steps


def _bytes_by_kind(generator: Generator, position: int) -> dict[str, int]:
    total, without_cache = generator.bytes_per_step(position), generator.bytes_per_step(-1)
    logits = 4 * generator.batch * generator.model.config.vocab_size
    return {"gemv": without_cache - logits, "attention": total - without_cache, "sampling": logits}


def _choices(generator: Generator, work: Work, weights: str) -> SameWork:
    """What the path draws after the given tokens, at each position.

    The step is that of the generation, with noise; the filters are open, since a token at a filter's edge may fall on
    either side of it without any score being wrong.
    """
    params = replace(work.params, top_k=0, top_p=1.0, min_p=0.0)
    if work.params.sampler == "full":
        params = replace(params, repetition_penalty=2.0)  # keeps the step; nothing counts as seen
    inputs, chosen, margins, largest = [], [], [], 0.0
    for start in work.positions:
        for position in range(start, start + COMPARED):
            _begin(generator, work, position, params)
            generator.step()
            generator.synchronize()
            inputs.append(work.ids[position])
            chosen += generator.state.ring[0].tolist()
            if generator.decoder == "eager":
                logits, perturbed = _scores(generator, work.ids[position], position, params)
                best = perturbed.topk(2).values
                margins += (best[:, 0] - best[:, 1]).tolist()
                largest = max(largest, float(logits.abs().max()))
    rounding = torch.finfo(generator.model.embed_tokens.weight.dtype).eps * largest
    tolerance = NEAR_TIE * rounding / (params.temperature or 1.0)
    return {"weights": weights, "inputs": inputs, "choices": chosen, "margins": margins, "tolerance": tolerance}


@torch.no_grad()
def _scores(
    generator: Generator, token: int, position: int, params: SamplingParams
) -> tuple[torch.Tensor, torch.Tensor]:
    """The plain path's logits [B, V] after a token, and the scores whose largest is drawn."""
    model, state = generator.model, generator.state
    tokens, positions = (torch.full((generator.batch, 1), n, device=generator.device) for n in (token, position))
    logits = model.logits(model(tokens, positions, None, position + 1)[:, 0])
    if params.sampler == "greedy":
        return logits, logits
    unseen = torch.zeros_like(state.seen)
    return logits, scores(params.sampler, logits, state.settings, positions[:, 0] + 1, unseen)


def _steps(generator: Generator, work: Work) -> list[Step]:
    """The steps to trace: those at one position follow each other as in generation."""
    steps = [Step("prefill", lambda: _prefill(generator, work))]
    for start in work.positions:
        for position in range(start, start + TRACED):
            seek = (lambda start=start: _begin(generator, work, start)) if position == start else None
            steps.append(Step(f"decode[{position}]", generator.step, seek))
    return steps

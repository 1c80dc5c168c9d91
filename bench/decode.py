"""Decode speed against the memory-bandwidth limit, for each decoder, precision, batch and prompt.

A repetition is one whole segment of decode steps, sampling included, with one synchronisation at its end; nothing else
is in its time. The limit is the bytes that a step must move over the read bandwidth measured just before.

`--compile-times` builds each decoder in two processes of its own: one with empty compile caches, and one with what that
left in them, which measures. The first ends with two traced steps, which on CUDA must show the graph launches that the
counters claimed.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import profiling
import trace_report
from bench import machine, rows, workload
from bench.bandwidth import read_bandwidth
from bench.rows import Row, Spread, say
from engine import Generator, SamplingParams, captures_graphs
from generate import choose_device

COLUMNS = (
    *("model", "precision", "decoder", "batch", "prompt", "new", "position", "rate", "p10", "p90", "share", "ttft"),
    *("prefill", "compile", "warm", "memory", "graphs"),
)


class Case(NamedTuple):
    """What is timed: `new_tokens` steps from `position` on, after a prompt, or (None) from a cache of zeros."""

    prompt_tokens: int | None
    new_tokens: int
    position: int


def cases(options: argparse.Namespace) -> list[Case]:
    if options.positions:
        chosen = workload.pairs(options.positions, options.new_tokens, "--positions and --new-tokens")
        return [Case(None, new, position) for position, new in chosen]
    chosen = workload.pairs(options.prompt_tokens, options.new_tokens, "--prompt-tokens and --new-tokens")
    return [Case(prompt, new, prompt - 1) for prompt, new in chosen]


def measure(generator: Generator, case: Case, params: SamplingParams, repetitions: int, bandwidth: float) -> Row:
    """One row's figures; the generator is warm. Raises RuntimeError where graphs were promised and did not run."""
    batch, new = generator.batch, case.new_tokens
    prompts = workload.random_prompts(generator.model, batch, case.prompt_tokens or 1)
    first_token_s = None
    if case.prompt_tokens is not None:
        first_token_s = _first_token(generator, prompts, params, repetitions)
        for number, prompt in enumerate(prompts):
            generator.prefill(prompt[:-1], number)

    def segment() -> float:
        generator.begin([prompt[-1] for prompt in prompts], [case.position] * batch, params)
        return generator.run_steps(new)

    segment()
    rates = Spread.of([batch * new / segment() for _ in range(repetitions)])
    graphs, graph_note = generator.graphs, "; ".join(generator.proof.reasons)
    bytes_per_step = generator.bytes_per_step(case.position + new // 2)
    return Row(
        decoder=generator.decoder,
        compile_mode=generator.compile_mode,
        batch=batch,
        prompt_tokens=case.prompt_tokens,
        new_tokens=new,
        max_seq_len=generator.capacity,
        position=case.position,
        temperature=params.temperature,
        top_k=params.top_k,
        decode_tok_per_s=rates.median,
        decode_tok_per_s_p10=rates.p10,
        decode_tok_per_s_p90=rates.p90,
        time_to_first_token_s=first_token_s,
        prefill_tok_per_s=first_token_s and batch * (case.prompt_tokens or 0) / first_token_s,
        weight_bytes=workload.weight_bytes(generator.model),
        peak_memory_bytes=machine.peak_memory(generator.device),
        read_bandwidth_bytes_per_s=bandwidth,
        bytes_per_step=bytes_per_step,
        share_of_limit=bytes_per_step * rates.median / batch / bandwidth,
        graphs=graphs,
        graph_note=graph_note or None,
        **machine.gpu_facts(generator.device, segment),
    )


def _first_token(
    generator: Generator, prompts: list[list[int]], params: SamplingParams, repetitions: int
) -> float | None:
    """Seconds from the prompts to every row's first token: the median after one untimed call."""

    def once() -> float:
        completion = generator.generate_ids(prompts, max_new_tokens=1, params=params, ignore_eos=True)[0]
        assert completion.time_to_first_token_s is not None
        return completion.time_to_first_token_s

    once()
    return Spread.of([once() for _ in range(repetitions)]).median


# --- Compile time and traces, in processes of their own -------------------------------------------------------------


@contextmanager
def empty_caches() -> Iterator[None]:
    """Compile caches of this process and of those it starts: empty at first, gone afterwards."""
    with tempfile.TemporaryDirectory() as directory:
        before = dict(os.environ)
        os.environ.update(TORCHINDUCTOR_CACHE_DIR=directory, TRITON_CACHE_DIR=f"{directory}/triton")
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


def cold_and_warm(options: argparse.Namespace, quantization: str, decoder: str, batch: int) -> Iterator[Row]:
    """The rows of one model, from two new processes: one compiles with empty caches and traces two steps, the other
    finds what that left in them and measures."""
    command = _arguments(options, quantization, decoder, batch)
    with empty_caches():
        cold = child([*command, "--compile-only"])
        for record in child(command):
            row = Row.from_dict(record)
            _say_limit(batch, row.bytes_per_step or 0, row.read_bandwidth_bytes_per_s or 0.0)
            seen = {"compile_cold_s": cold["compile_s"], "compile_cold_phases_s": cold["phases_s"], **cold["traced"]}
            # The command and the commit are for this process to say.
            yield replace(row, **seen, compile_warm_s=row.compile_s, command=None, commit=None)


def _arguments(options: argparse.Namespace, quantization: str, decoder: str, batch: int) -> list[str]:
    """These options for one model alone, without --compile-times."""
    source = ["--random", options.random] if options.random else ["--checkpoint", str(options.checkpoint.resolve())]
    kept = ("device", "dtype", "compile_mode", "settings", "max_seq_len", "temperature", "top_k", "repetitions")
    chosen = {name: getattr(options, name) for name in kept}
    chosen |= {"quantize": quantization, "decoders": decoder, "batch": batch}
    lists = {name: getattr(options, name) for name in ("prompt_tokens", "new_tokens", "positions")}
    chosen |= {name: values and ",".join(map(str, values)) for name, values in lists.items()}
    given = [f"--{name.replace('_', '-')}={value}" for name, value in chosen.items() if value is not None]
    flags = {"--allow-no-graphs": options.allow_no_graphs, "--compile-prefill": options.compile_prefill}
    return [*source, *given, *(flag for flag, wanted in flags.items() if wanted)]


def child(arguments: list[str]) -> Any:
    """The JSON that this bench, run in a process of its own, leaves on the last line of its standard output."""
    command = [sys.executable, "-m", "bench.decode", *arguments]
    done = subprocess.run(command, cwd=machine.ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"bench.decode {' '.join(arguments)}: {(done.stderr.splitlines() or ['?'])[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def compile_only(options: argparse.Namespace) -> dict[str, Any]:
    """The first child's part."""
    subject = workload.load(options, options.quantize[0])
    (decoder,), (batch,), params = options.decoders, options.batch, workload.sampling(options)
    with workload.generator(subject, decoder, options, positions=_room(options), batch=batch) as generator:
        generator.warm_up(params)
        cuda = generator.device.type == "cuda"
        return {
            "compile_s": generator.compile_s,
            "phases_s": generator.compilation()["phases_s"],
            "traced": traced_steps(generator, params, options.allow_no_graphs) if cuda else {},
        }


def traced_steps(generator: Generator, params: SamplingParams, allow_no_graphs: bool = False) -> dict[str, int]:
    """Kernels and graph launches of a decode step in a trace of two. Raises RuntimeError where the two differ, or no
    graph was launched though the counters say so."""
    generator.begin([0] * generator.batch, [0] * generator.batch, params)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        steps = [profiling.Step(f"decode[{position}]", generator.step) for position in (4, 5)]
        profiling.capture(path, steps, {}, generator.device)
        traced = trace_report.load(path).steps
    kernels = [len(step.kernels) for step in traced]
    launches = [
        len({kernel.launch.start for kernel in step.kernels if kernel.launch and trace_report.is_graph(kernel.launch)})
        for step in traced
    ]
    if len(set(kernels)) != 1 or kernels[0] == 0:
        raise RuntimeError(f"the traced steps have {kernels} kernels: they should have the same number")
    captures = generator.compile_mode is not None and captures_graphs(generator.compile_mode)
    if captures and 0 in launches and not allow_no_graphs:
        raise RuntimeError(f"the traced steps show {launches} graph launches")
    return {"traced_kernels_per_step": kernels[0], "traced_graph_launches_per_step": launches[0]}


# --- Command line ----------------------------------------------------------------------------------------------------


def _room(options: argparse.Namespace) -> int:
    """Positions that the longest case needs."""
    return max(case.position + case.new_tokens for case in cases(options))


def _say_limit(batch: int, step: int, bandwidth: float) -> None:
    limit = batch * bandwidth / step
    say(f"limit {limit:,.1f} tok/s: {step / 1e9:.3f} GB a step of {batch}, read at {bandwidth / 1e9:,.1f} GB/s")


def measured(options: argparse.Namespace) -> Iterator[Row]:
    """All rows that the options ask for; of two models, the first is gone before the second is built."""
    reading = Spread(0.0, 0.0, 0.0)
    for quantization, decoder, batch in itertools.product(options.quantize, options.decoders, options.batch):
        if options.compile_times and decoder != "eager":
            yield from cold_and_warm(options, quantization, decoder, batch)
            continue
        reading = max(reading, read_bandwidth(choose_device(options.device)))  # the best so far: others may take some
        yield from _measured(options, quantization, decoder, batch, reading)


def _measured(
    options: argparse.Namespace, quantization: str, decoder: str, batch: int, reading: Spread
) -> Iterator[Row]:
    params, device = workload.sampling(options), choose_device(options.device)
    subject = workload.load(options, quantization)
    machine.reset_peak_memory(device)  # building random weights, and quantising them in memory, is no user's peak
    settings = {"batch": batch, "compile_prefill": decoder != "eager" and options.compile_prefill}
    with workload.generator(subject, decoder, options, positions=_room(options), **settings) as generator:
        generator.warm_up(params)
        compile_s = generator.compile_s or None  # of the step: prefill is compiled when it is first asked for
        for case in cases(options):
            step = generator.bytes_per_step(case.position + case.new_tokens // 2)
            _say_limit(batch, step, reading.median)
            row = measure(generator, case, params, options.repetitions, reading.median)
            yield replace(row, **subject.fields, compile_s=compile_s)


def main() -> None:
    parser = workload.parser("decode", __doc__)
    workload.add_quantize_option(parser)
    workload.add_decode_options(parser)
    group = parser.add_argument_group("measurement")
    group.add_argument("--decoders", type=workload.decoders, default=["eager", "compiled"], metavar="NAME,...")
    group.add_argument("--batch", type=workload.listed(rows.whole(1)), default=[1], metavar="N,...")
    group.add_argument("--prompt-tokens", type=workload.listed(rows.whole(1)), default=[5], metavar="N,...")
    group.add_argument("--new-tokens", type=workload.listed(rows.whole(1)), default=[200], metavar="N,...")
    group.add_argument("--positions", type=workload.listed(rows.whole(0)), metavar="N,...", help="of starts")
    group.add_argument("--compile-prefill", action="store_true", help="also prefill: the time to the first token")
    group.add_argument("--repetitions", type=rows.whole(1), default=7)
    group.add_argument("--compile-times", action="store_true", help="also cold and warm, in fresh processes")
    group.add_argument("--compile-only", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile_only:
        print(json.dumps(compile_only(options)))
        return
    report = rows.Report(options, choose_device(options.device), COLUMNS)
    for row in measured(options):
        report.add(row)
    report.finish()


if __name__ == "__main__":
    rows.run(main)

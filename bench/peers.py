"""The same work by what a user would run instead: same weights, prompt, sampling, machine and run.

Every repetition lets each engine generate once, in turn (A B A B), so that a machine that speeds up or slows down
treats all alike; the ratio is taken within a repetition. An engine's decode time is what it needs for the tokens after
the first. A peer that is not installed is named with the line that installs it.
"""

import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from bench import rows, workload
from bench.bandwidth import read_bandwidth
from bench.gguf_file import write_gguf
from bench.rows import Row, Spread, say
from bench.workload import Subject
from engine import DECODERS, Generator, SamplingParams
from generate import choose_device
from model import ModelConfig

COLUMNS = (
    *("model", "precision", "decoder", "prompt", "new", "rate", "p10", "p90", "share", "ttft"),
    *("ratio", "ratio_p10", "ratio_p90"),
)


class Timing(NamedTuple):
    first_token_s: float
    decode_s: float  # of the tokens after the first


class Engine(Protocol):
    name: str
    bytes_per_step: int

    def run(self, prompt: list[int], new_tokens: int) -> Timing:
        """Generate that many tokens, two at least, whatever they are."""
        ...


@dataclass(frozen=True)
class Work:
    """What a peer is given."""

    plain: Subject  # the weights as stored
    source: Path | None  # the checkpoint directory they came from
    params: SamplingParams
    prompt_tokens: int
    new_tokens: int
    bytes_per_step: int  # of the plain weights, as this project counts them

    @property
    def position(self) -> int:
        """Of the middle step."""
        return self.prompt_tokens + self.new_tokens // 2


class Ours:
    def __init__(self, generator: Generator, params: SamplingParams, position: int) -> None:
        self.name = generator.decoder
        self.bytes_per_step = generator.bytes_per_step(position)
        self._generator, self._params = generator, params

    def run(self, prompt: list[int], new_tokens: int) -> Timing:
        (done,) = self._generator.generate_ids(
            [prompt], max_new_tokens=new_tokens, params=self._params, ignore_eos=True
        )
        assert done.time_to_first_token_s is not None and done.decode_tok_per_s is not None
        return Timing(done.time_to_first_token_s, (new_tokens - 1) / done.decode_tok_per_s)


class Transformers:
    """transformers' `generate`: a dynamic cache and eager steps, or a static cache and compiled ones."""

    def __init__(self, work: Work, *, compiled: bool) -> None:
        import transformers  # an extra: only where it is asked for

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        kind, cache = transformers.AutoModelForCausalLM, "static cache, compiled" if compiled else "dynamic cache"
        device, dtype = work.plain.device, work.plain.model.embed_tokens.weight.dtype
        if work.source is not None:
            model = kind.from_pretrained(work.source, dtype=dtype).to(device)
        else:
            with device:
                model = kind.from_config(_shape(work.plain.model.config), dtype=dtype)
        model.generation_config = transformers.GenerationConfig(pad_token_id=0)  # no end-of-sequence token
        self.name = f"transformers {transformers.__version__}, {cache}"
        self.bytes_per_step = work.bytes_per_step
        self._model, self._device = model.eval(), device
        self._options: dict[str, Any] = {"do_sample": False}
        if work.params.temperature:
            self._options = {"do_sample": True, "temperature": work.params.temperature, "top_k": work.params.top_k}
        if compiled:
            self._options |= {"cache_implementation": "static", "compile_config": _compile_config(device)}

    def run(self, prompt: list[int], new_tokens: int) -> Timing:
        ids, arrivals = torch.tensor([prompt], device=self._device), _Arrivals()
        began = time.perf_counter()
        with torch.no_grad():
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                streamer=arrivals,
                **self._options,
            )
        _prompt, first, *later = arrivals.times
        assert len(later) == new_tokens - 1
        return Timing(first - began, later[-1] - first)


class _Arrivals:
    """A streamer of transformers that notes when the prompt and each token come."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def _shape(config: ModelConfig) -> Any:
    """transformers' configuration of the same shape (rotary scaling, which costs nothing in a step, left out)."""
    import transformers

    names = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"),
    )
    return transformers.AutoConfig.for_model(config.model_type, **{name: getattr(config, name) for name in names})


def _compile_config(device: torch.device) -> Any:
    """transformers compiles on GPUs only, unless told otherwise."""
    import transformers

    config = transformers.CompileConfig(mode="reduce-overhead" if device.type == "cuda" else "default")
    config._compile_all_devices = True
    return config


class LlamaCpp:
    """llama.cpp through llama-cpp-python, on the CPU, from a GGUF file of the same weights."""

    def __init__(self, work: Work, precision: str) -> None:
        import llama_cpp

        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "model.gguf"
            self.bytes_per_step = write_gguf(work.plain.model, path, precision) + self._other_bytes(work)
            settings = {"n_ctx": work.prompt_tokens + work.new_tokens, "n_threads": torch.get_num_threads()}
            self._llama = llama_cpp.Llama(str(path), **settings, use_mmap=False, verbose=False)
        self.name = f"llama-cpp-python {llama_cpp.__version__}, {precision}"
        self._options = {"temp": work.params.temperature, "top_k": work.params.top_k, "top_p": 1.0, "min_p": 0.0}

    @staticmethod
    def _other_bytes(work: Work) -> int:
        """Keys and values in fp16 up to the middle step, and logits in fp32."""
        config = work.plain.model.config
        slot = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        return slot * (work.position + 1) + 4 * config.vocab_size

    def run(self, prompt: list[int], new_tokens: int) -> Timing:
        self._llama.reset()  # without it a known prompt would not be prefilled
        began = time.perf_counter()
        tokens = self._llama.generate(prompt, **self._options)
        next(tokens)
        first = time.perf_counter()
        for _ in range(new_tokens - 1):
            next(tokens)
        return Timing(first - began, time.perf_counter() - first)


class Peer(NamedTuple):
    module: str
    install: str
    cpu_only: bool
    quantization: str  # the precision of ours that it is compared with
    build: Callable[[Work], Engine]


PEERS = {
    "transformers": Peer(
        "transformers", "pip install -e '.[peers]'", False, "none", lambda work: Transformers(work, compiled=False)
    ),
    "transformers-compiled": Peer(
        "transformers", "pip install -e '.[peers]'", False, "none", lambda work: Transformers(work, compiled=True)
    ),
    "llama-cpp": Peer(
        "llama_cpp", "pip install llama-cpp-python gguf", True, "none", lambda work: LlamaCpp(work, "BF16")
    ),
    "llama-cpp-q8": Peer(
        "llama_cpp", "pip install llama-cpp-python gguf", True, "int8", lambda work: LlamaCpp(work, "Q8_0")
    ),
}


def present(names: list[str], device: torch.device) -> list[Peer]:
    """The peers that can run here; the others are named, with their install line."""
    found = []
    for name in names:
        peer = PEERS[name]
        if peer.cpu_only and device.type != "cpu":
            say(f"{name}: measured on the CPU only")
        elif importlib.util.find_spec(peer.module) is None:
            say(f"{name}: not installed ({peer.install})")
        else:
            found.append(peer)
    return found


def alternate(engines: list[Engine], prompt: list[int], new_tokens: int, repetitions: int) -> list[list[Timing]]:
    """Each engine's timings, taken in turn after one untimed round that compiles and warms."""
    for engine in engines:
        engine.run(prompt, new_tokens)
    rounds = [[engine.run(prompt, new_tokens) for engine in engines] for _ in range(repetitions)]
    return [list(timings) for timings in zip(*rounds, strict=True)]


def compare(
    engines: list[Engine], prompt: list[int], new_tokens: int, repetitions: int, bandwidth: float
) -> Iterator[Row]:
    """A row for each engine; those after the first say how many times faster the first was."""
    ours, *_ = timings = alternate(engines, prompt, new_tokens, repetitions)
    for engine, theirs in zip(engines, timings, strict=True):
        rates = Spread.of([(new_tokens - 1) / timing.decode_s for timing in theirs])
        ratios = Spread.of([b.decode_s / a.decode_s for a, b in zip(ours, theirs, strict=True)])
        first_token_s = Spread.of([timing.first_token_s for timing in theirs]).median
        row = Row(
            batch=1,
            prompt_tokens=len(prompt),
            new_tokens=new_tokens,
            position=len(prompt),
            decode_tok_per_s=rates.median,
            decode_tok_per_s_p10=rates.p10,
            decode_tok_per_s_p90=rates.p90,
            time_to_first_token_s=first_token_s,
            prefill_tok_per_s=len(prompt) / first_token_s,
            read_bandwidth_bytes_per_s=bandwidth,
            bytes_per_step=engine.bytes_per_step,
            share_of_limit=engine.bytes_per_step * rates.median / bandwidth,
        )
        if engine is engines[0]:
            yield replace(row, decoder=engine.name)
        else:
            yield replace(row, engine=engine.name, ratio=ratios.median, ratio_p10=ratios.p10, ratio_p90=ratios.p90)


def main() -> None:
    parser = workload.parser("peers", __doc__)
    workload.add_decode_options(parser)
    group = parser.add_argument_group("measurement")
    group.add_argument("--decoder", choices=DECODERS, help="ours (fused on CUDA, else compiled)")
    group.add_argument("--peers", type=workload.listed(str), default=list(PEERS), help=", ".join(PEERS))
    group.add_argument("--prompt-tokens", type=rows.whole(1), default=5, metavar="N", help="random ids")
    group.add_argument("--new-tokens", type=int, default=200, metavar="N")
    group.add_argument("--repetitions", type=rows.whole(1), default=7)
    options = parser.parse_args()
    device, params = choose_device(options.device), workload.sampling(options)
    decoder = options.decoder or ("fused" if device.type == "cuda" else "compiled")
    if unknown := set(options.peers) - PEERS.keys():
        raise ValueError(f"unknown peer {min(unknown)!r}: one of {', '.join(PEERS)}")
    if options.new_tokens < 2:
        raise ValueError("--new-tokens must be 2 or more: decoding is timed from the first token on")
    report, chosen = rows.Report(options, device, COLUMNS), present(options.peers, device)
    positions, middle = options.prompt_tokens + options.new_tokens, options.prompt_tokens + options.new_tokens // 2
    bandwidth = Spread(0.0, 0.0, 0.0)
    for quantization in dict.fromkeys(peer.quantization for peer in chosen):
        bandwidth = max(bandwidth, read_bandwidth(device))  # the best so far: others may take some of it meanwhile
        say(f"reading at {bandwidth.median / 1e9:,.1f} GB/s ({bandwidth.p10 / 1e9:,.1f} to {bandwidth.p90 / 1e9:,.1f})")
        plain, subject = workload.load(options), workload.load(options, quantization)
        if plain.quantization != "none":
            raise ValueError(f"{options.checkpoint}: peers need the weights as they were before quantisation")
        with workload.generator(subject, decoder, options, positions=positions) as generator:
            ours = Ours(generator, params, middle)
            lengths = (options.prompt_tokens, options.new_tokens)
            work = Work(plain, options.checkpoint, params, *lengths, ours.bytes_per_step)
            engines = [ours, *(peer.build(work) for peer in chosen if peer.quantization == quantization)]
            (prompt,) = workload.random_prompts(subject.model, 1, options.prompt_tokens)
            for row in compare(engines, prompt, options.new_tokens, options.repetitions, bandwidth.median):
                graphs = generator.graphs if row.decoder else None
                extra = {"temperature": params.temperature, "top_k": params.top_k, "graphs": graphs}
                report.add(replace(row, **subject.fields, **extra))
    report.finish()


if __name__ == "__main__":
    rows.run(main)

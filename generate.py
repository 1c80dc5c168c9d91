"""Generate text from a checkpoint: loading, streaming text, conversations, and the command line.

The only place that composes the other modules. Stacked, one concern each: `engine` makes token ids, `TextGenerator`
makes text of them, the command line prints it.

    from generate import TextGenerator
    llm = TextGenerator.load("checkpoints/SmolLM2-135M-Instruct")
    for piece in llm.stream("Gravity is", max_new_tokens=40): print(piece, end="", flush=True)
    print("".join(llm.chat().send("What is the capital of France?")))
    llm.close()
"""

import argparse
import io
import json
import os
import random
import select
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import torch

import quantize
import tracing
from bench import machine
from checkpoint import Checkpoint, check_targets, load_weights, open_checkpoint
from engine import (
    COMPILE_MODES,
    DEFAULT_CAPACITY,
    DEFAULT_SAMPLING,
    KERNELS,
    Completion,
    Generator,
    Run,
    SamplingParams,
    most_positions,
)
from model import RANDOM_SHAPES, ModelConfig, Transformer, cache_slots, materialize, randomize, skeleton
from tokenizer import TextStream, Tokenizer, load_tokenizer

DEFAULT_CHECKPOINT = Path("checkpoints/SmolLM2-135M-Instruct")
DEFAULT_PROMPT = "Once upon a time"
RANDOM_PROMPT_TOKENS = 5
CAPACITY_STEP = 256  # the context of a command-line run is rounded up to this, so that similar runs share compiled code
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


# --- Loading


class Loaded(NamedTuple):
    model: Transformer
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    checkpoint: Checkpoint


def choose_device(name: str = "auto") -> torch.device:
    """auto: CUDA where there is one, else CPU. ValueError where the device does not exist."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name not in available:
        raise ValueError(f"unknown device {name!r}: cpu, cuda or mps")
    if not available[name]:
        raise ValueError(f"device {name}: not available on this machine")
    return torch.device(name)


def choose_dtype(name: str, stored: torch.dtype, device: torch.device) -> torch.dtype:
    """auto: the dtype that the checkpoint is stored in, where the device computes in it."""
    if name != "auto" and name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}: auto, {', '.join(DTYPES)}")
    dtype = DTYPES.get(name, stored)
    if (
        dtype == torch.bfloat16
        and device.type == "cuda"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        if name != "auto":
            raise ValueError(f"dtype bf16: {torch.cuda.get_device_name(device)} does not compute in it; use fp16")
        print("dtype: fp16, since this GPU does not compute in bf16", file=sys.stderr)
        return torch.float16
    return dtype


def load_model(
    directory: str | Path, *, device: str = "auto", dtype: str = "auto", batch: int = 1, max_seq_len: int | None = None
) -> Loaded:
    """A checkpoint directory's model, in memory once, and its tokenizer. `batch` and `max_seq_len` serve to refuse,
    before anything is loaded, what would not fit. ValueError says in a line what is wrong, and where."""
    checkpoint, place = open_checkpoint(Path(directory)), choose_device(device)
    tokenizer = load_tokenizer(checkpoint.directory)
    config = checkpoint.config
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"{checkpoint.directory}: the tokenizer has {tokenizer.vocab_size} ids, the model {config.vocab_size}"
        )
    precision = choose_dtype(dtype, checkpoint.dtype, place)
    model = skeleton(config, precision)
    if checkpoint.quantization is not None:
        quantize.apply_quantization(model, checkpoint.quantization)
    targets = model.named_targets()
    check_targets(checkpoint, targets)
    require_memory(place, _bytes(targets), cache_bytes(config, precision, batch, max_seq_len))
    materialize(model, place)
    load_weights(checkpoint, model.named_targets(), progress=True)
    if checkpoint.quantization is not None:
        quantize.pack(model)
    return Loaded(model, tokenizer, checkpoint.eos_token_ids, checkpoint)


def random_model(
    name: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    quantize_mode: str | None = None,
    group_size: int | None = None,
    batch: int = 1,
    max_seq_len: int | None = None,
) -> Transformer:
    """Random weights in a published model's shape, made on the device: no file is read. `batch` and `max_seq_len` as
    in `load_model`."""
    config, place = random_shape(name), choose_device(device)
    precision = choose_dtype(dtype, torch.bfloat16, place)
    model = skeleton(config, precision)
    require_memory(place, _bytes(model.named_targets()), cache_bytes(config, precision, batch, max_seq_len))
    materialize(model, place)
    randomize(model)
    if quantize_mode is not None:
        quantize.quantize_in_memory(model, quantize_mode, group_size)
    return model


def random_shape(name: str) -> ModelConfig:
    """ValueError where there is none of this name."""
    if name not in RANDOM_SHAPES:
        raise ValueError(f"unknown shape {name!r}: one of {', '.join(RANDOM_SHAPES)}")
    return RANDOM_SHAPES[name]


def cache_bytes(config: ModelConfig, dtype: torch.dtype, batch: int, capacity: int | None) -> int:
    """What the keys and values of so many rows and positions take (None: as many as a Generator has by itself)."""
    capacity = min(most_positions(config), DEFAULT_CAPACITY) if capacity is None else capacity
    per_slot = config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize
    return 2 * batch * cache_slots(capacity) * per_slot


def _bytes(targets: Mapping[str, torch.Tensor]) -> int:
    return sum(target.numel() * target.element_size() for target in targets.values())


def require_memory(device: torch.device, weights: int, cache: int) -> None:
    """Refuse, with the figures, what does not fit into the device's free memory."""
    free = free_memory(device)
    if free is not None and weights + cache > free:
        gb = [f"{amount / 1e9:.2f} GB" for amount in (weights, cache, free)]
        raise ValueError(f"weights of {gb[0]} and a cache of {gb[1]} do not fit: {device.type} has {gb[2]} free")


def free_memory(device: torch.device) -> int | None:
    """Bytes; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text().splitlines() if meminfo.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)


# --- Text


class StopScanner:
    """Passes text on until a stop string appears, holding back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """-> the text that can be shown; nothing after a stop string, which is not shown itself."""
        if self.stopped:
            return ""
        self._held += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:  # the one that ends first counts, whatever the pieces that the text comes in
            shown, self._held, self.stopped = self._held[: min(found)[1]], "", True
            return shown
        kept = max((self._overlap(stop) for stop in self._stops), default=0)
        shown, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return shown

    def finish(self) -> str:
        """What was held back and turned out to be no stop string."""
        shown, self._held = self._held, ""
        return shown

    def _overlap(self, stop: str) -> int:
        """How much of the end of the held text begins this stop string."""
        return next((n for n in range(min(len(stop) - 1, len(self._held)), 0, -1) if self._held.endswith(stop[:n])), 0)


@dataclass
class TextCompletion:
    """One row's text (new tokens only) and the figures behind it."""

    completion: Completion
    text: str = ""


class _RowText:
    """Turns one row's ids into final pieces of text."""

    def __init__(self, stream: TextStream, stops: Sequence[str]) -> None:
        self._stream, self.scanner = stream, StopScanner(stops)

    def push(self, token: int) -> str:
        return self.scanner.push(self._stream.push(token))

    def finish(self) -> str:
        if self.scanner.stopped:
            return ""
        piece = self.scanner.push(self._stream.finish())
        return piece if self.scanner.stopped else piece + self.scanner.finish()


class TextRun:
    """A generation of text under way: iterate for (row, piece) at every token, the piece empty where no text is final
    yet; `completions` fills up meanwhile."""

    def __init__(self, run: Run, streams: Sequence[TextStream], stops: Sequence[str]) -> None:
        self._run = run
        self._rows = [_RowText(stream, stops) for stream in streams]
        self.completions = [TextCompletion(completion) for completion in run.completions]

    def __iter__(self) -> Iterator[tuple[int, str]]:
        open_rows = set(range(len(self._rows)))
        for tokens in self._run:
            for row in sorted(open_rows):
                text, token = self._rows[row], tokens[row]
                piece = "" if token is None else text.push(token)
                if text.scanner.stopped:
                    self._run.stop(row)
                if self.completions[row].completion.finish_reason is not None:
                    open_rows.discard(row)
                    piece += text.finish()
                    if text.scanner.stopped:
                        self.completions[row].completion.finish_reason = "stop"
                self.completions[row].text += piece
                yield row, piece


class TextGenerator:
    """A checkpoint ready to generate text. Settings of `Generator` are passed on to it."""

    def __init__(self, loaded: Loaded, **settings: Any) -> None:
        self.tokenizer = loaded.tokenizer
        self.generator = Generator(loaded.model, eos_token_ids=loaded.eos_token_ids, **settings)

    @classmethod
    def load(
        cls, directory: str | Path, *, device: str = "auto", dtype: str = "auto", **settings: Any
    ) -> "TextGenerator":
        """Load a checkpoint directory; see `load_model` and `Generator` for the settings and errors."""
        room = {name: settings[name] for name in ("batch", "max_seq_len") if name in settings}
        return cls(load_model(directory, device=device, dtype=dtype, **room), **settings)

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams = DEFAULT_SAMPLING,
        *,
        max_new_tokens: int = 200,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        reuse: bool = False,
        answers: bool = False,
    ) -> TextRun:
        """Generate text for prompts of token ids, one row each. answers: the text begins anew, and does not continue
        the prompt's (which decides whether a first space belongs to it)."""
        stop = [stop] if isinstance(stop, str) else stop  # a text is a sequence of texts too, but not meant as one
        if "" in stop:
            raise ValueError("a stop string must not be empty")
        run = self.generator.start(prompts, params, max_new_tokens=max_new_tokens, ignore_eos=ignore_eos, reuse=reuse)
        return TextRun(run, [self.tokenizer.stream(() if answers else prompt) for prompt in prompts], stop)

    def generate(
        self, prompts: Sequence[str], params: SamplingParams = DEFAULT_SAMPLING, **options: Any
    ) -> list[TextCompletion]:
        """Generate for all prompts as one batch; options as in `run`. ValueError for a text in place of several."""
        if isinstance(prompts, str):
            raise ValueError("prompts must be several texts, as in [text], not one")
        run = self.run([self.tokenizer.encode(prompt) for prompt in prompts], params, **options)
        for _ in run:
            pass
        return run.completions

    def stream(self, prompt: str, params: SamplingParams = DEFAULT_SAMPLING, **options: Any) -> Iterator[str]:
        """Generate for one prompt, piece by piece, each as soon as it is final; options as in `run`."""
        for _, piece in self.run([self.tokenizer.encode(prompt)], params, **options):
            if piece:
                yield piece

    def chat(self) -> "Conversation":
        """A conversation by the checkpoint's own chat template. ValueError where it has none."""
        return Conversation(self)

    def close(self) -> None:
        self.generator.close()


@dataclass
class Conversation:
    """Turns of a chat; the cache keeps the earlier ones, so that only a new turn is prefilled."""

    llm: TextGenerator
    messages: list[dict[str, str]] = field(default_factory=list)
    last: TextCompletion | None = None

    def send(self, text: str, params: SamplingParams = DEFAULT_SAMPLING, **options: Any) -> Iterator[str]:
        """Ask, and yield the answer piece by piece, one at every token (some are empty), so that it can be broken off
        between any two. It then counts as far as it came; a question that cannot be asked (ValueError) is not kept."""
        asked = [*self.messages, {"role": "user", "content": text}]
        run = self.llm.run([self.llm.tokenizer.chat(asked)], params, reuse=True, answers=True, **options)
        self.messages, self.last = asked, run.completions[0]
        try:
            for _, piece in run:
                yield piece
        finally:
            self.messages.append({"role": "assistant", "content": self.last.text})


# --- Command line


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="generate.py", description="Generate text from a checkpoint, or time and trace the decode step."
    )
    source = parser.add_argument_group("model")
    source.add_argument("--checkpoint", type=Path, metavar="DIR", help=f"checkpoint directory ({DEFAULT_CHECKPOINT})")
    source.add_argument("--random", metavar="NAME", help=f"random weights in a known shape: {', '.join(RANDOM_SHAPES)}")
    source.add_argument("--quantize", metavar="MODE", choices=quantize.MODES, help="with --random: int8, int4 or fp8")
    source.add_argument("--group-size", type=int, help="with --quantize int4: weights that share a scale")

    text = parser.add_argument_group("text")
    text.add_argument(
        "--prompt", action="append", metavar="TEXT", help="several make a batch (default: a fairy tale's start)"
    )
    text.add_argument("--chat", action="store_true", help="each prompt is a message, by the checkpoint's chat template")
    text.add_argument("--interactive", action="store_true", help="a conversation; Ctrl-C ends an answer, Ctrl-D leaves")
    text.add_argument("--max-new-tokens", type=int, default=200, metavar="N")
    text.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated"
    )
    text.add_argument("--ignore-eos", action="store_true", help="go on past the end-of-sequence token")
    text.add_argument(
        "--num-samples", type=int, default=1, metavar="N", help="samples a prompt, with seeds S, S+1, ..."
    )

    sampling, defaults = parser.add_argument_group("sampling"), DEFAULT_SAMPLING
    sampling.add_argument(
        "--temperature", type=float, default=defaults.temperature, metavar="T", help="0: the likeliest token"
    )
    sampling.add_argument("--top-k", type=int, default=defaults.top_k, metavar="K", help="0: off")
    sampling.add_argument("--top-p", type=float, default=defaults.top_p, metavar="P", help="1: off")
    sampling.add_argument("--min-p", type=float, default=defaults.min_p, metavar="P", help="0: off")
    sampling.add_argument(
        "--repetition-penalty", type=float, default=defaults.repetition_penalty, metavar="R", help="1: off"
    )
    sampling.add_argument("--seed", type=int, metavar="S", help="default: random, and reported")

    machine = parser.add_argument_group("machine")
    machine.add_argument("--device", default="auto", help="cpu, cuda or mps (cuda where there is one, else cpu)")
    machine.add_argument("--dtype", default="auto", help="auto, bf16, fp16 or fp32 (auto: as stored)")
    machine.add_argument("--max-seq-len", type=int, metavar="N", help="context (prompt and new tokens, rounded up)")

    speed = parser.add_argument_group("compilation")
    speed.add_argument("--compile", action=argparse.BooleanOptionalAction, help="compile the decode step (on CUDA)")
    speed.add_argument("--compile-mode", choices=COMPILE_MODES, default=COMPILE_MODES[0])
    speed.add_argument("--kernels", choices=KERNELS, default=KERNELS[0], help="triton: this project's own")
    speed.add_argument(
        "--compile-prefill", action=argparse.BooleanOptionalAction, help="compile prefill too (with --profile only)"
    )
    speed.add_argument("--allow-no-graphs", action="store_true", help="go on when CUDA graphs were skipped")

    output = parser.add_argument_group("output")
    output.add_argument(
        "--profile", type=Path, metavar="DIR", help="then time and trace every path, eager and compiled, and report"
    )
    output.add_argument("--profile-gzip", action="store_true", help="write the traces as .json.gz")
    output.add_argument("--nvtx", action="store_true", help="with --profile: mark the steps for Nsight Systems too")
    output.add_argument("--json", action="store_true", help="one JSON object a sample on stdout, and no other text")
    options = parser.parse_args(arguments)
    _check_arguments(options)
    return options


def _check_arguments(options: argparse.Namespace) -> None:
    def require(condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(message)

    require(not (options.checkpoint and options.random), "--checkpoint and --random exclude each other")
    require(not options.quantize or options.random, "--quantize goes with --random; quantize.py rewrites a checkpoint")
    require(options.group_size is None or options.quantize == "int4", "--group-size goes with --quantize int4")
    require(not options.random or not (options.prompt or options.chat or options.interactive or options.stop),
            "--random has no tokenizer: no --prompt, --chat, --interactive or --stop")  # fmt: skip
    require(options.max_new_tokens >= 1, f"--max-new-tokens must be 1 or more, not {options.max_new_tokens}")
    require(options.num_samples >= 1, f"--num-samples must be 1 or more, not {options.num_samples}")
    require(options.max_seq_len is None or options.max_seq_len >= 1, "--max-seq-len must be 1 or more")
    require("" not in options.stop, "--stop must not be empty")
    require(options.compile is not False or not (options.compile_prefill or options.kernels == "triton"),
            "--compile-prefill and --kernels triton exclude --no-compile")  # fmt: skip
    require(options.kernels != "triton" or options.compile or torch.cuda.is_available(),
            "--kernels triton needs --compile, which is off without a GPU")  # fmt: skip
    require(not (options.interactive and (options.json or options.num_samples > 1 or options.profile)),
            "--interactive excludes --json, --num-samples and --profile")  # fmt: skip
    require(options.profile or not (options.profile_gzip or options.nvtx),
            "--profile-gzip and --nvtx go with --profile")  # fmt: skip
    require(not options.profile or (options.max_seq_len or tracing.CAPACITY) >= tracing.LEAST_CAPACITY,
            f"--profile needs a context of {tracing.LEAST_CAPACITY} positions at least")  # fmt: skip
    require(not options.nvtx or torch.cuda.is_available(), "--nvtx needs an NVIDIA GPU")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. -> exit status: 0, 1 (the run failed), 2 (a user's mistake)."""
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # text that the terminal cannot show is no reason to stop
        if sys.stderr is None:  # closed by the shell; print() would take stdout instead
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        arguments = sys.argv[1:] if arguments is None else arguments
        options = parse_arguments(arguments)
        options.command = shlex.join(["python", "generate.py", *arguments])
        if options.profile:
            options.profile.mkdir(parents=True, exist_ok=True)  # before anything is computed
        params = SamplingParams(
            options.temperature, options.top_k, options.top_p, options.min_p, options.repetition_penalty, options.seed
        ).with_seed()
        _nth(params, options.num_samples - 1)  # refused now, if that seed is too large
        return _run_random(options, params) if options.random else _run_checkpoint(options, params)
    except BrokenPipeError:  # whoever read the text has left; the flush at exit must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _fail(error, 2 if error.filename else 1)  # a file that was named, or the output: a full disk, say
    except ValueError as error:
        return _fail(error, 2)
    except (RuntimeError, MemoryError) as error:  # out of memory, a failed compilation, graphs that did not run
        return _fail(error, 1)
    except KeyboardInterrupt:
        return 130


def _fail(error: BaseException, status: int) -> int:
    print(f"error: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
    return status


def _settings(options: argparse.Namespace, batch: int, capacity: int) -> dict[str, Any]:
    return {
        "batch": batch,
        "max_seq_len": capacity,
        "compile": options.compile,
        "kernels": options.kernels,
        "compile_mode": options.compile_mode,
        "compile_prefill": bool(options.compile_prefill),
        "allow_no_graphs": options.allow_no_graphs,
        "rotary_length": options.max_seq_len,
    }


def _capacity(options: argparse.Namespace, longest: int | None, config: ModelConfig) -> int:
    """Positions to provide: as asked, or enough for the longest prompt and its new tokens, and for a profile.
    longest: None for a conversation. Raises ValueError where the prompt or the model does not go with them."""
    capacity = options.max_seq_len
    if capacity is None:
        wanted = DEFAULT_CAPACITY if longest is None else longest + options.max_new_tokens
        wanted = max(-(-wanted // CAPACITY_STEP) * CAPACITY_STEP, tracing.CAPACITY if options.profile else 0)
        capacity = min(wanted, config.max_position_embeddings)
    if capacity > most_positions(config):
        raise ValueError(f"--max-seq-len {capacity}: the model knows {most_positions(config)} positions")
    if longest is not None and longest > capacity:
        raise ValueError(f"the prompt has {longest} tokens, the context {capacity}")
    return capacity


def _own(model: Transformer, options: argparse.Namespace) -> Transformer:
    """The model for a Generator to change: with --profile a second tree of modules, as the first is needed after it."""
    return tracing.sharing_weights(model) if options.profile else model


def _profile(
    options: argparse.Namespace,
    model: Transformer,
    prompt: Sequence[int],
    params: SamplingParams,
    settings: dict[str, Any],
    name: str,
    quantization: str,
) -> int:
    """Where asked for: every path timed, traced and reported. -> exit status."""
    if not options.profile:
        return 0
    verified = tracing.profile(
        model,
        prompt,
        options.profile,
        params=params,
        settings=settings | {"compile_prefill": options.compile_prefill is not False},
        facts={"model": name, "quantization": quantization, "command": options.command},
        compress=options.profile_gzip,
        nvtx=options.nvtx,
    )
    return 0 if verified else 1


def _run_random(options: argparse.Namespace, params: SamplingParams) -> int:
    config = random_shape(options.random)
    capacity = _capacity(options, RANDOM_PROMPT_TOKENS, config)
    model = random_model(
        options.random,
        device=options.device,
        dtype=options.dtype,
        quantize_mode=options.quantize,
        group_size=options.group_size,
        max_seq_len=capacity,
    )
    draw = random.Random(params.seed)
    prompt = [draw.randrange(config.vocab_size) for _ in range(RANDOM_PROMPT_TOKENS)]
    settings = _settings(options, 1, capacity)
    with Generator(_own(model, options), **settings) as generator:
        for sample in range(options.num_samples):
            (completion,) = generator.generate_ids(
                [prompt],
                max_new_tokens=options.max_new_tokens,
                params=_nth(params, sample),
                ignore_eos=options.ignore_eos,
            )
            _report(options, generator, TextCompletion(completion, " ".join(map(str, completion.tokens))))
    return _profile(options, model, prompt, params, settings, options.random, options.quantize or "none")


def _run_checkpoint(options: argparse.Namespace, params: SamplingParams) -> int:
    directory = options.checkpoint or DEFAULT_CHECKPOINT
    if options.checkpoint is None and not directory.exists():
        raise ValueError(f"{directory}: no such directory (scripts/demo.sh fetches it, or name one with --checkpoint)")
    texts = options.prompt or ([] if options.interactive else [DEFAULT_PROMPT])
    if options.interactive and texts:
        raise ValueError("--interactive asks for its own prompts: no --prompt")
    checkpoint, tokenizer = open_checkpoint(directory), load_tokenizer(directory)
    if (options.chat or options.interactive) and not tokenizer.has_chat_template:
        raise ValueError(f"{directory}: no chat template, so neither --chat nor --interactive")
    encode = (lambda text: tokenizer.chat([{"role": "user", "content": text}])) if options.chat else tokenizer.encode
    prompts = [encode(text) for text in texts]
    capacity = _capacity(options, max(map(len, prompts), default=None), checkpoint.config)
    loaded = load_model(
        directory, device=options.device, dtype=options.dtype, batch=max(len(prompts), 1), max_seq_len=capacity
    )
    settings = _settings(options, max(len(prompts), 1), capacity)
    llm = TextGenerator(loaded._replace(model=_own(loaded.model, options)), **settings)
    try:
        if options.interactive:
            return _converse(options, llm, params)
        for sample in range(options.num_samples):
            _print_batch(options, llm, prompts, _nth(params, sample))
    finally:
        llm.close()
    record = loaded.checkpoint.quantization
    precision = "none" if record is None else quantize.label(record)
    return _profile(options, loaded.model, prompts[0], params, settings, directory.resolve().name, precision)


def _nth(params: SamplingParams, sample: int) -> SamplingParams:
    """The settings of one of several samples: the seed goes up by one."""
    assert params.seed is not None
    return replace(params, seed=params.seed + sample)


def _ends(options: argparse.Namespace) -> dict[str, Any]:
    return {"max_new_tokens": options.max_new_tokens, "stop": options.stop, "ignore_eos": options.ignore_eos}


def _print_batch(
    options: argparse.Namespace, llm: TextGenerator, prompts: list[list[int]], params: SamplingParams
) -> None:
    run = llm.run(prompts, params, answers=options.chat, **_ends(options))
    streaming = len(prompts) == 1 and not options.json
    for _, piece in run:
        if streaming:
            print(piece, end="", flush=True)
    if streaming:
        print(flush=True)
    for completion in run.completions:
        _report(options, llm.generator, completion, shown=streaming)


def _report(options: argparse.Namespace, generator: Generator, result: TextCompletion, shown: bool = False) -> None:
    """One sample's text to stdout, unless it was shown as it came, and its figures to stderr; or all as JSON."""
    if options.json:
        print(json.dumps(describe(generator, result)), flush=True)
        return
    if not shown:
        print(result.text, flush=True)
    completion = result.completion
    rate = "-" if completion.decode_tok_per_s is None else f"{completion.decode_tok_per_s:.1f}"
    first = "-" if completion.time_to_first_token_s is None else f"{completion.time_to_first_token_s * 1e3:.1f} ms"
    graphs = "" if generator.graphs == "none" else f", graphs {generator.graphs}"
    print(
        f"[{generator.decoder}{graphs}: {completion.prompt_tokens} + {completion.new_tokens} tokens, {rate} tok/s, "
        f"first token after {first}, ended by {completion.finish_reason}, seed {completion.seed}]",
        file=sys.stderr,
    )


def describe(generator: Generator, result: TextCompletion) -> dict[str, Any]:
    """The fields of --json: seconds, bytes, tokens per second."""
    completion, device = result.completion, generator.device
    rate = completion.decode_tok_per_s
    middle = completion.prompt_tokens + completion.new_tokens // 2
    return {
        "text": result.text,
        "tokens": completion.tokens,
        "prompt_tokens": completion.prompt_tokens,
        "new_tokens": completion.new_tokens,
        "finish_reason": completion.finish_reason,
        "time_to_first_token_s": completion.time_to_first_token_s,
        "prefill_tok_per_s": completion.prefill_tok_per_s,
        "decode_tok_per_s": rate,
        "compile_s": generator.compile_s,
        "peak_memory_bytes": machine.peak_memory(device),
        "decoder": generator.decoder,
        "graphs": generator.graphs,
        "bandwidth_bytes_per_s": None if rate is None else rate * generator.bytes_per_step(middle),
        "seed": completion.seed,
        "device": device.type,
        "device_name": machine.device_name(device),
        "dtype": str(generator.model.embed_tokens.weight.dtype).removeprefix("torch."),
    }


def _converse(options: argparse.Namespace, llm: TextGenerator, params: SamplingParams) -> int:
    """Answer line after line, until their end."""
    conversation = llm.chat()
    with _Interrupts() as interrupts:
        for turn, line in enumerate(iter(lambda: _ask(interrupts), "")):
            try:
                with closing(conversation.send(line, _nth(params, turn), **_ends(options))) as pieces:
                    for piece in pieces:
                        print(piece, end="", flush=True)
                        if interrupts.noted:  # after the piece: the conversation remembers what was shown
                            break
            except ValueError as error:  # the conversation is full, say: it stays open, for the user to leave
                _fail(error, 2)
            else:
                print(flush=True)
    return 0


class _Interrupts:
    """Ctrl-C in a conversation: noted, never raised, so that an answer ends between two of its tokens and not inside a
    step. A signal that comes just before a read does not end it: hence a pipe, to be waited for beside the input."""

    def __enter__(self) -> "_Interrupts":
        self.noted = False
        self.wake, self._waker = os.pipe()
        for end in (self.wake, self._waker):
            os.set_blocking(end, False)
        self._before = signal.signal(signal.SIGINT, self._note), signal.set_wakeup_fd(self._waker)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._before[1])
        signal.signal(signal.SIGINT, self._before[0])
        os.close(self.wake)
        os.close(self._waker)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.noted = True

    def forget(self) -> None:
        self.noted = False
        with suppress(BlockingIOError):
            os.read(self.wake, 1 << 16)


def _ask(interrupts: _Interrupts) -> str:
    """The user's next line that says anything; empty at the end of the input."""
    if sys.stdin is None:
        return ""
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as lines:  # nothing is read ahead, past a `select`
        while True:
            interrupts.forget()
            print("> ", end="", file=sys.stderr, flush=True)
            if interrupts.wake in select.select([lines, interrupts.wake], [], [])[0]:
                print(file=sys.stderr)
                continue
            line = lines.readline().decode(errors="replace")
            if line.strip() or not line:
                return line.rstrip("\r\n")


if __name__ == "__main__":
    sys.exit(main())

"""What a bench runs: the options that choose it, the model, its generator, random prompts, sampling."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import quantize
from bench import rows
from engine import COMPILE_MODES, DECODERS, DEFAULT_SAMPLING, Generator, SamplingParams
from generate import CAPACITY_STEP, load_model, random_model
from model import RANDOM_SHAPES, Transformer
from tokenizer import Tokenizer


def listed(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """An argparse type: values separated by commas."""

    def values(text: str) -> list[Any]:
        return [kind(part) for part in text.split(",")]

    return values


def precision(text: str) -> str:
    """An argparse type: what rows call a precision. "int4" means groups of 64: "int4-g64"."""
    mode, _, group = text.partition("-g")
    if text != "none" and (mode not in quantize.MODES or ("-g" in text and (mode != "int4" or not group.isdigit()))):
        raise argparse.ArgumentTypeError(f"unknown precision {text!r}: none, {', '.join(quantize.MODES)} or int4-g128")
    return f"int4-g{quantize.DEFAULT_GROUP_SIZE}" if text == "int4" else text


def parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """The options that the benches of a model share."""
    result = rows.parser(name, doc)
    group = result.add_argument_group("model")
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument("--checkpoint", type=Path, metavar="DIR")
    source.add_argument("--random", choices=RANDOM_SHAPES, metavar="NAME", help=", ".join(RANDOM_SHAPES))
    group.add_argument("--device", default="auto", help="cpu, cuda or mps (cuda where there is one, else cpu)")
    group.add_argument("--dtype", default="auto", help="auto, bf16, fp16 or fp32 (auto: as stored)")
    rows.add_options(result)
    return result


def add_quantize_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quantize",
        type=listed(precision),
        default=["none"],
        metavar="MODE,...",
        help="quantise in memory: none, int8, fp8, int4 or int4-g128 (groups of 128)",
    )


def add_decode_options(parser: argparse.ArgumentParser) -> None:
    """How tokens are drawn, and how the decode step is built."""
    group = parser.add_argument_group("decoding")
    group.add_argument("--temperature", type=float, default=DEFAULT_SAMPLING.temperature)
    group.add_argument("--top-k", type=int, default=DEFAULT_SAMPLING.top_k, help="0: off")
    group.add_argument("--compile-mode", choices=COMPILE_MODES, default=COMPILE_MODES[0])
    group.add_argument("--settings", choices=("ours", "plain"), default="ours", help="plain: Inductor's for the mode")
    group.add_argument("--allow-no-graphs", action="store_true", help="measure also where CUDA graphs were skipped")
    group.add_argument("--max-seq-len", type=rows.whole(1), metavar="N", help="of the caches (as needed)")


def decoders(text: str) -> list[str]:
    """An argparse type: names of decoders separated by commas."""
    names = text.split(",")
    if unknown := set(names) - DECODERS.keys():
        raise argparse.ArgumentTypeError(f"unknown decoder {min(unknown)!r}: one of {', '.join(DECODERS)}")
    return names


@dataclass(frozen=True)
class Subject:
    """A model to measure, and how rows name it."""

    name: str
    model: Transformer
    quantization: str
    tokenizer: Tokenizer | None = None

    @property
    def device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    @property
    def fields(self) -> dict[str, Any]:
        """What every row says of it."""
        return {"model": self.name, "dtype": self.dtype, "quantization": self.quantization}

    @property
    def dtype(self) -> str:
        names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
        return names[self.model.embed_tokens.weight.dtype]


def load(options: argparse.Namespace, quantization: str = "none", checkpoint: Path | None = None) -> Subject:
    """The model that the options name (or the given checkpoint), freshly built: a compiled Generator changes its model.
    Raises ValueError for a model that cannot be had."""
    mode, _, group = quantization.partition("-g")
    recipe = (None, None) if mode == "none" else (mode, int(group) if group else None)
    place = {"device": options.device, "dtype": options.dtype}
    checkpoint = checkpoint or options.checkpoint
    if checkpoint is None:
        model = random_model(options.random, **place, quantize_mode=recipe[0], group_size=recipe[1])
        return Subject(options.random, model, quantization)
    loaded = load_model(checkpoint, **place)
    if loaded.checkpoint.quantization is not None:
        if mode != "none":
            raise ValueError(f"{checkpoint}: quantised already, so --quantize cannot apply")
        quantization = quantize.label(loaded.checkpoint.quantization)
    elif mode != "none":
        quantize.quantize_in_memory(loaded.model, *recipe)
    return Subject(checkpoint.resolve().name, loaded.model, quantization, loaded.tokenizer)


def capacity(options: argparse.Namespace, positions: int, limit: int) -> int:
    """--max-seq-len, or room for so many positions of a model that knows `limit`. Raises ValueError for too few."""
    chosen = options.max_seq_len or min(-(-positions // CAPACITY_STEP) * CAPACITY_STEP, limit)
    if positions > chosen:
        raise ValueError(f"{chosen} positions are too few for this work: it needs {positions}")
    return chosen


def generator(
    subject: Subject, decoder: str, options: argparse.Namespace, *, positions: int, batch: int = 1, **settings: Any
) -> Generator:
    """A Generator with room for so many positions, or for as many as --max-seq-len says."""
    if options.settings == "plain":
        settings["project_settings"] = False
    return Generator(
        subject.model,
        batch=batch,
        max_seq_len=capacity(options, positions, subject.model.config.max_position_embeddings),
        compile_mode=options.compile_mode,
        allow_no_graphs=options.allow_no_graphs,
        note=rows.say,
        **DECODERS[decoder],
        **settings,
    )


def sampling(options: argparse.Namespace) -> SamplingParams:
    return SamplingParams(temperature=options.temperature, top_k=options.top_k)


def random_prompts(model: Transformer, batch: int, length: int) -> list[list[int]]:
    """The same ids for every decoder and every run."""
    source = torch.Generator().manual_seed(length)
    return torch.randint(model.config.vocab_size, (batch, length), generator=source).tolist()


def weight_bytes(model: Transformer) -> int:
    """Of all weights as they lie in memory, the embedding table included, a shared tensor once."""
    tensors = {
        tensor.data_ptr(): tensor.numel() * tensor.element_size()
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if ".cache." not in name and not name.startswith("rope.")
    }
    return sum(tensors.values())


def pairs(first: Sequence[int], second: Sequence[int], names: str) -> list[tuple[int, int]]:
    """Two lists, element by element; a list of one goes with every element of the other. Raises ValueError."""
    length = max(len(first), len(second))
    if {len(first), len(second)} - {1, length}:
        raise ValueError(f"{names}: {len(first)} and {len(second)} values do not pair up")
    wide = [list(values) * length if len(values) == 1 else list(values) for values in (first, second)]
    return list(zip(*wide, strict=True))

"""Perplexity of a text, and how closely one checkpoint or decoder follows another.

The text's tokens are cut into windows, each scored alone from its second token on; with a stride shorter than the
window, a window scores only what no earlier one has. `--decoder` scores by teacher-forced decode steps of that decoder;
without it a window is one forward pass, as in prefill.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

import fused
from bench import rows, workload
from bench.rows import Row
from bench.workload import Subject
from decoding import DecodeState
from engine import DECODERS, Generator, SamplingParams, most_positions
from generate import choose_device
from model import Transformer

COLUMNS = ("model", "precision", "decoder", "windows", "size", "perplexity", "agreement", "kl")

Scorer = Callable[[Sequence[int]], Tensor]  # ids [T] -> logits fp32 [T, V], on the device


class Window(NamedTuple):
    ids: list[int]
    first: int  # index of the first id that this window scores


def windows(ids: Sequence[int], length: int, stride: int, count: int | None) -> list[Window]:
    """Whole windows only, `count` of them or as many as there are. Raises ValueError for a text that is too short."""
    if not 1 <= stride <= length or length < 2:
        raise ValueError(f"windows of {length} tokens every {stride}: need at least 2 tokens and 1 <= stride <= length")
    starts = range(0, len(ids) - length + 1, stride)[:count]
    if not starts or (count is not None and len(starts) < count):
        raise ValueError(f"the text has {len(ids)} tokens: too few for {count or 1} windows of {length}")
    overlap = length - stride
    return [Window(list(ids[start : start + length]), max(overlap, 1) if start else 1) for start in starts]


@dataclass
class Tally:
    """Sums over the tokens scored so far."""

    tokens: int = 0
    nll: float = 0.0
    agreed: int = 0
    kl: float = 0.0

    def add(self, window: Window, logits: Tensor, reference: Tensor | None = None) -> None:
        """logits, reference [T, V]: of this model and of the one it is compared with."""
        predicted = logits[window.first - 1 : -1].log_softmax(dim=-1)
        targets = torch.tensor(window.ids[window.first :], device=logits.device)
        self.tokens += len(targets)
        self.nll -= predicted.gather(1, targets.unsqueeze(1)).sum(dtype=torch.float64).item()
        if reference is not None:
            wanted = reference[window.first - 1 : -1].log_softmax(dim=-1)
            self.agreed += int((predicted.argmax(dim=-1) == wanted.argmax(dim=-1)).sum())
            self.kl += (wanted.exp() * (wanted - predicted)).sum(dtype=torch.float64).item()

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll / self.tokens)


def one_pass(model: Transformer) -> Scorer:
    """Scores a window by one forward pass over it; the model's caches have room for it."""
    device = model.embed_tokens.weight.device

    @torch.no_grad()
    def score(ids: Sequence[int]) -> Tensor:
        tokens = torch.tensor([list(ids)], device=device)
        positions = torch.arange(len(ids), device=device).unsqueeze(0)
        return model.logits(model(tokens, positions, None, len(ids))[0])

    return score


class _ScoringStep(nn.Module):
    """The plain decode step up to its logits, which stay in a buffer as the fused step's do."""

    logits: Tensor

    def __init__(self, model: Transformer, state: DecodeState) -> None:
        super().__init__()
        self.model, self.state = model, state
        shape, device = (1, model.config.vocab_size), state.token.device
        self.register_buffer("logits", torch.zeros(shape, device=device), persistent=False)

    def forward(self, sampler: str, kv_length: int | None = None) -> None:
        positions = self.state.position.unsqueeze(1)
        hidden = self.model(self.state.token.unsqueeze(1), positions, None, kv_length)
        self.logits.copy_(self.model.logits(hidden[:, 0]))


def step_by_step(generator: Generator) -> Scorer:
    """Scores a window by steps of the generator's decoder, each given the text's own token."""
    model, state, compiles = generator.model, generator.state, generator.compile_mode is not None
    step = fused.FusedStep(model, state) if generator.decoder == "fused" else _ScoringStep(model, state)
    run: Callable[..., None] = step
    if generator.compile_mode is not None:
        run = torch.compile(step, fullgraph=True, dynamic=False, options=dict(generator.options or {}))
    greedy = SamplingParams(temperature=0)

    @torch.no_grad()
    def score(ids: Sequence[int]) -> Tensor:
        logits = []
        for position, token in enumerate(ids):
            generator.begin([token], [position], greedy)
            run("greedy", None if compiles else position + 1)
            logits.append(step.logits[0].clone())
        return torch.stack(logits)

    return score


def scorer(subject: Subject, options: argparse.Namespace) -> Scorer:
    if options.window_tokens > (known := most_positions(subject.model.config)):
        raise ValueError(f"--window-tokens {options.window_tokens}: the model knows {known} positions")
    if options.decoder is None:
        with torch.no_grad():
            subject.model.allocate(1, options.window_tokens)
        return one_pass(subject.model)
    return step_by_step(workload.generator(subject, options.decoder, options, positions=options.window_tokens))


def evaluate(score: Scorer, chosen: Sequence[Window], reference: Scorer | None = None) -> tuple[Tally, Tally]:
    """What the windows gave for this scorer (compared with the reference, if there is one) and for the reference."""
    tally, of_reference = Tally(), Tally()
    for window in tqdm(chosen, unit="window"):
        logits = score(window.ids)
        wanted = None if reference is None else reference(window.ids)
        tally.add(window, logits, wanted)
        if wanted is not None:
            of_reference.add(window, wanted)
    return tally, of_reference


def main() -> None:
    parser = workload.parser("perplexity", __doc__)
    workload.add_decode_options(parser)
    workload.add_quantize_option(parser)
    group = parser.add_argument_group("measurement")
    group.add_argument("--text", type=Path, required=True, metavar="FILE")
    group.add_argument("--windows", type=rows.whole(1), metavar="N", help="from the start (all that are whole)")
    group.add_argument("--window-tokens", type=int, default=1024, metavar="N")
    group.add_argument("--stride", type=int, metavar="N", help="from one window to the next (a whole window)")
    group.add_argument("--decoder", choices=DECODERS, help="score by its decode steps (one forward pass)")
    group.add_argument("--against", type=Path, metavar="DIR", help="also: token agreement with this checkpoint, and KL")
    options = parser.parse_args()
    if options.checkpoint is None:
        raise ValueError("perplexity needs a --checkpoint: random weights predict nothing")
    report = rows.Report(options, choose_device(options.device), COLUMNS)
    length, text = options.window_tokens, options.text.read_text(encoding="utf-8")
    reference = None if options.against is None else workload.load(options, checkpoint=options.against)
    for quantization in options.quantize:
        subject = workload.load(options, quantization)
        assert subject.tokenizer is not None
        ids = subject.tokenizer.encode(text, bos=False)
        if (
            reference is not None
            and reference.tokenizer is not None
            and reference.tokenizer.encode(text, bos=False) != ids
        ):
            raise ValueError(f"{options.against}: another tokenizer, so tokens cannot be compared")
        chosen = windows(ids, length, options.stride or length, options.windows)
        score_reference = None if reference is None else scorer(reference, options)
        tally, of_reference = evaluate(scorer(subject, options), chosen, score_reference)
        row = Row(
            decoder=options.decoder,
            text=options.text.name,
            windows=len(chosen),
            window_tokens=length,
            stride=options.stride or length,
            weight_bytes=workload.weight_bytes(subject.model),
            perplexity=tally.perplexity,
            **subject.fields,
        )
        if reference is not None:
            if quantization == options.quantize[0]:
                weight_bytes = workload.weight_bytes(reference.model)
                plain = replace(row, **reference.fields, weight_bytes=weight_bytes, perplexity=of_reference.perplexity)
                report.add(plain)
            agreement, divergence = tally.agreed / tally.tokens, tally.kl / tally.tokens
            row = replace(row, against=reference.name, token_agreement=agreement, kl_divergence=divergence)
        report.add(row)
    report.finish()


if __name__ == "__main__":
    rows.run(main)

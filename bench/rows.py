"""Result rows: what was measured, on which machine, by which command, and which figures are refused.

Every bench hands its rows to a `Report`, which completes, checks, stores and prints them. Knows nothing of models or
of how anything is timed.
"""

import argparse
import json
import math
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from bench import machine, tables

SEVERAL = 4  # a model this many times larger than the last-level cache cannot live in it
_BOOKKEEPING = ("--append", "--commit", "--output")  # options that do not change what is measured


class ImpossibleFigure(RuntimeError):
    """A rate above what the memory can deliver: the measurement is wrong."""


class Spread(NamedTuple):
    """Median, 10th and 90th percentile of repeated measurements."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Raises ValueError without values."""
        if not values:
            raise ValueError("no measurements to summarise")
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        deciles = statistics.quantiles(values, n=10, method="inclusive")
        return cls(statistics.median(values), deciles[0], deciles[-1])


@dataclass(kw_only=True)
class Row:
    """One measurement and all that is needed to judge and to repeat it; None where something was not measured."""

    # What was run
    model: str | None = None
    dtype: str | None = None
    quantization: str | None = None  # none, int8, int4-g128, fp8
    decoder: str | None = None  # eager, compiled, fused; a peer names its `engine` and version instead
    engine: str | None = None
    step: str | None = None  # the ablation's name for what is new in this row
    compile_mode: str | None = None
    batch: int | None = None
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    max_seq_len: int | None = None
    position: int | None = None  # of the first timed step
    temperature: float | None = None
    top_k: int | None = None
    text: str | None = None  # what perplexity was measured on
    windows: int | None = None
    window_tokens: int | None = None
    stride: int | None = None
    against: str | None = None  # the checkpoint that agreement and KL refer to
    # What came out
    decode_tok_per_s: float | None = None  # median over repetitions, summed over the batch; decode steps only
    decode_tok_per_s_p10: float | None = None
    decode_tok_per_s_p90: float | None = None
    prefill_tok_per_s: float | None = None
    time_to_first_token_s: float | None = None
    compile_s: float | None = None  # in this run, whatever its caches held
    compile_cold_s: float | None = None
    compile_cold_phases_s: dict[str, float] | None = None  # of it, as `profiling.CompilationFacts` names them
    compile_warm_s: float | None = None
    peak_memory_bytes: int | None = None
    weight_bytes: int | None = None
    read_bandwidth_bytes_per_s: float | None = None  # measured in the same run
    read_bandwidth_bytes_per_s_p10: float | None = None
    read_bandwidth_bytes_per_s_p90: float | None = None
    matrix_flop_per_s: float | None = None  # bf16 matrix product, measured in the same run
    bytes_per_step: int | None = None  # weights once, head included, embedding rows used, KV at the position, logits
    share_of_limit: float | None = None  # bytes_per_step x steps per second / read bandwidth
    share_of_matrix_limit: float | None = None
    graphs: str | None = None  # verified, none, unverified
    traced_kernels_per_step: int | None = None
    traced_graph_launches_per_step: int | None = None
    graph_note: str | None = None  # why they are not verified
    quality_of: str | None = None  # whose the next two are, where they were not measured on this model
    perplexity: float | None = None
    token_agreement: float | None = None
    kl_divergence: float | None = None  # nats a token
    ratio: float | None = None  # ours over the peer's decode rate, paired repetitions
    ratio_p10: float | None = None
    ratio_p90: float | None = None
    measured_separately: bool | None = None  # not in one run with this project's rows
    note: str | None = None
    # Where and how
    device_name: str | None = None
    driver: str | None = None
    sm_clock_mhz: float | None = None  # while the device worked
    power_limit_w: float | None = None
    torch: str | None = None
    triton: str | None = None
    cuda: str | None = None
    commit: str | None = None
    date: str | None = None
    command: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """What is known, floats to six digits. Raises RuntimeError for a figure that is no number."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        for name, value in known.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise RuntimeError(f"{name} came out as {value}")
        return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in known.items()}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> "Row":
        """Raises ValueError for a key that no row has."""
        unknown = record.keys() - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"not a result row: unknown keys {', '.join(sorted(unknown))}")
        return cls(**record)


# Rows that agree in all of these measure the same thing: the newer replaces the older.
_IDENTITY = (
    *("model", "dtype", "quantization", "decoder", "engine", "step", "compile_mode", "batch", "prompt_tokens"),
    *("new_tokens", "max_seq_len", "position", "temperature", "top_k", "text", "windows", "window_tokens", "stride"),
    *("against", "device_name"),
)


def identity(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in _IDENTITY)


def check(row: Row, cache_bytes: int) -> None:
    """Raises ImpossibleFigure when the row claims to multiply faster than the processor, or to read faster than the
    memory from more than the cache can hold."""
    name = row.decoder or row.engine
    if row.share_of_matrix_limit is not None and row.share_of_matrix_limit > 1:
        raise ImpossibleFigure(
            f"{name}: {row.prefill_tok_per_s:.1f} tok/s is {row.share_of_matrix_limit:.3f} of the matrix rate measured "
            "in the same run; was the machine busy? Measure again"
        )
    if row.share_of_limit is None or row.bytes_per_step is None or row.bytes_per_step < SEVERAL * cache_bytes:
        return
    if row.share_of_limit > 1:
        raise ImpossibleFigure(
            f"{name}: {row.decode_tok_per_s:.1f} tok/s is {row.share_of_limit:.3f} of the bandwidth measured in the "
            "same run; was the machine busy? Measure again"
        )


# --- Files -----------------------------------------------------------------------------------------------------------


def read_rows(path: Path | None) -> list[dict[str, Any]]:
    """The rows of a result file, [] without one. Raises ValueError when it is not a list of rows."""
    if path is None or not path.exists():
        return []
    if not path.is_file():
        raise ValueError(f"{path}: not a file of rows")
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise ValueError(f"{path}: not a JSON list of rows")
    return [Row.from_dict(record).as_dict() for record in records]


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Put the row into the file, in place of an older one of the same thing; an interruption leaves the old file."""
    path = path.resolve()
    kept = [other for other in read_rows(path) if identity(other) != identity(row)]
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    scratch.write_text("[\n" + ",\n".join(map(json.dumps, [*kept, row])) + "\n]\n", encoding="utf-8")
    scratch.replace(path)


def command_line(argv: Sequence[str]) -> str:
    """The command as a reader would type it, without the options that only say where results go."""
    words, rest = ["python", "-m", f"bench.{Path(argv[0]).stem}"], iter(argv[1:])
    for word in rest:
        if word in _BOOKKEEPING:
            next(rest, None)
        elif not word.startswith(tuple(f"{option}=" for option in _BOOKKEEPING)):
            words.append(word)
    return shlex.join(words)


# --- A run -----------------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def whole(least: int) -> Callable[[str], int]:
    """An argparse type: a whole number, `least` or more."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    number.__name__ = "whole number"  # for argparse's message
    return number


def parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Of `python -m bench.NAME`, described by its docstring's first paragraph; a mistake is a ValueError."""
    return _Parser(prog=f"python -m bench.{name}", description=(doc or "").partition("\n\n")[0])


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("results")
    group.add_argument("--output", choices=("md", "csv", "json"), default="json", help="shown above the JSON list")
    group.add_argument("--append", type=Path, metavar="FILE", help="merge each row, once measured, into this JSON file")
    group.add_argument("--commit", help="commit to record where there is no git (or NEARROOF_COMMIT)")


class Report:
    """The rows of one run: completed, checked, stored and shown as they come."""

    def __init__(self, options: argparse.Namespace, device: torch.device, columns: Sequence[str]) -> None:
        self.rows: list[dict[str, Any]] = []
        read_rows(options.append)  # refused now, if ever
        self._options, self._device, self._columns = options, device, columns
        self._common = {
            "device_name": machine.device_name(device),
            "torch": torch.__version__,
            "triton": machine.package_version("triton"),
            "cuda": torch.version.cuda,
            "commit": machine.commit_name(options.commit),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "command": command_line(sys.argv),
            **machine.gpu_facts(device),
        }

    def add(self, row: Row) -> None:
        """Raises ImpossibleFigure for a rate that the memory cannot deliver; such a row goes nowhere."""
        check(row, machine.last_level_cache_bytes(self._device))
        missing = {key: value for key, value in self._common.items() if getattr(row, key) is None}
        record = replace(row, **missing).as_dict()
        self.rows.append(record)
        if self._options.append is not None:
            append_row(self._options.append, record)
        self._show(record)

    def finish(self) -> None:
        """Standard output: the table asked for, then the JSON list on the last line."""
        if self._options.output == "md":
            print(tables.markdown(self.rows, self._columns), end="\n\n")
        elif self._options.output == "csv":
            print(tables.comma_separated(self.rows), end="\n\n")
        print(json.dumps(self.rows), flush=True)

    def _show(self, record: Mapping[str, Any]) -> None:
        columns = [tables.COLUMNS[name] for name in self._columns]
        if len(self.rows) == 1:
            say("  ".join(column.title.rjust(column.width) for column in columns))
        say("  ".join(column.cell(record).rjust(column.width) for column in columns))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(main: Callable[[], None]) -> None:
    """A bench's exit: one line and status 2 for a user's mistake, status 1 for a failed run."""
    try:
        main()
    except (ValueError, OSError, RuntimeError) as error:
        say(f"error: {' '.join(str(error).split()) or type(error).__name__}")
        sys.exit(1 if isinstance(error, RuntimeError) else 2)
    except KeyboardInterrupt:
        sys.exit(130)

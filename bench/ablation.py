"""What each step bought: eager, compiled in each mode, the settings, the kernels, then fewer bits.

Each row comes from `bench.decode` in a process of its own and is written as it finishes; rows that the file already has
are skipped, so that a run can go on after an interruption. Perplexity and token agreement are joined from the rows of
`bench.perplexity` on a trained model, since random weights have none worth reading.
"""

import argparse
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import machine, rows, workload
from bench.decode import child, empty_caches
from bench.rows import Row, say
from generate import choose_device

COLUMNS = (
    *("step", "precision", "decoder", "mode", "rate", "share", "compile", "warm", "graphs"),
    *("perplexity", "agreement"),
)
QUALITY = machine.ROOT / "bench" / "results" / "quality.json"

# Name of the step -> options of bench.decode
STEPS = {
    "eager": "--decoders eager",
    "compiled without graphs": "--decoders compiled --compile-mode default",
    "max-autotune without graphs": "--decoders compiled --compile-mode max-autotune-no-cudagraphs",
    "CUDA graphs": "--decoders compiled --settings plain",
    "+ settings": "--decoders compiled",
    "max-autotune": "--decoders compiled --compile-mode max-autotune",
    "+ kernels": "--decoders fused",
    "+ int8": "--decoders fused --quantize int8",
    "+ fp8": "--decoders fused --quantize fp8",
    "+ int4": "--decoders fused --quantize int4-g128",
}
CPU_STEPS = {
    "eager": "--decoders eager",
    "compiled": "--decoders compiled",
    "+ int8": "--decoders compiled --quantize int8",
    "+ int4": "--decoders compiled --quantize int4-g128",
}


def join_quality(row: Mapping[str, Any], quality: list[dict[str, Any]]) -> dict[str, Any]:
    """The row with perplexity and token agreement of the trained model (`quality_of`) at the same precision, rounded to
    nearest as `--quantize` does it, where they are known."""
    precision = row.get("quantization")
    same = [other for other in quality if other.get("quantization") == precision and _is_rounded(other)]
    if not same:
        return dict(row)
    known = {key: same[-1][key] for key in ("perplexity", "token_agreement") if key in same[-1]}
    return dict(row) | {"quality_of": same[-1].get("model")} | known


def _is_rounded(quality: Mapping[str, Any]) -> bool:
    """Whether the checkpoint was scored as it is or quantised in memory, and does not come from a better method."""
    return quality.get("against") in (None, quality.get("model"))


def measure(arguments: list[str]) -> dict[str, Any]:
    """One row of bench.decode, from a process with empty caches. Raises RuntimeError with the last line it wrote."""
    with empty_caches():
        return child(arguments)[-1]


def main() -> None:
    parser = workload.parser("ablation", __doc__)
    group = parser.add_argument_group("measurement")
    group.add_argument(
        "--steps", type=workload.listed(str), help=f"of: {', '.join(STEPS | CPU_STEPS)} (all that apply)"
    )
    group.add_argument("--repetitions", type=rows.whole(1), default=7)
    group.add_argument("--compile-times", action="store_true", help="also cold and warm, in fresh processes")
    group.add_argument("--quality", type=Path, default=QUALITY, metavar="FILE", help="rows of bench.perplexity")
    options = parser.parse_args()
    device = choose_device(options.device)
    steps = STEPS if device.type == "cuda" else CPU_STEPS
    if unknown := set(options.steps or steps) - steps.keys():
        raise ValueError(f"unknown step {min(unknown)!r}: one of {', '.join(steps)}")
    report, failed = rows.Report(options, device, COLUMNS), []
    quality = rows.read_rows(options.quality)
    name = options.random or options.checkpoint.resolve().name
    known = {(row.get("model"), row.get("step"), row.get("device_name")) for row in rows.read_rows(options.append)}
    for step in options.steps or steps:
        if (name, step, machine.device_name(device)) in known:
            say(f"{step}: measured already")
            continue
        try:
            record = join_quality(measure([*_source(options), *shlex.split(steps[step])]), quality)
        except RuntimeError as error:  # the other steps are still worth having
            say(f"{step}: {error}")
            failed.append(step)
            continue
        report.add(replace(Row.from_dict(record), step=step, command=None, commit=None))
    report.finish()
    if failed:
        raise RuntimeError(f"no row for {', '.join(failed)}")


def _source(options: argparse.Namespace) -> list[str]:
    """The options that every step shares, for bench.decode."""
    source = f"--random={options.random}" if options.random else f"--checkpoint={options.checkpoint.resolve()}"
    shared = [source, f"--device={options.device}", f"--dtype={options.dtype}", f"--repetitions={options.repetitions}"]
    return [*shared, "--compile-times"] if options.compile_times else shared


if __name__ == "__main__":
    rows.run(main)

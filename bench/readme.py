"""The README's tables, generated from the committed rows: `python -m bench.readme` rewrites them.

A table stands between `<!-- table:NAME -->` and `<!-- /table -->`; the commands that reproduce its rows stand below it.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from bench import machine, rows, tables
from bench.ablation import QUALITY, join_quality

RESULTS = machine.ROOT / "bench" / "results"
README = machine.ROOT / "README.md"
_BLOCK = re.compile(r"(<!-- table:(?P<name>[\w-]+) -->\n).*?(<!-- /table -->)", re.DOTALL)

ResultRow = dict[str, Any]


class Table(NamedTuple):
    files: tuple[str, ...]  # of RESULTS, without .json
    columns: tuple[str, ...]
    keep: Callable[[ResultRow], bool] = lambda row: True
    order: Callable[[ResultRow], Any] = lambda row: 0  # rows that compare equal stay as they are in the files

    def rows(self) -> list[ResultRow]:
        quality = rows.read_rows(QUALITY)
        found = [row for file in self.files for row in rows.read_rows(RESULTS / f"{file}.json")]
        return sorted((join_quality(row, quality) for row in found if self.keep(row)), key=self.order)


def _short_prompt_on_h200(row: ResultRow) -> bool:
    return "H200" in row["device_name"] and row.get("batch") == 1 and (row.get("prompt_tokens") or 0) <= 5


def _by_model_and_rate(row: ResultRow) -> tuple[str, int, float]:
    bits = ("none", "int8", "fp8", "int4").index(row["quantization"].partition("-")[0])
    return row["model"], bits, -row["decode_tok_per_s"]


_PEERS_NOTED = ("model", "precision", "decoder", "rate", "share", "note")
TABLES = {
    "h200": Table(
        ("h200-decode",),
        ("model", "precision", "decoder", "batch", "rate", "share", "compile", "memory", "graphs"),
    ),
    # Others, as far as they ran on an H200.
    "peers": Table(("peers",), _PEERS_NOTED, _short_prompt_on_h200, _by_model_and_rate),
    # Both, side by side: what the picture shows.
    "h200-compared": Table(("h200-decode", "peers"), _PEERS_NOTED, _short_prompt_on_h200, _by_model_and_rate),
    "h200-precisions": Table(
        ("h200-decode",),
        ("precision", "decoder", "size", "rate", "share", "perplexity", "agreement"),
        lambda row: row["model"] == "llama-3.1-8b" and _short_prompt_on_h200(row),
        lambda row: -row["weight_bytes"],
    ),
    "h200-positions": Table(
        ("h200-positions",),
        ("model", "decoder", "capacity", "position", "rate", "share"),
        order=lambda row: (row["decoder"], row["max_seq_len"], row["position"]),
    ),
    "h200-prefill": Table(("h200-prefill",), ("model", "decoder", "prompt", "prefill", "matrix_share")),
    "h200-ablation": Table(
        ("h200-ablation",),
        ("step", "precision", "mode", "rate", "share", "compile", "warm", "graphs", "perplexity", "agreement"),
    ),
    "cpu": Table(("cpu-peers",), ("precision", "decoder", "rate", "p10", "p90", "bandwidth", "share", "ttft", "ratio")),
    "cpu-ablation": Table(
        ("cpu-ablation",), ("step", "precision", "rate", "bandwidth", "share", "compile", "perplexity", "agreement")
    ),
    "bandwidth": Table(
        ("h200-bandwidth", "cpu-bandwidth"), ("device", "bandwidth", "bandwidth_p10", "bandwidth_p90", "matrix")
    ),
}


def block(name: str) -> str:
    """The table and the commands below it. Raises ValueError for a name that no table has."""
    if name not in TABLES:
        raise ValueError(f"README: unknown table {name!r}: one of {', '.join(TABLES)}")
    found = TABLES[name].rows()
    if not found:
        return ""
    commands = dict.fromkeys(row["command"] for row in found if "command" in row)
    listed = ["", "```sh", *commands, "```"] if commands else []
    return "\n".join([tables.markdown(found, TABLES[name].columns), *listed, ""])


def rendered(text: str) -> str:
    """The README with every table as the committed rows have it."""
    return _BLOCK.sub(lambda match: match[1] + block(match["name"]) + match[3], text)


def main() -> None:
    rows.parser("readme", __doc__).parse_args()
    README.write_text(rendered(README.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    rows.run(main)

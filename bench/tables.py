"""How a result row reads as text: columns by name, Markdown, CSV. Rows are plain mappings here."""

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple


class Column(NamedTuple):
    title: str
    text: Callable[[Mapping[str, Any]], str]

    @property
    def width(self) -> int:
        return max(len(self.title), 8)

    def cell(self, row: Mapping[str, Any]) -> str:
        return self.text(row) or "-"


def _field(key: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: "" if row.get(key) is None else str(row[key])


def _quantity(key: str, style: str = ",.1f", scale: float = 1) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: "" if row.get(key) is None else format(row[key] * scale, style)


def _precision(row: Mapping[str, Any]) -> str:
    quantization = row.get("quantization") or "none"
    return row.get("dtype", "") if quantization == "none" else quantization


COLUMNS: dict[str, Column] = {
    "model": Column("model", _field("model")),
    "precision": Column("weights", _precision),
    "decoder": Column("decoder", lambda row: row.get("decoder") or row.get("engine") or ""),
    "step": Column("step", _field("step")),
    "mode": Column("compile mode", _field("compile_mode")),
    "batch": Column("batch", _field("batch")),
    "prompt": Column("prompt", _field("prompt_tokens")),
    "new": Column("new", _field("new_tokens")),
    "position": Column("position", _field("position")),
    "capacity": Column("capacity", _field("max_seq_len")),
    "rate": Column("tok/s", _quantity("decode_tok_per_s")),
    "p10": Column("p10", _quantity("decode_tok_per_s_p10")),
    "p90": Column("p90", _quantity("decode_tok_per_s_p90")),
    "share": Column("of limit", _quantity("share_of_limit", ".1%")),
    "prefill": Column("prefill tok/s", _quantity("prefill_tok_per_s", ",.0f")),
    "matrix_share": Column("of matrix limit", _quantity("share_of_matrix_limit", ".1%")),
    "ttft": Column("first token ms", _quantity("time_to_first_token_s", ",.1f", 1e3)),
    "compile": Column("compile s", lambda row: _quantity("compile_cold_s")(row) or _quantity("compile_s")(row)),
    "warm": Column("warm s", _quantity("compile_warm_s")),
    "memory": Column("peak GB", _quantity("peak_memory_bytes", ",.2f", 1e-9)),
    "size": Column("weights GB", _quantity("weight_bytes", ",.3f", 1e-9)),
    "graphs": Column("graphs", _field("graphs")),
    "perplexity": Column("perplexity", _quantity("perplexity", ".3f")),
    "agreement": Column("same token", _quantity("token_agreement", ".1%")),
    "kl": Column("KL nats", _quantity("kl_divergence", ".4f")),
    "ratio": Column("ours / theirs", _quantity("ratio", ".2f")),
    "ratio_p10": Column("p10", _quantity("ratio_p10", ".2f")),
    "ratio_p90": Column("p90", _quantity("ratio_p90", ".2f")),
    "bandwidth": Column("read GB/s", _quantity("read_bandwidth_bytes_per_s", ",.1f", 1e-9)),
    "bandwidth_p10": Column("p10", _quantity("read_bandwidth_bytes_per_s_p10", ",.1f", 1e-9)),
    "bandwidth_p90": Column("p90", _quantity("read_bandwidth_bytes_per_s_p90", ",.1f", 1e-9)),
    "matrix": Column("bf16 matrix TFLOP/s", _quantity("matrix_flop_per_s", ",.2f", 1e-12)),
    "device": Column("device", _field("device_name")),
    "windows": Column("windows", _field("windows")),
    "note": Column("note", _field("note")),
}


def markdown(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """A table of the named columns, numbers to the right."""
    chosen = [COLUMNS[name] for name in columns]
    cells = [[column.cell(row) for column in chosen] for row in rows]
    numeric = [all(line[i][0].isdigit() or line[i] == "-" for line in cells) for i in range(len(chosen))]
    rule = "|".join("---:" if right else "---" for right in numeric)
    lines = [[column.title for column in chosen], *cells]
    head, *body = ("| " + " | ".join(line) + " |" for line in lines)
    return "\n".join([head, f"|{rule}|", *body])


def comma_separated(rows: Sequence[Mapping[str, Any]]) -> str:
    """All fields that any row has, with a header."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().rstrip("\n")

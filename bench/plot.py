"""One picture of the committed rows: how near to the limit each decoder comes, and how that holds along the context."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench import machine, rows
from bench.readme import RESULTS, TABLES

OURS = {"eager": "#8fa6ba", "compiled": "#3f78a8", "fused": "#d9542b"}
PEER, INK, FAINT = "#cfcfcf", "#222222", "#999999"

ResultRow = dict[str, Any]


def grouped(found: Iterable[ResultRow]) -> dict[str, list[ResultRow]]:
    """Rows with a share of the limit, by model and precision; within one in the order given."""
    groups: dict[str, list[ResultRow]] = {}
    for row in found:
        if "share_of_limit" in row:
            precision = row["dtype"] if row["quantization"] == "none" else row["quantization"]
            groups.setdefault(f"{row['model']}, {precision}", []).append(row)
    return groups


def name_of(row: ResultRow) -> str:
    return row.get("decoder") or row["engine"]


def draw_shares(axes: Any, found: Iterable[ResultRow]) -> None:
    """Bars: share of the limit; at their ends tokens per second."""
    y, ticks = 0.0, []
    for title, group in grouped(found).items():
        axes.text(0, y, title, va="center", weight="bold", color=INK)
        for row in group:
            y += 1
            share = 100 * row["share_of_limit"]
            axes.barh(y, share, height=0.78, color=OURS.get(name_of(row), PEER))
            inside = {"x": share - 1, "ha": "right", "color": "white" if name_of(row) in OURS else INK}
            place = inside if share > 20 else {"x": share + 1, "ha": "left", "color": INK}
            axes.text(y=y, s=f"{row['decode_tok_per_s']:,.0f} tok/s", va="center", **place)
            ticks.append((y, name_of(row)))
        y += 1.6
    axes.axvline(100, color=INK, linewidth=1, linestyle="--")
    axes.text(99, -0.3, "limit", ha="right", color=INK)
    axes.set_yticks([at for at, _ in ticks], [label for _, label in ticks])
    axes.set(
        xlim=(0, 102),
        ylim=(y - 0.8, -0.8),
        xlabel="% of the measured read bandwidth (grey: others, measured separately)",
    )
    axes.set_xticks(range(0, 101, 20))
    axes.tick_params(axis="y", length=0)


def draw_positions(axes: Any, found: Iterable[ResultRow]) -> None:
    """Lines: tokens per second by the position of the step, below the limit, which falls as the cache is read too."""
    lines: dict[str, list[ResultRow]] = {}
    for row in found:
        lines.setdefault(row["decoder"], []).append(row)
    limit = {}
    for decoder, points in lines.items():
        points.sort(key=lambda row: row["position"])
        positions, rates = ([row[key] for row in points] for key in ("position", "decode_tok_per_s"))
        axes.plot(positions, rates, color=OURS[decoder], marker="o", linewidth=2, markersize=4)
        axes.annotate(decoder, (positions[-1], rates[-1]), (6, 0), textcoords="offset points", va="center", color=INK)
        limit |= {row["position"]: row["decode_tok_per_s"] / row["share_of_limit"] for row in points}
    if limit:
        positions = sorted(limit)
        axes.plot(positions, [limit[at] for at in positions], color=INK, linewidth=1, linestyle="--")
        end = (positions[-1], limit[positions[-1]])
        axes.annotate("limit", end, (6, 0), textcoords="offset points", va="center", color=INK)
    axes.set(xlabel="position of the step", ylabel="tokens per second", ylim=(0, None))
    axes.margins(x=0.02)


def main() -> None:
    parser = rows.parser("plot", __doc__)
    parser.add_argument("--output", type=Path, default=machine.ROOT / "docs" / "decode.png", metavar="FILE")
    options = parser.parse_args()
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("matplotlib is not installed (pip install -e '.[plot]')") from error
    shares, along = TABLES["h200-compared"].rows(), rows.read_rows(RESULTS / "h200-positions.json")
    if not grouped(shares):
        raise ValueError(f"{RESULTS}: no rows to draw")
    bars = len(shares) + 2 * len(grouped(shares))
    figure = Figure(figsize=(12, max(4.5, 0.26 * bars)), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(FAINT)
        axes.tick_params(colors=INK, labelsize=9)
    draw_shares(left, shares)
    draw_positions(right, along)
    left.set_title(f"Decoding one sequence on one {shares[0]['device_name']}", loc="left", color=INK)
    right.set_title(f"{along[0]['model'] if along else 'No rows'} along the context", loc="left", color=INK)
    figure.savefig(options.output, dpi=160, metadata={"Software": None})


if __name__ == "__main__":
    rows.run(main)

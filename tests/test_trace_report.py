"""The report on small synthetic traces of every kind, whose figures are known by construction."""

import gzip
import json
import math
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trace_report
from trace_report import (
    UNVERIFIED,
    Report,
    Timeline,
    TraceError,
    analyse,
    budget,
    kind_of,
    load,
    main,
    percentile,
    to_html,
    to_json,
    to_markdown,
    waterfall,
)

ROOT = Path(__file__).resolve().parents[1]
HOST = {"pid": 1, "tid": 1}
EAGER_OPS = [  # operator, kernel, microseconds on the device
    ("aten::mean", "void at::native::reduce_kernel<512, MeanOps<float>>(float*)", 4.0),
    ("aten::rsqrt", "void at::native::vectorized_elementwise_kernel<rsqrt_kernel_cuda>(int)", 2.0),
    ("aten::mul", "void at::native::vectorized_elementwise_kernel<MulFunctor>(int)", 2.0),
    ("aten::_flash_attention_forward", "void pytorch_flash::flash_fwd_splitkv_kernel<Traits>(Params)", 8.0),
    ("aten::mm", "nvjet_tst_64x8_64x16_4x1_v_bz_TNT", 20.0),
    ("aten::argmax", "void at::native::reduce_kernel<512, ArgMaxOps<float>>(float*)", 6.0),
]
FUSED_KERNELS = [
    ("triton_red_fused_mean_mul_rsqrt_0", 3.0),
    ("triton_tem_fused_flex_attention_1", 6.0),
    ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", 20.0),
    ("triton_red_fused_argmax_2", 4.0),
]


class Builder:
    """Writes events as torch's profiler does."""

    def __init__(self, **facts: Any) -> None:
        self.events: list[dict[str, Any]] = []
        self.facts = facts
        self.correlation = 0

    def add(self, category: str, name: str, start: float, duration: float, **args: Any) -> None:
        where = {"pid": 0, "tid": args.get("stream", 7)} if category in ("kernel", "gpu_memcpy") else HOST
        event = {"ph": "X", "cat": category, "name": name, "ts": 1e6 + start, "dur": duration, "args": args}
        self.events.append(event | where)

    def launch(self, call: str, start: float, operator: str = "") -> int:
        """A launch call of 2 us, inside an operator of 5 us where one is named."""
        self.correlation += 1
        if operator:
            self.add("cpu_op", operator, start - 2, 5, **{"External id": self.correlation})
        self.add("cuda_runtime", call, start, 2, correlation=self.correlation)
        return self.correlation

    def kernel(self, name: str, start: float, duration: float, correlation: int, stream: int = 7) -> None:
        extra = {"correlation": correlation, "stream": stream, "External id": correlation}
        self.add("kernel", name, start, duration, **extra)

    def write(self, path: Path) -> Path:
        content: dict[str, Any] = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}]}
        content |= {"nearroof": self.facts} if self.facts else {}
        text = json.dumps(content | {"traceEvents": self.events}, indent=2)
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
        return path


def eager(path: Path, positions: tuple[int, ...] = (16, 17), **facts: Any) -> Path:
    """Host-bound: an operator every 30 us, its kernel 5 us after its launch."""
    builder = Builder(**facts)
    for number, position in enumerate(positions):
        t = 1000.0 * number
        builder.add("user_annotation", f"decode[{position}]", t, 200)
        for index, (operator, kernel, us) in enumerate(EAGER_OPS):
            launched = t + 10 + 30 * index
            builder.kernel(kernel, launched + 5, us, builder.launch("cudaLaunchKernel", launched, operator))
    return builder.write(path)


def compiled(path: Path, positions: tuple[int, ...] = (16, 17), overlap: float = 0.0, **facts: Any) -> Path:
    """Two steps launched 40 us apart, replayed back to back: 1 us between steps, 0.5 us between a graph's kernels."""
    builder = Builder(**facts)
    end = 45.0
    for number, position in enumerate(positions):
        t = 40.0 * number
        builder.add("user_annotation", f"decode[{position}]", t, 30)
        builder.add("cpu_op", "TorchDynamo Cache Lookup", t + 1, 6)
        builder.add("cpu_op", "Torch-Compiled Region: 0/0", t + 8, 20)
        builder.add("cpu_op", "## Call CompiledFxGraph fabc ##", t + 10, 15)
        correlation = builder.launch("cudaGraphLaunch", t + 15)
        start = end + 1
        for kernel, us in FUSED_KERNELS:
            builder.kernel(kernel, start, us, correlation)
            end = start + us
            start = end + 0.5 - overlap
    return builder.write(path)


def facts(decoder: str, us: float, **more: Any) -> dict[str, Any]:
    step = {"unprofiled_us": [us - 1, us, us + 1], "tokens": 1, "bytes": {"gemv": 10_000, "attention": 2_000}}
    return {
        "decoder": decoder,
        "model": "tiny",
        "dtype": "bf16",
        "device": "cuda",
        "torch": "2.13.0",
        "read_bandwidth_bytes_per_s": 1e9,
        "steps": {f"decode[{p}]": step for p in (16, 17)},
        "same_work": {"weights": "w", "inputs": [1, 2], "choices": [3, 4], "margins": [1.0, 0.5], "tolerance": 0.1},
        **more,
    }


VERIFIED = {"graphs": {"status": "verified", "reasons": [], "counts": {"replays": 10, "steps": 10, "recordings": 1}}}
COMPILATION = {
    "compilations": 1,
    "cached": 0,
    "graph_breaks": {},
    "recompilations": [],
    "skips": 0,
    "skip_reasons": [],
    "compile_s": 2.0,
    "phases_s": {"dynamo": 0.5, "inductor": 1.5},
}


@pytest.fixture
def pair(tmp_path: Path) -> list[Path]:
    """Both paths with every fact: nothing is left to doubt."""
    warm = {"compilation": COMPILATION, "warm_up": {"compile_s": 2.0, "record_s": 0.5}}
    plain = eager(tmp_path / "trace_eager.json", **facts("eager", 190.0))
    return [plain, compiled(tmp_path / "trace_compiled.json", **facts("compiled", 40.0, **VERIFIED, **warm))]


def check(report: Report, name: str) -> trace_report.Check:
    return next(c for c in report.checks if c.name == name)


# ---- figures that are known by construction


def test_eager_steps_are_measured_from_their_launches(pair: list[Path]) -> None:
    group = load(pair[0]).groups["decode at 16"]
    assert group.kernel_counts == [6, 6] and group.launches == {"cudaLaunchKernel": 6}
    assert group.busy_us == pytest.approx(42)
    assert group.kinds == {
        "gemv": (1, pytest.approx(20)),
        "attention": (1, pytest.approx(8)),
        "norm": (2, pytest.approx(6)),
        "pointwise": (1, pytest.approx(2)),
        "sampling": (1, pytest.approx(6)),
    }
    between = group.gaps["between launches"]
    assert between.count == 5 and between.us == pytest.approx(150 - 36)  # from the first kernel's start to the last's
    assert group.gaps["between steps"].us == pytest.approx(1015 - 171)
    assert group.host["cudaLaunchKernel"] == (6, pytest.approx(12)) and group.host["operators"] == (
        6,
        pytest.approx(18),
    )
    assert group.host["Python"][1] == pytest.approx(170) and group.host_us == pytest.approx(200)
    owners = {(place, owner) for place, owner, _, _ in group.gap_owners}
    assert ("between launches", "Python") in owners


def test_all_kernels_of_a_replay_belong_to_its_launch(pair: list[Path]) -> None:
    trace = load(pair[1])
    group = trace.groups["decode at 16"]
    assert trace.unmatched == 0 and group.kernel_counts == [4, 4] and group.launches == {"cudaGraphLaunch": 1}
    assert group.gaps["inside a replay"].us == pytest.approx(1.5) and group.gaps["inside a replay"].count == 3
    assert group.gaps["between steps"].us == pytest.approx(1.0) and group.gaps["between launches"].us == 0
    assert group.traced_us == pytest.approx(33 + 1.5 + 1), "the step that follows another, end to end"
    assert group.gap_owners[0][:2] == ("inside a replay", "device: from one graph node to the next")
    assert ("between steps", "device: launched in time, start-up latency") in [o[:2] for o in group.gap_owners]
    assert group.host["guards (TorchDynamo Cache Lookup)"] == (1, pytest.approx(6))
    assert group.host["compiled wrapper"] == (2, pytest.approx(18))


def test_overlapping_kernels_are_counted_once(tmp_path: Path) -> None:
    trace = load(compiled(tmp_path / "trace.json", overlap=1.5))
    step = trace.steps[0]
    durations = sum(k.end - k.start for k in step.kernels)
    assert trace.overlaps == 6 and durations == pytest.approx(33)
    assert (
        sum(k.credited for k in step.kernels)
        == pytest.approx(33 - 3 * 1.0)
        == pytest.approx(max(k.end for k in step.kernels) - step.kernels[0].start)
    )
    assert trace.groups["decode at 16"].gaps["inside a replay"].us == 0


def test_streams_side_by_side_are_one_busy_interval(tmp_path: Path) -> None:
    builder = Builder()
    builder.add("user_annotation", "decode[1]", 0, 50)
    for stream, start, us in ((7, 10, 10), (8, 12, 20)):
        builder.kernel("_project_kernel", start, us, builder.launch("cudaLaunchKernel", start - 8), stream)
    trace = load(builder.write(tmp_path / "trace.json"))
    assert trace.overlaps == 0 and trace.groups["decode at 1"].busy_us == pytest.approx(22)


def test_budget_and_waterfall_sum_to_the_unprofiled_wall(pair: list[Path]) -> None:
    a, b = (load(path).groups["decode at 16"] for path in pair)
    assert sum(budget(a).values()) == pytest.approx(a.wall_us) == pytest.approx(190)
    assert budget(a)["unexplained rest"] == pytest.approx(0), "traced idle time is capped by the wall time"
    assert budget(b)["unexplained rest"] == pytest.approx(40 - 33 - 1.5 - 1)
    changes = waterfall(a, b)
    assert sum(changes.values()) == pytest.approx(-150)
    assert changes["norm"] == pytest.approx(3 - 6) and changes["gemv"] == pytest.approx(0)


def test_fusion_ledger_names_what_each_kernel_replaced(pair: list[Path]) -> None:
    rows = {f.name: f for f in trace_report.fusions(*map(load, pair), "decode at 16")}
    norm = rows["triton_red_fused_mean_mul_rsqrt_0"]
    assert norm.replaced == {"mean": 1, "rsqrt": 1, "mul": 1} and norm.replaced_us - norm.us == pytest.approx(8 - 3)
    assert rows["triton_tem_fused_flex_attention_1"].replaced == {"_flash_attention_forward": 1}
    assert rows["triton_red_fused_argmax_2"].replaced == {"argmax": 1}
    assert rows[""].replaced == {}


def test_equal_kernels_each_get_their_own_counterpart() -> None:
    plain = [trace_report.Kernel(f"nvjet_{i}", "gemv", i, i + 1, "7", "aten::mm") for i in range(3)]
    fused = [trace_report.Kernel(f"_project_kernel_{i}", "gemv", i, i + 1, "7") for i in range(3)]
    assert [k and k.name for k in trace_report.align(plain, fused)] == [k.name for k in fused]
    assert trace_report.align([], fused) == [] and trace_report.align(plain, []) == [None] * 3


def test_limit_roofline_and_what_is_left(pair: list[Path]) -> None:
    trace = load(pair[1])
    group = trace.groups["decode at 16"]
    assert trace.floors(group) == {"gemv": pytest.approx(10), "attention": pytest.approx(2)}
    assert trace.limit(group) == pytest.approx(1e6 / 12) and group.rate == pytest.approx(25_000)
    part, us, gain = trace_report.left(trace, group)[0]
    assert part == "gemv" and us == pytest.approx(10) and gain == pytest.approx(1e6 / 30 - 1e6 / 40)


def test_warm_up_breaks_even(pair: list[Path]) -> None:
    assert trace_report.break_even(*map(load, pair)) == pytest.approx(2.5e6 / 150)


# ---- integrity


def test_a_sound_pair_is_verified(pair: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*map(str, pair)]) == 0
    report = capsys.readouterr().err
    assert "4.75x the 5,263 of eager" in report and "30% of the limit of 83,333 tok/s" in report
    assert "the largest part left is gemv, 10.00 us a step. All that could be checked holds." in report
    assert (pair[0].parent / "report.md").read_text() == report
    assert json.loads((pair[0].parent / "report.json").read_text())["verified"] is True


BROKEN = {
    "graphs": {"graphs": {"status": "unverified", "reasons": ["skipping cudagraphs due to mutated inputs"]}},
    "replays": {"graphs": {"status": "verified", "counts": {"replays": 20, "steps": 10}}},
    "proof": {"graphs": None},
    "tokens": {
        "same_work": {"weights": "w", "inputs": [1, 2], "choices": [3, 9], "margins": [1.0, 0.4], "tolerance": 0.1}
    },
    "weights": {
        "same_work": {"weights": "v", "inputs": [1, 2], "choices": [3, 4], "margins": [1.0, 0.5], "tolerance": 0.1}
    },
    "no tokens": {"same_work": None},
    "no numbers": {
        "same_work": {"weights": "w", "inputs": [1, 2], "choices": [3, -2], "margins": [1.0, 0.5], "tolerance": 0.1}
    },
    "model": {"model": "another"},
    "timing": {"steps": {}},
}


@pytest.mark.parametrize(
    ("broken", "name", "detail"),
    [
        ("graphs", "compiled: graphs", "mutated inputs"),
        ("replays", "compiled: graphs", "the sources disagree: 2 replays a step"),
        ("proof", "compiled: graphs", "no proof in the file"),
        ("tokens", "eager and compiled: same tokens", "1 of 2 choices equal"),
        ("weights", "eager and compiled: same tokens", "other weights"),
        ("no tokens", "eager and compiled: same tokens", "no choices to compare"),
        ("no numbers", "eager and compiled: same tokens", "not numbers"),
        ("model", "eager and compiled: same run", "model: tiny and another"),
        ("timing", "compiled: profiler's tax", "no unprofiled timing"),
    ],
)
def test_a_broken_fact_is_unverified_and_exits_with_1(tmp_path: Path, broken: str, name: str, detail: str) -> None:
    plain = eager(tmp_path / "a.json", **facts("eager", 190.0))
    paths = [plain, compiled(tmp_path / "b.json", **facts("compiled", 40.0, **{**VERIFIED, **BROKEN[broken]}))]
    found = check(analyse(paths), name)
    assert found.status == UNVERIFIED and detail in found.detail
    assert main([*map(str, paths)]) == 1 and (tmp_path / "report.html").exists()
    assert f"UNVERIFIED: {name}" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize("margins", [[1.0, 0.05], []])
def test_a_near_tie_is_no_fault(tmp_path: Path, margins: list[float]) -> None:
    tie = {"weights": "w", "inputs": [1, 2], "choices": [3, 9], "margins": margins, "tolerance": 0.5}
    plain = eager(tmp_path / "a.json", **facts("eager", 190.0))
    other = compiled(tmp_path / "b.json", **facts("compiled", 40.0, **{**VERIFIED, "same_work": tie}))
    found = check(analyse([plain, other]), "eager and compiled: same tokens")
    assert found.status == "ok" and f"margins of the others up to {0.05 if margins else 0.5}" in found.detail


def edited(path: Path, change: Any) -> Path:
    """The trace with its list of events changed in place."""
    content = json.loads(path.read_text())
    change(content["traceEvents"])
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("name", "change", "detail"),
    [
        ("kernels", lambda e: e[-1]["args"].pop("correlation"), "1 without a launch"),
        ("kernels", lambda e: e.__delitem__(slice(-4, None)), "1 launches without a kernel"),
        ("kernels", lambda e: e.__setitem__(slice(None), [x for x in e if x["cat"] != "kernel"]), "none in the trace"),
        ("same kernels in each step", lambda e: e.pop(), "decode at 16: 4, 3"),
        ("nothing compiled in the steps", lambda e: e[1].update(name="compile_fx (dynamo_timed)"), "compile_fx"),
    ],
)
def test_lost_events_are_unverified(pair: list[Path], name: str, change: Any, detail: str) -> None:
    found = check(analyse([edited(pair[1], change)]), f"compiled: {name}")
    assert found.status == UNVERIFIED and detail in found.detail


# ---- every kind of file


def test_gzipped_traces_read_alike(tmp_path: Path) -> None:
    plain, packed = eager(tmp_path / "a.json"), eager(tmp_path / "a.json.gz")
    assert load(plain).groups == load(packed).groups and load(packed).label == "a"


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
@pytest.mark.parametrize("share", [0.5, 0.9, 0.999])
def test_a_cut_off_trace_is_read_as_far_as_it_goes(tmp_path: Path, suffix: str, share: float) -> None:
    path = eager(tmp_path / f"trace{suffix}", tuple(range(16, 48)))
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    report = analyse([path])
    assert check(report, "trace: file").status == UNVERIFIED and report.traces[0].kernels > 10


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"  \n", "the file is empty"),
        (b"hello", "not a trace"),
        (b"{}", "not a trace: no list of events"),
        (b'{"traceEvents": []}', "no complete event"),
        (b'{"traceEvents": [{"ph": "X", "na', "cut off before its first whole event"),
        (b"\x1f\x8bnonsense", "damaged gzip file"),
        (b"[1, 2, null]", "no complete event"),
    ],
)
def test_what_is_no_trace_gets_one_clear_line(
    tmp_path: Path, content: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message):
        load(path)
    assert main([str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and str(path) in error


@pytest.mark.parametrize(
    "content",
    [
        '{"deviceProperties": 5, "traceEvents": [%s]}',
        '{"nearroof": {"steps": [1]}, "traceEvents": [%s]}',
        '{"nearroof": {"graphs": "verified"}, "traceEvents": [%s]}',
        '[{"ph": "X", "ts": 1, "dur": 1e400, "name": "aten::mm", "cat": "cpu_op"}]',
        '[{"ph": "X", "ts": NaN, "dur": 2, "name": "aten::mm", "cat": "cpu_op"}]',
        "[" * 100_000,
    ],
)
def test_values_of_wrong_kinds_get_one_line_and_leave_no_report(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    event = '{"ph": "X", "ts": 1, "dur": 2, "name": "aten::mm", "cat": "cpu_op"}'
    (tmp_path / "trace.json").write_text(content.replace("%s", event))
    assert main([str(tmp_path / "trace.json")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and "trace.json" in error
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_a_report_never_takes_the_place_of_its_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = eager(tmp_path / "report.json", **facts("eager", 190.0))
    before = trace.read_bytes()
    assert main([str(trace)]) == 2 and "is one of the traces" in capsys.readouterr().err
    assert trace.read_bytes() == before


def test_a_mistake_on_the_command_line_gets_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--unknown"])
    error = capsys.readouterr().err
    assert left.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1


def test_a_missing_file_gets_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_foreign_trace_gets_what_can_be_said(tmp_path: Path) -> None:
    builder = Builder()
    for number in (3, 4):
        builder.add("user_annotation", f"ProfilerStep#{number}", 100 * number, 90)
        builder.add("python_function", "model.py(7): forward", 100 * number, 50)
        builder.kernel("sgemm_128x64", 100 * number + 30, 40, builder.launch("cudaLaunchKernel", 100 * number + 20))
    report = analyse([builder.write(tmp_path / "theirs.json")])
    assert report.verified and {c.status for c in report.checks} == {"ok", "n/a"}
    assert report.verdict.startswith(
        "The traced program on NVIDIA H200: step runs at 10,000 steps/s under the profiler"
    )
    group = report.traces[0].groups["step"]
    assert group.kinds == {"gemv": (1, pytest.approx(40))} and group.gaps["between steps"].us == pytest.approx(60)


def test_a_trace_without_annotations_is_one_step(tmp_path: Path) -> None:
    builder = Builder()
    builder.kernel("sgemm", 30, 40, builder.launch("cudaLaunchKernel", 20))
    assert load(builder.write(tmp_path / "t.json")).groups["step"].kernel_counts == [1]


def test_a_real_trace_of_an_h200_without_annotations(tmp_path: Path) -> None:
    """Four replays of the compiled step of a Llama-3.1-8B of three layers (bf16, greedy, Inductor's kernels)."""
    trace = load(ROOT / "tests" / "data" / "h200_compiled_3_layers.json.gz")
    group = trace.groups["step"]
    assert group.kernel_counts == [45] * 4 and group.launches == {"cudaGraphLaunch": 1} and trace.unmatched == 0
    kernels = {kind: count for kind, (count, _) in group.kinds.items()}
    # A layer: qkv, output, gate with up, down; norms before both halves; flex attention in two parts and their sum.
    assert kernels == {"gemv": 13, "attention": 9, "norm": 7, "pointwise": 14, "sampling": 2}
    assert group.kinds["gemv"][1] == pytest.approx(561, abs=1) and group.busy_us == pytest.approx(647, abs=1)
    assert trace.overlaps > 100, "programmatic dependent launch: most kernels start before the last one ends"
    inside = group.gaps["inside a replay"]
    assert inside.p90 < 0.5 and inside.us < 2
    report = analyse([ROOT / "tests" / "data" / "h200_compiled_3_layers.json.gz"])
    assert report.verified and "NVIDIA H200: step runs at 1,368 steps/s under the profiler" in report.verdict
    assert "the largest part is gemv" in report.verdict and to_html(report)


def test_what_follows_the_head_draws_the_token(tmp_path: Path) -> None:
    builder = Builder()
    builder.add("user_annotation", "decode[1]", 0, 50)
    names = ("_project_kernel", "triton_poi_fused_add_0", "_project_kernel", "triton_poi_fused_add_1")
    for index, name in enumerate(names):
        builder.kernel(name, 10 * index + 5, 5, builder.launch("cudaLaunchKernel", 10 * index))
    (step,) = load(builder.write(tmp_path / "trace.json")).steps
    assert [kernel.kind for kernel in step.kernels] == ["gemv", "pointwise", "gemv", "sampling"]


def test_traces_that_share_no_step_are_reported_apart(tmp_path: Path) -> None:
    paths = [eager(tmp_path / "a.json", (16,)), compiled(tmp_path / "b.json", (99,))]
    report = analyse(paths)
    assert "decode at 16" in report.verdict and to_json(report)["comparisons"] == [] and to_html(report)


def test_a_cpu_trace_has_operators_in_the_kernels_place(tmp_path: Path) -> None:
    builder = Builder(**{**facts("compiled", 60.0), "device": "cpu", "graphs": {"status": "none"}})
    builder.add("user_annotation", "decode[16]", 0, 50)
    builder.add("cpu_op", "Torch-Compiled Region: 0/0", 2, 46)
    builder.add("cpu_op", "aten::mm", 10, 20)
    builder.add("cpu_op", "aten::clone", 12, 5)
    builder.add("cpu_op", "graph_0_cpp_fused_add_argmax_1", 32, 8)
    trace = load(builder.write(tmp_path / "trace.json"))
    group = trace.groups["decode at 16"]
    assert group.kinds == {"gemv": (1, pytest.approx(20)), "other": (1, pytest.approx(8))}
    assert trace.floors(group) == {"gemv": pytest.approx(10), "other": pytest.approx(2)}, (
        "no kernel is attention's alone"
    )
    assert group.gaps["between launches"].us == pytest.approx(50 - 28) and group.traced_us == pytest.approx(50)
    report = analyse([tmp_path / "trace.json"])
    assert report.verified and check(report, "compiled: kernels").status == "n/a"


# ---- parts


@pytest.mark.parametrize(
    ("name", "operator", "kind"),
    [
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "", "gemv"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16>(Params)", "", "gemv"),
        ("void cublasLt::splitKreduce_kernel<32, 16>(Params)", "aten::mm", "gemv"),
        ("triton_red_fused__to_copy_mean_mm_mul_pow_rsqrt_3", "", "gemv"),
        ("triton_red_fused__to_copy_mean_mul_pow_rsqrt_3", "", "norm"),
        ("triton_poi_fused__scaled_dot_product_flash_attention_cat_2", "", "pointwise"),
        ("triton_tem_fused_flex_attention_4", "", "attention"),
        ("triton_red_fused_argmax_7", "", "sampling"),
        ("triton_red_fused__to_copy_add_as_strided_embedding_mul_sum_unsqueeze_view_19", "", "gemv"),
        ("triton_red_fused__to_copy_as_strided_mul_silu_slice_sum_view_13", "", "gemv"),
        ("triton_red_fused__fused_rms_norm__to_copy_add_embedding_unsqueeze_view_12", "", "norm"),
        ("triton_tem_fused__to_copy_add_arange_clamp_flex_attention_floor_divide_sub_8", "", "attention"),
        ("triton_per_fused__to_copy_add_clamp_flex_attention_floor_divide_where_10", "", "attention"),
        ("triton_poi_fused__to_copy_add_cat_index_mul_slice_split_with_sizes_sub_2", "", "pointwise"),
        ("triton_red_fused___rshift____to_copy_add_arange_bitwise_xor_ge_mul_sum_3", "", "sampling"),
        ("_embed_kernel", "", "pointwise"),
        ("_project_kernel", "", "gemv"),
        ("_attend_kernel", "nearroof::attend", "attention"),
        ("_select_kernel", "", "sampling"),
        ("void at::native::vectorized_elementwise_kernel<4, AddFunctor>(int)", "aten::add", "pointwise"),
        ("void at::native::elementwise_kernel<direct_copy_kernel_cuda>(int)", "aten::copy_", "copies"),
        ("void (anonymous namespace)::softmax_warp_forward<float>(float*)", "aten::_softmax", "sampling"),
        ("ncclDevKernel_AllReduce", "", "other"),
    ],
)
def test_kinds_of_kernels(name: str, operator: str, kind: str) -> None:
    assert kind_of(name, operator) == kind


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), min_size=1, max_size=12))
def test_the_timeline_gives_each_moment_to_the_innermost_event(spans: list[tuple[int, int]]) -> None:
    nested: list[tuple[int, int]] = []
    for start, size in sorted(spans, key=lambda s: (s[0], -s[1])):
        if all(start >= b or start + size <= b for _, b in nested):
            nested.append((start, start + size))
    events = [trace_report.Event(str(i), "cpu_op", a, b, ("1", "1"), {}) for i, (a, b) in enumerate(nested)]
    events.sort(key=lambda e: (e.start, -e.end))
    covered = sum(us for us, _ in Timeline(("1", "1"), events).within(-1, 100))
    assert covered == len({t for a, b in nested for t in range(a, b)})


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=9), st.floats(0, 1))
def test_percentile_lies_between_the_extremes(values: list[float], share: float) -> None:
    assert min(values) <= percentile(values, share) <= max(values) * (1 + 1e-12)
    assert percentile(values, 0.0) == min(values) and math.isclose(percentile(values, 1.0), max(values))


# ---- files


def test_runs_alone_with_the_standard_library(pair: list[Path], tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(ROOT / "trace_report.py", alone)
    command = [
        sys.executable,
        "-I",
        "-S",
        str(alone / "trace_report.py"),
        *map(str, pair),
        "--output",
        str(alone / "out"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout == "" and done.stderr.startswith("# Trace report")
    assert sorted(p.name for p in (alone / "out").iterdir()) == ["report.html", "report.json", "report.md"]


def test_a_busy_machine_is_told_from_a_slow_path(tmp_path: Path) -> None:
    slow = eager(tmp_path / "trace_eager.json", **facts("eager", 5000.0))
    fast = compiled(tmp_path / "trace_compiled.json", **facts("compiled", 40.0, **VERIFIED))
    report = analyse([slow, fast])
    assert "The machine was busy" in report.verdict and "x the" not in report.verdict
    (tax,) = (check for check in report.checks if check.name == "eager: profiler's tax")
    assert tax.detail.startswith("the machine was busy")


def test_sections_come_in_their_order(pair: list[Path]) -> None:
    report = to_markdown(analyse(pair))
    titles = [
        "Integrity",
        "Tokens a second against the limit",
        "Side by side",
        "Who owns the gaps",
        "Host ledger",
        "Waterfall from eager to compiled",
        "Fusion ledger",
        "Roofline",
        "What is left",
        "Warm-up",
        "Compilation",
    ]
    places = [report.index(f"## {title}") for title in titles]
    assert all(a < b for a, b in pairwise(places))


def test_json_holds_the_documented_keys(pair: list[Path]) -> None:
    content = json.loads(json.dumps(to_json(analyse(pair))))
    guide = (ROOT / "docs" / "traces.md").read_text(encoding="utf-8")
    keys = {*content, *content["runs"][0], *content["runs"][0]["groups"]["decode at 16"], *content["comparisons"][0]}
    keys |= {*content["integrity"][0], *content["comparisons"][0]["fusion"][0]}
    assert [key for key in sorted(keys) if f"`{key}`" not in guide] == []


def test_html_is_self_contained_and_escapes_names(tmp_path: Path) -> None:
    builder = Builder(decoder="</script><b>", model="<i>")
    builder.add("user_annotation", "decode[16]", 0, 50)
    builder.kernel("</script><img src=x>", 30, 10, builder.launch("cudaLaunchKernel", 20))
    page = to_html(analyse([builder.write(tmp_path / "t.json")]))
    assert "<img" not in page and "<b>" not in page and page.count("</script>") == 2
    assert not re.search(r"https?:|src=(?!x)|@import|url\(", page), "nothing is loaded from elsewhere"


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium to open the page in")
def test_the_page_draws_its_lanes_without_an_error(pair: list[Path], tmp_path: Path) -> None:
    main([*map(str, pair)])
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=2000"]
    page = (tmp_path / "report.html").as_uri()
    command = [CHROMIUM, *flags, f"--user-data-dir={tmp_path / 'browser'}", "--dump-dom", page]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr
    bars = sum(len(p["host"]) + len(p["device"]) for p in trace_report.picture(analyse(pair))["paths"])
    assert 'data-lanes="4"' in done.stdout and f'data-bars="{bars}"' in done.stdout
    assert done.stdout.count("<h2>") > 10 and 'class="gemv"' in done.stdout

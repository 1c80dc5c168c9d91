"""Proof that CUDA graphs ran, and the capture of traces.

Knows torch's profiler, its compile-time counters and its graph tree. Knows nothing of models, tokens or decoders: a
step is a name and a callable, and what a reader of the trace needs to know is handed in as plain data (`RunFacts`).
"""

import itertools
import json
import logging
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType
from typing import Any, Literal, NamedTuple, TypedDict

import torch

# Inductor says why it leaves graphs out through one of these loggers (which one depends on the version), nowhere else.
_SKIP_LOGGERS = tuple(f"torch._inductor.cudagraph_utils.__{artifact}" for artifact in ("cudagraphs", "perf_hints"))
_MAX_REASON = 300


@dataclass(frozen=True)
class GraphProof:
    """What one segment of steps showed.

    status: "verified" (every step replayed recorded graphs; nothing was recorded, skipped or compiled), "none" (no
        graphs were asked for: CPU, or a mode without them), "unverified" (refuted, or it cannot be shown).
    reasons: one line each, why the status is not better, or what broke the promise.
    failed: the promise was seen to be broken. "unverified" without it: torch's private interface is missing.
    counts: steps, replays, recordings (graphs in the tree), new_recordings, copied_inputs (a step, over its graphs),
        compilations, graph_breaks, skips.
    """

    status: Literal["verified", "none", "unverified"]
    reasons: tuple[str, ...] = ()
    failed: bool = False
    counts: dict[str, int] = field(default_factory=dict)


class CompilationFacts(TypedDict):
    """What the compiler did in this process since a GraphWatch was made."""

    compilations: int
    cached: int  # graphs whose code came from Inductor's cache
    graph_breaks: dict[str, int]  # reason -> how often
    recompilations: list[str]  # one reason each
    skips: int  # graphs that Inductor left out
    skip_reasons: list[str]
    compile_s: float
    phases_s: dict[str, float]  # phase -> seconds, without the phases within it


class StepFacts(TypedDict, total=False):
    """What is known of one kind of step (`decode[17]`, or `prefill`) without the profiler."""

    unprofiled_us: list[float]  # wall time a step, several measurements, taken BEFORE any profiler ran
    bytes: dict[str, int]  # what the step must move, by kind of kernel: gemv, attention, sampling, norm, other
    tokens: int  # tokens that the step yields (decode: the batch) or takes in (prefill)


class SameWork(TypedDict):
    """Teacher-forced choices, so that two paths can be compared token by token even on random weights."""

    weights: str  # names the weights: checkpoint, or shape and seed, and the quantisation
    inputs: list[int]  # the tokens fed in, the same on every path
    choices: list[int]  # the token that this path chose after each input
    margins: list[float]  # best minus second best (perturbed) score of each choice; may be empty on all paths but one
    tolerance: float  # a different choice is a fault only where the margin is larger


class WarmUp(TypedDict, total=False):
    compile_s: float  # the first call: trace, compile, run
    record_s: float  # the calls after it until replays are steady (recording included)
    prefill_s: float  # all of that for prefill


class RunFacts(TypedDict, total=False):
    """The facts of a run that its trace cannot show; stored in the trace under the key "nearroof".

    Every key may be missing: the report then says what cannot be shown.
    """

    decoder: str  # eager, compiled, fused
    model: str
    dtype: str
    quantization: str
    batch: int
    capacity: int
    device: str  # cpu, cuda, mps
    device_name: str
    driver: str
    sm_clock_mhz: float  # while decode steps run
    power_limit_w: float
    torch: str
    triton: str
    cuda: str
    commit: str
    command: str
    date: str
    compile_mode: str
    settings: dict[str, Any]  # of the compiler, where they differ from its defaults
    sampling: dict[str, Any]
    read_bandwidth_bytes_per_s: float  # measured on this device in this run
    graphs: dict[str, Any]  # dataclasses.asdict(GraphProof) of an unprofiled segment of decode steps
    compilation: CompilationFacts
    warm_up: WarmUp
    steps: dict[str, StepFacts]  # by the name of the step
    same_work: SameWork


class Step(NamedTuple):
    """One annotated step of a trace. prepare (not annotated) runs before it, and the device is idle when it begins."""

    name: str
    run: Callable[[], object]
    prepare: Callable[[], object] | None = None


class _SkipReasons(logging.Handler):
    """Keeps the last reasons that Inductor logged for leaving graphs out."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = " ".join(record.getMessage().split())[:_MAX_REASON]
        if "skipping cudagraph" in text and text not in self.texts:
            self.texts = [*self.texts[-7:], text]

    def detach(self) -> None:
        for name in _SKIP_LOGGERS:
            logging.getLogger(name).removeHandler(self)


@dataclass(frozen=True)
class _Snapshot:
    """Process-wide counts of the compiler at one moment."""

    compilations: int
    cached: int
    graph_breaks: dict[str, int]
    skips: int
    last_compilation: object | None


class GraphWatch:
    """Watches segments of decode steps and says whether CUDA graphs ran in each.

    Create it before anything is compiled: the reason of a skipped graph is logged once, while compiling or warming up.
    Warm up (three calls: compile and run, record, replay) before `start`. The graph tree belongs to a thread: call
    `start` and `stop` on the one that runs the steps. A replay costs one more Python call once it is watched. Counts of
    compilations are the process's, unless `start` is told which function's they should be.
    """

    def __init__(self, device: torch.device, expect_graphs: bool = True) -> None:
        self._device = device
        self._expects = expect_graphs and device.type == "cuda"
        self._skip_log = _SkipReasons()
        for name in _SKIP_LOGGERS:
            logging.getLogger(name).addHandler(self._skip_log)
        self._detach = weakref.finalize(self, self._skip_log.detach)
        self._made = _snapshot()
        self._before: _Snapshot | None = None
        self._code: CodeType | None = None  # whose compilations count
        self._missing = ""  # what torch's private interface lacks
        self._replays: dict[int, int] = {}  # as `_replays_by_graph` gave them when the segment began

    def start(self, function: Callable[..., object] | None = None) -> None:
        """Begin a segment, of calls of this function if it is given: what others compile is then no fault. An
        unfinished segment is dropped."""
        self._code = function and function.__code__
        self._before = _snapshot(self._code)
        self._missing = ""
        if not self._expects:
            return
        try:
            self._replays = _replays_by_graph(self._device)
        except (ImportError, AttributeError, TypeError) as error:
            self._missing = f"torch {torch.__version__} has another graph tree: {error}"

    def stop(self, steps: int | None = None) -> GraphProof:
        """End the segment. steps: how many ran in it; each must have replayed the same number of graphs."""
        if self._before is None:
            return GraphProof("unverified", ("the segment was never started",))
        before, after, self._before = self._before, _snapshot(self._code), None
        counts, broken = _compiler_changes(before, after)
        if not self._expects:
            return GraphProof("none", tuple(broken), bool(broken), counts)
        try:
            now = _replays_by_graph(self._device)
            during = {graph: count - self._replays[graph] for graph, count in now.items() if graph in self._replays}
            nodes = _tree_nodes(self._device)
            copied = sum(len(node.non_static_input_idx) for node in nodes if during.get(node.id.id))
        except (ImportError, AttributeError, TypeError) as error:
            self._missing = self._missing or f"torch {torch.__version__} has another graph tree: {error}"
            now, during, copied = {}, {}, 0
        replays = sum(during.values())
        new = len(now) - len(self._replays)
        counts |= {"replays": replays, "recordings": len(now), "new_recordings": new, "copied_inputs": copied}
        counts |= {"steps": steps} if steps is not None else {}
        if self._missing:
            return GraphProof("unverified", (*broken, self._missing), bool(broken), counts)
        if counts["skips"]:
            broken.append(f"a graph was skipped: {self._why_skipped()}")
        if new:
            broken.append(f"{new} graphs were recorded during the segment")
        if replays == 0:
            broken.append(f"no recorded graph was replayed: {self._why_skipped()}")
        elif steps and replays % steps:
            broken.append(f"{replays} replays do not divide into {steps} steps: some steps ran without graphs")
        return GraphProof("unverified" if broken else "verified", tuple(broken), bool(broken), counts)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Within a segment: the graphs that are recorded, replayed or skipped meanwhile are no step's."""
        if not self._expects or self._before is None or self._missing:
            yield
            return
        segment, skips, replays = self._before, _snapshot(self._code).skips, _replays_by_graph(self._device)
        yield
        if self._before is segment:
            skipped = _snapshot(self._code).skips - skips
            self._before = replace(segment, skips=segment.skips + skipped)
            for graph, count in _replays_by_graph(self._device).items():
                self._replays[graph] = self._replays.get(graph, 0) + count - replays.get(graph, 0)

    def compilation(self) -> CompilationFacts:
        """What the compiler did in this process since this watch was made, for a trace's metadata."""
        then, now = self._made, _snapshot()
        metrics = _metrics_since(then.last_compilation)
        return {
            "compilations": now.compilations - then.compilations,
            "cached": now.cached - then.cached,
            "graph_breaks": dict(Counter(now.graph_breaks) - Counter(then.graph_breaks)),
            "recompilations": _recompile_reasons(then.last_compilation),
            "skips": now.skips - then.skips,
            "skip_reasons": list(self._skip_log.texts),
            "compile_s": sum(m.entire_frame_compile_time_s or 0.0 for m in metrics),
            "phases_s": _phases(metrics),
        }

    def close(self) -> None:
        """Stop listening to Inductor's log."""
        self._detach()

    def _why_skipped(self) -> str:
        return "; ".join(self._skip_log.texts) or "Inductor gave no reason (was anything compiled with CUDA graphs?)"


def _one_line(text: str) -> str:
    return " ".join(text.split())[:_MAX_REASON]


def _snapshot(code: CodeType | None = None) -> _Snapshot:
    if "torch._dynamo" not in sys.modules:  # nothing was ever compiled, and the import takes a second
        return _Snapshot(0, 0, {}, 0, None)
    from torch._dynamo.utils import counters, get_compilation_metrics

    metrics, versions = get_compilation_metrics(), code and _versions(code)
    return _Snapshot(
        compilations=counters["stats"]["unique_graphs"] if versions is None else versions,
        cached=counters["inductor"]["fxgraph_cache_hit"],
        graph_breaks=dict(counters["graph_break"]) if versions is None else {},
        skips=counters["inductor"]["cudagraph_skips"],
        last_compilation=metrics[-1] if metrics else None,
    )


def _versions(code: CodeType) -> int | None:
    """How many compiled versions of this code exist, if torch still says."""
    try:
        from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
    except ImportError:
        return None
    return len(_debug_get_cache_entry_list(code))


def _compiler_changes(before: _Snapshot, after: _Snapshot) -> tuple[dict[str, int], list[str]]:
    """What the compiler did between two snapshots: counts, and a line for each that a steady segment never does."""
    new_breaks = [_one_line(why) for why, n in after.graph_breaks.items() if n > before.graph_breaks.get(why, 0)]
    counts = {
        "compilations": after.compilations - before.compilations,
        "graph_breaks": sum(after.graph_breaks.values()) - sum(before.graph_breaks.values()),
        "skips": after.skips - before.skips,
    }
    broken = []
    if counts["compilations"]:
        why = "; ".join(_recompile_reasons(before.last_compilation)) or "a function compiled for the first time"
        broken.append(f"compiled {counts['compilations']} times during the segment: {why}")
    if new_breaks:
        broken.append(f"the graph broke: {'; '.join(new_breaks)}")
    return counts, broken


def _recompile_reasons(since: object | None) -> list[str]:
    return [_one_line(m.recompile_reason) for m in _metrics_since(since) if m.recompile_reason]


def _metrics_since(since: object | None) -> list[Any]:
    """What torch recorded of each compilation after this one, oldest first."""
    from torch._dynamo.utils import get_compilation_metrics

    later = itertools.takewhile(lambda metrics: metrics is not since, reversed(get_compilation_metrics()))
    return list(later)[::-1]


# Each phase of compilation, and how torch counts it: with the phase below it, which runs within it.
_NESTED_PHASES = {
    "dynamo": "dynamo_cumulative_compile_time_us",
    "aot_autograd": "aot_autograd_cumulative_compile_time_us",
    "inductor": "inductor_cumulative_compile_time_us",
    "kernels": "triton_compile_time_us",  # C++ on a CPU, its name notwithstanding
}
_LATER_PHASES = {"autotuning": "runtime_triton_autotune_time_us", "recording": "runtime_cudagraphify_time_us"}


def _phases(metrics: list[Any]) -> dict[str, float]:
    """Seconds of each phase that took any; what this torch does not count is missing."""

    def seconds(name: str) -> float:
        return sum(getattr(m, name, None) or 0 for m in metrics) / 1e6

    totals = [seconds(name) for name in _NESTED_PHASES.values()]
    alone = (total - within for total, within in zip(totals, [*totals[1:], 0.0], strict=True))
    phases = dict(zip(_NESTED_PHASES, alone, strict=True))
    phases |= {phase: seconds(name) for phase, name in _LATER_PHASES.items()}
    return {phase: round(took, 3) for phase, took in phases.items() if took > 0}


def _tree_nodes(device: torch.device) -> Iterator[Any]:
    """The recorded graphs of a device (this thread's), parents before children. Nothing where no graph tree exists."""
    from torch._inductor.cudagraph_trees import get_manager

    index = device.index if device.index is not None else torch.cuda.current_device()
    manager = get_manager(index, False)
    pending = [node for roots in (manager.roots or {}).values() for node in roots] if manager is not None else []
    while pending:
        node = pending.pop(0)
        yield node
        pending += [child for children in node.children.values() for child in children]


class _Replay:
    """A recorded graph's own method to replay it, with a count of its calls. The graph holds this, hence a weak
    method: in a cycle, the graph and its memory would wait for a garbage collection after the one that drops it."""

    def __init__(self, replay: Callable[[], None]) -> None:
        self.replay, self.calls = weakref.WeakMethod(replay), 0

    def __call__(self) -> None:
        self.calls += 1
        replay = self.replay()
        assert replay is not None  # called by the graph that it is a method of
        replay()


def _replays_by_graph(device: torch.device) -> dict[int, int]:
    """Graph id -> how often it has been replayed since it was first asked for. One count serves all who watch: a
    segment may begin and end within another's."""
    counts = {}
    for node in _tree_nodes(device):
        if not isinstance(node.run_graph, _Replay):
            node.run_graph = _Replay(node.run_graph)  # shadows the method on this node alone
        counts[node.id.id] = node.run_graph.calls
    return counts


def capture(path: Path, steps: Sequence[Step], facts: RunFacts, device: torch.device, nvtx: bool = False) -> None:
    """Trace every step once, after two unrecorded rounds over all of them, into path (.json or .json.gz).

    A step without `prepare` follows the one before without a pause, as in generation; a step with it begins a new
    `ProfilerStep#`. nvtx marks the same ranges for Nsight Systems. Nothing may be timed in this process afterwards: the
    profiler leaves it 10 to 20 % slower. Raises OSError, and leaves no file, where the trace cannot be written.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    sections = 1 + sum(step.prepare is not None for step in steps[1:])
    profiler = torch.profiler.profile(
        activities=activities,
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=sections, repeat=1),
        on_trace_ready=lambda finished: _export(finished, path),
    )
    with profiler:
        for _round in ("wait", "warm-up"):
            for step in steps:
                _prepare(step, device)
                step.run()
            _synchronize(device)
            profiler.step()
        profiler.add_metadata_json("nearroof", json.dumps(facts))
        for number, step in enumerate(steps):
            if number and step.prepare is not None:
                _synchronize(device)
                profiler.step()
            _prepare(step, device)
            with torch.profiler.record_function(step.name), _nvtx_range(step.name, nvtx):
                step.run()
        _synchronize(device)  # before the profiler stops: the last kernels belong to the trace
        profiler.step()


def _export(profiler: torch.profiler.profile, path: Path) -> None:
    path.unlink(missing_ok=True)
    try:
        profiler.export_chrome_trace(str(path))
    except OSError as error:
        path.unlink(missing_ok=True)
        raise OSError(f"{path}: {error.strerror or error}") from error
    if not path.exists():  # libkineto logs a failure to write and goes on
        path.with_name(f"{path.name}.tmp").unlink(missing_ok=True)
        raise OSError(f"{path}: the trace could not be written (is the disk full?)")


def _prepare(step: Step, device: torch.device) -> None:
    if step.prepare is not None:
        step.prepare()
        _synchronize(device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _nvtx_range(name: str, enabled: bool) -> Iterator[None]:
    if not enabled:
        yield
        return
    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()

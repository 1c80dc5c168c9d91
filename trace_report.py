"""Traces of prefill and decode to a report: what compilation did, how far decode is from the limit, and what is left.

Reads what torch's profiler exports, and the facts that `profiling.capture` stored in it; a trace of another program
gets the part of the report that needs no facts. Standard library only, and alone in its directory: it knows nothing of
torch, models or devices, and analyses a trace on any machine. docs/traces.md explains the report and report.json.

    python trace_report.py trace_eager.json trace_compiled.json [--output DIR]

Exit status: 0 when all that is claimed is verified or does not apply, 1 when something is UNVERIFIED (the report is
written all the same), 2 when a file cannot be read.
"""

import argparse
import html
import json
import re
import sys
import zlib
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple, NoReturn

# All times are microseconds. The time credited to a kernel is its share of the union of intervals in which the device
# works: with programmatic dependent launch kernels overlap, and the sum of their durations is more than the time spent.

KINDS = ("gemv", "attention", "norm", "pointwise", "sampling", "copies", "other")
INSIDE, BETWEEN_LAUNCHES, BETWEEN_STEPS = PLACES = ("inside a replay", "between launches", "between steps")
OK, NONE, UNVERIFIED = "ok", "n/a", "UNVERIFIED"
SCHEMA = 1  # of report.json
MAX_CELLS = 4_000_000  # kernels of one step times kernels of the other, to be aligned: seconds beyond that
MAX_BARS = 20_000  # of a lane of the picture

_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}  # categories of events
_RUNTIME = {"cuda_runtime", "cuda_driver"}
_HOST = {"cpu_op", "user_annotation"} | _RUNTIME
_ANNOTATION = re.compile(r"(prefill|decode)(?:\[(\d+)\])?")
_FOREIGN_STEP = re.compile(r"(ProfilerStep)#(\d+)")
_LAUNCH = re.compile(r"Launch(?!HostFunc)|Memcpy|Memset")
# What torch.compile puts around the operators of a compiled call.
_WRAPPER = re.compile(r"Torch-Compiled Region|Pregraph bytecode|AOTDispatcher|## Call CompiledFxGraph|CompiledFunction")
_GUARDS = "TorchDynamo Cache Lookup"
_COMPILING = "(dynamo_timed)"


class TraceError(ValueError):
    """A file that is no trace."""


@dataclass(frozen=True)
class Event:
    """A complete event of the trace: a host call, an annotation, a kernel."""

    name: str
    category: str
    start: float
    end: float
    thread: tuple[str, str]  # process and thread; of a device: device and stream
    args: dict[str, Any]


@dataclass
class Kernel:
    """Work on the device. On a trace without a device the outermost operators stand in the kernels' place."""

    name: str
    kind: str
    start: float
    end: float
    stream: str
    operator: str = ""  # the host operator that launched it, "" if none is known
    launch: Event | None = None
    credited: float = 0.0


@dataclass
class Step:
    """An annotated step: its host call, and the kernels launched in it wherever they ran."""

    name: str
    phase: str  # prefill, decode, step
    position: int
    start: float  # of the host call
    end: float
    kernels: list[Kernel] = field(default_factory=list)
    previous_end: float | None = None  # of the last kernel of the step before, where that followed without a pause


class Gap(NamedTuple):
    """An interval in which the device is idle."""

    place: str
    owner: str  # the host event that owns it
    start: float
    end: float


@dataclass
class Gaps:
    """The gaps of one place: count and microseconds a step, percentiles over all."""

    count: float
    us: float
    p50: float
    p90: float


@dataclass
class Group:
    """Consecutive steps of one phase, as means a step."""

    name: str  # "prefill", "decode at 17"
    phase: str
    position: int
    steps: list[str]
    tokens: int
    unprofiled_us: float | None  # median
    unprofiled_p90_us: float | None
    unprofiled_p99_us: float | None
    traced_us: float  # wall time a step under the profiler
    host_us: float  # time the host needs to issue a step
    kernel_counts: list[int]
    busy_us: float  # union of intervals
    kinds: dict[str, tuple[float, float]]  # kernels and credited microseconds
    gaps: dict[str, Gaps]
    gap_owners: list[tuple[str, str, float, float]]  # place, owner, count, microseconds; the largest first
    launches: dict[str, float]  # by call
    host: dict[str, tuple[float, float]]  # calls and microseconds of the host's time
    bytes: dict[str, int]  # that a step must move, by kind

    @property
    def wall_us(self) -> float:
        """Unprofiled where it was measured, as traced otherwise."""
        return self.unprofiled_us if self.unprofiled_us is not None else self.traced_us

    @property
    def unit(self) -> str:
        """Of `rate`: what a step of another program yields is not known."""
        return "steps/s" if self.phase == "step" else "tok/s"

    @property
    def rate(self) -> float:
        return 1e6 * self.tokens / self.wall_us if self.wall_us else 0.0


@dataclass
class Trace:
    """A parsed file."""

    label: str
    facts: dict[str, Any]
    device_name: str
    events: list[Event]
    timeline: "Timeline"
    steps: list[Step]
    complete: bool  # False: the file was cut off
    has_device: bool
    kernels: int
    unmatched: int  # kernels without a launch
    overlaps: int = 0  # kernels that start before an earlier one of their stream ends
    groups: dict[str, Group] = field(default_factory=dict)

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second, as measured on the device."""
        return self.facts.get("read_bandwidth_bytes_per_s")

    def floors(self, group: Group) -> dict[str, float]:
        """The least microseconds of each kind: the bytes it must move, at the measured bandwidth.

        The bytes of a kind that has no kernel are moved by those of no single kind (Inductor's loops on a CPU).
        """
        floors: defaultdict[str, float] = defaultdict(float)
        for kind, count in group.bytes.items() if self.bandwidth else ():
            floors[kind if kind in group.kinds or "other" not in group.kinds else "other"] += (
                1e6 * count / self.bandwidth
            )
        return dict(floors)

    def limit(self, group: Group) -> float | None:
        """Tokens a second if a step did nothing but move its bytes."""
        floor = sum(self.floors(group).values())
        return 1e6 * group.tokens / floor if floor else None


class Timeline:
    """The innermost event of one host thread at every moment."""

    def __init__(self, thread: tuple[str, str], events: Iterable[Event]) -> None:
        """events: sorted by start, the longer first."""
        self.thread = thread
        self._segments: list[tuple[float, float, Event]] = []
        stack: list[Event] = []
        now = float("-inf")
        for event in [*(e for e in events if e.thread == thread and e.category in _HOST), None]:
            until = event.start if event else float("inf")
            while stack and stack[-1].end <= until:
                now = self._add(now, stack[-1].end, stack.pop())
            if event:
                now = self._add(now, until, stack[-1]) if stack else max(now, until)
                stack.append(event)
        self._starts = [start for start, _, _ in self._segments]

    def _add(self, start: float, end: float, event: Event) -> float:
        if end > start:
            self._segments.append((start, end, event))
        return max(start, end)

    def within(self, start: float, end: float) -> Iterator[tuple[float, Event]]:
        """The microseconds that each innermost event has of an interval."""
        index = max(0, bisect_right(self._starts, start) - 1)
        while index < len(self._segments) and self._segments[index][0] < end:
            first, last, event = self._segments[index]
            if min(last, end) > max(first, start):
                yield min(last, end) - max(first, start), event
            index += 1


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_json(path: Path) -> tuple[Any, bool]:
    """The file's content and whether it was complete. A cut-off trace is read up to its last whole event."""
    data, complete = path.read_bytes(), True
    if data[:2] == b"\x1f\x8b":
        inflate = zlib.decompressobj(wbits=31)
        try:
            data, complete = inflate.decompress(data), inflate.eof
        except zlib.error as error:
            raise TraceError(f"{path}: damaged gzip file ({error})") from None
    text = data.decode("utf-8", errors="replace")
    if not text.strip():
        raise TraceError(f"{path}: the file is empty")
    try:
        return json.loads(text), complete
    except json.JSONDecodeError as error:
        if '"traceEvents"' not in text:
            raise TraceError(f"{path}: not a trace: {error}") from None
    end = len(text)
    for _attempt in range(8):  # a cut inside an event's own braces needs a second or third try
        end = text.rfind("},", 0, end)
        try:
            return json.loads(text[: end + 1] + "]}"), False
        except json.JSONDecodeError:
            continue
    raise TraceError(f"{path}: cut off before its first whole event")


def load(path: Path) -> Trace:
    """Parse a trace and sum up its steps.

    Raises:
        TraceError: the file is empty, no trace, or holds no complete event.
    """
    content, complete = read_json(path)
    facts: dict[str, Any] = {}
    device_name = ""
    if isinstance(content, dict):
        facts = content["nearroof"] if isinstance(content.get("nearroof"), dict) else {}
        device_name = next((str(p.get("name", "")) for p in content.get("deviceProperties") or []), "")
        content = content.get("traceEvents")
    if not isinstance(content, list):
        raise TraceError(f"{path}: not a trace: no list of events")
    events = sorted(filter(None, map(_event, content)), key=lambda e: (e.start, -e.end))
    if not events:
        raise TraceError(f"{path}: no complete event in the trace")
    steps = _find_steps(events)
    thread = _main_thread(events, steps)
    found = _device_kernels(events)
    kernels = found or _operators(events, thread)
    trace = Trace(
        label=str(facts.get("decoder") or re.sub(r"^trace_|\.json(\.gz)?$", "", path.name)),
        facts=facts,
        device_name=str(facts.get("device_name") or device_name),
        events=events,
        timeline=Timeline(thread, events),
        steps=steps,
        complete=complete,
        has_device=bool(found),
        kernels=len(found),
        unmatched=sum(k.launch is None for k in found),
    )
    _assign(trace, kernels)
    trace.groups = {group.name: group for group in _groups(trace)}
    return trace


def _event(raw: Any) -> Event | None:
    if not isinstance(raw, dict) or raw.get("ph") != "X":
        return None
    start, duration, args = raw.get("ts"), raw.get("dur", 0), raw.get("args")
    if not isinstance(start, int | float) or not isinstance(duration, int | float):
        return None
    thread = (str(raw.get("pid")), str(raw.get("tid")))
    name, category = str(raw.get("name", "")), str(raw.get("cat", ""))
    return Event(name, category, start, start + duration, thread, args if isinstance(args, dict) else {})


def _find_steps(events: list[Event]) -> list[Step]:
    """Our annotations; else the profiler's own steps; else each graph launch up to the next; else all is one step."""
    marks = [e for e in events if e.category == "user_annotation"]
    for pattern in (_ANNOTATION, _FOREIGN_STEP):
        if found := [(m, e) for e in marks if (m := pattern.fullmatch(e.name))]:
            phases = {"ProfilerStep": "step"}
            return [Step(e.name, phases.get(m[1], m[1]), int(m[2] or 0), e.start, e.end) for m, e in found]
    host = [e for e in events if e.category in _HOST] or events
    starts = [e.start for e in host if is_graph(e)]
    bounds = list(pairwise([*starts, max(e.end for e in host)]))
    if len(bounds) < 2:
        return [Step("whole trace", "step", 0, host[0].start, max(e.end for e in host))]
    return [Step(f"replay {i}", "step", i, start, end) for i, (start, end) in enumerate(bounds)]


def _main_thread(events: list[Event], steps: list[Step]) -> tuple[str, str]:
    """The host thread that runs the steps: the one that issues most in them."""
    first, last = steps[0].start, max(s.end for s in steps)
    threads = Counter(e.thread for e in events if e.category in _HOST and first <= e.start <= last)
    return threads.most_common(1)[0][0] if threads else events[0].thread


def _device_kernels(events: list[Event]) -> list[Kernel]:
    launches = {e.args["correlation"]: e for e in events if e.category in _RUNTIME and "correlation" in e.args}
    operators = {e.args["External id"]: e.name for e in events if e.category == "cpu_op" and "External id" in e.args}
    kernels = []
    for e in events:
        if e.category in _DEVICE:
            operator = operators.get(e.args.get("External id"), "")
            kind = kind_of(e.name, operator) if e.category == "kernel" else "copies"
            stream, launch = str(e.args.get("stream", e.thread[1])), launches.get(e.args.get("correlation"))
            kernels.append(Kernel(e.name, kind, e.start, e.end, stream, operator, launch))
    return kernels


def _operators(events: list[Event], thread: tuple[str, str]) -> list[Kernel]:
    """The outermost operators of a trace without a device, compiled loops included."""
    found: list[Kernel] = []
    for e in events:
        wrapper = _WRAPPER.match(e.name) or e.name == _GUARDS or e.name.endswith(_COMPILING)
        inside = bool(found) and e.end <= found[-1].end
        if e.category == "cpu_op" and e.thread == thread and not wrapper and not inside:
            found.append(Kernel(e.name, kind_of(e.name, e.name), e.start, e.end, "host", e.name))
    return found


def _assign(trace: Trace, kernels: list[Kernel]) -> None:
    """Give each kernel to the step that launched it (by its own time where no launch is known), and credit its time."""
    starts = [s.start for s in trace.steps]
    for kernel in kernels:
        issued = kernel.launch.start if kernel.launch else kernel.start
        index = bisect_right(starts, issued) - 1
        if index >= 0 and issued <= trace.steps[index].end:
            trace.steps[index].kernels.append(kernel)
    for before, step in pairwise(trace.steps):
        if trace.has_device and before.kernels and (step.phase, step.position) == (before.phase, before.position + 1):
            step.previous_end = max(k.end for k in before.kernels)
    for step in trace.steps:
        step.kernels.sort(key=lambda k: (k.start, k.end))
        head = max((i for i, k in enumerate(step.kernels) if k.kind == "gemv"), default=len(step.kernels))
        for kernel in step.kernels[head + 1 :] if trace.has_device and step.phase == "decode" else ():
            kernel.kind = "sampling"  # what follows a token's last matrix product, the head, draws the next one
        covered = step.previous_end or float("-inf")
        stream_end: dict[str, float] = {}
        for kernel in step.kernels:
            trace.overlaps += kernel.start < stream_end.get(kernel.stream, float("-inf"))
            stream_end[kernel.stream] = max(stream_end.get(kernel.stream, kernel.end), kernel.end)
            kernel.credited = max(0.0, kernel.end - max(kernel.start, covered))
            covered = max(covered, kernel.end)


# ---- names -----------------------------------------------------------------------------------------------------------

_KIND_PATTERNS = tuple(  # the first that is found in a kernel's name or its operator's
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("copies", r"^mem(cpy|set)|direct_copy|catarray|fillfunctor|aten::(copy_|clone|_to_copy|to|fill_|zero_)$"),
        ("attention", r"attention|attn|flash|fmha|flex|sdpa"),
        ("gemv", r"as_strided_mul_\w*sum|triton_tem"),  # a product with one row, as Inductor's reduction
        ("sampling", r"argm(ax|in)|amax|topk|sort|softmax|gumbel|sampl|cumsum|scan_|multinomial|exponential|radix"),
        ("sampling", r"fused_\w*(bitwise|shift__)"),
        ("gemv", r"gem[mv]|(?<![a-z])(mm|addmm|bmm|linear)(?![a-z])|matmul|cutlass|nvjet|splitk|xmma|mul_\w*sum|dot_k"),
        ("norm", r"rsqrt|rms_?norm|layer_?norm|mean"),
        ("pointwise", r"elementwise|fused|pointwise|vectorized|unrolled|aten::"),
    )
)
_OWN_KINDS = {"embed": "pointwise", "project": "gemv", "attend": "attention", "select": "sampling"}
_OWN_KERNEL = re.compile(rf"_({'|'.join(_OWN_KINDS)})\w*_kernel")


def kind_of(name: str, operator: str = "") -> str:
    """The kind of a kernel, by its name and by that of the operator that launched it."""
    if own := _OWN_KERNEL.match(name):
        return _OWN_KINDS[own[1]]
    if name.startswith("triton_poi_"):  # its name lists what it feeds too, which it does not compute
        return "pointwise"
    if "cpp_fused_" in name:  # a function of many loops, often the whole step
        return "other"
    text = f"{name} {operator}".lower()
    return next((kind for kind, pattern in _KIND_PATTERNS if pattern.search(text)), "other")


def short_name(name: str) -> str:
    """A kernel's name without its C++ return type, namespaces, parameters and the middle of what remains."""
    text = re.sub(r"^void |at::native::|\(anonymous namespace\)::", "", name)
    text = text if text.startswith("Mem") else re.sub(r"\(.*", "", text)
    return text if len(text) <= 72 else f"{text[:52]}...{text[-17:]}"


def host_class(event: Event) -> str:
    """The row of the host's ledger that an event belongs to."""
    if event.category in _RUNTIME:
        return event.name
    if event.name == _GUARDS:
        return "guards (TorchDynamo Cache Lookup)"
    if event.name.endswith(_COMPILING):
        return "compilation (dynamo_timed)"
    if _WRAPPER.match(event.name):
        return "compiled wrapper"
    return "operators" if event.category == "cpu_op" else "Python"


def is_graph(launch: Event | None) -> bool:
    return launch is not None and "GraphLaunch" in launch.name


# ---- analysis --------------------------------------------------------------------------------------------------------


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between the two nearest; 0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    low = int(share * (len(ordered) - 1))
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (share * (len(ordered) - 1) - low)


def step_gaps(trace: Trace, step: Step) -> Iterator[Gap]:
    """The idle intervals of a step, from the end of the step before where that is known."""
    covered, before = step.previous_end if trace.has_device else step.start, None
    for kernel in step.kernels:
        if covered is not None and kernel.start > covered:
            replay = before is not None and before.launch is kernel.launch and is_graph(kernel.launch)
            place = INSIDE if replay else BETWEEN_LAUNCHES if before or not trace.has_device else BETWEEN_STEPS
            yield Gap(place, _owner(trace, kernel, covered, replay), covered, kernel.start)
        if covered is None or before is None or kernel.end > covered:
            covered, before = kernel.end if covered is None else max(kernel.end, covered), kernel
    if not trace.has_device and covered is not None and covered < step.end:
        yield Gap(BETWEEN_LAUNCHES, "Python", covered, step.end)


def _owner(trace: Trace, kernel: Kernel, start: float, replay: bool) -> str:
    """What the host did while the device waited for this kernel; the device itself, if it was launched in time."""
    if replay:
        return "device: from one graph node to the next"
    if kernel.launch is not None and kernel.launch.end <= start:
        return "device: launched in time, start-up latency"
    if trace.has_device and kernel.launch is None:
        return "unknown: no launch in the trace"
    until = min(kernel.start, kernel.launch.end) if kernel.launch else kernel.start
    shares: Counter[str] = Counter()
    for us, event in trace.timeline.within(start, until):
        name = "Python" if event.category == "user_annotation" else event.name
        shares[re.sub(r"(## Call CompiledFxGraph).*", r"\1", name)] += us
    return shares.most_common(1)[0][0] if shares else "Python"


def _groups(trace: Trace) -> Iterator[Group]:
    """Steps of one phase at one or at consecutive positions form a group."""
    run: list[Step] = []
    for step in trace.steps:
        if run and (run[-1].phase != step.phase or step.position - run[-1].position not in (0, 1)):
            yield _group(trace, run)
            run = []
        run.append(step)
    yield _group(trace, run)


def _group(trace: Trace, steps: list[Step]) -> Group:
    first, n = steps[0], len(steps)
    facts = [trace.facts.get("steps", {}).get(s.name, {}) for s in steps]
    unprofiled = [us for f in facts for us in f.get("unprofiled_us", [])]
    gaps = [gap for step in steps for gap in step_gaps(trace, step)]
    followed = [s for s in steps if s.previous_end is not None]
    counted = {place: max(1, len(followed) if place == BETWEEN_STEPS else n) for place in PLACES}
    kinds = {k: [kernel.credited for s in steps for kernel in s.kernels if kernel.kind == k] for k in KINDS}
    host: defaultdict[str, float] = defaultdict(float)
    for us, event in (item for s in steps for item in trace.timeline.within(s.start, s.end)):
        host[host_class(event)] += us
    calls = Counter(host_class(e) for s in steps for e in issued(trace, s) if e.category != "user_annotation")
    launched = Counter(e.name for s in steps for e in launches(trace, s))
    return Group(
        name=f"decode at {first.position}" if first.phase == "decode" else first.phase,
        phase=first.phase,
        position=first.position,
        steps=[s.name for s in steps],
        tokens=int(facts[0].get("tokens", 1)),
        unprofiled_us=median(unprofiled) if unprofiled else None,
        unprofiled_p90_us=percentile(unprofiled, 0.9) if unprofiled else None,
        unprofiled_p99_us=percentile(unprofiled, 0.99) if unprofiled else None,
        traced_us=fmean(_traced_us(trace, s) for s in followed or steps),
        host_us=fmean(s.end - s.start for s in steps),
        kernel_counts=[len(s.kernels) for s in steps],
        busy_us=sum(map(sum, kinds.values())) / n,
        kinds={k: (len(us) / n, sum(us) / n) for k, us in kinds.items() if us},
        gaps={place: _sum_gaps(gaps, place, counted[place]) for place in PLACES},
        gap_owners=_gap_owners(gaps, counted),
        launches={name: count / n for name, count in launched.most_common()},
        host={k: (calls[k] / n, us / n) for k, us in sorted(host.items(), key=lambda item: -item[1])},
        bytes={k: int(fmean(f.get("bytes", {}).get(k, 0) for f in facts)) for k in facts[0].get("bytes", {})},
    )


def issued(trace: Trace, step: Step) -> list[Event]:
    """The host events that begin in a step, on any thread, without its own annotation."""
    first, last = (bisect_left(trace.events, time, key=lambda e: e.start) for time in (step.start, step.end))
    return [e for e in trace.events[first:last] if e.category in _HOST and e.name != step.name]


def launches(trace: Trace, step: Step) -> list[Event]:
    """The calls of a step that put work on the device."""
    return [e for e in issued(trace, step) if e.category in _RUNTIME and _LAUNCH.search(e.name)]


def _traced_us(trace: Trace, step: Step) -> float:
    last = max((k.end for k in step.kernels), default=step.end)
    if step.previous_end is not None:
        return last - step.previous_end
    return (max(last, step.end) if trace.has_device else step.end) - step.start


def _sum_gaps(gaps: list[Gap], place: str, steps: int) -> Gaps:
    us = [g.end - g.start for g in gaps if g.place == place]
    return Gaps(len(us) / steps, sum(us) / steps, percentile(us, 0.5), percentile(us, 0.9))


def _gap_owners(gaps: list[Gap], steps: dict[str, int]) -> list[tuple[str, str, float, float]]:
    total: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for gap in gaps:
        total[gap.place, gap.owner].append(gap.end - gap.start)
    rows = [(place, who, len(us) / steps[place], sum(us) / steps[place]) for (place, who), us in total.items()]
    return sorted(rows, key=lambda row: -row[3])


def budget(group: Group) -> dict[str, float]:
    """Where a step's wall time goes: kinds of kernel, idle by place, and the rest that no trace explains.

    The parts sum to `wall_us`. The profiler slows the host, so idle time is scaled down to what the unprofiled wall
    time has room for; where even the kernels take longer in the trace than the step without it, the rest is negative.
    """
    idle = sum(g.us for g in group.gaps.values())
    scale = min(1.0, max(0.0, group.wall_us - group.busy_us) / idle) if idle else 0.0
    parts = {kind: us for kind, (_, us) in group.kinds.items()}
    parts |= {f"idle {place}": g.us * scale for place, g in group.gaps.items() if g.us}
    return parts | {"unexplained rest": group.wall_us - sum(parts.values())}


def waterfall(before: Group, after: Group) -> dict[str, float]:
    """What each part adds to a step from one path to the next; sums to the change of the wall time."""
    a, b = budget(before), budget(after)
    return {part: b.get(part, 0.0) - a.get(part, 0.0) for part in dict.fromkeys([*a, *b])}


def left(trace: Trace, group: Group) -> list[tuple[str, float, float]]:
    """What is above the floor: part, microseconds, and the tokens/s that a step without it would add. Largest first."""
    floor, wall = trace.floors(group), group.wall_us
    over = [(part, us - floor.get(part, 0.0)) for part, us in budget(group).items()]
    rows = [(part, us, 1e6 * group.tokens / (wall - us) - group.rate) for part, us in over if 0 < us < wall]
    return sorted(rows, key=lambda row: -row[1])


def break_even(before: Trace, after: Trace) -> float | None:
    """Tokens after which the later path has earned back its warm-up; None if it never does or the times are unknown."""
    warm_ups = [trace.facts.get("warm_up", {}) for trace in (before, after)]
    costs = [facts.get("compile_s", 0.0) + facts.get("record_s", 0.0) for facts in warm_ups]
    rates = [trace.groups[name].rate for name in shared_groups([before, after])[:1] for trace in (before, after)]
    if not costs[1] or not all(rates) or not rates or rates[0] >= rates[1]:
        return None
    return max(0.0, (costs[1] - costs[0]) / (1 / rates[0] - 1 / rates[1]))


def shared_groups(traces: Sequence[Trace], decode: bool = False) -> list[str]:
    """Names of the groups that every trace has: prefill last; with `decode` only where there is nothing else."""
    names = [name for name in traces[0].groups if all(name in trace.groups for trace in traces)]
    others = [name for name in names if name != "prefill"]
    return others if decode and others else others + ["prefill"] * ("prefill" in names)


def main_group(traces: Sequence[Trace]) -> str:
    """The group that verdict and picture are about."""
    return (shared_groups(traces) or shared_groups(traces[:1]))[0]


@dataclass
class Fusion:
    """One kernel of the later path, and the kernels of the earlier one that it stands for, a step."""

    name: str  # "" for those without a counterpart by name
    count: int
    us: float
    replaced: dict[str, int]  # operator (or kernel) -> kernels
    replaced_us: float


def fusions(before: Trace, after: Trace, name: str) -> list[Fusion]:
    """The ledger of a group's first step, from two traces: the kernels that stand for most come first."""
    first, second = (next(s for s in t.steps if s.name == t.groups[name].steps[0]).kernels for t in (before, after))
    rows = {kernel.name: Fusion(kernel.name, 0, 0.0, {}, 0.0) for kernel in second}
    rows[""] = Fusion("", 0, 0.0, {}, 0.0)
    for kernel in second:
        rows[kernel.name].count += 1
        rows[kernel.name].us += kernel.credited
    for kernel, counterpart in zip(first, align(first, second), strict=True):
        row = rows[counterpart.name if counterpart else ""]
        label = kernel.operator.removeprefix("aten::") or short_name(kernel.name)
        row.replaced[label] = row.replaced.get(label, 0) + 1
        row.replaced_us += kernel.credited
    return sorted(rows.values(), key=lambda r: (not r.name, -sum(r.replaced.values()), -r.us))


def align(before: list[Kernel], after: list[Kernel]) -> list[Kernel | None]:
    """For each earlier kernel the later one that stands for it, if any.

    The assignment keeps the order and has the most matches; matrix products and attention count more, as anchors, and a
    later kernel's first match counts more, so that of two equal kernels each gets its own.
    """
    if len(before) * len(after) > MAX_CELLS:
        return [None] * len(before)
    likeness: dict[tuple[str, str, str], int] = {}
    best = [0] * (len(after) + 1)  # best[j]: of the earlier kernels so far, with the first j later ones
    moves: list[bytearray] = []  # 0: not to j; 1: to none; 2: to j, as others may be; 3: to j, as its first
    for a in before:
        row, move = [best[0]], bytearray(len(after) + 1)
        for j, b in enumerate(after, start=1):
            key = (a.operator or a.name, a.kind, b.name)
            score = likeness[key] if key in likeness else likeness.setdefault(key, _likeness(a, b))
            options = (row[j - 1], best[j], best[j] + score, best[j - 1] + score + 1 if score else -1)
            row.append(max(options))
            move[j] = options.index(row[j])
        moves.append(move)
        best = row
    found: list[Kernel | None] = [None] * len(before)
    i, j = len(before) - 1, len(after)
    while i >= 0 and j > 0:
        move = moves[i][j]
        found[i] = after[j - 1] if move >= 2 else None
        i -= move > 0
        j -= move in (0, 3)
    return found


def _likeness(a: Kernel, b: Kernel) -> int:
    if a.kind == b.kind and a.kind in ("gemv", "attention", "norm", "sampling"):
        return 8 if a.kind in ("gemv", "attention") else 2
    operator = re.sub(r"^\w+::|_$", "", a.operator)
    _, fused, listed = b.name.partition("fused_")
    if fused:
        return 2 * (bool(operator) and f"_{operator}_" in f"_{listed}_")
    return 2 * (a.operator == b.operator if b.operator else a.kind == b.kind and a.kind != "other")


# ---- integrity -------------------------------------------------------------------------------------------------------


@dataclass
class Check:
    """One line of the integrity block."""

    name: str
    status: str  # ok, n/a, UNVERIFIED
    detail: str


def _check(name: str, good: bool, detail: str) -> Check:
    return Check(name, OK if good else UNVERIFIED, detail)


def check_trace(trace: Trace) -> list[Check]:
    """What one trace can show of itself."""
    compiling = sorted({e.name for s in trace.steps for e in issued(trace, s) if e.name.endswith(_COMPILING)})
    checks = [
        _check("file", trace.complete, "complete" if trace.complete else "cut off: events are lost"),
        _check_kernels(trace),
        _check_counts(trace),
        _check("nothing compiled in the steps", not compiling, ", ".join(compiling[:4]) or "no compiler event in them"),
        _check_graphs(trace),
        _check_timing(trace),
    ]
    return [Check(f"{trace.label}: {c.name}", c.status, c.detail) for c in checks]


def _check_kernels(trace: Trace) -> Check:
    calls = [e for s in trace.steps for e in launches(trace, s) if "Launch" in e.name and "correlation" in e.args]
    if not trace.has_device:
        if calls or trace.facts.get("device") == "cuda":
            return Check("kernels", UNVERIFIED, f"none in the trace, {len(calls)} launches")
        return Check("kernels", NONE, "no device in the trace: host operators stand in the kernels' place")
    ran = {id(k.launch) for s in trace.steps for k in s.kernels}
    lost = sum(id(e) not in ran for e in calls)
    detail = f"{trace.kernels} recorded, {trace.unmatched} without a launch, {lost} launches without a kernel"
    detail += f"; {trace.overlaps} overlap an earlier one of their stream" if trace.overlaps else ""
    return _check("kernels", not trace.unmatched and not lost, detail)


def _check_counts(trace: Trace) -> Check:
    decode = [g for g in trace.groups.values() if g.phase == "decode"]
    if not decode:
        return Check("same kernels in each step", NONE, "no decode steps are annotated")
    detail = "; ".join(f"{g.name}: {', '.join(map(str, g.kernel_counts))}" for g in decode)
    return _check("same kernels in each step", all(len(set(g.kernel_counts)) == 1 for g in decode), detail)


def _check_graphs(trace: Trace) -> Check:
    """Counters and graph tree (in the facts) and the trace must agree."""
    proof, decoder = trace.facts.get("graphs") or {}, trace.facts.get("decoder")
    steps = [s for s in trace.steps if s.phase == "decode"] or trace.steps
    replays = [sum(map(is_graph, launches(trace, s))) for s in steps]
    seen = f"graph launches a step in the trace: {', '.join(map(str, replays))}"
    if proof.get("status") == "unverified":
        return Check("graphs", UNVERIFIED, f"{'; '.join(proof.get('reasons', [])) or 'no proof'}; {seen}")
    if proof.get("status") != "verified":
        claimed = not proof and trace.has_device and decoder in ("compiled", "fused")
        why = "no proof in the file" if claimed or not decoder else "none asked for"
        return Check("graphs", UNVERIFIED if claimed else NONE, f"{why}; {seen}")
    counts = proof.get("counts", {})
    expected = counts.get("replays", 0) / (counts.get("steps") or 1)
    agree = all(n == expected for n in replays)
    detail = f"{expected:g} replays a step by the graph tree, nothing recorded, skipped or compiled; {seen}"
    return _check("graphs", agree, detail if agree else f"the sources disagree: {detail}")


def _check_timing(trace: Trace) -> Check:
    timed = [g for g in trace.groups.values() if g.unprofiled_us is not None]
    if not timed:
        detail = "no unprofiled timing in the file: the times below are the profiled ones"
        return Check("profiler's tax", UNVERIFIED if trace.facts else NONE, detail)
    taxes = "; ".join(f"{g.name}: {g.traced_us - g.unprofiled_us:+,.0f} us on {g.unprofiled_us:,.0f}" for g in timed)
    if any(map(disturbed, timed)):
        return Check("profiler's tax", NONE, f"the machine was busy when the untraced steps were timed: {taxes}")
    return Check("profiler's tax", OK, taxes)


def disturbed(group: Group) -> bool:
    """Whether untraced steps took so much longer than traced ones that something else must have held them up."""
    return group.unprofiled_us is not None and group.unprofiled_us > 2 * group.traced_us


_RUN_KEYS = ("model", "dtype", "quantization", "batch", "capacity", "device_name", "driver", "torch", "triton", "cuda")


def check_pair(before: Trace, after: Trace) -> list[Check]:
    """Whether two paths did the same work on the same machine."""
    a, b = before.facts, after.facts
    name = f"{before.label} and {after.label}"
    if not (a and b):
        return [Check(f"{name}: same run, same tokens", NONE, "not known from the files")]
    differ = [f"{key}: {a[key]} and {b[key]}" for key in _RUN_KEYS if key in a and key in b and a[key] != b[key]]
    same = ", ".join(f"{key} {a[key]}" for key in _RUN_KEYS if key in a and a[key] == b.get(key))
    work = _check_work(a.get("same_work"), b.get("same_work"))
    run = _check(f"{name}: same run", not differ, "; ".join(differ) or same)
    return [run, Check(f"{name}: {work.name}", work.status, work.detail)]


def _check_work(a: dict[str, Any] | None, b: dict[str, Any] | None) -> Check:
    if not a or not b:
        return Check("same tokens", UNVERIFIED, "the files hold no choices to compare")
    if (a["weights"], a["inputs"], len(a["choices"])) != (b["weights"], b["inputs"], len(b["choices"])):
        return Check("same tokens", UNVERIFIED, "the paths were given other weights or other tokens")
    if min([*a["choices"], *b["choices"]], default=0) < 0:
        return Check("same tokens", UNVERIFIED, "some logits are not numbers")
    total, tolerance = len(a["choices"]), max(a["tolerance"], b["tolerance"])
    known = [work["margins"] for work in (a, b) if work["margins"]] or [[float("inf")] * total]
    pairs = zip(a["choices"], b["choices"], (min(m) for m in zip(*known, strict=True)), strict=True)
    margins = [margin for x, y, margin in pairs if x != y]
    detail = f"{total - len(margins)} of {total} choices equal on the same weights and inputs"
    detail += f"; margins of the others up to {max(margins):.3g}, near ties reach {tolerance:.3g}" if margins else ""
    return _check("same tokens", total > 0 and max(margins, default=0.0) <= tolerance, detail)


# ---- the report ------------------------------------------------------------------------------------------------------


@dataclass
class Section:
    """A titled table with a sentence above it; rendered once to Markdown and once to HTML."""

    title: str
    header: list[str]
    rows: list[list[str]]
    text: str = ""


@dataclass
class Report:
    """Everything that the files show."""

    verdict: str
    checks: list[Check]
    sections: list[Section]
    traces: list[Trace]

    @property
    def verified(self) -> bool:
        return all(check.status != UNVERIFIED for check in self.checks)


def analyse(paths: Sequence[Path]) -> Report:
    """Read the traces, the plainest path first, and draw up the report.

    Raises:
        TraceError: a file is no trace.
    """
    traces = [load(path) for path in paths]
    checks = [c for trace in traces for c in check_trace(trace)]
    checks += [c for a, b in pairwise(traces) for c in check_pair(a, b)]
    last, names = traces[-1], shared_groups(traces) or shared_groups(traces[:1])
    sections = [
        _integrity(checks),
        _against_the_limit(traces),
        *(_side_by_side(traces, name) for name in names),
        *(_owners(trace) for trace in traces),
        _host_ledger(traces, names[0]),
        *(_waterfall(a, b, name) for a, b in pairwise(traces) for name in shared_groups([a, b], decode=True)),
        *(_fusion(a, b, name) for a, b in pairwise(traces) for name in shared_groups([a, b], decode=True)[:1]),
        *(_roofline(last, last.groups[name]) for name in shared_groups([last], decode=True) if last.bandwidth),
        *(_left(last, last.groups[name]) for name in shared_groups([last], decode=True)),
        _warm_up(traces),
        _compilation(traces),
    ]
    return Report(_verdict(traces, checks), checks, [s for s in sections if s.rows], traces)


def us(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.1f}"


def _verdict(traces: list[Trace], checks: list[Check]) -> str:
    name = main_group(traces)
    shown = [trace for trace in traces if name in trace.groups]
    first, last = shown[0], shown[-1]
    group, before = last.groups[name], first.groups[name]
    what = " ".join(str(first.facts[key]) for key in ("model", "dtype") if key in first.facts) or "The traced program"
    device = first.device_name or ("the device" if first.has_device else "the host")
    timed = "" if group.unprofiled_us is not None else " under the profiler"
    text = f"{what} on {device}: {name} runs at {number(group.rate)} {group.unit}{timed} ({last.label})"
    busy = disturbed(group) or disturbed(before)
    if last is not first and before.rate and not busy:
        text += f", {group.rate / before.rate:.2f}x the {number(before.rate)} of {first.label}"
    if limit := last.limit(group):
        text += f", {group.rate / limit:.0%} of the limit of {number(limit)} {group.unit}"
    if last.has_device and (rows := left(last, group)):
        text += f"; the largest part {'left ' * bool(limit)}is {rows[0][0]}, {us(rows[0][1])} us a step"
    if busy:
        text += ". The machine was busy, measure again: untraced steps took twice as long as traced ones"
    wrong = [c.name for c in checks if c.status == UNVERIFIED]
    return f"{text}. " + (f"UNVERIFIED: {', '.join(wrong)}." if wrong else "All that could be checked holds.")


def _integrity(checks: list[Check]) -> Section:
    rows = [[c.status, c.name, c.detail] for c in sorted(checks, key=lambda c: c.status != UNVERIFIED)]
    return Section("Integrity", ["", "check", "what was seen"], rows)


def _against_the_limit(traces: list[Trace]) -> Section:
    rows = []
    for trace in traces:
        for g in trace.groups.values():
            limit = trace.limit(g)
            times = [us(v) for v in (g.unprofiled_us, g.unprofiled_p90_us, g.unprofiled_p99_us, g.traced_us)]
            share = f"{g.rate / limit:.1%}" if limit else "-"
            rows.append([trace.label, g.name, number(g.rate), number(limit), share, *times])
    measured = next((f"{t.bandwidth / 1e9:,.0f} GB/s" for t in traces if t.bandwidth), "not in the files")
    text = f"The limit: a step's bytes moved once at the bandwidth measured on this device ({measured})."
    if any((limit := trace.limit(g)) and g.rate > limit for trace in traces for g in trace.groups.values()):
        text += " A share above 100%: a cache holds them, or other work took bandwidth while it was measured."
    unit = traces[0].groups[main_group(traces)].unit
    header = ["path", "step", unit, "limit", "share", "unprofiled us p50", "p90", "p99", "traced us"]
    return Section("Tokens a second against the limit", header, rows, text)


def _side_by_side(traces: list[Trace], name: str) -> Section:
    shown = [trace for trace in traces if name in trace.groups]
    groups = [trace.groups[name] for trace in shown]
    rows = [
        ["kernels a step", *(number(fmean(g.kernel_counts)) for g in groups)],
        *([f"{call} a step", *(number(g.launches.get(call, 0)) for g in groups)] for call in _keys(groups, "launches")),
        ["wall us, unprofiled", *(us(g.unprofiled_us) for g in groups)],
        ["device busy us", *(us(g.busy_us) for g in groups)],
        ["host us to issue the step", *(us(g.host_us) for g in groups)],
    ]
    for place in PLACES:
        gaps = [g.gaps[place] for g in groups]
        if any(gap.us for gap in gaps):
            rows.append([f"gaps {place}, us a step", *(us(g.us) for g in gaps)])
            spread = (f"{number(g.count)}: {us(g.p50)}, {us(g.p90)}" for g in gaps)
            rows.append([f"gaps {place}, how many: p50, p90 us", *spread])
    for kind in _keys(groups, "kinds"):
        rows.append([f"{kind} us (kernels)", *(_pair(g.kinds.get(kind)) for g in groups)])
    text = "Gaps and host time are the profiled ones: the profiler slows each host call."
    return Section(f"Side by side: {name}", ["", *(trace.label for trace in shown)], rows, text)


def _keys(groups: list[Group], attribute: str) -> list[str]:
    return list(dict.fromkeys(key for group in groups for key in getattr(group, attribute)))


def _pair(value: tuple[float, float] | None) -> str:
    """A count and its microseconds."""
    return f"{us(value[1])} ({number(value[0])})" if value else "-"


def _owners(trace: Trace) -> Section:
    group = trace.groups[shared_groups([trace])[0]]
    rows = [[place, owner, number(n), us(t)] for place, owner, n, t in group.gap_owners[:8]]
    return Section(f"Who owns the gaps: {trace.label}, {group.name}", ["place", "owner", "a step", "us a step"], rows)


def _host_ledger(traces: list[Trace], name: str) -> Section:
    shown = [trace for trace in traces if name in trace.groups]
    groups = [trace.groups[name] for trace in shown]
    rows = [[key, *(_pair(g.host.get(key)) for g in groups)] for key in _keys(groups, "host")]
    text = "Microseconds of the host's time a step by the innermost event, and how many there are (profiled)."
    return Section(f"Host ledger: {name}", ["", *(trace.label for trace in shown)], rows, text)


def _waterfall(a: Trace, b: Trace, name: str) -> Section:
    before, after = a.groups[name], b.groups[name]
    now = before.wall_us
    rows = [[a.label, "", us(now)]]
    for part, change in sorted(waterfall(before, after).items(), key=lambda item: item[1]):
        now += change
        rows.append([part, ("+" if change >= 0 else "") + us(change), us(now)])
    rows.append([b.label, "", us(after.wall_us)])
    timed = before.unprofiled_us is not None and after.unprofiled_us is not None
    text = "Unprofiled at both ends." if timed else "Profiled times: the speed-up is inflated."
    return Section(f"Waterfall from {a.label} to {b.label}: {name}", ["part", "change us", "step us"], rows, text)


def _fusion(a: Trace, b: Trace, name: str) -> Section:
    found = [f for f in fusions(a, b, name) if f.replaced]
    rows = []
    for f in [f for f in found if f.name][:16] + [f for f in found if not f.name]:
        most = sorted(f.replaced.items(), key=lambda item: -item[1])
        which = ", ".join(f"{operator} x{n}" for operator, n in most[:6]) + (", ..." if len(most) > 6 else "")
        counterpart = f"{short_name(f.name)} x{f.count}" if f.name else "no counterpart by name"
        kernels = number(sum(f.replaced.values()))
        rows.append([counterpart, us(f.us), kernels, us(f.replaced_us), us(f.replaced_us - f.us), which])
    header = [b.label, "us", f"{a.label} kernels", "us", "saved us", "which"]
    text = (
        "Kernels aligned in their order, by the operators that a fused kernel's name lists; microseconds on the device."
    )
    return Section(f"Fusion ledger: what the kernels of {a.label} became, {name}", header, rows, text)


def _roofline(trace: Trace, group: Group) -> Section:
    floor = trace.floors(group)
    spent = {kind: group.kinds.get(kind, (0, 0.0))[1] for kind in KINDS if kind in group.kinds or kind in floor}
    rows = []
    for kind, time in {**spent, "all, busy": group.busy_us}.items():
        least = floor.get(kind, 0.0) if kind in spent else sum(floor.values())
        moved = least * trace.bandwidth / 1e6 if trace.bandwidth else 0.0
        share = f"{least / time:.1%}" if time and least else "-"
        rows.append([kind, f"{moved / 1e6:,.1f}", us(least), us(time), us(time - least), share])
    header = ["kind", "MB to move", "floor us", "traced us", "above it us", "share"]
    return Section(f"Roofline: {trace.label}, {group.name}", header, rows)


def _left(trace: Trace, group: Group) -> Section:
    rows = [[part, us(t), f"+{number(gain)}"] for part, t, gain in left(trace, group) if t >= 0.05]
    text = "What a step spends above its floor, and the rate that it would gain without that part alone."
    return Section(f"What is left: {trace.label}, {group.name}", ["part", "us a step", group.unit], rows, text)


def _warm_up(traces: list[Trace]) -> Section:
    rows = []
    for trace in traces:
        if facts := trace.facts.get("warm_up"):
            seconds = [f"{facts[key]:.2f}" if key in facts else "-" for key in ("compile_s", "record_s", "prefill_s")]
            rows.append([trace.label, *seconds, number(break_even(traces[0], trace))])
    text = "Seconds until the decode step is steady, and until prefill is; tokens that earn back the former."
    header = ["path", "compile s", "record s", "prefill s", f"break-even tokens over {traces[0].label}"]
    return Section("Warm-up", header, rows, text)


def _compilation(traces: list[Trace]) -> Section:
    rows = []
    for trace in traces:
        facts, proof = trace.facts.get("compilation"), trace.facts.get("graphs") or {}
        if not facts:
            continue
        counts = proof.get("counts", {})
        partitions = counts.get("replays", 0) / counts["steps"] if counts.get("steps") else None
        skips = f"{facts['skips']}{': ' * bool(facts['skip_reasons'])}{'; '.join(facts['skip_reasons'])}"
        settings = ", ".join(f"{key}={value}" for key, value in trace.facts.get("settings", {}).items())
        phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in facts.get("phases_s", {}).items())
        values = {
            "compiled": f"{facts['compilations']} graphs, {facts.get('cached', 0)} of them from the cache",
            "seconds by phase": phases or "-",
            "graphs captured": f"{counts.get('recordings', 0)} ({proof.get('status', 'no proof')})",
            "graphs skipped": "-" if proof.get("status") == "none" else skips,
            "graph breaks": "; ".join(f"{why} ({n})" for why, n in facts["graph_breaks"].items()) or "0",
            "recompilations": "; ".join(facts["recompilations"]) or "0",
            "graph partitions a step": number(partitions),
            "inputs copied a step (not static)": number(counts.get("copied_inputs")),
            "compiler settings": settings or "-",
        }
        rows += [[trace.label, key, value] for key, value in values.items()]
    return Section("Compilation", ["path", "fact", ""], rows)


# ---- files -----------------------------------------------------------------------------------------------------------


def to_json(report: Report) -> dict[str, Any]:
    """The content of report.json, as docs/traces.md documents it."""
    runs = []
    for t in report.traces:
        groups = {
            name: asdict(g)
            | {"tok_per_s": g.rate, "limit_tok_per_s": t.limit(g), "budget_us": budget(g)}
            | {"floor_us": t.floors(g), "left": left(t, g)}
            for name, g in t.groups.items()
        }
        runs.append({"label": t.label, "device_name": t.device_name, "facts": t.facts, "groups": groups})
    comparisons = []
    for a, b in pairwise(report.traces):
        for name in (n for n in a.groups if n in b.groups):
            ledger = [asdict(f) for f in fusions(a, b, name)]
            changes = waterfall(a.groups[name], b.groups[name])
            pair = {"from": a.label, "to": b.label, "group": name, "break_even_tokens": break_even(a, b)}
            comparisons.append(pair | {"waterfall_us": changes, "fusion": ledger})
    head = {"schema": SCHEMA, "verdict": report.verdict, "verified": report.verified}
    return head | {"integrity": [asdict(c) for c in report.checks], "runs": runs, "comparisons": comparisons}


def to_markdown(report: Report) -> str:
    def row(cells: Iterable[str]) -> str:
        return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"

    lines = ["# Trace report", "", report.verdict]
    for section in report.sections:
        lines += ["", f"## {section.title}", *(["", section.text] if section.text else []), ""]
        lines += [row(section.header), row("---" for _ in section.header), *map(row, section.rows)]
    return "\n".join(lines) + "\n"


def picture(report: Report) -> dict[str, Any]:
    """What the page draws: one step of each path, times from the start of its host call."""
    name = main_group(report.traces)
    paths = []
    for trace in report.traces:
        if name in trace.groups:
            step = next(s for s in trace.steps if s.name == trace.groups[name].steps[0])
            paths.append({"label": trace.label, "step": step.name, **_lanes(trace, step)})
    return {"paths": paths, "kinds": KINDS}


def _lanes(trace: Trace, step: Step) -> dict[str, Any]:
    """Bars as [name, class, start, duration, row]; a gap has its owner for a name and its place for a class."""

    def bar(name: str, kind: str, start: float, end: float, row: int) -> list[Any]:
        return [name, kind, round(start - step.start, 3), round(end - start, 3), row]

    stack: list[Event] = []
    host = []
    for event in [e for e in issued(trace, step) if e.thread == trace.timeline.thread][:MAX_BARS]:
        while stack and stack[-1].end <= event.start:
            stack.pop()
        host.append(bar(event.name, host_class(event), event.start, event.end, len(stack)))
        stack.append(event)
    rows: list[tuple[str, float]] = []  # stream, end of its last bar: overlapping kernels get rows of their own
    device = []
    for k in step.kernels[:MAX_BARS]:
        row = next((i for i, (stream, end) in enumerate(rows) if stream == k.stream and end <= k.start), len(rows))
        rows[row : row + 1] = [(k.stream, k.end)]
        device.append(bar(k.name, k.kind, k.start, k.end, row))
    gaps = [bar(g.owner, g.place, g.start, g.end, 0) for g in step_gaps(trace, step)]
    return {"host": host, "device": device, "gaps": gaps, "rows": len(rows), "has_device": trace.has_device}


def to_html(report: Report) -> str:
    data = json.dumps(picture(report), separators=(",", ":")).replace("<", "\\u003c")
    values = {"VERDICT": html.escape(report.verdict), "STATE": "" if report.verified else "wrong", "DATA": data}
    values |= {"BUDGETS": _html_budgets(report), "SECTIONS": "".join(map(_html_section, report.sections))}
    return re.sub(r"@@([A-Z]+)@@", lambda m: values[m[1]], _PAGE)


def _html_section(section: Section) -> str:
    def row(cells: list[str], tag: str, like: list[str]) -> str:
        """like: the cells whose looks these have; a heading stands as the figures below it."""
        styles = ("number" if _FIGURE.fullmatch(c) else _STATUS_STYLES.get(c, "") for c in like)
        return "".join(f'<{tag} class="{s}">{html.escape(c)}</{tag}>' for c, s in zip(cells, styles, strict=True))

    rows = [row(section.header, "th", section.rows[-1]), *(row(r, "td", r) for r in section.rows)]
    table = f"<div class=scroll><table>{''.join(f'<tr>{r}</tr>' for r in rows)}</table></div>"
    return f"<section><h2>{html.escape(section.title)}</h2><p>{html.escape(section.text)}</p>{table}</section>"


_FIGURE = re.compile(r"[+-]?[\d,.]+%?( \([\d,.]+\)|: [\d,.]+, [\d,.]+)?|-")
_STATUS_STYLES = {OK: "good", NONE: "none", UNVERIFIED: "bad"}


def _html_budgets(report: Report) -> str:
    """A stacked bar for each path: where the wall time of a step goes, and the floor as a mark."""
    name = main_group(report.traces)
    shown = [(trace, trace.groups[name]) for trace in report.traces if name in trace.groups]
    longest = max(group.wall_us for _, group in shown) or 1.0
    lines = [f"<p>{html.escape(name)}: microseconds a step; the mark is the floor.</p>"]
    for trace, group in shown:
        parts = [(part, t) for part, t in budget(group).items() if t > 0]
        scale = 100 * group.wall_us / longest / (sum(t for _, t in parts) or 1.0)
        bars = "".join(
            f'<i class="{part.split()[0]}" style="width:{t * scale:.3f}%" title="{part}: {us(t)} us"></i>'
            for part, t in parts
        )
        floor = sum(trace.floors(group).values())
        bars += f'<b style="left:{100 * floor / longest:.3f}%" title="floor: {us(floor)} us"></b>' if floor else ""
        label, wall = html.escape(trace.label), us(group.wall_us)
        lines.append(f"<div class=budget><span>{label}</span><div>{bars}</div><span>{wall} us</span></div>")
    return "".join(lines)


def write(paths: Sequence[Path], output: Path) -> Report:
    """Analyse the traces, the plainest path first; write report.md (to stderr, too), report.json and report.html.

    Raises:
        TraceError: a file is no trace.
    """
    report = analyse(paths)
    markdown = to_markdown(report)
    try:
        content = json.dumps(to_json(report), indent=1, allow_nan=False)
    except ValueError as error:
        raise TraceError(f"{paths[0]}: not a trace: some times are no finite numbers") from error
    texts = {"report.md": markdown, "report.json": f"{content}\n", "report.html": to_html(report)}
    for name in texts:
        if any(path.resolve() == (output / name).resolve() for path in paths):
            raise TraceError(f"{output / name}: is one of the traces: name another --output")
    output.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (output / name).write_text(text, encoding="utf-8", errors="replace")
    sys.stderr.write(markdown)
    return report


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = _Parser(prog="trace_report.py", description="Report on traces of prefill and decode.")
    parser.add_argument("traces", nargs="+", type=Path, help="traces (.json, .json.gz), the plainest path first")
    parser.add_argument("--output", type=Path, help="directory of the report (default: that of the first trace)")
    args = parser.parse_args(argv)
    try:
        report = write(args.traces, args.output or args.traces[0].parent)
    except (TraceError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        named = ", ".join(map(str, args.traces))  # of events that have the right names, and values of the wrong kinds
        sys.stderr.write(f"error: {named}: not a trace: {type(error).__name__}: {' '.join(str(error).split())}\n")
        return 2
    return 0 if report.verified else 1


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Trace report</title><style>
:root { color-scheme: light dark; --ink: #1c2330; --soft: #667085; --line: #dfe3ea; --paper: #fff; --panel: #f6f7f9;
  --gemv: #3f74b5; --attention: #e8832a; --norm: #4b9b4f; --pointwise: #a572b0; --sampling: #d6455d; --copies: #96705b;
  --other: #8790a0; --idle: #f2c6c2; --unexplained: #c4cad4; --host: #b9c4d6; --launch: #5d86c9; --wait: #c9a35d; }
@media (prefers-color-scheme: dark) { :root { --ink: #e5e9f0; --soft: #98a2b3; --line: #2d3542; --paper: #12161d;
  --panel: #1a202a; --idle: #5b3035; --unexplained: #3c4453; --host: #45526a; --launch: #4d78bd; --wait: #8f7237; } }
body { font: 14px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1200px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; margin: 0; } h2 { font-size: 1rem; margin: 2rem 0 .4rem; }
p { margin: .3rem 0; color: var(--soft); }
#verdict { border-left: 4px solid #4b9b4f; padding: .5rem .9rem; background: var(--panel); margin: .8rem 0; }
#verdict.wrong { border-color: #d6455d; }
.bad { color: #d6455d; font-weight: 600; } .good { color: #4b9b4f; } .none { color: var(--soft); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; }
th { color: var(--soft); font-weight: 600; }
td, th { text-align: left; padding: .22rem .9rem .22rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
canvas { width: 100%; display: block; background: var(--panel); border-radius: 6px; cursor: grab; touch-action: none; }
#legend { display: flex; flex-wrap: wrap; gap: .2rem 1rem; margin: .5rem 0; font-size: 12px; color: var(--soft); }
#legend i { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .35em; }
#tip { position: fixed; display: none; pointer-events: none; background: var(--ink); color: var(--paper); z-index: 9;
  padding: .35rem .6rem; border-radius: 4px; font-size: 12px; max-width: 60ch; overflow-wrap: anywhere;
  white-space: pre-line; }
.budget { display: flex; align-items: center; gap: .8rem; margin: .35rem 0; font-variant-numeric: tabular-nums; }
.budget span { width: 6rem; overflow: hidden; text-overflow: ellipsis; } .budget span:last-child { text-align: right; }
.budget > div { flex: 1; display: flex; position: relative; } .budget i { height: 1.5rem; }
.budget b { position: absolute; top: -.2rem; height: 1.9rem; border-left: 2px solid var(--ink); }
.gemv { background: var(--gemv); } .attention { background: var(--attention); } .norm { background: var(--norm); }
.pointwise { background: var(--pointwise); } .sampling { background: var(--sampling); }
.copies { background: var(--copies); } .other { background: var(--other); } .idle { background: var(--idle); }
.unexplained { background: var(--unexplained); }
</style></head><body>
<h1>Trace report</h1><div id="verdict" class="@@STATE@@">@@VERDICT@@</div>
<h2>Where a step's time goes</h2>@@BUDGETS@@<div id="legend"></div>
<h2>One step of each path on one time axis</h2>
<p>Host calls above, device below. Wheel: zoom at the pointer. Drag: move. Double click: all.</p>
<canvas id="picture"></canvas><div id="tip"></div>
@@SECTIONS@@
<script type="application/json" id="data">@@DATA@@</script>
<script>
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const canvas = document.getElementById("picture"), tip = document.getElementById("tip"), pen = canvas.getContext("2d");
const colour = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const LEFT = 74, ROW = 15, MAX_DEPTH = 6, HEAD = 20, AXIS = 22;

// Lanes from top to bottom, each with its bars ([name, kind, start, duration, row]) and its place on the page.
const lanes = [];
let height = AXIS;
for (const path of data.paths) {
  const host = path.host.filter(b => b[4] < MAX_DEPTH), depth = 1 + Math.max(0, ...host.map(b => b[4]));
  const title = path.label + ", " + path.step, label = path.has_device ? "device" : "operators";
  const rows = Math.max(1, path.rows), row = rows > 1 ? ROW : 2 * ROW;
  height += HEAD;
  lanes.push({ title, label: "host", top: height, rows: depth, row: ROW, bars: host, gaps: [] });
  height += depth * ROW + 5;
  lanes.push({ label, top: height, rows, row, bars: path.device, gaps: path.gaps });
  height += rows * row + 12;
}
const all = lanes.flatMap(lane => lane.bars);
const first = Math.min(0, ...all.map(b => b[2])), last = 1.01 * Math.max(1, ...all.map(b => b[2] + b[3]));
let from = first, to = last, width = 0;

const x = t => LEFT + (t - from) / (to - from) * (width - LEFT);
const time = px => from + (px - LEFT) / (width - LEFT) * (to - from);
const micro = t => t.toFixed(t >= 100 ? 0 : 2);

function fill(lane, kind) {
  if (lane.label !== "host") return colour(kind);
  return colour(/Synchronize|Wait/.test(kind) ? "wait" : /^cu|^hip/.test(kind) ? "launch" : "host");
}

function drawAxis() {
  const span = (to - from) / Math.max(3, width / 130), power = Math.pow(10, Math.floor(Math.log10(span)));
  const tick = power * ([1, 2, 5].find(s => s * power >= span) || 10);
  for (let t = Math.ceil(from / tick) * tick; t < to; t += tick) {
    pen.fillStyle = colour("line");
    pen.fillRect(x(t), AXIS, 1, height - AXIS);
    pen.fillStyle = colour("soft");
    pen.fillText(+t.toPrecision(8) + " us", x(t) + 3, AXIS / 2);
  }
}

function drawLane(lane) {
  const size = lane.rows * lane.row, palette = {};
  pen.fillStyle = colour("soft");
  pen.fillText(lane.label, 8, lane.top + size / 2);
  if (lane.title) {
    pen.fillStyle = colour("ink"); pen.font = "600 12px system-ui";
    pen.fillText(lane.title, 8, lane.top - 9);
    pen.font = "11px system-ui";
  }
  pen.save(); pen.beginPath(); pen.rect(LEFT, lane.top, width - LEFT, size); pen.clip();
  pen.fillStyle = colour("idle");
  for (const gap of lane.gaps) pen.fillRect(x(gap[2]), lane.top, Math.max(0.3, x(gap[2] + gap[3]) - x(gap[2])), size);
  for (const bar of lane.bars) {
    const a = x(bar[2]), b = x(bar[2] + bar[3]), y = lane.top + bar[4] * lane.row;
    if (b < LEFT || a > width) continue;
    pen.fillStyle = palette[bar[1]] ||= fill(lane, bar[1]);
    pen.fillRect(a, y + 1, Math.max(0.6, b - a - (b - a > 4 ? 0.7 : 0)), lane.row - 2);
    const start = Math.max(a, LEFT) + 4, room = Math.floor((b - start) / 6.6);
    if (room < 4) continue;
    pen.fillStyle = lane.label === "host" ? colour("ink") : "#fff";
    pen.fillText(bar[0].length > room ? bar[0].slice(0, room - 1) + "\\u2026" : bar[0], start, y + lane.row / 2 + 0.5);
  }
  pen.restore();
}

function draw() {
  const ratio = window.devicePixelRatio || 1;
  width = canvas.clientWidth; canvas.style.height = height + "px";
  canvas.width = width * ratio; canvas.height = height * ratio;
  pen.scale(ratio, ratio); pen.font = "11px system-ui"; pen.textBaseline = "middle";
  drawAxis();
  lanes.forEach(drawLane);
  canvas.dataset.lanes = lanes.length; canvas.dataset.bars = all.length;
}

function find(px, py) {
  const lane = lanes.find(l => py >= l.top && py < l.top + l.rows * l.row);
  if (!lane || px < LEFT) return null;
  const row = Math.floor((py - lane.top) / lane.row), slack = 1.5 * (to - from) / width, t = time(px);
  const near = b => t >= b[2] - slack && t <= b[2] + b[3] + slack, inside = b => t >= b[2] && t <= b[2] + b[3];
  const bar = lane.bars.filter(b => b[4] === row && near(b)).sort((p, q) => inside(q) - inside(p) || p[3] - q[3])[0];
  const gap = lane.gaps.find(near);
  return gap && !(bar && inside(bar)) ? ["gap owned by " + gap[0], gap[1], gap[2], gap[3]] : bar;
}

function hover(event) {
  const bar = find(event.offsetX, event.offsetY);
  tip.style.display = bar ? "block" : "none";
  if (!bar) return;
  const when = micro(bar[3]) + " us, from " + micro(bar[2]) + " to " + micro(bar[2] + bar[3]);
  tip.textContent = bar[0] + "\\n" + bar[1] + ": " + when;
  tip.style.left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = event.clientY + 16 + "px";
}

canvas.addEventListener("wheel", event => {
  event.preventDefault();
  const t = time(event.offsetX), factor = Math.exp(event.deltaY * 0.0015);
  if ((to - from) * factor < 0.5) return;
  from = Math.max(first, t - (t - from) * factor); to = Math.min(last, t + (to - t) * factor);
  draw();
}, { passive: false });
let grip = null;
canvas.addEventListener("pointerdown", event => { grip = event.offsetX; canvas.setPointerCapture(event.pointerId); });
canvas.addEventListener("pointerup", () => { grip = null; });
canvas.addEventListener("pointerleave", () => { tip.style.display = "none"; });
canvas.addEventListener("pointermove", event => {
  if (grip === null) return hover(event);
  const shift = (grip - event.offsetX) / (width - LEFT) * (to - from);
  grip = event.offsetX; from += shift; to += shift;
  draw();
});
canvas.addEventListener("dblclick", () => { from = first; to = last; draw(); });
window.addEventListener("resize", draw);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
for (const kind of [...data.kinds, "idle", "unexplained"]) {
  const item = document.createElement("span"), box = document.createElement("i");
  box.className = kind;
  item.append(box, kind === "unexplained" ? "unexplained rest" : kind);
  document.getElementById("legend").append(item);
}
const zoom = /zoom=([\\d.]+),([\\d.]+)/.exec(location.hash);  // report.html#zoom=100,250 opens on these microseconds
if (zoom) [from, to] = [+zoom[1], +zoom[2]];
draw();
</script></body></html>
"""

if __name__ == "__main__":
    sys.exit(main())

"""GraphWatch against fakes shaped like torch's graph tree, and the capture of small CPU traces."""

import gc
import gzip
import json
import logging
import weakref
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import cudagraph_trees

from profiling import GraphWatch, Step, capture

CUDA = torch.device("cuda", 0)
SKIP = "skipping cudagraphs due to mutated inputs (2 instances). Found from : \n   state.copy_(out)"


class Node:
    """What GraphWatch reads and shadows of a recorded graph."""

    def __init__(self, number: int) -> None:
        self.id = SimpleNamespace(id=number)
        self.children: dict[int, list[Node]] = defaultdict(list)
        self.non_static_input_idx: list[int] = []
        self.replayed = 0

    def run_graph(self) -> None:
        self.replayed += 1


@pytest.fixture
def tree(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A graph tree with two roots, one of which has a child (a second partition)."""
    first, second, child = Node(0), Node(1), Node(2)
    second.children[1].append(child)
    manager = SimpleNamespace(roots={0: [first], 1: [second]}, first=first, second=second, child=child)
    monkeypatch.setattr(cudagraph_trees, "get_manager", lambda index, create: manager)
    return manager


@pytest.fixture
def watch() -> GraphWatch:
    made = GraphWatch(CUDA)
    yield made
    made.close()


def test_replays_of_every_step_are_verified(tree: SimpleNamespace, watch: GraphWatch) -> None:
    watch.start()
    for _ in range(3):
        tree.second.run_graph()
        tree.child.run_graph()
    proof = watch.stop(steps=3)
    assert (proof.status, proof.reasons, proof.failed) == ("verified", (), False)
    assert proof.counts["replays"] == 6 and proof.counts["recordings"] == 3
    assert tree.second.replayed == tree.child.replayed == 3


def test_a_watched_graph_is_freed_as_soon_as_it_is_dropped(tree: SimpleNamespace, watch: GraphWatch) -> None:
    watch.start()
    gone = weakref.ref(tree.child)
    gc.disable()
    try:
        tree.second.children.clear()
        del tree.child
        assert gone() is None
    finally:
        gc.enable()


def test_copied_inputs_are_counted_on_replayed_graphs_only(tree: SimpleNamespace, watch: GraphWatch) -> None:
    tree.first.non_static_input_idx, tree.second.non_static_input_idx = [0, 3], [1]
    watch.start()
    tree.first.run_graph()
    assert watch.stop(1).counts["copied_inputs"] == 2


def test_a_segment_without_a_replay_fails_and_names_why(tree: SimpleNamespace, watch: GraphWatch) -> None:
    logging.getLogger("torch._inductor.cudagraph_utils.__cudagraphs").warning(SKIP)
    tree.first.run_graph()  # before the segment: no proof for it
    watch.start()
    proof = watch.stop(1)
    assert proof.status == "unverified" and proof.failed
    assert proof.reasons == (f"no recorded graph was replayed: {' '.join(SKIP.split())}",)


def test_steps_without_graphs_among_others_fail(tree: SimpleNamespace, watch: GraphWatch) -> None:
    watch.start()
    tree.first.run_graph()
    proof = watch.stop(steps=2)
    assert proof.failed and "1 replays do not divide into 2 steps" in proof.reasons[0]


def test_a_recording_fails(tree: SimpleNamespace, watch: GraphWatch) -> None:
    watch.start()
    tree.first.run_graph()
    tree.first.children[0].append(Node(3))
    proof = watch.stop()
    assert proof.failed and proof.reasons == ("1 graphs were recorded during the segment",)


def test_skips_and_graph_breaks_fail(tree: SimpleNamespace, watch: GraphWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(counters, "inductor", counters["inductor"].copy())
    monkeypatch.setitem(counters, "graph_break", counters["graph_break"].copy())
    watch.start()
    tree.first.run_graph()
    counters["inductor"]["cudagraph_skips"] += 1
    counters["graph_break"]["call to print"] += 1
    proof = watch.stop(1)
    assert proof.failed and [reason.split(":")[0] for reason in proof.reasons] == [
        "the graph broke",
        "a graph was skipped",
    ]
    assert proof.counts["skips"] == proof.counts["graph_breaks"] == 1


def test_no_tree_means_that_no_graph_exists(watch: GraphWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudagraph_trees, "get_manager", lambda index, create: None)
    watch.start()
    proof = watch.stop(1)
    assert proof.failed and "no recorded graph was replayed" in proof.reasons[0]


@pytest.mark.parametrize("broken", ["get_manager", "roots", "run_graph"])
def test_another_private_interface_is_unverified_but_no_failure(
    broken: str, tree: SimpleNamespace, watch: GraphWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    if broken == "get_manager":
        monkeypatch.delattr(cudagraph_trees, "get_manager")
    elif broken == "roots":
        del tree.roots
    else:
        monkeypatch.delattr(Node, "run_graph")
    watch.start()
    proof = watch.stop(1)
    assert proof.status == "unverified" and not proof.failed
    assert "another graph tree" in proof.reasons[0] and broken in proof.reasons[0]


def test_stop_without_start_is_unverified(watch: GraphWatch) -> None:
    assert watch.stop().status == "unverified"


def test_close_stops_listening() -> None:
    logger = logging.getLogger("torch._inductor.cudagraph_utils.__cudagraphs")
    before = len(logger.handlers)
    watch = GraphWatch(CUDA)
    assert len(logger.handlers) == before + 1
    del watch
    assert len(logger.handlers) == before


def test_cpu_has_no_graphs_and_still_names_a_recompilation() -> None:
    watch = GraphWatch(torch.device("cpu"))
    double = torch.compile(lambda x: x * 2, dynamic=False, backend="eager")
    double(torch.ones(3))
    watch.start()
    double(torch.ones(3))
    assert watch.stop(1).status == "none"
    watch.start()
    double(torch.ones(4))
    proof = watch.stop(1)
    assert proof.status == "none" and proof.failed and "expected 3, actual 4" in proof.reasons[0]
    facts = watch.compilation()
    assert any("expected 3, actual 4" in reason for reason in facts["recompilations"]) and facts["compile_s"] > 0
    assert sum(facts["phases_s"].values()) == pytest.approx(facts["compile_s"], rel=0.2)


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_capture_annotates_each_step_once_and_stores_the_facts(tmp_path: Path, name: str) -> None:
    state, calls = torch.ones(8), []
    steps = [
        Step("prefill", lambda: state.add_(1)),
        Step("decode[8]", lambda: state.mul_(2), lambda: calls.append("prepare")),
        Step("decode[9]", lambda: state.mul_(2)),
    ]
    path = tmp_path / name
    capture(path, steps, {"decoder": "eager", "steps": {"prefill": {"unprofiled_us": [1.5]}}}, torch.device("cpu"))
    raw = path.read_bytes()
    trace = json.loads(gzip.decompress(raw) if name.endswith("gz") else raw)
    marks = [e for e in trace["traceEvents"] if e.get("cat") == "user_annotation"]
    names = [e["name"] for e in sorted(marks, key=lambda e: e["ts"]) if not e["name"].startswith("ProfilerStep#")]
    assert names == ["prefill", "decode[8]", "decode[9]"]
    assert sum(e["name"].startswith("ProfilerStep#") for e in marks) == 2, "one a section"
    assert trace["nearroof"]["steps"]["prefill"]["unprofiled_us"] == [1.5]
    assert len(calls) == 3, "two unrecorded rounds and the recorded one"
    inside = next(e for e in marks if e["name"] == "decode[9]")
    ops = [e["name"] for e in trace["traceEvents"] if e.get("cat") == "cpu_op" and e["ts"] > inside["ts"]]
    assert ops[0] == "aten::mul_" and "aten::add_" not in ops


def test_what_others_compile_is_no_fault_of_the_function_watched() -> None:
    watch = GraphWatch(torch.device("cpu"))

    def plain(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    triple, other = (torch.compile(f, dynamic=False, backend="eager") for f in (plain, lambda x: x * 5))
    triple(torch.ones(3))
    watch.start(plain)
    other(torch.ones(3))
    triple(torch.ones(3))
    assert not watch.stop(1).failed
    watch.start(plain)
    triple(torch.ones(4))
    proof = watch.stop(1)
    assert proof.failed and "expected 3, actual 4" in proof.reasons[0]


def test_graphs_recorded_and_skipped_aside_are_no_fault(tree: SimpleNamespace, watch: GraphWatch) -> None:
    watch.start()
    with watch.aside():
        tree.roots[0].append(Node(9))
    tree.first.run_graph()
    assert watch.stop(1).status == "verified"


def test_a_segment_within_another_counts_for_itself(tree: SimpleNamespace, watch: GraphWatch) -> None:
    inner = GraphWatch(CUDA)
    watch.start()
    tree.first.run_graph()
    with watch.aside():
        inner.start()
        for _ in range(3):
            tree.second.run_graph()
        assert inner.stop(3).counts["replays"] == 3
        inner.close()
    tree.first.run_graph()
    proof = watch.stop(2)
    assert (proof.status, proof.counts["replays"]) == ("verified", 2)


def test_a_trace_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(_: object, path: str) -> None:
        Path(path).write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", half)
    with pytest.raises(OSError, match=r"trace\.json\.gz: No space left on device"):
        capture(tmp_path / "trace.json.gz", [Step("prefill", lambda: None)], {}, torch.device("cpu"))
    assert not list(tmp_path.iterdir())

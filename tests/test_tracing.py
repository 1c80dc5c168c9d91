"""The composition: every path of a tiny random model timed, traced and reported, on the CPU."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import generate
import trace_report
import tracing
from bench.rows import Spread
from engine import SamplingParams
from model import RANDOM_SHAPES, Transformer, build, randomize
from profiling import GraphProof, GraphWatch
from tracing import Work, profile, sharing_weights

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0, seed=3)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile without Inductor, time little, and take the bandwidth as known."""
    compiled = {"compile": True, "kernels": "inductor", "backend": "eager"}
    monkeypatch.setitem(tracing.DECODERS, "compiled", compiled)
    monkeypatch.setattr(tracing, "REPETITIONS", 2)
    monkeypatch.setattr(tracing, "TIMED", 8)
    monkeypatch.setattr(tracing, "read_bandwidth", lambda device: Spread(1e10, 1e10, 1e10))


@pytest.fixture(scope="module")
def model() -> Transformer:
    made = build(RANDOM_SHAPES["tiny"], CPU, torch.float32)
    randomize(made)
    return made


def traced(model: Transformer, directory: Path, **more: Any) -> bool:
    more = {"params": GREEDY, "settings": {"batch": 1, "max_seq_len": 64}, "facts": {"model": "tiny"}, **more}
    return profile(model, [1, 2, 3], directory, **more)


def read(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)


# ---- the command line


def test_profile_traces_both_paths_and_keeps_stdout_pure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEARROOF_COMMIT", "abc1234567")
    (tmp_path / "report.md").write_text("old")
    (tmp_path / "trace_fused.json").write_text("old")
    (tmp_path / "notes.txt").write_text("kept")
    options = "--random tiny --device cpu --dtype fp32 --seed 1 --max-new-tokens 3 --max-seq-len 64 --json".split()
    assert generate.main([*options, "--profile", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    (line,) = shown.out.splitlines()
    assert len(json.loads(line)["tokens"]) == 3, "stdout holds the generation and nothing else"
    written = sorted(path.name for path in tmp_path.iterdir())
    reports = ["report.html", "report.json", "report.md"]
    assert written == ["notes.txt", *reports, "trace_compiled.json", "trace_eager.json"]
    assert (tmp_path / "report.md").read_text() in shown.err and "no fused path: " in shown.err
    report = read(tmp_path / "report.json")
    assert report["verified"] and [run["label"] for run in report["runs"]] == ["eager", "compiled"]
    checks = {check["name"]: check for check in report["integrity"]}
    assert checks["compiled: graphs"]["status"] == checks["compiled: kernels"]["status"] == "n/a"
    assert "16 of 16 choices equal" in checks["eager and compiled: same tokens"]["detail"]
    for run in report["runs"]:
        facts, groups = run["facts"], run["groups"]
        assert facts["command"].startswith("python generate.py --random tiny") and facts["commit"] == "abc1234567"
        assert facts["model"] == "tiny" and facts["torch"] == torch.__version__ and facts["sampling"]["seed"] == 1
        assert list(groups) == ["prefill", "decode at 32", "decode at 56"]
        assert groups["decode at 32"]["steps"] == ["decode[32]", "decode[33]", "decode[34]"]
        assert groups["prefill"]["tokens"] == 32 and all(group["unprofiled_us"] > 0 for group in groups.values())
        assert groups["decode at 56"]["bytes"]["attention"] > groups["decode at 32"]["bytes"]["attention"] > 0
    warm_up = report["runs"][1]["facts"]["warm_up"]
    assert all(warm_up[key] > 0 for key in ("compile_s", "record_s", "prefill_s"))
    assert report["runs"][1]["facts"]["compilation"]["compilations"] == 2, "the decode step and prefill"


def test_a_disk_that_fills_ends_with_one_line_and_keeps_the_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", lambda *_: None)  # as libkineto: no error
    options = "--random tiny --device cpu --dtype fp32 --temperature 0 --max-new-tokens 3 --max-seq-len 64".split()
    assert generate.main([*options, "--profile", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert len(shown.out.split()) == 3
    last = shown.err.splitlines()[-1]
    assert last.startswith("error: ") and "trace_eager.json: the trace could not be written" in last
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_is_profiled_with_its_prompt(
    shared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def profiled(model: Transformer, prompt: list[int], directory: Path, **given: Any) -> bool:
        seen.update(given, model=model, prompt=prompt, directory=directory, text=capsys.readouterr().out)
        return False

    seen: dict[str, Any] = {}
    monkeypatch.setattr(tracing, "profile", profiled)
    options = ["--checkpoint", str(shared_data / "stories260K-hf"), "--prompt", "Once", "--device", "cpu"]
    assert generate.main([*options, "--max-new-tokens", "2", "--profile", str(tmp_path)]) == 1
    assert len(seen["prompt"]) == 2 and seen["directory"] == tmp_path and seen["text"].strip()
    assert seen["facts"]["model"] == "stories260K-hf" and seen["facts"]["quantization"] == "none"
    assert seen["settings"]["max_seq_len"] == 512 and seen["settings"]["compile_prefill"]
    assert seen["model"].layers[0].self_attn.cache.k.numel() == 0, "no Generator has had it"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--random tiny --profile {file}", "File exists"),
        ("--random tiny --profile {new} --max-seq-len 16", "a context of 32 positions at least"),
        ("--random tiny --profile {new} --nvtx", "--nvtx needs an NVIDIA GPU"),
        ("--random tiny --profile-gzip", "go with --profile"),
        ("--interactive --profile {new}", "--interactive excludes"),
    ],
)
def test_mistakes_end_before_anything_is_generated(
    options: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "file").write_text("")
    words = options.format(file=tmp_path / "file", new=tmp_path / "new").split()
    assert generate.main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1 and message in shown.err


# ---- paths


def test_a_batch_with_all_filters_is_profiled_too(model: Transformer, tmp_path: Path) -> None:
    params = SamplingParams(seed=5, top_p=0.9, repetition_penalty=1.2)
    assert traced(model, tmp_path, params=params, settings={"batch": 2, "max_seq_len": 64}, compress=True)
    assert {path.name for path in tmp_path.iterdir()} <= set(tracing.OWN_FILES)
    for path in ("eager", "compiled"):
        trace = trace_report.load(tmp_path / f"trace_{path}.json.gz")
        assert [step.phase for step in trace.steps] == ["prefill", *["decode"] * 6]
        work, steps = trace.facts["same_work"], trace.facts["steps"]
        assert len(work["choices"]) == len(work["margins"]) == 2 * len(work["inputs"]) == 32
        assert work["tolerance"] > 0 and steps["decode[32]"]["tokens"] == 2 and steps["prefill"]["tokens"] == 64


def test_a_run_without_its_graphs_is_reported_and_fails(
    model: Transformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    why = "no recorded graph was replayed: skipping cudagraphs due to bisector"
    monkeypatch.setattr(GraphWatch, "stop", lambda *_: GraphProof("unverified", (why,), failed=True))
    assert not traced(model, tmp_path)
    report = (tmp_path / "report.md").read_text()
    assert "UNVERIFIED: compiled: graphs" in report and why in report  # eager promises none
    assert (tmp_path / "report.html").exists() and why in capsys.readouterr().err


def test_other_tokens_are_found_out(model: Transformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = sharing_weights

    def broken(source: Transformer) -> Transformer:
        """Every tree after the first has a head that is wrong."""
        tree = shared(source)
        if made:
            tree.lm_head.weight = torch.nn.Parameter(-tree.lm_head.weight, requires_grad=False)
        made.append(tree)
        return tree

    made: list[Transformer] = []
    monkeypatch.setattr(tracing, "sharing_weights", broken)
    assert not traced(model, tmp_path)
    assert "UNVERIFIED: eager and compiled: same tokens" in (tmp_path / "report.md").read_text()


def test_paths_share_weights_and_nothing_else(model: Transformer) -> None:
    first, second = sharing_weights(model), sharing_weights(model)
    assert all(a is b for a, b in zip(first.parameters(), second.parameters(), strict=True))
    first.allocate(1, 32)
    assert second.layers[0].self_attn.cache.k.numel() == 0 and first.layers[0] is not second.layers[0]


@pytest.mark.parametrize("capacity", [32, 33, 48, 64, 300, 1024, 4096])
@pytest.mark.parametrize("length", [1, 5, 32, 200])
def test_early_and_late_steps_lie_apart_in_the_cache(capacity: int, length: int) -> None:
    work = Work.of([1] * min(length, capacity), capacity, 100, GREEDY)
    early, late = work.positions
    assert len(work.ids) == capacity and 1 <= work.prompt_tokens <= capacity // 2
    assert early == work.prompt_tokens and early + tracing.TRACED < late
    assert late + max(tracing.TRACED, tracing.COMPARED) <= capacity

"""The benches' arithmetic, rows, tables and refusals; a whole run of each on a tiny random model. Nothing is timed."""

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bench import ablation, bandwidth, decode, machine, peers, perplexity, plot, prefill, readme, rows, tables, workload
from bench.gguf_file import write_gguf
from bench.rows import Row, Spread
from engine import Generator
from generate import load_model, random_model
from model import RANDOM_SHAPES, Transformer

CPU = torch.device("cpu")
TINY = ["--random", "tiny", "--device", "cpu"]


@pytest.fixture
def tiny() -> Transformer:
    return random_model("tiny", device="cpu", dtype="fp32")


def run_bench(module: Any, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Any:
    """-> the bench's rows, from the last line of its standard output, and what stood above it."""
    monkeypatch.setattr(sys, "argv", [module.__file__, *arguments])
    monkeypatch.setattr(bandwidth, "_default_bytes", lambda device: 4 << 20)
    module.main()
    *above, last = capsys.readouterr().out.splitlines()
    return json.loads(last), above


# --- Rows and files


def test_a_spread_is_the_median_and_the_deciles() -> None:
    assert Spread.of([3.0]) == (3.0, 3.0, 3.0)
    assert Spread.of([float(n) for n in range(10, -1, -1)]) == (5.0, 1.0, 9.0)
    with pytest.raises(ValueError, match="no measurements"):
        Spread.of([])


def test_a_row_keeps_what_is_known_and_refuses_foreign_keys() -> None:
    record = Row(model="tiny", decode_tok_per_s=1 / 3, batch=1, top_k=0).as_dict()
    assert record == {"model": "tiny", "batch": 1, "top_k": 0, "decode_tok_per_s": 0.333333}
    assert Row.from_dict(record).as_dict() == record
    with pytest.raises(ValueError, match="unknown keys speed"):
        Row.from_dict({"speed": 1})
    with pytest.raises(RuntimeError, match="perplexity came out as nan"):
        Row(perplexity=math.nan).as_dict()


def test_appending_replaces_the_same_measurement_and_keeps_the_others(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.json"
    for decoder, rate in (("eager", 1.0), ("compiled", 2.0), ("eager", 3.0)):
        rows.append_row(path, Row(decoder=decoder, decode_tok_per_s=rate).as_dict())
    assert [(row["decoder"], row["decode_tok_per_s"]) for row in rows.read_rows(path)] == [
        ("compiled", 2),
        ("eager", 3),
    ]
    assert [file.name for file in path.parent.iterdir()] == ["rows.json"]


def test_an_interrupted_append_leaves_the_old_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.json"
    rows.append_row(path, {"model": "a"})
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", lambda self, target: (_ for _ in ()).throw(KeyboardInterrupt))
        rows.append_row(path, {"model": "b"})
    assert rows.read_rows(path) == [{"model": "a"}]


@pytest.mark.parametrize("text", ["{", '{"a": 1}', "[1]", '[{"nonsense": 1}]'])
def test_a_result_file_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(ValueError, match=r"rows\.json|unknown keys"):
        rows.read_rows(tmp_path / "rows.json")


@pytest.mark.parametrize(("share", "size", "refused"), [(1.01, 100, True), (1.0, 100, False), (1.5, 30, False)])
def test_a_rate_above_the_limit_is_refused_unless_the_cache_may_explain_it(
    share: float, size: int, refused: bool
) -> None:
    row = Row(decoder="eager", decode_tok_per_s=9.0, share_of_limit=share, bytes_per_step=size)
    expected = pytest.raises(rows.ImpossibleFigure, match=r"1\.010 of the bandwidth") if refused else nullcontext()
    with expected:
        rows.check(row, cache_bytes=10)


def test_a_prefill_faster_than_the_processor_multiplies_is_refused() -> None:
    rows.check(Row(decoder="eager", prefill_tok_per_s=9.0, share_of_matrix_limit=1.0), cache_bytes=10)
    with pytest.raises(rows.ImpossibleFigure, match=r"9\.0 tok/s is 1\.500 of the matrix rate"):
        rows.check(Row(decoder="eager", prefill_tok_per_s=9.0, share_of_matrix_limit=1.5), cache_bytes=10)


@pytest.mark.parametrize("path", sorted(readme.RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_committed_rows_are_rows(path: Path) -> None:
    for row in rows.read_rows(path):
        assert row["device_name"]
        assert row.get("measured_separately") or row.keys() >= {"commit", "command", "date", "torch"}
        assert "-dirty" not in row.get("commit", "")


# --- Where and how


def test_a_commit_is_the_one_given_else_of_the_environment_else_of_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEARROOF_COMMIT", "abc")
    assert (machine.commit_name("def"), machine.commit_name()) == ("def", "abc")
    monkeypatch.delenv("NEARROOF_COMMIT")
    name = machine.commit_name()
    assert name is None or len(name.removesuffix("-dirty")) == 10


@pytest.mark.parametrize(
    "options",
    ["--new-tokens 0", "--prompt-tokens 0", "--positions -1", "--repetitions 0", "--batch 0", "--quantize int4-g"],
)
def test_a_number_without_meaning_is_refused(options: str) -> None:
    command = [sys.executable, "-m", "bench.decode", "--random", "tiny", *options.split()]
    done = subprocess.run(command, cwd=machine.ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_rows_to_append_to_are_read_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text("{broken")
    options = ["--random", "tiny", "--decoders", "eager", "--append", str(tmp_path / "rows.json")]
    command = [sys.executable, "-m", "bench.decode", *options]
    done = subprocess.run(command, cwd=machine.ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert "rows.json: not JSON" in done.stderr


def test_a_tree_that_git_refuses_has_no_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NEARROOF_COMMIT", raising=False)
    (tmp_path / ".git").mkdir()  # no repository
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    assert machine.commit_name() is None


def test_the_command_leaves_out_where_results_go() -> None:
    typed = [
        "bench/decode.py",
        "--random",
        "tiny",
        "--append",
        "x.json",
        "--commit=abc",
        "--output",
        "md",
        "--top-k",
        "0",
    ]
    assert rows.command_line(typed) == "python -m bench.decode --random tiny --top-k 0"


def test_the_machine_is_named() -> None:
    assert "cores" in machine.device_name(CPU)
    assert machine.last_level_cache_bytes(CPU) > 1 << 16
    assert machine.gpu_facts(CPU) == {}
    assert machine.package_version("no-such-package") is None


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError("a\nb"), 2), (FileNotFoundError("a b"), 2), (RuntimeError("a b"), 1)]
)
def test_a_bench_ends_with_one_line(error: Exception, status: int, capsys: pytest.CaptureFixture) -> None:
    def main() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        rows.run(main)
    assert ended.value.code == status
    assert capsys.readouterr().err == "error: a b\n"


# --- Tables


def test_a_table_aligns_numbers_and_fills_gaps() -> None:
    found = [{"model": "a", "decode_tok_per_s": 1234.56}, {"model": "b", "dtype": "bf16", "quantization": "int8"}]
    assert tables.markdown(found, ("model", "precision", "rate")).splitlines() == [
        "| model | weights | tok/s |",
        "|---|---|---:|",
        "| a | - | 1,234.6 |",
        "| b | int8 | - |",
    ]


def test_csv_has_every_field_of_every_row() -> None:
    text = tables.comma_separated([{"model": "a,b", "batch": 1}, {"model": "c", "note": "x"}])
    assert text.splitlines() == ["model,batch,note", '"a,b",1,', "c,,x"]


def test_the_readme_is_rendered_from_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    monkeypatch.setattr(readme, "QUALITY", tmp_path / "quality.json")
    for decoder, rate in (("eager", 1.0), ("compiled", 2.0)):
        row = Row(model="tiny", quantization="int8", decoder=decoder, decode_tok_per_s=rate, command="python -m x")
        rows.append_row(tmp_path / "h200-ablation.json", row.as_dict() | {"step": decoder})
    rows.append_row(tmp_path / "quality.json", {"quantization": "int8", "perplexity": 24.5, "token_agreement": 0.9})
    text = readme.rendered("before\n<!-- table:h200-ablation -->\nold\n<!-- /table -->\nafter\n")
    assert "old" not in text and text.startswith("before\n") and text.endswith("<!-- /table -->\nafter\n")
    assert "| compiled | int8 | - | 2.0 |" in text and "24.500 | 90.0% |" in text
    assert text.count("python -m x") == 1
    assert readme.rendered(text) == text
    with pytest.raises(ValueError, match="unknown table 'nonsense'"):
        readme.rendered("<!-- table:nonsense -->\n<!-- /table -->")


def test_the_readme_shows_the_committed_rows() -> None:
    if not readme.README.exists():
        pytest.skip("no README in this copy")
    text = readme.README.read_text(encoding="utf-8")
    assert readme.rendered(text) == text, "run: python -m bench.readme"


def test_every_table_renders() -> None:
    for name, table in readme.TABLES.items():
        assert set(table.columns) <= tables.COLUMNS.keys()
        assert readme.block(name) == "" or tables.COLUMNS[table.columns[0]].title in readme.block(name)


# --- Ceilings


def test_the_ceilings_are_measured() -> None:
    assert bandwidth.read_bandwidth(CPU, nbytes=1 << 20, repetitions=3).median > 0
    assert bandwidth.matrix_rate(CPU, size=32, repetitions=3).median > 0


def test_the_bandwidth_bench_prints_a_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(bandwidth, "matrix_rate", lambda device, repetitions: Spread(1e12, 1e12, 1e12))
    (row,), above = run_bench(
        bandwidth, ["--device", "cpu", "--output", "md", "--repetitions", "2"], monkeypatch, capsys
    )
    assert row["read_bandwidth_bytes_per_s"] > 0
    assert above[0].startswith("| device | read GB/s |")


def test_quality_is_that_of_weights_quantised_as_the_measured_ones_were() -> None:
    rounded = {"model": "a", "against": "a", "quantization": "int4-g64", "perplexity": 33.0}
    better = {"model": "a-gptq", "against": "a", "quantization": "int4-g64", "perplexity": 25.0}
    row = {"model": "b", "quantization": "int4-g64"}
    assert ablation.join_quality(row, [rounded, better]) == row | {"quality_of": "a", "perplexity": 33.0}
    assert ablation.join_quality({"model": "b", "quantization": "int8"}, [rounded]).keys() == row.keys()


def test_prefill_counts_multiplications_of_layers_and_causal_attention() -> None:
    config = RANDOM_SHAPES["llama-3.1-8b"]
    parameters = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336)
    attention = 32 * 4 * 4096 * (1 + 2 + 3)
    assert prefill.floating_point_operations(config, 3) == 2 * parameters * 3 + attention


# --- Workload


def test_lists_pair_up_or_are_refused() -> None:
    assert workload.pairs([5, 512], [200], "x") == [(5, 200), (512, 200)]
    assert workload.pairs([1], [2, 3], "x") == [(1, 2), (1, 3)]
    with pytest.raises(ValueError, match="2 and 3 values do not pair up"):
        workload.pairs([1, 2], [1, 2, 3], "x")


def test_a_precision_is_named_as_rows_name_it() -> None:
    assert [workload.precision(text) for text in ("none", "int8", "int4-g128")] == ["none", "int8", "int4-g128"]
    assert workload.precision("int4") == "int4-g64"
    for wrong in ("int3", "int4-gx", "int8-g64", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="unknown precision"):
            workload.precision(wrong)


def test_weight_bytes_count_a_tied_head_once(tiny: Transformer) -> None:
    distinct = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tiny.parameters()}
    assert workload.weight_bytes(tiny) == sum(distinct.values())


# --- Whole runs


DESIGN_FIELDS = {
    *("model", "dtype", "quantization", "decoder", "batch", "prompt_tokens", "new_tokens", "position", "temperature"),
    *("top_k", "decode_tok_per_s", "decode_tok_per_s_p10", "decode_tok_per_s_p90", "prefill_tok_per_s"),
    *("time_to_first_token_s", "peak_memory_bytes", "read_bandwidth_bytes_per_s", "bytes_per_step", "share_of_limit"),
    *("graphs", "device_name", "torch", "date", "command"),
}


def test_decode_measures_every_batch_and_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / "rows.json"
    lengths = ["--prompt-tokens", "1,20", "--new-tokens", "3", "--batch", "1,2", "--repetitions", "2"]
    wanted = [*TINY, "--decoders", "eager", *lengths, "--output", "csv", "--append", str(file)]
    found, above = run_bench(decode, wanted, monkeypatch, capsys)
    assert [(row["batch"], row["prompt_tokens"], row["position"]) for row in found] == [
        (1, 1, 0),
        (1, 20, 19),
        (2, 1, 0),
        (2, 20, 19),
    ]
    for row in found:
        assert row.keys() >= DESIGN_FIELDS
        steps = row["decode_tok_per_s"] / row["batch"]
        assert row["share_of_limit"] == pytest.approx(
            row["bytes_per_step"] * steps / row["read_bandwidth_bytes_per_s"], 1e-4
        )
        assert row["graphs"] == "none" and row["decoder"] == "eager"
    assert len(above) == 6  # a header, four rows, a blank line
    assert rows.read_rows(file) == found


def test_decode_starts_at_the_positions_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    wanted = [
        "--decoders",
        "eager",
        "--positions",
        "0,90",
        "--new-tokens",
        "3",
        "--max-seq-len",
        "100",
        "--repetitions",
        "1",
    ]
    found, _ = run_bench(decode, [*TINY, *wanted], monkeypatch, capsys)
    assert [(row["position"], row["max_seq_len"]) for row in found] == [(0, 100), (90, 100)]
    assert all("prompt_tokens" not in row and "time_to_first_token_s" not in row for row in found)
    assert found[1]["bytes_per_step"] > found[0]["bytes_per_step"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--random", "tiny", "--max-seq-len", "100"], "100 positions are too few for this work: it needs 204"),
        (["--random", "tiny", "--decoders", "fastest"], "unknown decoder 'fastest'"),
        (["--random", "gpt-2"], "invalid choice: 'gpt-2'"),
        ([], "one of the arguments --checkpoint --random is required"),
        (["--random", "tiny", "--batch", "x"], "invalid"),
    ],
)
def test_a_wrong_option_is_a_value_error(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["decode.py", *arguments])
    monkeypatch.setattr(bandwidth, "_default_bytes", lambda device: 1 << 20)
    with pytest.raises(ValueError, match=message):
        decode.main()


def test_prefill_measures_every_length(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(prefill, "matrix_rate", lambda device: Spread(1e12, 1e12, 1e12))
    wanted = [*TINY, "--decoders", "eager", "--prompt-tokens", "1,16,300", "--repetitions", "1"]
    found, _ = run_bench(prefill, wanted, monkeypatch, capsys)
    assert [row["prompt_tokens"] for row in found] == [1, 16, 300]
    assert all(row["prefill_tok_per_s"] > 0 and row["share_of_matrix_limit"] > 0 for row in found)


def test_compile_times_are_of_a_process_that_compiles_and_of_the_one_that_measures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    caches = []

    def child(arguments: list[str]) -> Any:
        caches.append(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        if "--compile-only" in arguments:
            return {"compile_s": 30.0, "phases_s": {"inductor": 20.0}, "traced": {"traced_kernels_per_step": 9}}
        assert "--decoders=compiled" in arguments and "--compile-prefill" in arguments
        quicker = [*arguments, "--decoders=eager"]
        return [row | {"compile_s": 2.0} for row in run_bench(decode, quicker, monkeypatch, capsys)[0]]

    monkeypatch.setattr(decode, "child", child)
    wanted = [*TINY, "--decoders", "compiled", "--compile-times", "--compile-prefill", "--repetitions", "1"]
    found, _ = run_bench(decode, [*wanted, "--prompt-tokens", "3,4", "--new-tokens", "6"], monkeypatch, capsys)
    assert [row["prompt_tokens"] for row in found] == [3, 4]
    for row in found:
        assert row["compile_cold_s"] == 30.0 and row["compile_warm_s"] == 2.0 and row["traced_kernels_per_step"] == 9
        assert row["compile_cold_phases_s"] == {"inductor": 20.0} and "--compile-times" in row["command"]
    assert len(caches) == 2 and caches[0] == caches[1] and not Path(caches[0]).exists()


@pytest.mark.gpu
def test_a_compiled_decoder_is_measured_with_traced_proof(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    wanted = [
        "--random",
        "tiny",
        "--decoders",
        "compiled",
        "--compile-times",
        "--repetitions",
        "2",
        "--new-tokens",
        "20",
    ]
    (row,), _ = run_bench(decode, wanted, monkeypatch, capsys)
    assert row["graphs"] == "verified" and row["traced_graph_launches_per_step"] >= 1
    assert row["compile_cold_s"] > 0 and row["compile_warm_s"] > 0


# --- Peers


class FakeEngine:
    bytes_per_step = 100

    def __init__(self, name: str, seconds: list[float], log: list[str]) -> None:
        self.name, self._seconds, self._log = name, seconds, log

    def run(self, prompt: list[int], new_tokens: int) -> peers.Timing:
        self._log.append(self.name)
        return peers.Timing(0.5, self._seconds.pop(0))


def test_peers_take_turns_and_ratios_are_within_a_turn() -> None:
    log: list[str] = []
    engines = [FakeEngine("ours", [9, 1, 2, 4], log), FakeEngine("theirs", [9, 2, 4, 8], log)]
    ours, theirs = peers.compare(engines, [1, 2], 11, 3, bandwidth=1000.0)
    assert log == ["ours", "theirs"] * 4
    assert (ours.decoder, ours.engine, ours.ratio) == ("ours", None, None)
    assert (theirs.decoder, theirs.engine) == (None, "theirs")
    assert (theirs.ratio, theirs.ratio_p10, theirs.ratio_p90) == (2.0, 2.0, 2.0)
    assert theirs.decode_tok_per_s == 10 / 4 and theirs.share_of_limit == 0.25
    assert theirs.prefill_tok_per_s == 4.0


def test_a_missing_peer_is_named_with_its_install_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert peers.present(["llama-cpp", "transformers"], CPU) == []
    assert capsys.readouterr().err.splitlines() == [
        "llama-cpp: not installed (pip install llama-cpp-python gguf)",
        "transformers: not installed (pip install -e '.[peers]')",
    ]


def test_transformers_does_the_same_work(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("transformers")
    wanted = [*TINY, "--decoder", "eager", "--peers", "transformers", "--new-tokens", "3", "--repetitions", "1"]
    ours, theirs = run_bench(peers, wanted, monkeypatch, capsys)[0]
    assert ours["decoder"] == "eager" and theirs["engine"].startswith("transformers 5")
    assert theirs["ratio"] > 0 and theirs["bytes_per_step"] == ours["bytes_per_step"]


def test_gguf_holds_the_weights_with_the_heads_interleaved(tiny: Transformer, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    size = write_gguf(tiny, tmp_path / "tiny.gguf", "BF16")
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "tiny.gguf").tensors}
    targets, config = tiny.named_targets(), tiny.config
    assert len(stored) == len(targets)
    assert size == sum(
        t.n_bytes for t in stored.values() if config.tie_word_embeddings or t.name != "token_embd.weight"
    )

    def read(name: str) -> torch.Tensor:
        return torch.from_numpy(gguf.quants.dequantize(stored[name].data, stored[name].tensor_type))

    q = targets["model.layers.1.self_attn.q_proj.weight"].bfloat16().float()
    halves = q.view(config.num_attention_heads, 2, config.head_dim // 2, -1)
    read_q = read("blk.1.attn_q.weight").view(config.num_attention_heads, config.head_dim // 2, 2, -1)
    assert torch.equal(read_q[:, :, 0], halves[:, 0]) and torch.equal(read_q[:, :, 1], halves[:, 1])
    down = targets["model.layers.0.mlp.down_proj.weight"].bfloat16().float()
    assert torch.equal(read("blk.0.ffn_down.weight"), down)


# --- Perplexity


def test_windows_score_every_token_once() -> None:
    alone = perplexity.windows(list(range(10)), 4, 4, None)
    assert [(window.ids, window.first) for window in alone] == [([0, 1, 2, 3], 1), ([4, 5, 6, 7], 1)]
    overlapping = perplexity.windows(list(range(8)), 4, 2, None)
    assert [window.ids[window.first :] for window in overlapping] == [[1, 2, 3], [4, 5], [6, 7]]
    for length, stride, count in ((4, 5, None), (1, 1, None), (4, 4, 3), (11, 11, None)):
        with pytest.raises(ValueError, match="windows"):
            perplexity.windows(list(range(10)), length, stride, count)


def test_a_tally_is_cross_entropy_agreement_and_divergence() -> None:
    logits, reference = torch.randn(2, 6, 11, generator=torch.Generator().manual_seed(0))
    window = perplexity.Window([1, 2, 3, 4, 5, 6], 2)
    tally = perplexity.Tally()
    tally.add(window, logits, reference)
    predicted, wanted = logits[1:5], reference[1:5]
    assert tally.tokens == 4
    assert math.log(tally.perplexity) == pytest.approx(
        F.cross_entropy(predicted, torch.tensor([3, 4, 5, 6])).item(), 1e-5
    )
    assert tally.agreed == int((predicted.argmax(-1) == wanted.argmax(-1)).sum())
    divergence = F.kl_div(predicted.log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="sum").item()
    assert tally.kl == pytest.approx(divergence, 1e-4)


def test_perplexity_equals_transformers_for_the_same_windows(shared_data: Path) -> None:
    transformers = pytest.importorskip("transformers")
    directory = shared_data / "stories260K-hf"
    loaded = load_model(directory, device="cpu", dtype="fp32")
    ids = loaded.tokenizer.encode("Once upon a time there was a girl. She liked to play. " * 20, bos=False)
    chosen = perplexity.windows(ids, 64, 48, 4)
    loaded.model.allocate(1, 64)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    @torch.no_grad()
    def reference(window: Any) -> torch.Tensor:
        return theirs(torch.tensor([list(window)])).logits[0].float()

    ours, expected = perplexity.evaluate(perplexity.one_pass(loaded.model), chosen, reference)
    assert ours.perplexity == pytest.approx(expected.perplexity, 1e-4)
    assert ours.agreed == ours.tokens and ours.kl / ours.tokens < 1e-6


def test_decode_steps_score_like_one_pass(tiny: Transformer) -> None:
    ids = workload.random_prompts(tiny, 1, 12)[0]
    with Generator(tiny, max_seq_len=12, compile=False) as generator:
        by_steps = perplexity.step_by_step(generator)(ids)
        torch.testing.assert_close(by_steps, perplexity.one_pass(tiny)(ids), rtol=1e-4, atol=1e-4)


def test_perplexity_compares_two_checkpoints(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    directory, text = shared_data / "stories260K-hf", tmp_path / "text.txt"
    text.write_text("Once upon a time there was a little girl named Lily. " * 8)
    wanted = ["--checkpoint", str(directory), "--against", str(directory), "--text", str(text), "--device", "cpu"]
    plain, compared = run_bench(perplexity, [*wanted, "--windows", "2", "--window-tokens", "32"], monkeypatch, capsys)[
        0
    ]
    assert plain["perplexity"] == compared["perplexity"] > 1
    assert compared["token_agreement"] == 1 and compared["kl_divergence"] == pytest.approx(0, abs=1e-6)
    assert "token_agreement" not in plain


def test_lm_eval_runs_a_task_of_a_local_file(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    pytest.importorskip("lm_eval")
    from bench import lm_eval_adapter

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    (tmp_path / "documents.jsonl").write_text('{"begin": "Once upon a", "end": [" time", " zebra"], "answer": 0}\n')
    files = f"data_files: {{test: {tmp_path}/documents.jsonl}}, cache_dir: {tmp_path}"
    common = f"dataset_path: json\ndataset_kwargs: {{{files}}}\n"
    kinds = {
        "choice": "output_type: multiple_choice\ndoc_to_text: '{{begin}}'\ndoc_to_choice: '{{end}}'\n"
        "doc_to_target: '{{answer}}'\nmetric_list: [{metric: acc}]\n",
        "rolling": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{begin}} time'\n"
        "metric_list: [{metric: word_perplexity}]\n",
        "generated": "output_type: generate_until\ndoc_to_text: '{{begin}}'\ndoc_to_target: ' time'\n"
        "generation_kwargs: {until: [','], max_gen_toks: 8}\nmetric_list: [{metric: exact_match}]\n",
    }
    for name, rest in kinds.items():
        (tmp_path / f"{name}.yaml").write_text(f"task: {name}\ntest_split: test\n{common}{rest}")
    source = ["--checkpoint", str(shared_data / "stories260K-hf"), "--include-path", str(tmp_path), "--device", "cpu"]
    found, _ = run_bench(lm_eval_adapter, [*source, "--tasks", ",".join(kinds)], monkeypatch, capsys)
    assert found["choice"]["acc,none"] == 1.0
    assert found["rolling"]["word_perplexity,none"] > 1
    assert found["generated"]["exact_match,none"] == 1.0


# --- Ablation and picture


def test_ablation_writes_as_it_goes_skips_what_is_there_and_joins_quality(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    file, quality, ran = tmp_path / "rows.json", tmp_path / "quality.json", []
    rows.append_row(quality, {"quantization": "int8", "perplexity": 24.0, "token_agreement": 0.9})

    def measure(arguments: list[str]) -> dict[str, Any]:
        ran.append(arguments)
        if "compiled" in arguments and "--quantize" not in arguments:
            raise RuntimeError("error: no compiler")
        mode = arguments[arguments.index("--quantize") + 1] if "--quantize" in arguments else "none"
        return {"model": "tiny", "quantization": mode, "device_name": machine.device_name(CPU), "command": "child"}

    monkeypatch.setattr(ablation, "measure", measure)
    wanted = [*TINY, "--append", str(file), "--quality", str(quality)]
    with pytest.raises(RuntimeError, match="no row for compiled"):
        run_bench(ablation, wanted, monkeypatch, capsys)
    written = rows.read_rows(file)
    assert [row["step"] for row in written] == ["eager", "+ int8", "+ int4"]
    assert written[1]["perplexity"] == 24.0 and written[1]["token_agreement"] == 0.9
    assert all(row["command"].startswith("python -m bench.ablation") for row in written)
    with pytest.raises(RuntimeError, match="no row for compiled"):
        run_bench(ablation, wanted, monkeypatch, capsys)
    assert len(ran) == 5  # four steps, and once more the one that failed


def test_every_ablation_step_is_a_command_that_decode_understands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "measured", lambda options: [])
    for step in {**ablation.STEPS, **ablation.CPU_STEPS}.values():
        monkeypatch.setattr(sys, "argv", ["decode.py", *TINY, *step.split()])
        decode.main()


def test_the_picture_is_drawn_from_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    row = {
        "model": "tiny",
        "dtype": "bf16",
        "quantization": "none",
        "batch": 1,
        "device_name": "NVIDIA H200",
        "commit": "a",
    }
    fast = row | {"decoder": "compiled", "decode_tok_per_s": 90.0, "share_of_limit": 0.9, "prompt_tokens": 5}
    slow = row | {"engine": "other 1.0", "decode_tok_per_s": 10.0, "share_of_limit": 0.1, "prompt_tokens": 5}
    for file, found in (("h200-decode", [fast]), ("peers", [slow])):
        for each in found:
            rows.append_row(tmp_path / f"{file}.json", each)
    for position in (0, 7000):
        rows.append_row(tmp_path / "h200-positions.json", fast | {"position": position})
    for module in (readme, plot):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["plot.py", "--output", str(tmp_path / "picture.png")])
    plot.main()
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")

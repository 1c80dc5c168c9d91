"""Quantised weights: what is stored, how it is chosen, how it multiplies, and directories made of it."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import quantize
import tiny_checkpoint
from checkpoint import CheckpointError
from engine import Generator, SamplingParams
from generate import load_model
from model import RANDOM_SHAPES, Linear, Transformer, build, randomize
from quantize import (
    QuantizationError,
    QuantizedLinear,
    Recipe,
    Scheme,
    apply_quantization,
    dequantize,
    gptq,
    label,
    make_record,
    make_scheme,
    quantize_in_memory,
    quantize_matrix,
    read_record,
    relative_error,
    rewrite,
)

INT8, FP8, INT4 = Scheme("int8"), Scheme("fp8"), Scheme("int4", 64)
INT4_ZERO = Scheme("int4", 32, symmetric=False)
KINDS = [INT8, FP8, INT4, INT4_ZERO, Scheme("int4", 128)]
BOUND = {"int8": 0.01, "fp8": 0.03, "int4": 0.13}  # relative error of normal weights
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 60


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return tiny_checkpoint.write(tmp_path / "plain")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "calibration.txt").write_text(TEXT)
    return tmp_path / "calibration.txt"


def silent(line: str) -> None: ...


def logits(model: Transformer, ids: list[int]) -> Tensor:
    model.allocate(1, len(ids))
    with torch.no_grad():
        return model.logits(model(torch.tensor([ids]), torch.arange(len(ids)).unsqueeze(0), None, len(ids)))


def moments(samples: int, columns: int) -> Tensor:
    """Of inputs that depend on each other."""
    x = torch.randn(samples, columns) @ torch.randn(columns, columns)
    return x.T @ x / samples


# --- What is stored


@pytest.mark.parametrize("scheme", KINDS, ids=str)
@pytest.mark.parametrize("columns", [128, 100, 20])
def test_any_number_of_columns_comes_back_and_any_rows_stand_alone(scheme: Scheme, columns: int) -> None:
    weight = torch.randn(24, columns)
    stored = quantize_matrix(weight, scheme)
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in stored.items()}
    assert shapes == scheme.tensors(24, columns)
    whole = dequantize(stored, torch.float32, columns)
    assert relative_error(weight, stored) < BOUND[scheme.mode]
    some = {name: tensor[5:9] for name, tensor in stored.items()}
    assert torch.equal(dequantize(some, torch.float32, columns), whole[5:9])
    assert torch.equal(dequantize(quantize_matrix(weight[5:9], scheme), torch.float32, columns), whole[5:9])


@pytest.mark.parametrize("scheme", KINDS, ids=str)
def test_what_is_stored_is_stored_again_as_it_is(scheme: Scheme) -> None:
    once = dequantize(quantize_matrix(torch.randn(8, 128), scheme), torch.float32, 128)
    again = dequantize(quantize_matrix(once, scheme), torch.float32, 128)
    assert torch.allclose(again, once, rtol=0.02, atol=0.02 * float(once.abs().max()))


def test_a_byte_of_int4_holds_both_halves_of_its_group() -> None:
    codes = torch.arange(64).remainder(16).sub(8).float().view(1, 1, 64)
    stored = INT4.store(codes, torch.ones(1, 1, 1), None)
    assert stored["qweight"][0, 3].item() == 3 | (35 % 16) << 4
    assert torch.equal(dequantize(stored, torch.float32, 64), codes.flatten(1))


@pytest.mark.parametrize("scheme", KINDS, ids=str)
def test_rows_of_zeros_stay_zeros(scheme: Scheme) -> None:
    assert not dequantize(quantize_matrix(torch.zeros(3, 64), scheme), torch.float32, 64).any()


def test_all_fp8_codes_are_read_exactly() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = codes[codes.float().isfinite()]
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(quantize._codes(codes, dtype).float(), codes.float())


# --- Methods


@pytest.mark.parametrize("scheme", [INT4, INT4_ZERO], ids=str)
def test_half_quadratic_is_closer_than_rounding(scheme: Scheme) -> None:
    weight = torch.randn(32, 256)
    nearest, hqq = (relative_error(weight, quantize_matrix(weight, scheme, method)) for method in ("rtn", "hqq"))
    assert hqq < nearest


def test_gptq_equals_solving_for_the_columns_that_are_left() -> None:
    """The same greedy choice, where every column's correction is a least-squares problem of its own."""
    weight, hessian = torch.randn(5, 64), moments(500, 64)
    stored = gptq(weight, hessian, INT4)
    scale = stored["scale"].float()
    damped = (hessian + 0.01 * hessian.diagonal().mean() * torch.eye(64)).double()
    order = damped.diagonal().argsort(descending=True).tolist()
    left, result = weight.double().clone(), torch.zeros(5, 64, dtype=torch.float64)
    for step, column in enumerate(order):
        result[:, column] = (left[:, column] / scale[:, 0]).round().clamp(-8, 7) * scale[:, 0]
        error, rest = result[:, column] - left[:, column], order[step + 1 :]
        if rest:  # the correction d of the rest minimises (e, d) H (e, d)^T
            among = damped[rest][:, rest]
            left[:, rest] -= torch.linalg.solve(among, damped[rest, column].unsqueeze(1) * error.unsqueeze(0)).T
    got = dequantize(stored, torch.float32, 64).double()
    assert (got == result).double().mean() > 0.99  # a tie of fp32 may fall the other way
    assert torch.allclose(got, result, atol=2 * float(scale.abs().max()))


@pytest.mark.parametrize("scheme", [INT4, INT4_ZERO, FP8], ids=str)
def test_gptq_errs_less_in_the_product_than_rounding(scheme: Scheme) -> None:
    weight, hessian = torch.randn(16, 100), moments(400, 100)

    def loss(stored: dict[str, Tensor]) -> float:
        error = weight - dequantize(stored, torch.float32, 100)
        return float(((error @ hessian) * error).sum())

    assert loss(gptq(weight, hessian, scheme)) < 0.7 * loss(quantize_matrix(weight, scheme))


def test_gptq_takes_inputs_that_are_always_zero() -> None:
    hessian = moments(200, 64)
    hessian[7], hessian[:, 7] = 0, 0
    weight = torch.randn(4, 64)
    got = dequantize(gptq(weight, hessian, INT4), torch.float32, 64)
    assert got.isfinite().all() and (got - weight)[:, 7].abs().max() < 0.5


# --- Products


def linear_of(rows: int, columns: int, scheme: Scheme, dtype: torch.dtype) -> tuple[QuantizedLinear, Tensor]:
    """A layer with a bias, and the weights that it stands for."""
    linear = Linear(columns, rows, bias=True)
    torch.nn.init.normal_(linear.weight)
    assert linear.bias is not None
    torch.nn.init.normal_(linear.bias)
    stored = quantize_matrix(linear.weight, scheme)
    weight = dequantize(stored, torch.float32, columns)
    layer = QuantizedLinear(linear.to(dtype), scheme, stored)
    layer.pack(dtype)
    return layer, weight


@pytest.mark.parametrize("scheme", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), [(48, 128), (40, 100), (48, 20)])
def test_every_form_of_the_product_is_the_product(scheme: Scheme, dtype: torch.dtype, rows: int, columns: int) -> None:
    layer, weight = linear_of(rows, columns, scheme, dtype)
    assert layer.bias is not None
    for count in (1, 3, 20):
        x = torch.randn(1, count, columns).to(dtype)
        right = x.float() @ weight.T + layer.bias.float()
        for layer.as_reduction in (False, True):
            tolerance = 5e-5 if dtype == torch.float32 else 0.01
            assert torch.allclose(layer(x).float(), right, atol=tolerance * float(right.abs().max()))
            whole = torch.cat(layer.in_parts(x, slice(8, 24), slice(24, None)), dim=-1)
            assert torch.allclose(whole.float(), right[..., 8:], atol=tolerance * float(right.abs().max()))


@pytest.mark.parametrize(
    ("scheme", "dtype", "columns", "count"),
    [
        (INT8, torch.bfloat16, 128, 1),
        (FP8, torch.float32, 100, 1),
        (INT4_ZERO, torch.float32, 100, 1),
        (INT4, torch.float16, 100, 3),
    ],
)
def test_compiled_products_have_no_graph_break(scheme: Scheme, dtype: torch.dtype, columns: int, count: int) -> None:
    layer, weight = linear_of(48, columns, scheme, dtype)
    assert layer.bias is not None
    layer.as_reduction = True
    x = torch.randn(1, count, columns).to(dtype)
    torch.compiler.reset()
    y = torch.compile(layer, fullgraph=True, dynamic=False)(x)
    right = x.float() @ weight.T + layer.bias.float()
    assert torch.allclose(y.float(), right, atol=0.01 * float(right.abs().max()))


# --- Models


@pytest.mark.parametrize(("mode", "group_size"), [("int8", None), ("fp8", None), ("int4", 32), ("int4", 128)])
def test_a_model_in_memory_stays_close(mode: str, group_size: int | None) -> None:
    model = build(RANDOM_SHAPES["tiny"], torch.device("cpu"), torch.float32)
    randomize(model)
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    before, table = logits(model, ids), model.embed_tokens.weight.clone()
    record = quantize_in_memory(model, mode, group_size)
    assert not any(type(module) is Linear for module in model.modules())
    assert torch.equal(model.embed_tokens.weight, table)  # the head, which was tied to it, has a copy of its own
    assert read_record(record)["lm_head"].mode == ("fp8" if mode == "fp8" else "int8")
    assert (logits(model, ids) - before).norm() / before.norm() < 4 * BOUND[mode]


@pytest.mark.parametrize(("mode", "batch"), [("int4", 1), ("int8", 2)])
def test_eager_and_compiled_give_the_same_tokens(plain: Path, mode: str, batch: int) -> None:
    ran = []
    for compiled in (False, True):
        model = load_model(plain, dtype="fp32").model
        quantize_in_memory(model, mode)
        with Generator(model, batch=batch, max_seq_len=64, compile=compiled, kernels="inductor") as generator:
            greedy = SamplingParams(temperature=0.0, seed=0)
            done = generator.generate_ids([[7, 40, 90]] * batch, max_new_tokens=6, params=greedy, ignore_eos=True)
            ran.append([completion.tokens for completion in done])
    assert ran[0] == ran[1] and all(len(tokens) == 6 for tokens in ran[0])


# --- Directories


@pytest.mark.parametrize("scheme", KINDS, ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_a_directory_gives_the_logits_of_its_stored_weights(tmp_path: Path, scheme: Scheme, tied: bool) -> None:
    plain = tiny_checkpoint.write(tmp_path / "plain", tie_word_embeddings=tied)
    errors = rewrite(plain, tmp_path / "small", Recipe(scheme), say=silent)
    assert "lm_head" in errors and len(errors) == 2 * 7 + 1
    model = load_model(plain, dtype="fp32").model
    if tied:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone(), requires_grad=False)
    for path, linear, _ in quantize.linears(model):
        chosen = quantize.head_scheme(scheme) if path == "lm_head" else scheme
        linear.weight.copy_(dequantize(quantize_matrix(linear.weight, chosen), torch.float32, linear.in_features))
    ids = list(range(3, 40))
    right = logits(model, ids)
    loaded = load_model(tmp_path / "small", dtype="fp32")
    assert torch.allclose(logits(loaded.model, ids), right, atol=1e-4 * float(right.abs().max()))
    assert loaded.checkpoint.quantization is not None
    assert label(loaded.checkpoint.quantization) == label(make_record({"any": scheme}, "rtn"))
    copied = {path.name for path in plain.iterdir()} | {quantize.REPORT_FILE}
    assert {path.name for path in (tmp_path / "small").iterdir()} == copied
    assert (tmp_path / "small" / "tokenizer.json").read_bytes() == (plain / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("mode", ["int4", "fp8"])
def test_gptq_goes_layer_by_layer_and_is_closer_than_rounding(plain: Path, text: Path, mode: str) -> None:
    whole = load_model(plain, dtype="fp32")
    ids = whole.tokenizer.encode(TEXT)[:500]
    before = logits(whole.model, ids)
    distance = {}
    for method in ("rtn", "gptq"):
        output, calibration = plain.parent / method, text if method == "gptq" else None
        errors = rewrite(plain, output, Recipe(make_scheme(mode), method, calibration), say=silent)
        assert len(errors) == 2 * 7 + 1
        distance[method] = float((logits(load_model(output, dtype="fp32").model, ids) - before).norm())
    assert distance["gptq"] < distance["rtn"]


def test_kept_layers_and_their_mates_stay_and_are_named(plain: Path) -> None:
    said: list[str] = []
    recipe = Recipe(INT8, keep=("*.0.self_attn.q_proj", "*.down_proj", "lm_head"))
    rewrite(plain, plain.parent / "small", recipe, say=said.append)
    names = load_file(plain.parent / "small" / "model.safetensors").keys()
    for kept in ("layers.0.self_attn.q_proj", "layers.0.self_attn.k_proj", "layers.1.mlp.down_proj"):
        assert f"model.{kept}.weight" in names
    assert "model.layers.1.self_attn.q_proj.qweight" in names and "lm_head.weight" in names
    assert any("k_proj, model.layers.0.self_attn.v_proj, rows of the same matrix" in line for line in said)
    assert logits(load_model(plain.parent / "small").model, [1, 2]).isfinite().all()
    with pytest.raises(QuantizationError, match="no layer has such a name"):
        rewrite(plain, plain.parent / "other", Recipe(INT8, keep=("down",)), say=silent)


def test_a_kept_head_stays_tied(tmp_path: Path) -> None:
    plain = tiny_checkpoint.write(tmp_path / "plain", tie_word_embeddings=True)
    rewrite(plain, tmp_path / "small", Recipe(INT8, keep=("lm_head",)), say=silent)
    model = load_model(tmp_path / "small").model
    assert model.lm_head.weight is model.embed_tokens.weight


def test_padding_and_the_copy_of_a_tied_head_are_said(tmp_path: Path) -> None:
    said: list[str] = []
    plain = tiny_checkpoint.write(tmp_path / "plain", tie_word_embeddings=True)
    rewrite(plain, tmp_path / "small", Recipe(Scheme("int4", 128)), say=said.append)
    assert any("48 columns, filled up to 128" in line for line in said)
    assert any("tied to the embeddings, it gets its own int8 copy" in line for line in said)


def test_a_directory_that_exists_is_replaced_only_by_force(plain: Path) -> None:
    output = plain.parent / "small"
    rewrite(plain, output, Recipe(INT8), say=silent)
    with pytest.raises(CheckpointError, match="already exists"):
        rewrite(plain, output, Recipe(INT4), say=silent)
    rewrite(plain, output, Recipe(INT4), force=True, say=silent)
    assert label(json.loads((output / "config.json").read_text())["quantization_config"]) == "int4-g64"
    with pytest.raises(QuantizationError, match="is the checkpoint itself"):
        rewrite(plain, plain, Recipe(INT8), force=True, say=silent)
    with pytest.raises(QuantizationError, match="quantised already"):
        rewrite(output, plain.parent / "twice", Recipe(INT8), say=silent)


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), OSError("no space left")])
def test_an_interrupted_run_leaves_nothing(plain: Path, monkeypatch: pytest.MonkeyPatch, fault: BaseException) -> None:
    work, calls = quantize.quantize_matrix, []

    def failing(*arguments: Any) -> dict[str, Tensor]:
        calls.append(arguments)
        if len(calls) == 5:
            raise fault
        return work(*arguments)

    monkeypatch.setattr(quantize, "quantize_matrix", failing)
    before = sorted(plain.parent.iterdir())
    with pytest.raises(type(fault)):
        rewrite(plain, plain.parent / "small", Recipe(INT8), say=silent)
    assert sorted(plain.parent.iterdir()) == before


def test_weights_that_are_no_numbers_are_named(plain: Path) -> None:
    tensors = load_file(plain / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 3] = torch.nan
    save_file(tensors, plain / "model.safetensors")
    with pytest.raises(QuantizationError, match="up_proj has weights that are not finite"):
        rewrite(plain, plain.parent / "small", Recipe(INT4), say=silent)
    assert not (plain.parent / "small").exists()


def test_a_link_out_of_the_directory_is_not_copied(plain: Path) -> None:
    (plain.parent / "secret.json").write_text("{}")
    (plain / "notes.json").symlink_to(plain.parent / "secret.json")
    (plain / "original").mkdir()
    said: list[str] = []
    rewrite(plain, plain.parent / "small", Recipe(INT8), say=said.append)
    assert not (plain.parent / "small" / "notes.json").exists()
    assert sum(line.startswith("not copied: ") for line in said) == 2


# --- Records and files that are wrong


def changed(plain: Path, change: dict[str, Any]) -> Path:
    """A quantised directory whose record is not as it was written."""
    output = plain.parent / "small"
    rewrite(plain, output, Recipe(INT4), say=silent)
    config = json.loads((output / "config.json").read_text())
    record = config["quantization_config"]
    if "layer" in change:
        record["layers"] |= change["layer"]
    else:
        record |= change
    (output / "config.json").write_text(json.dumps(config))
    return output


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"quant_method": "gptq"}, "quantization_config by 'gptq' is not supported"),
        ({"version": 2}, "version 2 is not the known 1"),
        ({"version": None}, "version None is not the known 1"),
        ({"layers": {}}, "layers is missing or empty"),
        ({"layers": [1]}, "layers is missing or empty"),
        ({"layer": {Q: {"scheme": "int3", "group_size": 64, "symmetric": True}}}, "q_proj' has an unknown scheme"),
        ({"layer": {Q: {"scheme": "int4", "group_size": 48, "symmetric": True}}}, "q_proj' has an unknown scheme"),
        ({"layer": {Q: {"scheme": "int8", "group_size": None, "symmetric": True}}}, "have different schemes"),
        ({"layer": {"model.layers.9.mlp": INT8.record()}}, "layers.9.mlp' does not exist in this model"),
        ({"layer": {Q: "int4"}}, "q_proj' has an unknown scheme"),
    ],
)
def test_a_wrong_record_is_one_clear_line(plain: Path, change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as caught:
        load_model(changed(plain, change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", ["qweight", "scale"])
def test_truncated_packed_tensors_are_one_clear_line(plain: Path, suffix: str) -> None:
    output = changed(plain, {})
    tensors = load_file(output / "model.safetensors")
    tensors[f"{Q}.{suffix}"] = tensors[f"{Q}.{suffix}"][:, :-1].contiguous()
    save_file(tensors, output / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"q_proj.{suffix} has shape"):
        load_model(output)


def test_the_record_alone_shapes_the_model() -> None:
    with torch.device("meta"):
        model = Transformer(RANDOM_SHAPES["tiny"])
    schemes = {name: INT4 for path, _, names in quantize.linears(model) if path != "lm_head" for name in names}
    apply_quantization(model, make_record(schemes, "rtn"))
    target = model.named_targets()["model.layers.1.self_attn.v_proj.qweight"]
    assert target.shape == (64, 64) and target.device.type == "meta"
    assert "model.layers.1.self_attn.v_proj.weight" not in model.named_targets()


# --- Command line


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--mode", "int5"], "invalid choice"),
        (["--mode", "int4", "--group-size", "48"], "group size 48 is not one of 32, 64, 128"),
        (["--mode", "int8", "--group-size", "64"], "mode int8 has one scale a row"),
        (["--mode", "fp8", "--zero-point"], "mode fp8 has one scale a row"),
        (["--mode", "fp8", "--method", "hqq"], "method hqq serves int4"),
        (["--mode", "int4", "--method", "gptq"], "method gptq and --calibration FILE"),
        (["--mode", "int4", "--method", "gptq", "--calibration", "nowhere.txt"], "No such file"),
        (["--mode", "int4", "--keep", "*"], "nothing to quantise"),
        (["--mode", "int8", "--checkpoint", "nowhere"], "nowhere: no such directory"),
    ],
)
def test_a_mistake_is_one_line(
    plain: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    assert quantize.main(["--checkpoint", str(plain), "--output", str(plain.parent / "small"), *arguments]) == 2
    printed = capsys.readouterr()
    last = printed.err.splitlines()[-1]
    assert last.startswith("error: ") and complaint in last and printed.out == ""
    assert not (plain.parent / "small").exists()


def test_the_order_of_a_record_says_nothing(plain: Path) -> None:
    record = quantize.make_record({"model.layers.0.mlp.up_proj": INT4, "lm_head": INT8}, "rtn")
    shuffled = json.loads(json.dumps(record, sort_keys=True))
    assert quantize.read_record(shuffled) == quantize.read_record(record)


def test_a_full_disk_ends_in_one_line_and_leaves_nothing(plain: Path, root: Path) -> None:
    command = f"ulimit -f 20; exec {sys.executable} quantize.py --checkpoint {plain} --output {plain.parent / 'out'}"
    ignoring = f"trap '' XFSZ; {command} --mode int8"
    done = subprocess.run(["bash", "-c", ignoring], cwd=root, capture_output=True, text=True)
    errors = [line for line in done.stderr.splitlines() if "Traceback" in line or line.startswith("error: ")]
    assert done.returncode == 1 and len(errors) == 1 and "could not be written" in errors[0], done.stderr
    assert [path.name for path in plain.parent.iterdir()] == [plain.name]


def test_text_too_short_to_calibrate_with_is_refused(plain: Path, text: Path) -> None:
    text.write_text("Short.")
    with pytest.raises(QuantizationError, match="tokens are too few to calibrate with"):
        rewrite(plain, plain.parent / "small", Recipe(INT4, "gptq", text), say=silent)


def test_the_command_writes_a_directory_and_reports(plain: Path, root: Path) -> None:
    command = [sys.executable, "quantize.py", "--checkpoint", str(plain), "--output", str(plain.parent / "small")]
    ran = subprocess.run([*command, "--mode", "int8"], cwd=root, capture_output=True, text=True)
    assert ran.returncode == 0 and ran.stdout == "", ran.stderr
    assert "relative error" in ran.stderr and "int8, " in ran.stderr
    report = json.loads((plain.parent / "small" / quantize.REPORT_FILE).read_text())
    assert report["label"] == "int8" and max(report["error"].values()) < BOUND["int8"]
    assert report["bytes"] < report["source_bytes"]


# --- Real weights


def test_a_trained_model_stays_close(shared_data: Path, tmp_path: Path) -> None:
    """In the loss of the model on a text of its own: the stories that it tells."""
    plain = shared_data / "stories260K-hf"
    ids = load_model(plain).tokenizer.encode("Once upon a time, there was a little girl named Lily. She loved to play.")

    def loss(directory: Path) -> float:
        scores = logits(load_model(directory, dtype="fp32").model, ids)
        return float(torch.nn.functional.cross_entropy(scores[0, :-1], torch.tensor(ids[1:])))

    before = loss(plain)
    for scheme, bound in ((INT8, 0.02), (FP8, 0.1), (INT4, 0.5)):
        rewrite(plain, tmp_path / scheme.mode, Recipe(scheme), say=silent)
        assert abs(loss(tmp_path / scheme.mode) - before) < bound

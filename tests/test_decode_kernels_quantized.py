"""Products with packed weights against their references: on the GPU, or in Triton's interpreter."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
import decode_kernels as kernels
from test_decode_kernels import DEVICE, HERE, ON_GPU, normal, poison

FORMS = ["int8", "fp8", "int4-32", "int4-64", "int4-128", "int4-64-zero"]
SHAPES = [(24, 64), (7, 1120)]  # N, K: the second in three steps
DTYPES = [torch.float32, torch.bfloat16 if ON_GPU else torch.float16]


@pytest.mark.skipif(HERE, reason="the kernels run in this process")
def test_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[1]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]


def packed(form: str, rows: int, size: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Random weights, their scales and zero points, as the kernels take them."""
    if not form.startswith("int4"):
        scale = ((torch.rand(rows) + 0.5) * size**-0.5 / 64).bfloat16()
        raw = torch.randn(rows, size) * 40
        weight = raw.round().clamp(-128, 127).to(torch.int8) if form == "int8" else raw.to(torch.float8_e4m3fn)
        return weight.to(DEVICE), scale.to(DEVICE), None
    group = int(form.split("-")[1])
    groups = -(-size // group)
    scale = ((torch.rand(rows, groups) + 0.5) * size**-0.5 / 4).bfloat16()
    zero = torch.randn(rows, groups).bfloat16().to(DEVICE) if form.endswith("zero") else None
    return torch.randint(0, 256, (rows, groups * group // 2), dtype=torch.uint8).to(DEVICE), scale.to(DEVICE), zero


def inputs(size: int, dtype: torch.dtype) -> Tensor:
    h = normal(1, size, dtype=dtype)
    h[0, 3] = 100.0  # large ones are what quantised inputs suffer from
    return h


def agree(
    op: Callable[..., None], reference: Callable[..., None], arguments: tuple, outputs: tuple, scales: tuple
) -> None:
    got, expected = tuple(t.clone() for t in outputs), tuple(t.clone() for t in outputs)
    op(*arguments, *got, *scales)
    reference(*arguments, *expected, *scales)
    for ours, theirs in zip(got, expected, strict=True):
        error = (ours.float() - theirs.float()).norm() / theirs.float().norm()
        # Both round what they store; near a boundary of that rounding they may end one unit in the last place apart.
        rounding = torch.finfo(ours.dtype).eps if ours.dtype != torch.float32 else 0.0
        assert error < 2e-3 + rounding, error


class TestPacked:
    __test__ = HERE

    @pytest.fixture(autouse=True)
    def settings(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(0)
        for scheme in kernels.UNITS:
            for gated in (False, True):
                tile = kernels.Tile(4, 512, 1, ahead=1 + gated)
                monkeypatch.setitem(kernels.PACKED_TILES, (scheme, *SHAPES[1], gated), tile)

    @pytest.mark.parametrize(("outputs", "size"), SHAPES)
    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize(("dtype", "gated"), [(DTYPES[0], False), (DTYPES[1], True)])
    def test_project(self, outputs: int, size: int, form: str, dtype: torch.dtype, gated: bool) -> None:
        weight, *scales = packed(form, outputs * (1 + gated), size)
        bias = normal(outputs * (1 + gated), dtype=dtype)
        arguments = (inputs(size, dtype), normal(1, 3).square() * size, weight, bias, 1e-5)
        if gated:
            left = (poison(1, outputs, dtype=dtype),)
            agree(kernels.project_gated, kernels.project_gated_reference, arguments, left, scales)
        else:
            agree(kernels.project, kernels.project_reference, arguments, (poison(1, outputs),), scales)

    @pytest.mark.parametrize("form", FORMS)
    def test_residual(self, form: str) -> None:
        outputs, size = SHAPES[1]
        weight, *scales = packed(form, outputs, size)
        arguments = (inputs(size, DTYPES[1]), weight, None, normal(outputs, dtype=DTYPES[1]), 0.7)
        left = (normal(1, outputs), poison(1, outputs, dtype=DTYPES[1]), poison(1, -(-outputs // 4)))
        agree(kernels.project_residual, kernels.project_residual_reference, arguments, left, scales)

    @pytest.mark.parametrize("form", FORMS)
    def test_logits(self, form: str) -> None:
        weight, *scales = packed(form, 13, 96)  # int4: the last group of 64 or 128 is not full
        arguments = (inputs(96, DTYPES[1]), normal(1, 5).square() * 96, weight, 1e-5, 0.25)
        left = (poison(1, 13), poison(1, 1))
        agree(kernels.project_logits, kernels.project_logits_reference, arguments, left, scales)

    @pytest.mark.parametrize("form", ["int8", "fp8", "int4-64"])
    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_what_is_no_number_stays_so(self, form: str, bad: float) -> None:
        weight, *scales = packed(form, 16, 64)
        h, out = inputs(64, torch.float32), poison(1, 16)
        h[0, 40] = bad
        out.zero_()
        kernels.project(h, normal(1, 3).square(), weight, None, 1e-5, out, *scales)
        assert not out.isfinite().any()

"""Every kernel against its plain torch reference: on the GPU where there is one, else in Triton's interpreter, which
wants an environment variable at import and hence a process of its own."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
import decode_kernels as kernels

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
HERE = ON_GPU or kernels.INTERPRETED

if kernels.INTERPRETED:
    # Triton 3.6's interpreter takes range bounds by int(array of one element), which NumPy 2.4 refuses.
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_index_too(tensor: type, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_index_too


@pytest.mark.skipif(HERE, reason="the kernels run in this process")
def test_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[1]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]


def normal(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).to(DEVICE, dtype)


def poison(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def compare(
    op: Callable[..., None], reference: Callable[..., None], inputs: tuple, outputs: tuple[Tensor, ...]
) -> None:
    """Run both on the same inputs and on copies of the outputs; they must leave the same there."""
    got, expected = tuple(t.clone() for t in outputs), tuple(t.clone() for t in outputs)
    op(*inputs, *got)
    reference(*inputs, *expected)
    for ours, theirs in zip(got, expected, strict=True):
        exact = not ours.is_floating_point()
        loose = ours.dtype in (torch.bfloat16, torch.float16)
        torch.testing.assert_close(
            ours, theirs, rtol=0 if exact else 2e-2 if loose else 1e-4, atol=0 if exact else 1e-3 if loose else 2e-5
        )


SHAPES = [(40, 64), (37, 100), (5, 7), (24, 1100), (33, 3000)]  # N, K
DTYPES = [torch.float32, torch.bfloat16 if ON_GPU else torch.float16]  # the interpreter's dot does not know bfloat16


class TestKernels:
    __test__ = HERE

    @pytest.fixture(autouse=True)
    def seed(self) -> None:
        torch.manual_seed(0)

    @pytest.mark.parametrize(("hidden", "parts"), [(48, 3), (33, 5), (7, 1), (1500, 188)])
    def test_embed(self, hidden: int, parts: int) -> None:
        token = torch.randint(0, 11, (1,), device=DEVICE)
        inputs = (token, normal(11, hidden), normal(hidden), 1.5)
        outputs = (poison(1, hidden), poison(1, hidden), poison(1, parts))
        compare(kernels.embed, kernels.embed_reference, inputs, outputs)

    @pytest.mark.parametrize(("outputs", "size"), SHAPES)
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("gated", [False, True])
    def test_project(self, outputs: int, size: int, dtype: torch.dtype, bias: bool, gated: bool) -> None:
        rows = outputs * (1 + gated)
        h, squares = normal(1, size, dtype=dtype), normal(1, 3).square() * size
        inputs = (
            h,
            squares,
            normal(rows, size, dtype=dtype, scale=size**-0.5),
            normal(rows, dtype=dtype) if bias else None,
            1e-5,
        )
        if gated:
            compare(kernels.project_gated, kernels.project_gated_reference, inputs, (poison(1, outputs, dtype=dtype),))
        else:
            compare(kernels.project, kernels.project_reference, inputs, (poison(1, outputs),))

    @pytest.mark.parametrize(("outputs", "size"), SHAPES)
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("bias", [False, True])
    def test_project_residual(self, outputs: int, size: int, dtype: torch.dtype, bias: bool) -> None:
        weight = normal(outputs, size, dtype=dtype, scale=size**-0.5)
        inputs = (
            normal(1, size, dtype=dtype),
            weight,
            normal(outputs, dtype=dtype) if bias else None,
            normal(outputs, dtype=dtype),
            0.7,
        )
        left = (normal(1, outputs), poison(1, outputs, dtype=dtype), poison(1, -(-outputs // 16)))
        compare(kernels.project_residual, kernels.project_residual_reference, inputs, left)

    @pytest.mark.parametrize(("outputs", "size"), SHAPES)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_project_logits(self, outputs: int, size: int, dtype: torch.dtype) -> None:
        h, squares = normal(1, size, dtype=dtype), normal(1, 5).square() * size
        inputs = (h, squares, normal(outputs, size, dtype=dtype, scale=size**-0.5), 1e-5, 0.25)
        left = (poison(1, outputs), poison(1, -(-outputs // 16)))
        compare(kernels.project_logits, kernels.project_logits_reference, inputs, left)

    @pytest.mark.parametrize(
        ("kv_heads", "group", "dim", "half", "norms", "window"),
        [
            (2, 1, 16, 8, False, 0),
            (1, 3, 20, 10, True, 0),
            (2, 4, 32, 8, True, 5),  # rotary over half of the head
            (1, 7, 16, 0, False, 40),  # no rotary
            (1, 17, 8, 4, False, 1),
        ],
    )
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_attend(
        self, monkeypatch: pytest.MonkeyPatch, kv_heads: int, group: int, dim: int, half: int, norms: bool, window: int,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        slots, splits = 128, 3
        stages = 1 + group % 3
        monkeypatch.setattr(kernels, "spread", lambda *shape: kernels.Spread(splits, least=32, block=16, stages=stages))
        for at in (0, 1, 31, 32, 33, 64, 90, 126):
            q_gain, k_gain = (normal(dim, dtype=dtype), normal(dim, dtype=dtype)) if norms else (None, None)
            angles = torch.rand(slots, half, device=DEVICE) * 6
            cos, sin = (angles.cos(), angles.sin()) if half else (None, None)
            k_cache, v_cache = (normal(1, kv_heads, slots, dim, dtype=dtype) for _ in range(2))
            k_cache[:, :, at:], v_cache[:, :, at:] = float("nan"), 100.0  # never to be read
            out = poison(1, kv_heads * group * dim, dtype=dtype)
            arrivals = torch.zeros(kv_heads, dtype=torch.int32, device=DEVICE)
            room = (poison(kv_heads, splits, group, dim), poison(kv_heads, splits, 2, group), arrivals)

            qkv, position = normal(1, (kv_heads * (group + 2)) * dim), torch.tensor([at], device=DEVICE)
            inputs = (qkv, q_gain, k_gain, cos, sin, position, torch.tensor([False], device=DEVICE))
            ours = tuple(t.clone() for t in (k_cache, v_cache, out))
            theirs = tuple(t.clone() for t in (k_cache.nan_to_num(0.0), v_cache, out))
            settings = (dim**-0.5, 1e-6, window, slots - 1)
            kernels.attend(*inputs, ours[0], ours[1], *settings, ours[2], *room)
            kernels.attend_reference(*inputs, theirs[0], theirs[1], *settings, theirs[2])
            loose = {"rtol": 2e-2, "atol": 2e-2} if dtype != torch.float32 else {"rtol": 1e-4, "atol": 1e-5}
            torch.testing.assert_close(ours[0].nan_to_num(0.0), theirs[0], **loose)
            torch.testing.assert_close(ours[1], theirs[1], **loose)
            torch.testing.assert_close(ours[2], theirs[2], **loose)
            assert not arrivals.any()

    def test_a_finished_row_writes_to_scratch(self) -> None:
        slots, dim = 32, 16
        k_cache, v_cache = normal(1, 1, slots, dim), normal(1, 1, slots, dim)
        before = k_cache.clone()
        room = (
            poison(1, dim),
            poison(1, 1, 1, dim),
            poison(1, 1, 2, 1),
            torch.zeros(1, dtype=torch.int32, device=DEVICE),
        )
        at, done = torch.tensor([7], device=DEVICE), torch.tensor([True], device=DEVICE)
        kernels.attend(
            normal(1, 3 * dim), None, None, None, None, at, done, k_cache, v_cache, 1.0, 0.0, 0, slots - 2, *room
        )
        assert (k_cache != before).nonzero()[:, 2].unique().tolist() == [slots - 2]

    @pytest.mark.parametrize("greedy", [False, True])
    @pytest.mark.parametrize(("vocab", "unit"), [(50, 8), (33, 32), (600, 8), (9000, 2)])
    def test_select(self, greedy: bool, vocab: int, unit: int) -> None:
        blocks = -(-vocab // unit)
        settings = [  # temperature, top-k, min-p
            (0.8, 5, 0.0), (1.0, vocab, 0.0), (0.0, 3, 0.0), (0.5, vocab + 5, 0.2), (100.0, 1, 0.0),
            (1.3, vocab - 1, 0.01), (0.9, min(200, vocab), 0.0), (2.0, 40, 0.1),
        ]  # fmt: skip
        for i, (temperature, top_k, min_p) in enumerate(settings[:2] if greedy else settings):
            logits = normal(1, vocab, scale=3.0)
            if i % 2:
                logits = logits.round()  # ties
            if i == 3:
                logits[0, ::2] = float("-inf")
            self.compare_select(logits, blocks, greedy, temperature, top_k, min_p)

    @pytest.mark.parametrize("greedy", [False, True])
    @pytest.mark.parametrize("value", [float("nan"), float("-inf")])
    def test_select_of_no_token(self, greedy: bool, value: float) -> None:
        logits = normal(1, 50)
        logits[0, 7 if value != value else slice(None)] = value
        self.compare_select(logits, 7, greedy, 0.8, 5, 0.0)

    def compare_select(
        self, logits: Tensor, blocks: int, greedy: bool, temperature: float, top_k: int, min_p: float
    ) -> None:
        """From the same state, running and done, `select` and its reference lead to the same state."""
        maxima = kernels._blocks(logits, blocks, float("-inf")).amax(-1)

        def full(value: float, dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=DEVICE)

        for done in (False, True):
            position = torch.randint(0, 1000, (1,), device=DEVICE)
            inputs = (
                logits, maxima, greedy, full(temperature, torch.float32, 1), full(top_k, torch.int64, 1),
                full(min_p, torch.float32, 1), torch.randint(-(2**62), 2**62, (1,), device=DEVICE),
                position + torch.randint(1, 3, (1,), device=DEVICE), torch.tensor([-1, 3, 7, 11], device=DEVICE),
            )  # fmt: skip
            state = (
                full(9, torch.int64, 1), position, full(done, torch.bool, 1), full(-7, torch.int64, 4, 1),
                full(6, torch.int64, 1), full(False, torch.bool, 1, logits.shape[1]),
            )  # fmt: skip
            ours, theirs = tuple(t.clone() for t in state), tuple(t.clone() for t in state)
            kernels.select(*inputs, *ours, full(-1, torch.int32, 1, blocks))
            kernels.select_reference(logits, *inputs[2:], *theirs)
            for name, a, b in zip(("token", "position", "done", "ring", "count", "seen"), ours, theirs, strict=True):
                assert torch.equal(a, b), (name, a, b, temperature, top_k, min_p)

"""The fused step over quantised weights against the plain one: by its references, and on the GPU in its graph."""

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import decode_kernels as kernels
import fused
from engine import Generator
from fused import FusedStep
from model import Transformer
from quantize import QuantizedLinear, dequantize, make_scheme, quantize_in_memory, quantize_matrix
from sampling import SAMPLERS
from test_fused import HOT, LLAMA, MIXED, ON_GPU, begin, compare_steps_of, hold_against_eager, model_of

CPU = torch.device("cpu")
SCHEMES = [("int8", None), ("fp8", None), ("int4", 32), ("int4", 64), ("int4", 128)]


def quantized(mode: str, group_size: int | None) -> Transformer:
    model = model_of(LLAMA, device=CPU)  # 64 columns and 96: int4 fills up groups of 64 and 128
    quantize_in_memory(model, mode, group_size)
    return model


@pytest.mark.parametrize("columns", [128, 100])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("mode", "group_size"), SCHEMES)
def test_the_kernels_mean_the_same_weights(mode: str, group_size: int | None, symmetric: bool, columns: int) -> None:
    scheme = make_scheme(mode, group_size, symmetric or mode != "int4")
    stored = quantize_matrix(torch.randn(6, columns), scheme)
    ours = kernels.unpacked(stored["qweight"], stored["scale"], stored.get("zero"))
    assert torch.equal(ours[:, :columns], dequantize(stored, torch.float32, columns))


@pytest.mark.parametrize(("mode", "group_size"), SCHEMES)
def test_references_draw_the_same_tokens(mode: str, group_size: int | None) -> None:
    model = quantized(mode, group_size)
    for sampler in SAMPLERS:
        compare_steps_of(model, sampler, 6, [7, 3, 11, 2, 9, 150, 31], **HOT)


@pytest.mark.parametrize(("mode", "group_size"), SCHEMES)
def test_a_step_reads_what_is_stored(mode: str, group_size: int | None) -> None:
    model = quantized(mode, group_size)
    stored = [
        tensor for linear in model.modules() if isinstance(linear, QuantizedLinear) for tensor in linear.buffers()
    ]
    norms = sum(parameter.nbytes for name, parameter in model.named_parameters() if "norm" in name)
    token = 4 * (LLAMA.hidden_size + LLAMA.vocab_size)  # a row of embeddings, logits
    slot = 4 * 2 * LLAMA.num_hidden_layers * LLAMA.num_key_value_heads * LLAMA.head_dim
    with Generator(model, compile=False, max_seq_len=32) as generator:
        assert generator.bytes_per_step(9) == sum(tensor.nbytes for tensor in stored) + norms + token + 10 * slot


def test_rows_that_are_no_whole_words_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a GPU")

    def reason(mode: str, columns: int) -> str | None:
        model = quantized(mode, None)
        linear = model.layers[0].mlp.down_proj
        linear.qweight = linear.qweight[:, :columns]
        return fused._unsupported_weights([linear], torch.device("cuda"))

    assert reason("int8", 96) is None
    assert "multiple of 4 bytes" in str(reason("int8", 90))
    assert "8.9" in str(reason("fp8", 96))


class AbsentGpu:
    """As much of a driver as Triton asks for when it compiles and does not run."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> object:
        return importlib.import_module("triton.backends.compiler").GPUTarget("cuda", self.capability, 32)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("mode", "group_size"), [(None, None), *SCHEMES[:3]])
@torch.no_grad()
def test_a_step_compiles_for_a_gpu_that_is_not_here(
    capability: int, mode: str | None, group_size: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    triton = pytest.importorskip("triton")
    if kernels.INTERPRETED or ON_GPU or (mode, capability) == ("fp8", 80):
        pytest.skip("a GPU compiles what it runs, the interpreter does not compile, and 8.0 has no fp8")
    model = model_of(replace(MIXED, qk_norm=True), torch.bfloat16)
    if mode is not None:
        quantize_in_memory(model, mode, group_size)
    chained, compiled = capability >= 90, []

    def compile_only(kernel: Any, programs: int, *args: object, first: bool = False, **options: object) -> None:
        launch = {"launch_pdl": True} if chained and not first else {}
        made = kernel.warmup(*args, grid=(programs,), CHAIN=chained, DELAY=0, **launch, **options)
        compiled.append((kernel.__name__, made.asm["ptx"]))

    monkeypatch.setattr(kernels, "_launch", compile_only)
    monkeypatch.setattr(kernels, "_runs_kernel", lambda tensor: True)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.runtime.driver, "_active", AbsentGpu(capability))
    for sampler in ("greedy", "top_k"):
        FusedStep(model, begin(model, [1, 2, 3]))(sampler)
    assert {name for name, _ in compiled} == {"_embed_kernel", "_project_kernel", "_attend_kernel", "_select_kernel"}
    assert all(("griddepcontrol.wait" in ptx) == chained for _, ptx in compiled)


@pytest.mark.gpu
@pytest.mark.parametrize(("mode", "group_size"), SCHEMES)
def test_the_eager_decoder_draws_the_same_tokens(mode: str, group_size: int | None) -> None:
    def make() -> Transformer:
        model = model_of(MIXED, torch.bfloat16)
        quantize_in_memory(model, mode, group_size)
        return model

    hold_against_eager(make)

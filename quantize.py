"""Quantised weights: schemes, packing, three methods, the Linear that multiplies with them, and the command that
rewrites a checkpoint directory.

A weight matrix [N, K] becomes codes and scales, w = (code - zero) * scale, row by row: any slice of rows is valid by
itself. On disk the form is the same for every device (docs/quantization.md); `pack` lays it out for the device after
loading. What was done is in config.json, layer by layer, never in a file's name. Knows nothing of graphs or generation.

    python quantize.py --checkpoint DIR --output DIR --mode int4 --method hqq

Legend: N rows (outputs), K columns (inputs), G columns that share a scale, g groups of a row.
"""

import argparse
import math
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from tqdm import tqdm

from checkpoint import QUANT_METHOD, Checkpoint, CheckpointWriter, check_targets, open_checkpoint
from model import Block, Linear, SharedInputs, Transformer, cache_slots, scaled
from tokenizer import load_tokenizer

MODES = ("int8", "int4", "fp8")
METHODS = ("rtn", "hqq", "gptq")
GROUP_SIZES = (32, 64, 128)
DEFAULT_GROUP_SIZE = 64
RECORD_VERSION = 1
CHUNK = {"cpu": 2**18, "cuda": 2**24}  # weights that are worked on at once: they stay in a core's cache, or fill a GPU
PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}  # rows of one matrix
REPORT_FILE = "quantization_report.json"
CALIBRATION_WINDOWS, CALIBRATION_LENGTH = 32, 512
SINK_SHARE = 0.1  # most heads rest on the first position's key (attention sinks, Xiao et al. 2023): all others read it
FEW = 16  # rows of activations below which torch's operators for CPUs beat turning codes into weights


class QuantizationError(ValueError):
    """What is wrong with a recipe or a record, in one line."""


# --- Schemes: how a matrix is stored


@dataclass(frozen=True)
class Scheme:
    """How one weight matrix is stored. Scales and zeros are bf16 values, which every path uses exactly."""

    mode: str  # int8: codes -127..127; int4: -8..7, stored as code + 8; fp8: e4m3
    group_size: int | None = None  # None: the whole row
    symmetric: bool = True  # False (int4 only): a group has a zero, a real number

    @property
    def levels(self) -> tuple[float, float]:
        return {"int8": (-127.0, 127.0), "int4": (-8.0, 7.0), "fp8": (-448.0, 448.0)}[self.mode]

    def padded(self, columns: int) -> int:
        return columns if self.group_size is None else -(-columns // self.group_size) * self.group_size

    def tensors(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of what is stored, by the suffix of its name."""
        if self.mode != "int4":
            codes = torch.int8 if self.mode == "int8" else torch.float8_e4m3fn
            return {"qweight": ((rows, columns), codes), "scale": ((rows,), torch.bfloat16)}
        padded = self.padded(columns)
        groups = ((rows, padded // (self.group_size or padded)), torch.bfloat16)
        stored = {"qweight": ((rows, padded // 2), torch.uint8), "scale": groups}
        return stored if self.symmetric else stored | {"zero": groups}

    def grouped(self, weight: Tensor) -> Tensor:
        """[N, K] -> [N, g, G], the last group filled up with zeros."""
        padded = self.padded(weight.shape[1])
        return F.pad(weight, (0, padded - weight.shape[1])).view(weight.shape[0], -1, self.group_size or padded)

    def snap(self, weight: Tensor, scale: Tensor, zero: Tensor | float) -> Tensor:
        """The nearest code of each weight, as fp32; scale and zero broadcast."""
        low, high = self.levels
        if self.mode == "fp8":
            return (weight / scale).clamp(low, high).to(torch.float8_e4m3fn).float()
        return (weight / scale + zero).round().clamp(low, high)

    def store(self, codes: Tensor, scale: Tensor, zero: Tensor | None) -> dict[str, Tensor]:
        """codes [N, g, G], scale and zero [N, g, 1] -> what is stored. Byte j of an int4 group holds code j in its low
        half and code j + G / 2 in its high half."""
        if self.mode != "int4":
            qweight = codes.flatten(1).to(torch.int8 if self.mode == "int8" else torch.float8_e4m3fn)
            return {"qweight": qweight, "scale": scale.flatten().to(torch.bfloat16)}
        low, high = (codes + 8).to(torch.uint8).chunk(2, dim=-1)
        stored = {"qweight": (low | high << 4).flatten(1), "scale": scale.flatten(1).to(torch.bfloat16)}
        return stored if zero is None else stored | {"zero": zero.flatten(1).to(torch.bfloat16)}

    def record(self) -> dict[str, Any]:
        return {"scheme": self.mode, "group_size": self.group_size, "symmetric": self.symmetric}


SCHEMES = (
    Scheme("int8"),
    Scheme("fp8"),
    *(Scheme("int4", size, symmetric) for size in GROUP_SIZES for symmetric in (True, False)),
)


def head_scheme(scheme: Scheme) -> Scheme:
    """The head decides among many near-equal logits: it keeps 8 bits."""
    return Scheme("int8") if scheme.mode == "int4" else scheme


def dequantize(stored: Mapping[str, Tensor], dtype: torch.dtype, columns: int) -> Tensor:
    """What is stored -> weights [N, K]."""
    qweight, scale = stored["qweight"], stored["scale"]
    wide = torch.float32 if dtype == torch.float16 else dtype  # a scale may be too small for fp16
    if qweight.dtype != torch.uint8:
        return (_codes(qweight, wide) * scale.to(wide).unsqueeze(1)).to(dtype)
    pairs = qweight.view(*scale.shape, -1)  # [N, g, G / 2]
    codes = torch.cat((pairs & 15, pairs >> 4), dim=-1).to(wide) - 8
    if "zero" in stored:
        codes = codes - stored["zero"].to(wide).unsqueeze(-1)
    weight = codes * scale.to(wide).unsqueeze(-1)
    return weight.flatten(1)[:, :columns].to(dtype)


def _converts_fp8(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.get_device_capability(tensor.device) >= (8, 9)


FP8_BITS_SCALE = 2.0**-120


def _fp8_bits(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """e4m3 codes times FP8_BITS_SCALE in fp32 or bf16: sign, exponent and fraction moved to where that has them.
    Vectorises where there is no instruction for it; exact, subnormal codes included."""
    integers, shift = (torch.int32, 20) if dtype == torch.float32 else (torch.int16, 4)
    bits = codes.view(torch.int8).to(integers)
    return bits.bitwise_left_shift_(shift).bitwise_and_(~(0x78 << shift + 4)).view(dtype)


def _codes(qweight: Tensor, dtype: torch.dtype) -> Tensor:
    """8-bit codes as fp32 or bf16, exact in both."""
    if qweight.dtype == torch.int8 or _converts_fp8(qweight):
        return qweight.to(dtype)
    return _fp8_bits(qweight, dtype).mul_(1 / FP8_BITS_SCALE)


# --- Methods: which codes and scales


def _as_scale(scale: Tensor) -> Tensor:
    """Rounded to what is stored; a group of zeros gets 1."""
    scale = scale.to(torch.bfloat16).float()
    return torch.where(scale == 0, 1.0, scale)


def round_to_nearest(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor | None]:
    """weight [N, g, G] fp32 -> scale, zero [N, g, 1] from the extremes of each group."""
    low, high = scheme.levels
    if scheme.symmetric:
        return _as_scale(weight.abs().amax(-1, keepdim=True) / high), None
    least, most = weight.amin(-1, keepdim=True), weight.amax(-1, keepdim=True)
    scale = _as_scale((most - least) / (high - low))
    return scale, (low - least / scale).to(torch.bfloat16).float()


def half_quadratic(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor | None]:
    """The same by half-quadratic splitting (HQQ, Badri & Shaji 2023): errors are measured by |e| ** 0.7, so that a few
    large ones cost little. In turns, `outliers` takes up the large errors (their proximal step) and scale or zero is
    solved for in closed form; the best pair met is kept. Symmetric groups solve for the scale, from both of its signs:
    there is one more code below zero than above."""
    low, high = scheme.levels
    power, beta = 0.7, 10.0
    if scheme.symmetric:
        largest = weight.gather(-1, weight.abs().argmax(-1, keepdim=True))
        starts = [(_as_scale(largest / bound), torch.zeros_like(largest)) for bound in (low, high)]
    else:
        starts = [round_to_nearest(weight, scheme)]
    best, least = starts[0], torch.full_like(starts[0][0], torch.inf)
    for scale, zero in starts:
        for step in range(12):
            codes = scheme.snap(weight, scale, zero)
            error = weight / scale - (codes - zero)  # in units of the scale
            cost = error.mul(scale).abs().pow(power).sum(-1, keepdim=True)
            best = (torch.where(cost < least, scale, best[0]), torch.where(cost < least, zero, best[1]))
            least = torch.minimum(cost, least)
            threshold = error.abs().clamp(min=1e-6).pow(power - 1) / (beta * 1.01**step)
            outliers = error.sign() * (error.abs() - threshold).clamp(min=0) * scale
            if scheme.symmetric:
                squares = codes.square().sum(-1, keepdim=True).clamp(min=1e-9)
                scale = _as_scale(((weight - outliers) * codes).sum(-1, keepdim=True) / squares)
            else:
                zero = (codes - (weight - outliers) / scale).mean(-1, keepdim=True).to(torch.bfloat16).float()
    return best[0], None if scheme.symmetric else best[1]


def search(weight: Tensor, scheme: Scheme, importance: Tensor) -> tuple[Tensor, Tensor | None]:
    """The same by trial: of the scales around that of `round_to_nearest`, of both signs where groups are symmetric, the
    one with the least squared error, columns weighted by importance [g, G]."""
    start, zero = round_to_nearest(weight, scheme)
    best, least = (start, zero), torch.full_like(start, torch.inf)
    factors = torch.linspace(0.56, 1.08, 24).tolist()
    for factor in [*factors, *(-factor for factor in factors if scheme.symmetric)]:
        scale = _as_scale(start * factor)  # a zero moves so that the middle of the group keeps its code
        offset = None if zero is None else ((zero + 0.5) / factor - 0.5).to(torch.bfloat16).float()
        shift = 0.0 if offset is None else offset
        error = (scheme.snap(weight, scale, shift) - shift) * scale - weight
        cost = (error.square() * importance).sum(-1, keepdim=True)
        better, least = cost < least, torch.minimum(cost, least)
        best = (
            torch.where(better, scale, best[0]),
            None if offset is None or best[1] is None else torch.where(better, offset, best[1]),
        )
    return best


def quantize_matrix(weight: Tensor, scheme: Scheme, method: str = "rtn") -> dict[str, Tensor]:
    """weight [N, K] -> what is stored. Works through a few rows at a time."""
    choose = half_quadratic if method == "hqq" and scheme.mode == "int4" else round_to_nearest
    stored = {
        name: torch.empty(shape, dtype=dtype, device=weight.device)
        for name, (shape, dtype) in scheme.tensors(*weight.shape).items()
    }
    for rows in _row_chunks(weight):
        grouped = scheme.grouped(weight[rows].float())
        scale, zero = choose(grouped, scheme)
        codes = scheme.snap(grouped, scale, 0.0 if zero is None else zero)
        for name, tensor in scheme.store(codes, scale, zero).items():
            stored[name][rows] = tensor
    return stored


def relative_error(weight: Tensor, stored: Mapping[str, Tensor]) -> float:
    """|w - w'| / |w|, in Frobenius norms; not a number where the weights are not."""
    squares = torch.zeros(2, dtype=torch.float64)
    for rows in _row_chunks(weight):
        part = weight[rows].float()
        error = part - dequantize({name: tensor[rows] for name, tensor in stored.items()}, torch.float32, part.shape[1])
        squares += torch.stack((error.square().sum(), part.square().sum())).double()
    error, whole = squares.tolist()
    return math.sqrt(error / whole) if whole else 0.0


def _row_chunks(weight: Tensor, size: int | None = None) -> Iterator[slice]:
    step = max(1, (size or CHUNK.get(weight.device.type, CHUNK["cpu"])) // weight.shape[1])
    return (slice(first, first + step) for first in range(0, weight.shape[0], step))


def gptq(weight: Tensor, hessian: Tensor, scheme: Scheme) -> dict[str, Tensor]:
    """GPTQ (Frantar et al. 2022): round column by column, and let the columns not yet rounded make up for the error in
    the product with the inputs x, whose second moments E[x x^T] are `hessian` [K, K]. Columns with large inputs come
    first; scales are fixed before. -> what is stored."""
    hessian = F.pad(hessian.float(), (0, scheme.padded(weight.shape[1]) - weight.shape[1]) * 2)
    importance = hessian.diagonal()
    hessian = hessian + torch.diag(torch.where(importance == 0, 1.0, 0.01 * importance[importance > 0].mean()))
    order = hessian.diagonal().argsort(descending=True)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian[order][:, order]))
    inverse = torch.linalg.cholesky(inverse, upper=True)
    parts = []
    for rows in _row_chunks(weight, 2**24):
        grouped = scheme.grouped(weight[rows].float())
        scale, zero = search(grouped, scheme, importance.sqrt().view(grouped.shape[1:]))
        codes = _compensated(grouped, scale, zero, inverse, order, scheme)
        parts.append(scheme.store(codes, scale, zero))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _compensated(
    weight: Tensor, scale: Tensor, zero: Tensor | None, inverse: Tensor, order: Tensor, scheme: Scheme
) -> Tensor:
    """Codes [N, g, G]; `inverse` is the upper Cholesky factor of the inverse of the moments of the ordered columns."""
    left = weight.flatten(1)[:, order].T.contiguous()  # [padded K, N]: still to be rounded, corrected as others are
    codes, groups = torch.empty_like(left), (order // weight.shape[-1]).tolist()
    scales = scale.squeeze(-1).T.contiguous()  # [g, N]
    zeros = torch.zeros_like(scales) if zero is None else zero.squeeze(-1).T.contiguous()
    for first in range(0, len(left), 64):  # corrections within a block at once, beyond it per block
        last = min(first + 64, len(left))
        errors = torch.empty_like(left[first:last])
        for column in range(first, last):
            scale, zero = scales[groups[column]], zeros[groups[column]]
            codes[column] = scheme.snap(left[column], scale, zero)
            error = (left[column] - (codes[column] - zero) * scale) / inverse[column, column]
            left[column:last].addr_(inverse[column, column:last], error, alpha=-1)
            errors[column - first] = error
        left[last:].addmm_(inverse[first:last, last:].T, errors, alpha=-1)
    return codes[order.argsort()].T.reshape(weight.shape)


# --- The Linear that multiplies with codes


class QuantizedLinear(Linear):
    """y = x W^T + b, with the interface of `Linear`; W lies as codes and scales (`Scheme.tensors`)."""

    qweight: Tensor
    scale: Tensor

    def __init__(self, linear: Linear, scheme: Scheme, stored: Mapping[str, Tensor] | None = None) -> None:
        """In the place of `linear`: with what is stored, or uninitialised."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias, self.scheme, self.dtype = linear.bias, scheme, linear.weight.dtype
        for name, (shape, dtype) in scheme.tensors(self.out_features, self.in_features).items():
            tensor = torch.empty(shape, dtype=dtype, device=linear.weight.device) if stored is None else stored[name]
            self.register_buffer(name, tensor)
        self._as_reduction = linear.as_reduction
        self.packed: tuple[Tensor, Tensor] | None = None

    @property
    def as_reduction(self) -> bool:
        return self._as_reduction

    @as_reduction.setter
    def as_reduction(self, compiled: bool) -> None:
        if compiled != self._as_reduction:
            self._as_reduction = compiled
            self._lay_out_codes()

    def _lay_out_codes(self) -> None:
        """Eager products of few rows read a copy of int4 codes, laid out for torch's operator; compiled ones do not."""
        fits = self.qweight.device.type == "cpu" and self.dtype == torch.bfloat16 and self.out_features % 16 == 0
        if self._as_reduction or not fits or self.scheme.mode != "int4":
            self.packed = None
            return
        pairs = self.qweight.view(*self.scale.shape, -1)
        codes = torch.cat((pairs & 15, pairs >> 4), dim=-1).flatten(1).to(torch.int32)
        shift = -self.stored["zero"] * self.scale if "zero" in self.stored else torch.zeros_like(self.scale)
        scale = torch.stack((self.scale, shift), dim=-1).transpose(0, 1)  # of code - 8: [g, N, 2]
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        self.packed = (packed, scale.contiguous().to(torch.bfloat16))

    @property
    def stored(self) -> dict[str, Tensor]:
        return dict(self.named_buffers())

    def parts(self, rows: slice) -> dict[str, Tensor]:
        return {name: tensor[rows] for name, tensor in [*self.named_buffers(), *self.named_parameters()]}

    def in_parts(self, x: Tensor, *parts: slice) -> list[Tensor]:
        if self.reduces(x):
            row = self._filled(x.reshape(-1).float())
            return [self._finished(self._reduction(row, rows), x, rows) for rows in parts]
        y = self._product(self._filled(x.reshape(-1, self.in_features)))
        y = (y if self.bias is None else y + self.bias).view(*x.shape[:-1], -1)
        return [y[..., rows] for rows in parts]

    def _reduction(self, x: Tensor, rows: slice) -> Tensor:
        """One row as a product and a sum, x fp32 [padded K] -> fp32 [N]: Inductor makes one loop of it that streams the
        codes. as_strided makes it store x, which would be computed anew for every output otherwise."""
        codes, scale = self.qweight[rows], self.scale[rows].float()
        if self.scheme.mode == "int8":
            return (codes.float() * _kept(x)).sum(-1) * scale
        if self.scheme.mode == "fp8":
            if _converts_fp8(codes):
                return (codes.float() * _kept(x)).sum(-1) * scale
            half = FP8_BITS_SCALE**-0.5  # the other half comes after the sum, so that neither leaves fp32's range
            return (_fp8_bits(codes, torch.float32) * _kept(x * half)).sum(-1) * (scale * half)
        pairs = codes.view(*scale.shape, -1).to(torch.int32)  # bytes would not vectorise
        low, high = _kept(x).view(scale.shape[1], 2, -1).unbind(1)
        zero = self.stored["zero"][rows].float().unsqueeze(-1) if "zero" in self.stored else 0.0
        terms = ((pairs & 15) - 8 - zero) * low + ((pairs >> 4) - 8 - zero) * high  # [N, g, G / 2]
        return (terms * scale.unsqueeze(-1)).sum((1, 2))

    def _product(self, x: Tensor) -> Tensor:
        """x [M, padded K] -> [M, N]: by torch's own operators for codes on CPUs where they are the fastest, else of
        codes turned into weights."""
        few = x.device.type == "cpu" and x.dtype == torch.bfloat16 and x.shape[0] < FEW
        if few and self.packed is not None:
            codes, scale = self.packed
            return torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), codes, self.scheme.group_size, scale)
        if few and self.scheme.mode == "int8" and self.in_features % 16 == 0:  # it reads past the end of other rows
            return torch.ops.aten._weight_int8pack_mm(x.contiguous(), self.qweight, self.scale)
        if self.scheme.mode != "int4" and x.dtype != torch.float16:  # one pass less
            return F.linear(x, _codes(self.qweight, x.dtype)) * self.scale.to(x.dtype)
        return F.linear(x, dequantize(self.stored, x.dtype, x.shape[1]))

    def _filled(self, x: Tensor) -> Tensor:
        """Zeros up to whole groups."""
        padding = self.scheme.padded(self.in_features) - self.in_features
        return F.pad(x, (0, padding)) if padding else x

    def pack(self, dtype: torch.dtype) -> None:
        """Lay what is stored, now filled, out for activations of this dtype."""
        self.dtype = dtype
        if self.qweight.device.type == "cpu" and (self.scheme.mode == "int4" or dtype == torch.float16):
            for name, tensor in self.stored.items():  # in Inductor's loops for CPUs bf16 is slow, beside fp16 wrong
                if tensor.dtype == torch.bfloat16:
                    setattr(self, name, tensor.float())
        self._lay_out_codes()


def _kept(x: Tensor) -> Tensor:
    return x.as_strided(x.shape, (1,))


# --- Models


def linears(model: Transformer) -> Iterator[tuple[str, Linear, tuple[str, ...]]]:
    """(path in the model, Linear, names in the files of what its rows hold). Before any is quantised."""
    targets = model.named_targets()
    for path, module in model.named_modules():
        if isinstance(module, Linear):
            parent, _, leaf = path.rpartition(".")
            name = path if path == "lm_head" else f"model.{path}"
            apart = leaf in PACKED and f"{name}.weight" not in targets
            yield path, module, tuple(f"model.{parent}.{part}" for part in PACKED[leaf]) if apart else (name,)


def make_record(schemes: Mapping[str, Scheme], method: str) -> dict[str, Any]:
    """What config.json says under quantization_config."""
    layers = {name: scheme.record() for name, scheme in schemes.items()}
    return {"quant_method": QUANT_METHOD, "version": RECORD_VERSION, "method": method, "layers": layers}


def read_record(record: Mapping[str, Any]) -> dict[str, Scheme]:
    """-> scheme by layer name. QuantizationError for what this program does not know."""
    where = "quantization_config"
    if record.get("quant_method") != QUANT_METHOD:
        raise QuantizationError(f"{where}: quant_method {record.get('quant_method')!r:.50} is not {QUANT_METHOD!r}")
    if record.get("version") != RECORD_VERSION:
        raise QuantizationError(f"{where}: version {record.get('version')!r:.50} is not the known {RECORD_VERSION}")
    layers = record.get("layers")
    if not isinstance(layers, Mapping) or not layers:
        raise QuantizationError(f"{where}: layers is missing or empty")
    known, schemes = {_key(scheme.record()): scheme for scheme in SCHEMES}, {}
    for name, entry in layers.items():
        if _key(entry) not in known:
            raise QuantizationError(f"{where}: layer {name!r:.80} has an unknown scheme, {entry!r:.120}")
        schemes[name] = known[_key(entry)]
    return schemes


def _key(entry: Any) -> str:
    """The same for the same entries, in whatever order a file has them; 1 is not True."""
    return repr(sorted(entry.items()) if isinstance(entry, dict) else entry)


def label(record: Mapping[str, Any]) -> str:
    """The scheme of most layers, in short: int8, int4-g64, fp8."""
    scheme, _ = Counter(read_record(record).values()).most_common(1)[0]
    return scheme.mode if scheme.group_size is None else f"{scheme.mode}-g{scheme.group_size}"


def apply_quantization(model: Transformer, record: Mapping[str, Any]) -> None:
    """Put a QuantizedLinear, still to be filled, where the record says. Works on the meta device."""
    schemes = read_record(record)
    for path, linear, names in list(linears(model)):
        found = {schemes.pop(name, None) for name in names}
        if len(found) > 1:
            raise QuantizationError(f"quantization_config: {' and '.join(names)} have different schemes")
        if scheme := found.pop():
            model.set_submodule(path, QuantizedLinear(linear, scheme))
    if schemes:
        raise QuantizationError(f"quantization_config: layer {next(iter(schemes))!r:.80} does not exist in this model")


@torch.no_grad()
def quantize_in_memory(model: Transformer, mode: str, group_size: int | None = None) -> dict[str, Any]:
    """Round a filled model's weights to the nearest code, one matrix after the other; returns the record."""
    scheme, schemes = make_scheme(mode, group_size), {}
    for path, linear, names in list(linears(model)):
        chosen = head_scheme(scheme) if path == "lm_head" else scheme
        model.set_submodule(path, QuantizedLinear(linear, chosen, quantize_matrix(linear.weight, chosen)))
        schemes |= dict.fromkeys(names, chosen)
    pack(model)
    return make_record(schemes, "rtn")


@torch.no_grad()
def pack(model: Transformer) -> None:
    """Lay quantised weights out for the device that they are on. Called once, after loading."""
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.pack(model.embed_tokens.weight.dtype)


def make_scheme(mode: str, group_size: int | None = None, symmetric: bool = True) -> Scheme:
    if mode not in MODES:
        raise QuantizationError(f"unknown mode {mode!r}: one of {', '.join(MODES)}")
    if mode != "int4" and (group_size is not None or not symmetric):
        raise QuantizationError(f"mode {mode} has one scale a row: group size and zero points go with int4")
    if group_size is not None and group_size not in GROUP_SIZES:
        raise QuantizationError(f"group size {group_size} is not one of {', '.join(map(str, GROUP_SIZES))}")
    return Scheme(mode, (group_size or DEFAULT_GROUP_SIZE) if mode == "int4" else None, symmetric)


# --- Directories


@dataclass(frozen=True)
class Recipe:
    """What to do to a checkpoint. `calibration` is a text file, for gptq; `keep` holds patterns of layer names."""

    scheme: Scheme
    method: str = "rtn"
    calibration: Path | None = None
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise QuantizationError(f"unknown method {self.method!r}: one of {', '.join(METHODS)}")
        if self.method == "hqq" and self.scheme.mode != "int4":
            raise QuantizationError(f"method hqq serves int4, not {self.scheme.mode}: use rtn or gptq")
        if (self.method == "gptq") != (self.calibration is not None):
            raise QuantizationError("method gptq and --calibration FILE, a text, go together")


def plan(model: Transformer, recipe: Recipe, say: Callable[[str], None]) -> dict[str, Scheme]:
    """-> scheme by layer name; says what is left as it is or is not as one may expect, and why."""
    schemes, padded = {}, Counter[str]()
    unused = set(recipe.keep)
    say("kept: model.embed_tokens, of which a step reads single rows; norms and biases, which are small")
    for path, linear, names in linears(model):
        matched = {name: [pattern for pattern in recipe.keep if fnmatchcase(name, pattern)] for name in names}
        unused.difference_update(*matched.values())
        if hits := [name for name in names if matched[name]]:
            others = [name for name in names if name not in hits]
            same = f"; so are {', '.join(others)}, rows of the same matrix" if others else ""
            say(f"kept: {', '.join(hits)} (--keep){same}")
            continue
        scheme = head_scheme(recipe.scheme) if path == "lm_head" else recipe.scheme
        schemes |= dict.fromkeys(names, scheme)
        if (width := scheme.padded(linear.in_features)) != linear.in_features:
            groups = f"{width} to make whole groups of {scheme.group_size}"
            padded[f"{linear.in_features} columns, filled up to {groups}"] += len(names)
    if unused:
        raise QuantizationError(f"--keep {min(unused)}: no layer has such a name")
    if not schemes:
        raise QuantizationError("every layer is kept: there is nothing to quantise")
    if "lm_head" in schemes and model.config.tie_word_embeddings:
        say(f"lm_head: tied to the embeddings, it gets its own {schemes['lm_head'].mode} copy")
    for what, count in padded.items():
        say(f"padded: {count} layers of {what}")
    return schemes


@torch.no_grad()
def rewrite(
    directory: Path, output: Path, recipe: Recipe, *, force: bool = False, say: Callable[[str], None] = print
) -> dict[str, float]:
    """Write a quantised copy of a checkpoint directory; -> relative error by layer. One tensor is worked on at a time,
    or with gptq one layer. ValueError says in a line what is wrong."""
    checkpoint = open_checkpoint(directory)
    if checkpoint.quantization is not None:
        raise QuantizationError(f"{directory}: quantised already")
    if output.resolve() == directory.resolve():
        raise QuantizationError(f"{output}: is the checkpoint itself")
    writer = CheckpointWriter(output, source=directory, force=force)
    with torch.device("meta"):
        model = Transformer(checkpoint.config)
    check_targets(checkpoint, model.named_targets())
    schemes = plan(model, recipe, say)
    windows = _calibration_windows(checkpoint, recipe.calibration) if recipe.calibration else None
    record = make_record(schemes, recipe.method)
    errors: dict[str, float] = {}
    with writer:

        def add(layer: str, weight: Tensor, stored: Mapping[str, Tensor]) -> None:
            errors[layer] = relative_error(weight, stored)
            if not math.isfinite(errors[layer]):
                raise QuantizationError(f"{directory}: {layer} has weights that are not finite numbers")
            for suffix, tensor in stored.items():
                writer.add(f"{layer}.{suffix}", tensor)

        writer.write_json("config.json", {**checkpoint.raw_config, "quantization_config": record})
        _copy_rest(directory, writer, say)
        if windows is not None:
            for layer, weight, stored in calibrate(checkpoint, model, schemes, windows):
                add(layer, weight, stored)
        total = sum(info.nbytes for info in checkpoint.infos.values())
        head = _head_name(checkpoint)
        with tqdm(total=total, desc="quantising", unit="B", unit_scale=True, delay=2) as bar:
            for name, tensor in checkpoint.tensors():
                layer = name.removesuffix(".weight")
                if layer not in schemes:
                    writer.add(name, tensor)
                elif layer not in errors and name != head:
                    add(layer, tensor, quantize_matrix(tensor, schemes[layer], recipe.method))
                if name == head and "lm_head" in schemes and "lm_head" not in errors:
                    add("lm_head", tensor, quantize_matrix(tensor, schemes["lm_head"], recipe.method))
                bar.update(tensor.nbytes)
        size = writer.bytes
        writer.write_json(REPORT_FILE, {"label": label(record), "bytes": size, "source_bytes": total, "error": errors})
    worst = sorted(errors, key=errors.__getitem__, reverse=True)[:5]
    say(f"relative error |w - w'| / |w|: mean {sum(errors.values()) / len(errors):.4f}, most")
    for layer in worst:
        say(f"  {errors[layer]:.4f} {layer}")
    say(f"{output}: {label(record)}, {size / 1e6:,.1f} MB of {total / 1e6:,.1f} MB")
    return errors


_WEIGHT_FILES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pth", ".pt", ".gguf")


def _copy_rest(directory: Path, writer: CheckpointWriter, say: Callable[[str], None]) -> None:
    """Tokenizer, generation settings and the like; nothing that a link brings in from elsewhere."""
    root = directory.resolve()
    homes = (root, root.parent.parent / "blobs")  # the second is where the cache of Hugging Face's hub keeps files
    for path in sorted(directory.iterdir()):
        if path.name in ("config.json", REPORT_FILE) or path.name.endswith(_WEIGHT_FILES):
            continue
        if path.is_file() and path.resolve().parent in homes:
            writer.copy(path)
        else:
            say(f"not copied: {path.name} ({'a directory' if path.is_dir() else 'not a file of this directory'})")


# --- Calibration


def _calibration_windows(checkpoint: Checkpoint, text: Path) -> Tensor:
    """The start of a text file as windows of token ids, [W, T]."""
    try:
        tokenizer = load_tokenizer(checkpoint.directory)
        ids = tokenizer.encode(text.read_text(encoding="utf-8"), bos=False)
    except UnicodeDecodeError as error:
        raise QuantizationError(f"{text}: not a text in UTF-8") from error
    vocab = checkpoint.config.vocab_size
    if tokenizer.vocab_size > vocab:
        raise QuantizationError(
            f"{checkpoint.directory}: the tokenizer has {tokenizer.vocab_size} ids, the model {vocab}"
        )
    length = min(CALIBRATION_LENGTH, checkpoint.config.max_position_embeddings)
    count = min(len(ids) // length, CALIBRATION_WINDOWS)
    if count == 0:
        raise QuantizationError(f"{text}: {len(ids)} tokens are too few to calibrate with: {length} at least")
    return torch.tensor(ids[: count * length]).view(count, length)


def calibrate(
    checkpoint: Checkpoint, model: Transformer, schemes: Mapping[str, Scheme], windows: Tensor
) -> Iterator[tuple[str, Tensor, dict[str, Tensor]]]:
    """GPTQ block by block: (layer, weight, what is stored). `model` is on the meta device; one block at a time is
    filled. What a block reads comes from the quantised blocks before it: later ones make up for their errors."""
    config, length = checkpoint.config, windows.shape[1]
    table = _read(checkpoint, "model.embed_tokens.weight")
    hidden = [
        scaled(F.embedding(window, table).float().unsqueeze(0), config.embedding_multiplier) for window in windows
    ]
    positions, slots = torch.arange(length).unsqueeze(0), cache_slots(length)
    model.rope.cos, model.rope.sin = torch.empty(2, slots, config.rotary_dim // 2)
    model.rope.fill(config, length)
    matrices, targets = list(linears(model)), model.named_targets()
    for index, block in enumerate(tqdm(list(model.blocks()), desc="calibrating", unit="layer")):
        _fill(block, checkpoint, model, index, slots)
        window = block.self_attn.window
        plans = {window: model.attention.plan(positions, slots, window, length)}
        shared = SharedInputs(positions, None, model.rope.at(positions), model.attention, plans)
        here = [(linear, names) for path, linear, names in matrices if path.startswith(f"layers.{index}.")]
        here = [(linear, names) for linear, names in here if names[0] in schemes]
        moments = {linear: torch.zeros(linear.in_features, linear.in_features) for linear, _ in here}

        def gather(linear: nn.Module, inputs: tuple[Tensor], block: Block = block, moments: Any = moments) -> None:
            moments[linear] += _second_moments(inputs[0], SINK_SHARE if linear is block.self_attn.qkv_proj else 0.0)

        hooks = [linear.register_forward_pre_hook(gather) for linear in moments]
        for x in hidden:
            block(x, shared)
        for hook in hooks:
            hook.remove()
        for linear, names in here:
            stored = gptq(linear.weight, moments.pop(linear), schemes[names[0]])
            first = 0
            for name in names:
                rows = slice(first, first := first + targets[f"{name}.weight"].shape[0])
                yield name, linear.weight[rows], {suffix: tensor[rows] for suffix, tensor in stored.items()}
            linear.weight.copy_(dequantize(stored, torch.float32, linear.in_features))
        hidden = [block(x, shared) for x in hidden]
        block.to("meta")
    if "lm_head" in schemes:
        norm, head = model.norm.to_empty(device="cpu"), _read(checkpoint, _head_name(checkpoint))
        norm.weight.copy_(_read(checkpoint, "model.norm.weight"))
        seen = torch.stack([_second_moments(norm(x)) for x in hidden]).sum(0)
        yield "lm_head", head, gptq(head, seen, schemes["lm_head"])


def _head_name(checkpoint: Checkpoint) -> str:
    return "model.embed_tokens.weight" if checkpoint.config.tie_word_embeddings else "lm_head.weight"


def _read(checkpoint: Checkpoint, name: str) -> Tensor:
    with safe_open(checkpoint.infos[name].file, framework="pt") as shard:
        return shard.get_tensor(name)


def _fill(block: Block, checkpoint: Checkpoint, model: Transformer, index: int, slots: int) -> None:
    block.to_empty(device="cpu")
    cache, config = block.self_attn.cache, model.config
    cache.k, cache.v = torch.zeros(2, 1, config.num_key_value_heads, slots, config.head_dim)
    for name, target in model.named_targets().items():
        if name.startswith(f"model.layers.{index}."):
            target.copy_(_read(checkpoint, name))


def _second_moments(x: Tensor, sink_share: float = 0.0) -> Tensor:
    """x [1, T, K] -> the sum of x x^T [K, K], where the first position counts as this share of the window."""
    x = x.squeeze(0).clone()
    x[0] *= math.sqrt(max(1.0, sink_share * x.shape[0]))
    return x.T @ x


# --- Command line


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise QuantizationError(message)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(prog="quantize.py", description="Rewrite a checkpoint directory with quantised weights.")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", required=True, help="what to quantise")
    parser.add_argument("--output", type=Path, metavar="DIR", required=True, help="where the result goes")
    parser.add_argument("--mode", choices=MODES, required=True, help="bits of the weights; the head has 8 in any mode")
    parser.add_argument(
        "--group-size", type=int, metavar="G", help=f"int4: {GROUP_SIZES}, default {DEFAULT_GROUP_SIZE}"
    )
    parser.add_argument("--zero-point", action="store_true", help="int4: a zero for each group")
    parser.add_argument("--method", choices=METHODS, default="rtn", help="how codes are chosen (default: rtn)")
    parser.add_argument("--calibration", type=Path, metavar="FILE", help="gptq: a text such as the model will see")
    parser.add_argument("--keep", action="append", default=[], metavar="PATTERN", help="layers to leave as they are")
    parser.add_argument("--force", action="store_true", help="replace the output if it exists")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. -> exit status: 0, 1 (the run failed), 2 (a user's mistake)."""
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, lambda number, _: sys.exit(128 + number))  # unwinds, so that nothing half-made is left
    try:
        options = _options(arguments)
        scheme = make_scheme(options.mode, options.group_size, not options.zero_point)
        recipe = Recipe(scheme, options.method, options.calibration, tuple(options.keep))
        rewrite(options.checkpoint, options.output, recipe, force=options.force, say=_say)
    except OSError as error:
        return _fail(error, 2 if error.filename else 1)  # a file that was named, or a full disk
    except ValueError as error:
        return _fail(error, 2)
    except RuntimeError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return 130
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def _fail(error: Exception, status: int) -> int:
    _say(f"error: {' '.join(str(error).split()) or type(error).__name__}")
    return status


if __name__ == "__main__":
    sys.exit(main())

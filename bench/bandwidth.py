"""The two ceilings of a device: read bandwidth, which bounds decoding, and the bf16 matrix rate, which bounds prefill.

`python -m bench.bandwidth` prints both; every other bench measures the first again in its own run. The highest of
several ways to read is the honest ceiling: a slow way would make every share of it look better.
"""

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bench import rows
from bench.rows import Row, Spread

try:
    import triton
    import triton.language as tl
except ImportError:  # not every platform has Triton; torch's own reductions then give the bandwidth
    triton = None

_STREAMS = ((2048, 8, 4), (4096, 8, 8), (8192, 4, 8), (4096, 16, 4))  # elements a load, loads a program, warps

if triton is not None:

    @triton.jit
    def _stream(source, sink, BLOCK: tl.constexpr, LOADS: tl.constexpr):
        """Each program reads LOADS blocks of int32 and stores one sum, so that nothing can be optimised away."""
        start = tl.program_id(0).to(tl.int64) * BLOCK * LOADS + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.int32)
        for i in tl.static_range(LOADS):
            total += tl.load(source + start + i * BLOCK)
        tl.store(sink + tl.program_id(0), tl.sum(total))


def timings(work: Callable[[], object], device: torch.device, repetitions: int) -> list[float]:
    """Seconds of each call, after one untimed call; the device's own clock on CUDA."""
    work()
    if device.type != "cuda":
        return [_wall_time(work, device) for _ in range(repetitions)]
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repetitions)]
    for start, end in events:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) / 1e3 for start, end in events]


def _wall_time(work: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    work()
    if device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter() - start


def _readers(data: Tensor) -> Iterator[Callable[[], object]]:
    """Ways to read all of `data` (int32) once."""
    if data.device.type == "cuda" and triton is not None:
        sink = torch.empty(data.numel() // (2048 * 8), dtype=torch.int32, device=data.device)
        for block, loads, warps in _STREAMS:
            grid = (data.numel() // (block * loads),)
            yield lambda b=block, n=loads, w=warps, g=grid: _stream[g](data, sink, BLOCK=b, LOADS=n, num_warps=w)
    else:
        single, double = data.view(torch.float32), data.view(torch.float64) if data.device.type == "cpu" else None
        yield single.sum
        yield single.amax
        if double is not None:
            yield double.sum
            yield lambda: torch.linalg.vector_norm(double)


def _default_bytes(device: torch.device) -> int:
    """Many times any cache, and at most a quarter of the memory that is free."""
    if device.type != "cuda":
        return 1 << 30
    return min(8 << 30, torch.cuda.mem_get_info(device)[0] // 4) >> 20 << 20


def read_bandwidth(device: torch.device, *, nbytes: int | None = None, repetitions: int = 20) -> Spread:
    """Bytes per second of a streaming read of `nbytes` (a multiple of 1 MiB), by the best way found here."""
    nbytes = nbytes or _default_bytes(device)
    data = torch.ones(nbytes // 4, dtype=torch.int32, device=device)
    best = min(_readers(data), key=lambda read: Spread.of(timings(read, device, 5)).median)
    return Spread.of([nbytes / seconds for seconds in timings(best, device, repetitions)])


def matrix_rate(device: torch.device, *, size: int | None = None, repetitions: int = 10) -> Spread:
    """Floating-point operations per second of a square bf16 matrix product, on normally distributed values."""
    size = size or (8192 if device.type == "cuda" else 2048)
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return Spread.of([2 * size**3 / seconds for seconds in timings(lambda: a @ b, device, repetitions)])


def main() -> None:
    from generate import choose_device  # which imports this module, for the rate in a trace

    parser = rows.parser("bandwidth", __doc__)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    parser.add_argument("--repetitions", type=rows.whole(1), default=20)
    rows.add_options(parser)
    options = parser.parse_args()
    device = choose_device(options.device)
    report = rows.Report(options, device, ("device", "bandwidth", "bandwidth_p10", "bandwidth_p90", "matrix"))
    reading = read_bandwidth(device, repetitions=options.repetitions)
    matrix = matrix_rate(device, repetitions=options.repetitions)
    report.add(
        Row(
            read_bandwidth_bytes_per_s=reading.median,
            read_bandwidth_bytes_per_s_p10=reading.p10,
            read_bandwidth_bytes_per_s_p90=reading.p90,
            matrix_flop_per_s=matrix.median,
        )
    )
    report.finish()


if __name__ == "__main__":
    rows.run(main)

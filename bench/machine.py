"""Facts of the machine and of the source tree that a result row carries. Knows nothing of rows."""

import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def commit_name(given: str | None = None) -> str | None:
    """`given`, NEARROOF_COMMIT, or git's: "-dirty" when a source file differs (results and text do not count)."""
    named = given or os.environ.get("NEARROOF_COMMIT")
    if named:
        return named
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        dirty = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results", ":!*.md", ":!docs")
        return git("rev-parse", "--short=10", "HEAD") + ("-dirty" if dirty else "")
    except subprocess.CalledProcessError:  # a tree of another user's, or one without a commit
        return None


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name, cpuinfo = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = (line.partition(":") for line in cpuinfo.read_text(encoding="utf-8").splitlines())
        name = next((value.strip() for key, _, value in lines if key.strip() == "model name"), name)
    return f"{name}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"


def last_level_cache_bytes(device: torch.device) -> int:
    """As the device says; 64 MiB where it does not."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size.rstrip("K")) << 10 for size in sizes if size.endswith("K")), default=64 << 20)


def gpu_facts(device: torch.device, work: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """Driver, SM clock and power limit as nvidia-smi gives them while `work` keeps the device busy; {} without it."""
    smi = shutil.which("nvidia-smi")
    if device.type != "cuda" or torch.version.hip or smi is None:
        return {}
    uuid = torch.cuda.get_device_properties(device).uuid
    query = "--query-gpu=driver_version,clocks.sm,power.limit"
    command = [smi, f"--id=GPU-{uuid}", query, "--format=csv,noheader,nounits"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        deadline = time.monotonic() + 20
        while process.poll() is None:
            if time.monotonic() > deadline:
                process.kill()
            work()
        answer = process.communicate()[0].strip().split(", ")
    if process.returncode or len(answer) != 3:
        return {}
    return {"driver": answer[0], "sm_clock_mhz": _number(answer[1]), "power_limit_w": _number(answer[2])}


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # nvidia-smi writes "[N/A]" for what a device does not have
        return None


def reset_peak_memory(device: torch.device) -> None:
    """Start the peak anew, where the system can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _CLEAR_REFS.exists():
        _CLEAR_REFS.write_text("5")


def peak_memory(device: torch.device) -> int | None:
    """Bytes allocated on a GPU; on the CPU what the process had resident, interpreter and libraries included."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if not _STATUS.exists():
        return None
    lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) << 10 if "VmHWM" in lines else None


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None

"""Mutated checkpoints: each ends with a clear error or a normal load, in bounded time and memory, and runs nothing.

The mutations are drawn from fixed seeds. NEARROOF_MUTATIONS sets how many are tried (a thousand take ten seconds).
They run in a child process (this file as a script), so that a crash or a hang is seen and named.
"""

import faulthandler
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from checkpoint import CheckpointError, check_targets, load_weights, open_checkpoint, parse_config
from model import Transformer

COUNT = int(os.environ.get("NEARROOF_MUTATIONS", "300"))
SECONDS, BYTES = 5.0, 2**30
TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": [2, 3],
}
MORE: dict[str, dict[str, Any]] = {
    "llama": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]},
    "smollm3": {"no_rope_layers": [1, 0], "rope_scaling": {"type": "yarn", "factor": 2.0}},
    "phi3": {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 2, "long_factor": [2.0] * 2}},
}
DEEP = "[" * 50_000 + "]" * 50_000
NASTY = [
    *(None, True, False, -1, 0, 1, 2, 7, 2**31, 2**63, 2**64, 10**400, 1e308, -0.5, 1e-300, "", "x", "x" * 5000, "\n"),
    *([], {}, [[]], [1], {"a": 1}, "../a", "/etc/passwd", "config.json", "BF16", "F64", "llama", "linear", "longrope"),
]


# ----------------------------------------------------------------------------------------------------------- mutations


def write_originals(parent: Path) -> list[Path]:
    """One valid checkpoint per family, every other one in shards."""
    directories = []
    for number, (family, changes) in enumerate(MORE.items()):
        directory = parent / family
        directory.mkdir()
        raw = {key: value for key, value in TINY.items() if key != "architectures"} | {"model_type": family, **changes}
        (directory / "config.json").write_text(json.dumps(raw))
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "bos_token_id": 1}))
        targets = transformer(parse_config(raw)).named_targets()
        tensors = {name: torch.rand(target.shape) for name, target in targets.items()}
        if number % 2:
            names = sorted(tensors)
            shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
            weight_map = {name: file for file, held in shards.items() for name in held}
            (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        else:
            shards = {"model.safetensors": list(tensors)}
        for file, held in shards.items():
            save_file({name: tensors[name] for name in held}, directory / file)
        directories.append(directory)
    return directories


def flip_bytes(directory: Path, draw: random.Random) -> None:
    path = any_file(directory, draw)
    content = bytearray(path.read_bytes())
    for _ in range(draw.randint(1, 20)):
        at = draw.randrange(min(len(content), draw.choice((16, 200, len(content)))))
        content[at] = draw.choice((content[at] ^ 1 << draw.randrange(8), draw.randrange(256)))
    path.write_bytes(content)


def change_length(directory: Path, draw: random.Random) -> None:
    path = any_file(directory, draw)
    content = path.read_bytes()
    cut = content[: draw.choice((0, 1, 7, 8, 9, draw.randrange(len(content)), len(content) - 1))]
    path.write_bytes(draw.choice((cut, content + draw.randbytes(draw.randint(1, 100)), content * 2)))


def change_header_length(directory: Path, draw: random.Random) -> None:
    path = draw.choice(sorted(directory.glob("*.safetensors")))
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    lie = draw.choice((0, 1, length - 1, length + 1, length * 2, len(content), 2**25, 2**31, 2**40, 2**63, 2**64 - 1))
    path.write_bytes(lie.to_bytes(8, "little") + content[8:])


def change_json(directory: Path, draw: random.Random) -> None:
    path = draw.choice(sorted(directory.glob("*.json")))
    value = json.loads(path.read_text())
    for _ in range(draw.choice((1, 1, 1, 3))):
        change_value(value, draw)
    path.write_text(spelled(value, draw))


def change_header(directory: Path, draw: random.Random) -> None:
    """Lie in the header of a safetensors file, its length being right."""
    path = draw.choice(sorted(directory.glob("*.safetensors")))
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    for _ in range(draw.choice((1, 1, 2))):
        change_value(header, draw)
    text = spelled(header, draw).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def change_value(value: Any, draw: random.Random) -> None:
    """Replace, remove, rename or add one thing somewhere in a JSON value, in place."""
    while True:
        keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = draw.choice(keys) if keys else None
        inner = value[key] if keys else None
        if not isinstance(inner, dict | list) or draw.random() < 0.2:
            break
        value = inner
    if isinstance(value, dict):
        action = draw.randrange(5)
        if action == 0 and keys:
            del value[key]
        elif action == 1 and keys:
            value[draw.choice((f"{key}x", "../x", "x\n", "model_type", "__metadata__"))] = value.pop(key)
        elif action == 2:
            value[draw.choice(("rope_scaling", "sliding_window", "quantization_config", "x"))] = draw.choice(NASTY)
        elif keys:
            value[key] = draw.choice(NASTY)
    elif keys:
        value[key] = draw.choice((draw.choice(NASTY), draw.randint(-5, 100)))
    else:
        value.append(draw.choice(NASTY))


def spelled(value: Any, draw: random.Random) -> str:
    """As JSON, now and then with what a writer of JSON would not write."""
    sys.set_int_max_str_digits(0)
    text = json.dumps(value)
    sys.set_int_max_str_digits(4300)
    place = draw.choice((":", ",", "{"))
    strange = draw.choice(
        (
            DEEP,
            "NaN",
            "-Infinity",
            "9" * 6000,
            '{"a":' * 20_000,
            "\0",
            "\ud800".encode("utf-16-le", "surrogatepass").decode("latin1"),
        )
    )
    return text.replace(place, f"{place}{strange}", 1) if draw.random() < 0.1 else text


def replace_file(directory: Path, draw: random.Random) -> None:
    """Something else under the name of a file: nothing, a link out of the directory, a loop, a folder, a pipe."""
    path = any_file(directory, draw)
    content = path.read_bytes()
    path.unlink()
    kind = draw.randrange(6)
    if kind == 1:
        outside = directory.parent / "outside"
        outside.write_bytes(content)
        path.symlink_to(draw.choice((outside, Path("..", "outside"), Path("/dev/zero"), Path("/etc/passwd"))))
    elif kind == 2:
        path.symlink_to(path.name)
    elif kind == 3:
        path.mkdir()
    elif kind == 4:
        os.mkfifo(path)
    elif kind == 5:
        path.write_bytes(
            draw.choice((b"\x80\x04cos\nsystem\n", b"PK\x03\x04", b"GGUF", b"\0" * 1000, b"version https://"))
        )


def any_file(directory: Path, draw: random.Random) -> Path:
    return draw.choice(sorted(path for path in directory.iterdir() if path.is_file() and path.stat().st_size))


MUTATIONS: list[Callable[[Path, random.Random], None]] = [
    flip_bytes,
    change_length,
    change_header_length,
    change_json,
    change_json,
    change_header,
    change_header,
    replace_file,
]


# --------------------------------------------------------------------------------------------------------------- child


def transformer(config: Any) -> Transformer:
    with torch.device("meta"):
        return Transformer(config)


def load(directory: Path) -> None:
    found = open_checkpoint(directory)
    model = transformer(found.config).to(found.dtype)
    check_targets(found, model.named_targets())
    model.to_empty(device="cpu")
    if found.config.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    model.allocate(1, 16)
    load_weights(found, model.named_targets(), progress=False)


class Watch:
    """Python's own account of what is opened and run. It cannot be removed, so it is switched."""

    def __init__(self) -> None:
        self.allowed: Path | None = None
        self.seen: list[str] = []
        sys.addaudithook(self.hook)

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.allowed is None:
            return
        if event in ("exec", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class"):
            self.seen.append(event)
        if event == "open" and isinstance(arguments[0], str) and not Path(arguments[0]).is_relative_to(self.allowed):
            self.seen.append(f"open {arguments[0]}")


def try_case(case: int, originals: list[Path], watch: Watch) -> tuple[str, list[str]]:
    """-> (what it ended with, what is wrong with that)."""
    draw, faults = random.Random(case), []
    with tempfile.TemporaryDirectory(dir=originals[0].parent) as parent:
        directory = Path(shutil.copytree(draw.choice(originals), Path(parent, "checkpoint")))
        draw.choice(MUTATIONS)(directory, draw)
        links_out = any(not Path(os.path.realpath(path)).is_relative_to(directory) for path in directory.iterdir())
        start, watch.allowed = time.monotonic(), directory
        try:
            load(directory)
            ended = "loaded"
        except CheckpointError as error:
            ended = "refused"
            if len(str(error).splitlines()) != 1 or len(str(error)) > 1000:
                faults.append(f"message of the wrong form: {str(error)[:300]!r}")
        except Exception as error:  # anything else is what this test looks for
            ended = "failed"
            faults.append(f"{type(error).__name__}: {str(error)[:300]}")
        watch.allowed, seconds = None, time.monotonic() - start
    faults += [f"did {event}" for event in watch.seen] + [f"took {seconds:.1f} s"] * (seconds > SECONDS)
    faults += ["read a file outside"] * (links_out and ended == "loaded")
    watch.seen.clear()
    return ended, faults


def child(first: int, count: int, parent: Path) -> None:
    """Print one JSON line: how the cases ended, their faults, the memory taken."""
    originals, watch, faults, ends = write_originals(parent), Watch(), {}, Counter[str]()
    for original in originals:
        load(original)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for case in range(first, first + count):
        print(f"case {case}", file=sys.stderr, flush=True)
        faulthandler.dump_traceback_later(6 * SECONDS, exit=True)
        ended, wrong = try_case(case, originals, watch)
        faulthandler.cancel_dump_traceback_later()
        ends[ended] += 1
        faults |= {case: wrong} if wrong else {}
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    print(json.dumps({"ends": ends, "faults": faults, "grown": grown}))


def test_mutated_checkpoints_end_with_an_error_or_a_normal_load(tmp_path: Path, root: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "0", str(COUNT), str(tmp_path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    report = json.loads(result.stdout)
    assert report["faults"] == {}
    assert report["grown"] < BYTES
    assert report["ends"]["refused"] > COUNT / 2
    assert report["ends"]["loaded"] > COUNT / 50


if __name__ == "__main__":
    child(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))

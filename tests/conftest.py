"""What the tests share: data that may be absent, real weights that may be absent, a GPU that may be absent."""

from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def root() -> Path:
    """The project's directory."""
    return ROOT


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """A tiny real model in three layouts, and text."""
    path = ROOT.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip("needs ../shared/data")
    return path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default checkpoint's directory: real weights."""
    path = ROOT / "checkpoints" / "SmolLM2-135M-Instruct"
    if not (path / "config.json").is_file():
        pytest.skip("needs the default checkpoint: python scripts/default_checkpoint.py")
    return path

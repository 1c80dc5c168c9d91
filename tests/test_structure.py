"""What may import what, and that importing changes nothing."""

import ast
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

# Which of our modules each may import. engine.py, tracing.py and generate.py compose; nothing else does.
MAY_IMPORT: dict[str, set[str]] = {
    "attention": set(),
    "model": {"attention"},
    "sampling": set(),
    "decoding": {"model", "sampling"},
    "tokenizer": set(),
    "checkpoint": {"model"},
    "decode_kernels": {"sampling"},
    "quantize": {"model", "checkpoint", "tokenizer", "decode_kernels"},
    "fused": {"model", "decode_kernels", "quantize", "decoding", "sampling"},
    "profiling": set(),
    "trace_report": set(),
    "engine": {"attention", "decoding", "fused", "model", "profiling", "sampling"},
    "tracing": {"engine", "model", "profiling", "sampling", "trace_report"},  # and what bench knows of the machine
}
COMPOSES = {"generate"}
WITHOUT_TORCH = {"tokenizer", "trace_report"}
RUNNABLE = {"generate", "quantize", "trace_report"}
IMPORT_OF_SCRIPTS = {"checkpoint"}


def imports(path: Path) -> Iterator[str]:
    """The top-level names that a file imports at run time, inside functions too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = {
        id(node)
        for test in ast.walk(tree)
        if isinstance(test, ast.If) and ast.unparse(test.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in test.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def sources(root: Path) -> list[Path]:
    return [path for folder in (".", "bench", "scripts", "tests") for path in sorted((root / folder).glob("*.py"))]


def our_imports(root: Path, name: str) -> set[str]:
    return set(imports(root / f"{name}.py")) & (MAY_IMPORT.keys() | COMPOSES)


def test_the_table_names_every_module(root: Path) -> None:
    assert {path.stem for path in root.glob("*.py")} == MAY_IMPORT.keys() | COMPOSES


@pytest.mark.parametrize("name", MAY_IMPORT)
def test_module_imports_only_what_the_table_allows(name: str, root: Path) -> None:
    assert our_imports(root, name) <= MAY_IMPORT[name]


def test_scripts_import_the_checkpoint_module_only(root: Path) -> None:
    ours = MAY_IMPORT.keys() | COMPOSES | {"bench"}
    for path in (root / "scripts").glob("*.py"):
        assert set(imports(path)) & ours <= IMPORT_OF_SCRIPTS, path.name


def test_no_module_reaches_back_to_itself(root: Path) -> None:
    direct = {name: our_imports(root, name) for name in MAY_IMPORT.keys() | COMPOSES}
    for name in direct:
        reached, waiting = set(), [name]
        while waiting:
            new = direct[waiting.pop()] - reached
            reached |= new
            waiting.extend(new)
        assert name not in reached


def test_trace_report_needs_the_standard_library_only(root: Path) -> None:
    assert set(imports(root / "trace_report.py")) <= set(sys.stdlib_module_names)


def test_packaging_lists_every_module(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    assert set(project["tool"]["setuptools"]["py-modules"]) == MAY_IMPORT.keys() | COMPOSES
    assert project["tool"]["setuptools"]["packages"] == ["bench"]
    assert project["project"]["requires-python"] == ">=3.11"
    assert {"dev", "gguf", "plot", "peers", "eval"} == project["project"]["optional-dependencies"].keys()
    assert "torch>=2.10" in project["project"]["dependencies"]


def test_no_module_hides_one_of_another_project(root: Path) -> None:
    """Modules lie at the top level: one named as a library's would be imported in its place, by that library too."""
    ours = MAY_IMPORT.keys() | COMPOSES | {"bench"}
    for name, projects in packages_distributions().items():
        assert name not in ours or set(projects) == {"nearroof"}, f"{name} is also of {projects}"


def test_constraints_pin_what_the_tests_run_with(root: Path) -> None:
    lines = (root / "constraints.txt").read_text(encoding="utf-8").split()
    assert {"torch==2.13.0", "triton==3.6.0"} <= set(lines)


def test_every_file_says_what_it_is_for(root: Path) -> None:
    for path in sources(root):
        text = path.read_text(encoding="utf-8")
        assert not text or ast.get_docstring(ast.parse(text)), path


def test_no_error_is_caught_without_being_named(root: Path) -> None:
    for path in sources(root):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not (isinstance(node, ast.ExceptHandler) and node.type is None), f"{path}:{node.lineno}"


STATE = """
import importlib, json, logging, os, random, signal, sys, warnings
import torch, torch._dynamo.config, torch._inductor.config

def state():
    return {
        "dtype": str(torch.get_default_dtype()),
        "device": str(torch.get_default_device()),
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "grad": torch.is_grad_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn": [torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32],
        "matmul": torch.backends.cuda.matmul.allow_tf32,
        "random": [torch.get_rng_state().sum().item(), hash(random.getstate())],
        "inductor": repr(sorted(torch._inductor.config.get_config_copy().items(), key=str)),
        "dynamo": repr(sorted(torch._dynamo.config.get_config_copy().items(), key=str)),
        "path": list(sys.path),
        "environment": dict(os.environ),
        "logging": logging.getLogger().level,
        "interrupt": str(signal.getsignal(signal.SIGINT)),
    }

before = state()
importlib.import_module(sys.argv[1])
after = state()
print(json.dumps({key: [before[key], after[key]] for key in before if before[key] != after[key]}))
"""


def test_importing_changes_no_global_state(root: Path) -> None:
    composed = subprocess.run(
        [sys.executable, "-c", STATE, "generate"], cwd=root, capture_output=True, text=True, check=True
    )
    assert json.loads(composed.stdout.splitlines()[-1]) == {}
    assert composed.stderr == ""


@pytest.mark.parametrize("name", sorted(WITHOUT_TORCH))
def test_module_does_without_torch(name: str, root: Path) -> None:
    code = f"import sys, {name}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True)


def test_text_is_generated_without_triton(root: Path) -> None:
    """Builds of torch for CPUs come without it."""
    code = "import sys; sys.modules['triton'] = None; import generate"
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True)


@pytest.mark.parametrize("name", sorted(RUNNABLE))
def test_runnable_module_offers_help(name: str, root: Path) -> None:
    shown = subprocess.run(
        [sys.executable, f"{name}.py", "--help"], cwd=root, capture_output=True, text=True, check=True
    )
    assert shown.stdout.startswith("usage:")

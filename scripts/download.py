"""Download a checkpoint from the Hugging Face hub: only the files that are needed, in one format.

    python scripts/download.py REPO_ID [--output DIR] [--revision REVISION]

An interrupted download goes on where it stopped. The access token is the one that `hf auth login` or HF_TOKEN gives.
"""

import json
from collections.abc import Collection
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from command import Parser, run

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
OTHER_FORMATS = (".bin", ".pth", ".pt", ".gguf", ".safetensors", ".msgpack", ".h5", ".onnx")
BESIDE_THE_WEIGHTS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)


def choose_files(repo_id: str, available: Collection[str], shards: Collection[str]) -> list[str]:
    """What to fetch of a repository's files; `shards` are those that its index names."""
    if "config.json" not in available:
        raise ValueError(f"{repo_id}: has no config.json, so it is not a checkpoint in Hugging Face's layout")
    if WEIGHTS in available:
        weights = [WEIGHTS]
    elif INDEX in available:
        weights = [INDEX, *shards]
        if missing := sorted(set(shards) - set(available)):
            raise ValueError(f"{repo_id}: {INDEX} names {missing[0]}, which the repository lacks")
    else:
        others = sorted(name for name in available if name.endswith(OTHER_FORMATS))
        found = f"only {', '.join(others[:3])}" if others else "no weights"
        raise ValueError(f"{repo_id}: no {WEIGHTS} and no {INDEX}, {found}; other formats are not downloaded")
    return [name for name in BESIDE_THE_WEIGHTS if name in available] + weights


def download(repo_id: str, output: Path, revision: str | None = None) -> None:
    """Fetch into `output`, which appears when it is whole; one that exists is brought up to date."""
    info = HfApi().model_info(repo_id, revision=revision)  # open to all even where the files are not
    available = {sibling.rfilename for sibling in info.siblings or ()}
    revision = info.sha or revision  # one state of the repository, even if it changes meanwhile
    partial = output if output.is_dir() else output.with_name(f"{output.name}.partial")
    if "config.json" in available:  # before anything else, so that a refusal comes before any progress bar
        hf_hub_download(repo_id, "config.json", revision=revision, local_dir=partial)
    shards: set[str] = set()
    if INDEX in available and WEIGHTS not in available:
        index = hf_hub_download(repo_id, INDEX, revision=revision, local_dir=partial)
        shards = set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values())
    files = choose_files(repo_id, available, shards)
    snapshot_download(repo_id, revision=revision, local_dir=partial, allow_patterns=files)
    if partial != output:
        partial.rename(output)


def explained(repo_id: str, error: Exception) -> Exception:
    """The error with what to do about it, in one line."""
    if isinstance(error, GatedRepoError):
        return ValueError(f"{repo_id}: gated: ask for access on its page, then `hf auth login` or set HF_TOKEN")
    if isinstance(error, RepositoryNotFoundError):
        return ValueError(f"{repo_id}: not found, or private: check the name, or `hf auth login`")
    if isinstance(error, RevisionNotFoundError):
        return ValueError(f"{repo_id}: has no such revision")
    if isinstance(error, OfflineModeIsEnabled):
        return ValueError(f"{repo_id}: not downloaded, since HF_HUB_OFFLINE is set")
    if isinstance(error, ValueError):
        return ValueError(str(error).splitlines()[0])
    reason = " ".join(str(error).split())[:200]
    return RuntimeError(f"{repo_id}: the download failed; run it again to go on ({type(error).__name__}: {reason})")


def main() -> None:
    parser = Parser(description="Download a checkpoint from the Hugging Face hub.")
    parser.add_argument("repo_id", metavar="REPO_ID", help="as in HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--output", type=Path, metavar="DIR", help="(default: checkpoints/ and the repository's name)")
    parser.add_argument("--revision", help="a branch, tag or commit (default: main)")
    arguments = parser.parse_args()
    output = arguments.output or Path("checkpoints", arguments.repo_id.split("/")[-1])
    try:
        download(arguments.repo_id, output, arguments.revision)
    except Exception as error:  # the errors of the hub's HTTP library, which varies, have no base in common
        raise explained(arguments.repo_id, error) from error
    print(output)


if __name__ == "__main__":
    run(main)

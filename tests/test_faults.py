"""Faults that users of such engines have met. docs/faults.md names a test for each; those without a better place are
here."""

import ast
import json
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import generate
import tiny_checkpoint
from engine import Generator, SamplingParams, unawaiting_kernels
from generate import TextGenerator
from model import RANDOM_SHAPES, build, randomize

GREEDY = SamplingParams(temperature=0.0)
TOP_K = SamplingParams(seed=3)
NAMED = re.compile(r"`(test_\w+\.py)::(test_\w+)`")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint.write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[TextGenerator]:
    made = TextGenerator.load(tiny, device="cpu", max_seq_len=400)
    yield made
    made.close()


def random_generator(device: str = "cpu", **settings: Any) -> Generator:
    model = build(RANDOM_SHAPES["tiny"], torch.device(device), torch.float32)
    randomize(model)
    return Generator(model, **{"max_seq_len": 512, "note": lambda line: None, **settings})


def tokens_of(
    generator: Generator, *prompts: list[int], params: SamplingParams = TOP_K, count: int = 12
) -> list[list[int]]:
    completions = generator.generate_ids(prompts, max_new_tokens=count, params=params)
    return [completion.tokens for completion in completions]


# --- The list


def test_every_fault_has_a_test_that_exists_and_is_its_own(root: Path) -> None:
    lines = (root / "docs" / "faults.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.startswith("| input")]
    assert len(rows) > 50
    named = [NAMED.findall(row) for row in rows]
    assert all(named), [row for row, tests in zip(rows, named, strict=True) if not tests]
    for file in {file for tests in named for file, _ in tests}:
        nodes = ast.walk(ast.parse((root / "tests" / file).read_text(encoding="utf-8")))
        exist = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
        assert {name for tests in named for f, name in tests if f == file} <= exist, file
    twice = [test for test, times in Counter(test for tests in named for test in tests).items() if times > 1]
    assert not twice


# --- Loading


def test_a_vocabulary_padded_beyond_the_tokenizer_loads_and_its_extra_ids_read_as_nothing(llm: TextGenerator) -> None:
    padded = range(llm.tokenizer.vocab_size, llm.generator.model.config.vocab_size)
    assert len(padded) == 5
    assert llm.tokenizer.decode([67, *padded, 68]) == llm.tokenizer.decode([67, 68])
    assert llm.generate(["Hello"], GREEDY, max_new_tokens=3)


@pytest.mark.parametrize(
    "rotary",
    [
        {"rope_theta": 1_000_000.0},  # CodeLlama
        {"rope_theta": 500_000.0},  # Llama 3
        {
            "rope_theta": 500_000.0,  # Llama 3.1
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ],
    ids=["codellama", "llama-3", "llama-3.1"],
)
@torch.no_grad()
def test_rotary_settings_hold_beyond_a_thousand_tokens(rotary: dict[str, Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    directory = tiny_checkpoint.write(tmp_path, max_position_embeddings=16384, **rotary)
    reference = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model = generate.load_model(directory, device="cpu", max_seq_len=1500).model
    model.allocate(1, 1500)
    ids, places = torch.randint(3, 200, (1, 1500)), torch.arange(1500).unsqueeze(0)
    found = model.logits(model(ids, places, kv_length=1500))
    torch.testing.assert_close(found, reference(ids).logits, rtol=0, atol=2e-4)


def test_a_missing_tokenizer_is_said_to_be_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tiny_checkpoint.write(tmp_path)
    (directory / "tokenizer.json").unlink()
    assert generate.main(["--checkpoint", str(directory), "--prompt", "x"]) == 2
    message = capsys.readouterr().err
    assert "tokenizer.json" in message and "tokenizer.model" in message and str(directory) in message
    assert "ids" not in message, "and not to be of another size than the model"


# --- Generation


def test_a_prompt_of_digits_is_text(llm: TextGenerator, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert llm.tokenizer.encode("42") == [llm.tokenizer.encode(digit)[0] for digit in "42"]
    options = ["--checkpoint", str(tiny), "--prompt", "42", "--max-new-tokens", "1", "--json", "--device", "cpu"]
    assert generate.main(options) == 0
    assert json.loads(capsys.readouterr().out)["prompt_tokens"] == 2


def test_more_new_tokens_than_the_context_holds_end_with_length(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--checkpoint", str(tiny), "--prompt", "Hello", "--max-seq-len", "20", "--ignore-eos", "--json"]
    assert generate.main([*options, "--max-new-tokens", str(10**12), "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["new_tokens"], found["finish_reason"]) == (16, "length"), "the last token needs no position"


def test_top_k_of_zero_one_and_beyond_the_vocabulary(llm: TextGenerator) -> None:
    def text(top_k: int, temperature: float = 3.0) -> str:
        params = SamplingParams(temperature=temperature, top_k=top_k, seed=6)
        return llm.generate(["Hello"], params, max_new_tokens=20, ignore_eos=True)[0].text

    assert text(0) == text(264) == text(10**30) != text(2)
    assert text(1) == text(0, temperature=0.0)


# --- Compilation


def test_the_first_prompt_after_warm_up_compiles_nothing() -> None:
    with random_generator(compile=True, backend="eager") as generator:
        generator.warm_up(TOP_K)
        before, spent = counters["stats"]["unique_graphs"], generator.compile_s
        tokens_of(generator, [1, 2, 3])
        assert counters["stats"]["unique_graphs"] == before and generator.compile_s == spent > 0


def test_a_longer_prompt_than_the_one_compiled_with() -> None:
    long = [7 * n % 512 for n in range(300)]
    with random_generator() as plain, random_generator(compile=True, backend="eager") as compiled:
        tokens_of(compiled, [1, 2, 3])
        assert tokens_of(compiled, long) == tokens_of(plain, long)


def test_a_larger_batch_after_a_smaller_one() -> None:
    prompts = [[1, 2, 3], [4], [5] * 40]
    with random_generator(compile=True, backend="eager") as small:
        expected = [tokens_of(small, prompt)[0] for prompt in prompts]
        with pytest.raises(ValueError, match="3 prompts: this generator serves 1 to 1"):
            tokens_of(small, *prompts)
    with random_generator(compile=True, backend="eager", batch=3) as large:
        assert tokens_of(large, *prompts) == expected


def test_a_cache_directory_that_cannot_be_written_is_one_line(tiny: Path, root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "file")}
    command = [sys.executable, "generate.py", "--checkpoint", tiny, "--prompt", "x", "--device", "cpu"]

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *options], cwd=root, env=environment, capture_output=True, text=True, errors="replace"
        )

    compiled = run("--compile")
    assert (compiled.returncode, compiled.stdout, compiled.stderr.count("\n")) == (1, "", 1)
    assert compiled.stderr.startswith("error: the compiler has no cache directory (")
    assert run("--max-new-tokens", "2").returncode == 0


# --- Measurement


def test_compilation_is_in_no_reported_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with random_generator(compile=True, backend="eager", compile_prefill=True) as generator:
        (completion,) = generator.generate_ids([[1, 2, 3]], max_new_tokens=5, params=TOP_K)
        assert completion.time_to_first_token_s is not None and completion.decode_tok_per_s is not None
        assert completion.time_to_first_token_s + 4 / completion.decode_tok_per_s < generator.compile_s


def test_a_trace_directory_that_exists_keeps_what_is_not_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    monkeypatch.setattr("tracing.profile", lambda model, prompt, directory, **more: directory == tmp_path)
    options = ["--random", "tiny", "--max-new-tokens", "2", "--profile", str(tmp_path), "--device", "cpu"]
    assert generate.main(options) == 0 and len(capsys.readouterr().out.split()) == 2
    assert (tmp_path / "notes.txt").read_text() == "mine"


# --- On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["inductor", "auto"])
@pytest.mark.parametrize("batch", [1, 8])
def test_on_a_gpu_graphs_are_verified_and_give_the_tokens_of_eager(kernels: str, batch: int) -> None:
    prompts = [[5 * n % 512 for n in range(length)] for length in (3, 1, 17, 40, 128, 130, 200, 300)][-batch:]
    with random_generator("cuda", compile=False, batch=batch) as eager:
        expected = {params: tokens_of(eager, *prompts, params=params) for params in (GREEDY, TOP_K)}
    with random_generator("cuda", kernels=kernels, batch=batch) as compiled:
        for params, tokens in expected.items():
            assert tokens_of(compiled, *prompts, params=params) == tokens
            assert compiled.graphs == "verified", compiled.proof


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["inductor", "auto"])
@pytest.mark.parametrize("shape", ["tiny", "smollm2-135m"])  # the latter's heads are filled up
def test_on_a_gpu_every_kernel_that_starts_early_waits(kernels: str, shape: str) -> None:
    model = build(replace(RANDOM_SHAPES[shape], vocab_size=1500), torch.device("cuda"), torch.bfloat16)
    randomize(model)
    settings = {"kernels": kernels, "compile_prefill": True, "max_seq_len": 512, "note": lambda line: None}
    with Generator(model, **settings) as generator:
        for params in (GREEDY, TOP_K, SamplingParams(top_p=0.9, seed=3)):
            tokens_of(generator, [1, 2, 3], params=params)
        assert unawaiting_kernels() == []
        early = torch.cuda.get_device_capability() >= (9, 0)
        assert generator.options is not None and generator.options.get("triton.enable_pdl", False) == early
    written = [Path(str(module.__file__)).read_text() for module in torch._inductor.codecache.PyCodeCache.modules]
    assert any("'launch_pdl': True" in text for text in written) == early


@pytest.mark.gpu
def test_on_a_gpu_the_first_prompt_after_warm_up_is_not_slow() -> None:
    with random_generator("cuda") as generator:
        generator.warm_up(TOP_K)
        first, *later = (
            generator.generate_ids([[1, 2, 3]], max_new_tokens=5, params=TOP_K)[0].time_to_first_token_s
            for _ in range(6)
        )
        assert first < 5 * sorted(later)[2] + 0.05, "prefill of three ids loads its kernels at most"


@pytest.mark.gpu
def test_on_a_gpu_two_hundred_lengths_record_nothing_and_take_no_memory() -> None:
    with random_generator("cuda") as generator:
        taken = []
        for length in range(1, 201):
            tokens_of(generator, [3 * n % 512 for n in range(length)], count=3)
            assert generator.graphs == "verified"
            taken.append(torch.cuda.memory_allocated())
        assert taken[-1] <= taken[20]


def live_blocks() -> Counter[tuple[Any, ...]]:
    """What is allocated on the GPU: how many blocks of each pool, stream and size."""
    return Counter(
        (*segment.get("segment_pool_id", ()), segment["stream"], block["size"])
        for segment in torch.cuda.memory_snapshot()
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    )


@pytest.mark.gpu
def test_on_a_gpu_ten_generators_in_a_row_leave_nothing() -> None:
    taken, blocks = [], []
    for _ in range(10):
        with random_generator("cuda") as generator:
            tokens_of(generator, [1, 2, 3], count=3)
        del generator
        torch.cuda.synchronize()
        taken.append(torch.cuda.memory_reserved())
        blocks.append(live_blocks())
    assert taken[-1] <= taken[1], f"left (pool, stream, bytes): {dict(blocks[-1] - blocks[1])}"


@pytest.mark.gpu
def test_on_a_gpu_another_thread_gets_a_clear_error() -> None:
    with random_generator("cuda") as generator:
        expected = tokens_of(generator, [1, 2, 3])
        said: list[str] = []

        def work() -> None:
            try:
                tokens_of(generator, [1, 2, 3])
            except RuntimeError as error:
                said.append(str(error))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert said == ["CUDA graphs belong to a thread: use this Generator in the one that made it"]
        assert tokens_of(generator, [1, 2, 3]) == expected


@pytest.mark.gpu
def test_on_a_gpu_an_abandoned_run_leaves_the_next_one_right() -> None:
    with random_generator("cuda") as generator:
        expected = tokens_of(generator, [1, 2, 3])
        next(iter(generator.start([[9] * 50], TOP_K, max_new_tokens=100)))
        assert tokens_of(generator, [1, 2, 3]) == expected


@pytest.mark.gpu
def test_on_a_gpu_the_reader_of_the_tokens_may_compile_and_record_meanwhile() -> None:
    with random_generator("cuda") as generator, random_generator("cuda", batch=2) as other:
        expected = tokens_of(generator, [1, 2, 3])
        seen = []
        for number, (token,) in enumerate(generator.start([[1, 2, 3]], TOP_K, max_new_tokens=12)):
            seen.append(token)
            if number == 3:
                tokens_of(other, [4], [5, 6])
        assert [seen] == expected and generator.graphs == "verified"

"""Text in and out: right values, streaming, stop strings, conversations, and the command line."""

import fcntl
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import generate
import tiny_checkpoint
from engine import SamplingParams
from generate import Conversation, StopScanner, TextGenerator, load_model

GREEDY = SamplingParams(temperature=0.0, seed=0)
STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw a "
    "big, red ball. She wanted to play with it, but it was too high."
)
FIELDS = (
    "text tokens prompt_tokens new_tokens finish_reason time_to_first_token_s prefill_tok_per_s decode_tok_per_s "
    "compile_s peak_memory_bytes decoder graphs bandwidth_bytes_per_s seed device device_name dtype"
).split()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint.write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[TextGenerator]:
    made = TextGenerator.load(tiny, device="cpu", max_seq_len=400)
    yield made
    made.close()


@pytest.fixture(scope="module")
def stories(shared_data: Path) -> Path:
    return shared_data / "stories260K-hf"


class Result(NamedTuple):
    status: int
    out: str
    err: str


Cli = Callable[..., Result]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """The command line in this process."""

    def run(*arguments: object) -> Result:
        status = generate.main([*map(str, arguments), "--device", "cpu"])
        return Result(status, *capsys.readouterr())

    return run


def texts_of(llm: TextGenerator, *prompts: str, params: SamplingParams = GREEDY, **options: Any) -> list[str]:
    with_rows = llm.generate(prompts, params, **{"max_new_tokens": 30, **options})
    return [completion.text for completion in with_rows]


# --- Right values


def test_stories260k_tells_its_story(stories: Path, cli: Cli) -> None:
    shown = cli("--checkpoint", stories, "--prompt", "", "--temperature", 0, "--max-new-tokens", 80)
    assert shown.status == 0 and shown.out.startswith(STORY)


def test_a_sentencepiece_text_goes_on_with_its_space(stories: Path, cli: Cli) -> None:
    """Of the whole text, the prompt and what follows it are two pieces: nothing is lost or doubled between them."""
    for prompt in ("Once", "Once upon a", "Once upon a time, there was a little girl named"):
        shown = cli("--checkpoint", stories, "--prompt", prompt, "--temperature", 0, "--max-new-tokens", 20)
        assert STORY.startswith(prompt + shown.out.removesuffix("\n"))


@pytest.fixture(scope="module")
def smol(smollm2: Path) -> Iterator[TextGenerator]:
    made = TextGenerator.load(smollm2, device="cpu", max_seq_len=256)
    yield made
    made.close()


def test_smollm2_knows_gravity(smol: TextGenerator) -> None:
    ids = smol.tokenizer.encode("Gravity is")
    assert ids == [22007, 6463, 314]
    expected = (
        " a fundamental concept in physics that describes the curvature of spacetime caused by the presence of "
        "matter and energy"
    )
    assert texts_of(smol, "Gravity is", max_new_tokens=20)[0].startswith(expected)


def test_smollm2_knows_the_capital_of_france_and_remembers(smol: TextGenerator) -> None:
    conversation = smol.chat()
    assert "".join(conversation.send("What is the capital of France?", GREEDY)) == "The capital of France is Paris."
    assert conversation.last is not None and conversation.last.completion.finish_reason == "eos"
    assert "Paris" in "".join(conversation.send("Name it once more.", GREEDY, max_new_tokens=25))


# --- Streaming


@pytest.mark.parametrize("prompt", ["Hello", "42", "漢字 🐄 e\u0301", "a\r\n\tb\0", "<|im_end|>", " "])
def test_pieces_joined_are_the_text_of_all_ids(prompt: str, llm: TextGenerator) -> None:
    params = SamplingParams(seed=5, temperature=2.0)
    ids = llm.tokenizer.encode(prompt)
    assert "".join(map(chr, ids)) != prompt and llm.tokenizer.decode(ids) == prompt, "the prompt is text, not ids"
    run = llm.run([ids], params, max_new_tokens=60)
    pieces = [piece for _, piece in run]
    (completion,) = run.completions
    assert "".join(pieces) == completion.text
    assert completion.text == llm.tokenizer.decode(completion.completion.tokens, ids)
    assert list(llm.stream(prompt, params, max_new_tokens=60)) == [piece for piece in pieces if piece]


def test_the_first_new_token_is_shown_as_soon_as_it_is_there(llm: TextGenerator) -> None:
    run = llm.run([llm.tokenizer.encode("Hello")], SamplingParams(seed=9), max_new_tokens=50)
    row, piece = next(iter(run))
    assert row == 0 and piece and len(run.completions[0].completion.tokens) < 5


def test_a_literal_replacement_character_does_not_stall_the_stream(llm: TextGenerator) -> None:
    """Ids that spell U+FFFD are shown at once, as any character is."""
    stream = llm.tokenizer.stream()
    assert "".join(map(stream.push, llm.tokenizer.encode("a\ufffdb"))) == "a\ufffdb"


# --- Stop strings


def scanned(text: str, stops: list[str], cuts: list[int]) -> str:
    scanner, shown, at = StopScanner(stops), "", 0
    for cut in [*sorted(min(cut, len(text)) for cut in cuts), len(text)]:
        shown += scanner.push(text[at:cut])
        at = cut
    return shown if scanner.stopped else shown + scanner.finish()


@settings(max_examples=300, deadline=None)
@given(
    st.text("ab\n🐄", max_size=24),
    st.lists(st.text("ab\n🐄", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 24), max_size=8),
)
def test_text_is_shown_up_to_the_first_stop_string_however_it_is_cut(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    expected = text[: min(ends)[1]] if ends else text
    assert scanned(text, stops, cuts) == expected
    assert not any(stop in expected for stop in stops)


def test_what_cannot_begin_a_stop_string_is_not_held_back() -> None:
    scanner = StopScanner(["STOP", "\n\n"])
    assert [scanner.push(piece) for piece in ("a", "S", "T", "x", "\n", "b")] == ["a", "", "", "STx", "", "\nb"]


def test_a_stop_string_over_several_tokens_ends_the_text_and_is_not_shown(llm: TextGenerator) -> None:
    params = SamplingParams(seed=2, temperature=3.0)
    # Past the EOS: which token the noise draws is not what this is about.
    (whole,) = texts_of(llm, "Hello", params=params, max_new_tokens=120, ignore_eos=True)
    for at in range(5, 60, 9):
        stop = whole[at : at + 3]  # random bytes: characters of several bytes and U+FFFD are among them
        (completion,) = llm.generate(
            ["Hello"], params, max_new_tokens=120, ignore_eos=True, stop=["never", stop, stop + "x"]
        )
        assert completion.text == whole[: whole.index(stop)] and completion.completion.finish_reason == "stop"
        assert len(completion.completion.tokens) < 120


def test_rows_stop_each_at_its_own_place(tiny: Path) -> None:
    llm = TextGenerator.load(tiny, device="cpu", batch=3, max_seq_len=200)
    prompts, params = ["One", "Two, and longer", "3"], SamplingParams(seed=4, temperature=3.0)
    whole = texts_of(llm, *prompts, params=params, max_new_tokens=60)
    stops = [text[10:12] for text in whole[:2]]
    for text, completion in zip(whole, llm.generate(prompts, params, max_new_tokens=60, stop=stops), strict=True):
        ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
        assert completion.text == (text[: min(ends)[1]] if ends else text)
    llm.close()


def test_a_stop_string_of_the_last_token_counts_as_stop(llm: TextGenerator) -> None:
    params = SamplingParams(seed=2)
    (whole,) = texts_of(llm, "Hello", params=params, max_new_tokens=12, ignore_eos=True)
    (completion,) = llm.generate(["Hello"], params, max_new_tokens=12, ignore_eos=True, stop=[whole[-1]])
    assert completion.completion.finish_reason == "stop" and whole[-1] not in completion.text
    assert (
        llm.generate(["Hello"], params, max_new_tokens=12, ignore_eos=True, stop=whole[3:6])[0].text
        == whole[: whole.index(whole[3:6])]
    )


def test_an_empty_stop_string_is_refused(llm: TextGenerator) -> None:
    with pytest.raises(ValueError, match="a stop string must not be empty"):
        llm.generate(["Hello"], GREEDY, stop=[""])


# --- Conversations


@pytest.fixture
def prefilled(llm: TextGenerator, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many ids each prefill takes in."""
    sizes: list[int] = []
    real = llm.generator.prefill

    def counting(ids: list[int], *rest: int) -> None:
        sizes.append(len(ids))
        real(ids, *rest)

    monkeypatch.setattr(llm.generator, "prefill", counting)
    return sizes


def fresh(llm: TextGenerator, conversation: Conversation, params: SamplingParams = GREEDY, **options: Any) -> str:
    """The last answer again, of the whole conversation without anything kept."""
    ids = llm.tokenizer.chat(conversation.messages[:-1])
    run = llm.run([ids], params, answers=True, **options)
    return "".join(piece for _, piece in run)


def test_a_second_turn_remembers_the_first_and_prefills_what_is_new(llm: TextGenerator, prefilled: list[int]) -> None:
    conversation = llm.chat()
    first = "".join(conversation.send("Hi there.", GREEDY, max_new_tokens=6, stop=["never"]))
    before = len(llm.tokenizer.chat(conversation.messages[:1]))
    second = "".join(conversation.send("And?", GREEDY, max_new_tokens=6))
    whole = len(llm.tokenizer.chat(conversation.messages[:3]))
    assert prefilled[0] == before - 1
    assert prefilled[1] < whole - before, "less than the new turn and the answer, which is there already"
    assert [message["content"] for message in conversation.messages] == ["Hi there.", first, "And?", second]
    assert second == fresh(llm, conversation, max_new_tokens=6)


def test_an_answer_can_be_broken_off_at_any_token_one_without_text_too(llm: TextGenerator) -> None:
    pieces = list(llm.chat().send("Hi.", SamplingParams(seed=5), max_new_tokens=60, ignore_eos=True))
    assert len(pieces) == 60 and "" in pieces


def test_a_third_turn_after_an_interrupted_one_goes_on_from_what_was_shown(
    llm: TextGenerator, prefilled: list[int]
) -> None:
    conversation, params = llm.chat(), SamplingParams(seed=8)
    "".join(conversation.send("Hi there.", params, max_new_tokens=6))
    pieces = conversation.send("Tell me a long story.", params, max_new_tokens=60, ignore_eos=True)
    shown = next(pieces) + next(pieces)
    pieces.close()
    assert conversation.messages[-1] == {"role": "assistant", "content": shown}
    third = "".join(conversation.send("Go on.", params, max_new_tokens=10))
    assert prefilled[2] < len(llm.tokenizer.chat(conversation.messages[:5])) // 2
    assert third == fresh(llm, conversation, params, max_new_tokens=10)


def test_an_interrupted_conversation_remembers_what_it_has_printed(
    llm: TextGenerator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation, lines, seen = llm.chat(), iter(["Tell me a long story.", ""]), []
    send = conversation.send

    def ask(interrupts: Any) -> str:
        seen.append(interrupts)
        return next(lines)

    def interrupted(*arguments: Any, **settings: Any) -> Iterator[str]:
        with closing(send(*arguments, **settings)) as pieces:
            for number, piece in enumerate(pieces):
                seen[0].noted = number == 9  # while the tenth token was computed
                yield piece

    monkeypatch.setattr(generate, "_ask", ask)
    monkeypatch.setattr(llm, "chat", lambda: conversation)
    monkeypatch.setattr(conversation, "send", interrupted)
    options = generate.parse_arguments(["--interactive", "--max-new-tokens", "60", "--ignore-eos"])
    assert generate._converse(options, llm, SamplingParams(seed=8)) == 0
    printed = capsys.readouterr().out.removesuffix("\n")
    assert printed and conversation.messages[-1] == {"role": "assistant", "content": printed}


def test_a_question_that_does_not_fit_is_not_kept(llm: TextGenerator) -> None:
    conversation = llm.chat()
    "".join(conversation.send("Hi.", GREEDY, max_new_tokens=3))
    asked = list(conversation.messages)
    with pytest.raises(ValueError, match=r"the prompt has \d+ tokens, the context 400"):
        "".join(conversation.send("x" * 500, GREEDY))
    assert conversation.messages == asked
    answer = "".join(conversation.send("Short.", GREEDY, max_new_tokens=3))
    assert answer == fresh(llm, conversation, max_new_tokens=3)


def test_one_text_is_not_taken_for_several(llm: TextGenerator) -> None:
    with pytest.raises(ValueError, match="several texts"):
        llm.generate("Once")


def test_two_conversations_do_not_mix(llm: TextGenerator) -> None:
    one, other = llm.chat(), llm.chat()
    for turn in ("a", "bc"):
        for conversation in (one, other):
            text = f"{turn} of {id(conversation) == id(one)}"
            assert "".join(conversation.send(text, GREEDY, max_new_tokens=4)) is not None
    assert "".join(other.send("last", GREEDY, max_new_tokens=8)) == fresh(llm, other, max_new_tokens=8)
    assert len(one.messages) == 4 and len(other.messages) == 6


def test_an_answer_shows_no_special_token(llm: TextGenerator) -> None:
    special = llm.tokenizer.chat([{"role": "user", "content": ""}])[0]
    row = generate._RowText(llm.tokenizer.stream(), [])
    assert row.push(special) == "" and llm.tokenizer.decode([special, 67, special]) == llm.tokenizer.decode([67])


# --- The Python interface


def test_five_lines_of_python(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llm = TextGenerator.load(tiny, device="cpu", max_seq_len=256)
    for piece in llm.stream("Gravity is", max_new_tokens=4):
        print(piece, end="", flush=True)
    print("".join(llm.chat().send("What is the capital of France?", max_new_tokens=4)))
    llm.close()
    assert capsys.readouterr().out.endswith("\n")


def test_settings_reach_the_generator(tiny: Path) -> None:
    llm = TextGenerator.load(tiny, device="cpu", dtype="bf16", batch=2, max_seq_len=64)
    assert (llm.generator.batch, llm.generator.capacity) == (2, 64)
    assert llm.generator.model.embed_tokens.weight.dtype == torch.bfloat16
    llm.close()


def test_a_tied_head_loads_as_one_tensor(tmp_path: Path) -> None:
    loaded = load_model(tiny_checkpoint.write(tmp_path, tie_word_embeddings=True), device="cpu")
    assert loaded.model.lm_head.weight is loaded.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("asked", "supported", "chosen"),
    [("auto", False, torch.float16), ("auto", True, torch.bfloat16), ("fp32", False, torch.float32)],
)
def test_a_gpu_without_bf16_gets_fp16(
    asked: str,
    supported: bool,
    chosen: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: supported)
    assert generate.choose_dtype(asked, torch.bfloat16, torch.device("cuda")) == chosen
    assert ("fp16" in capsys.readouterr().err) == (chosen == torch.float16)


def test_bf16_asked_of_a_gpu_without_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(ValueError, match="dtype bf16: Tesla T4 does not compute in it; use fp16"):
        generate.choose_dtype("bf16", torch.bfloat16, torch.device("cuda"))


# --- The command line: output


def test_stdout_holds_the_new_text_and_nothing_else(tiny: Path, llm: TextGenerator, cli: Cli) -> None:
    options = ("--checkpoint", tiny, "--seed", 3, "--max-new-tokens", 25, "--max-seq-len", 400)
    (expected,) = texts_of(llm, "Hello", params=SamplingParams(seed=3), max_new_tokens=25)
    shown = cli(*options, "--prompt", "Hello")
    assert (shown.status, shown.out) == (0, expected + "\n")
    assert "[eager: 5 + 25 tokens" in shown.err and "ended by length, seed 3]" in shown.err


def test_json_has_every_field_and_any_text(tiny: Path, cli: Cli) -> None:
    shown = cli("--checkpoint", tiny, "--prompt", 'a "b"\n漢\0', "--seed", 3, "--temperature", 5, "--json",
                "--max-new-tokens", 40, "--num-samples", 2, "--ignore-eos")  # fmt: skip
    first, second = map(json.loads, shown.out.splitlines())
    assert list(first) == FIELDS
    assert (first["seed"], second["seed"]) == (3, 4) and first["text"] != second["text"]
    assert first["prompt_tokens"] == len('a "b"\n漢\0'.encode()) and first["new_tokens"] == len(first["tokens"]) == 40
    assert first["finish_reason"] == "length"
    assert (first["decoder"], first["graphs"], first["device"], first["dtype"]) == ("eager", "none", "cpu", "float32")
    rates = ("time_to_first_token_s", "prefill_tok_per_s", "decode_tok_per_s", "bandwidth_bytes_per_s")
    assert all(first[rate] > 0 for rate in rates) and first["compile_s"] == 0
    assert first["peak_memory_bytes"] is None or first["peak_memory_bytes"] > 1 << 20
    assert first["device_name"]


def test_rates_are_null_and_never_nan_below_two_tokens(tiny: Path, cli: Cli) -> None:
    shown = cli("--checkpoint", tiny, "--prompt", "x", "--max-new-tokens", 1, "--json")
    (found,) = map(json.loads, shown.out.splitlines())
    assert found["decode_tok_per_s"] is None and found["bandwidth_bytes_per_s"] is None
    assert "NaN" not in shown.out and "Infinity" not in shown.out


def test_time_to_first_token_includes_prefill(tiny: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    real = generate.Generator.prefill
    monkeypatch.setattr(generate.Generator, "prefill", lambda *rest: (time.sleep(0.2), real(*rest))[1])
    found = json.loads(
        cli("--checkpoint", tiny, "--prompt", "Hello", "--max-new-tokens", 3, "--ignore-eos", "--json").out
    )
    assert found["time_to_first_token_s"] > 0.2 and found["prefill_tok_per_s"] < 5 / 0.2
    assert found["decode_tok_per_s"] > 1 / 0.2, "and decoding does not"


def test_samples_differ_and_a_seed_repeats_each(tiny: Path, cli: Cli) -> None:
    options = ("--checkpoint", tiny, "--prompt", "Hello", "--max-new-tokens", 20)
    three = cli(*options, "--seed", 7, "--num-samples", 3, "--json").out.splitlines()
    samples = [json.loads(line) for line in three]
    assert [sample["seed"] for sample in samples] == [7, 8, 9]
    assert len({sample["text"] for sample in samples}) == 3
    (again,) = map(json.loads, cli(*options, "--seed", 8, "--json").out.splitlines())
    assert again["text"] == samples[1]["text"]


def test_without_a_seed_a_random_one_is_reported(tiny: Path, cli: Cli) -> None:
    options = ("--checkpoint", tiny, "--prompt", "Hello", "--max-new-tokens", 20, "--json")
    one, other = (json.loads(cli(*options).out) for _ in range(2))
    assert one["seed"] != other["seed"]
    assert json.loads(cli(*options, "--seed", one["seed"]).out)["text"] == one["text"]


def test_prompts_of_different_lengths_run_as_one_batch_and_equal_their_solo_runs(tiny: Path, cli: Cli) -> None:
    prompts = ["Hi", "A much longer prompt than the other two are.", "42"]
    options = ("--checkpoint", tiny, "--seed", 5, "--max-new-tokens", 15, "--json")
    together = cli(*options, *(part for prompt in prompts for part in ("--prompt", prompt)))
    alone = [json.loads(cli(*options, "--prompt", prompt).out) for prompt in prompts]
    for ours, theirs in zip(map(json.loads, together.out.splitlines()), alone, strict=True):
        assert {key: ours[key] for key in ("text", "tokens", "seed", "prompt_tokens")} == {
            key: theirs[key] for key in ("text", "tokens", "seed", "prompt_tokens")
        }


def test_a_batch_prints_its_texts_one_after_the_other(tiny: Path, cli: Cli, llm: TextGenerator) -> None:
    params = SamplingParams(seed=5)
    expected = [texts_of(llm, prompt, params=params, max_new_tokens=8)[0] for prompt in ("Hi", "there")]
    shown = cli("--checkpoint", tiny, "--seed", 5, "--max-new-tokens", 8, "--prompt", "Hi", "--prompt", "there")
    assert shown.out == "".join(f"{text}\n" for text in expected)


def test_chat_answers_by_the_template(tiny: Path, cli: Cli, llm: TextGenerator) -> None:
    expected = "".join(llm.chat().send("Hello", SamplingParams(seed=1), max_new_tokens=10))
    shown = cli("--checkpoint", tiny, "--chat", "--prompt", "Hello", "--seed", 1, "--max-new-tokens", 10)
    assert shown.out == expected + "\n"


def test_random_weights_show_ids(cli: Cli) -> None:
    shown = cli("--random", "tiny", "--seed", 1, "--max-new-tokens", 6, "--json", "--dtype", "fp32")
    found = json.loads(shown.out)
    assert found["text"] == " ".join(map(str, found["tokens"])) and found["prompt_tokens"] == 5


def test_compiled_text_equals_eager_text(tiny: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--checkpoint", tiny, "--prompt", "Hello", "--seed", 2, "--max-new-tokens", 20, "--json")
    eager = json.loads(cli(*options, "--no-compile").out)
    real = generate._settings
    monkeypatch.setattr(generate, "_settings", lambda *rest: real(*rest) | {"backend": "eager"})
    shown = cli(*options, "--compile", "--kernels", "inductor", "--compile-prefill")
    compiled = json.loads(shown.out)
    assert compiled["text"] == eager["text"]
    assert compiled["decoder"] == "compiled" and compiled["compile_s"] > 0 and compiled["graphs"] == "none"
    assert "compiling the compiled decode step" in shown.err


def test_text_that_stdout_cannot_show_is_replaced(tiny: Path, root: Path) -> None:
    shown = subprocess.run(
        [sys.executable, "generate.py", "--checkpoint", tiny, "--prompt", "x", "--seed", "3", "--temperature", "9",
         "--device", "cpu"],
        cwd=root, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert shown.returncode == 0 and b"?" in shown.stdout and b"Error" not in shown.stderr


def test_a_reader_that_leaves_ends_the_run_quietly(tiny: Path, root: Path) -> None:
    command = f"{sys.executable} generate.py --checkpoint {tiny} --prompt x --device cpu --num-samples 9 | head -c 5"
    shown = subprocess.run(["bash", "-c", command], cwd=root, capture_output=True, text=True, errors="replace")
    assert "Traceback" not in shown.stderr and "Exception" not in shown.stderr


def test_without_a_stderr_nothing_but_text_goes_to_stdout(root: Path) -> None:
    command = f"{sys.executable} generate.py --random tiny --device cpu --max-new-tokens 3 --seed 1"
    texts = [subprocess.check_output(["bash", "-c", f"{command} 2>{to}"], cwd=root) for to in ("/dev/null", "&-")]
    assert texts[0] == texts[1] and len(texts[0].split()) == 3


# --- The command line: mistakes


def damaged(directory: Path, name: str) -> Path:
    """A tiny checkpoint with one thing wrong."""
    tiny_checkpoint.write(directory)
    weights, config = directory / "model.safetensors", directory / "config.json"

    def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
        held = tiny_checkpoint.weights(tiny_checkpoint.CONFIG)
        change(held)
        tiny_checkpoint.save_file(held, weights)

    match name:
        case "no weights":
            weights.unlink()
        case "no tokenizer":
            (directory / "tokenizer.json").unlink()
        case "no config":
            config.unlink()
        case "truncated weights":
            weights.write_bytes(weights.read_bytes()[:-100])
        case "lying header":
            content = weights.read_bytes()
            weights.write_bytes(content[:8] + content[8:].replace(b"[264,48]", b"[265,48]", 1))
        case "wrong shape":
            tensors(lambda held: held.update({"model.norm.weight": torch.ones(47)}))
        case "missing name":
            tensors(lambda held: held.pop("model.layers.1.mlp.down_proj.weight"))
        case "leftover name":
            tensors(lambda held: held.update({"model.layers.1.mlp.extra.weight": torch.ones(48, 64)}))
        case "index outside":
            index = {"weight_map": {"model.norm.weight": "../model.safetensors"}}
            (directory / "model.safetensors.index.json").write_text(json.dumps(index))
            weights.unlink()
        case "small vocabulary":
            tiny_checkpoint.write(directory, vocab_size=200)
        case "unknown family":
            config.write_text(json.dumps(tiny_checkpoint.CONFIG | {"model_type": "mamba"}))
        case "code in a pickle":
            weights.rename(directory / "pytorch_model.bin")
    return directory


DAMAGES = {
    "no weights": "safetensors",
    "no tokenizer": "tokenizer",
    "no config": "config.json",
    "truncated weights": "model.safetensors",
    "lying header": "model.safetensors",
    "wrong shape": "model.norm.weight",
    "missing name": "model.layers.1.mlp.down_proj.weight",
    "leftover name": "model.layers.1.mlp.extra.weight",
    "index outside": "../model.safetensors",
    "small vocabulary": "the tokenizer has 259 ids, the model 200",
    "unknown family": "mamba",
    "code in a pickle": "pytorch_model.bin",
}


def assert_one_line(shown: Result, *words: str) -> None:
    assert shown.status == 2 and shown.out == ""
    assert shown.err.startswith("error: ") and shown.err.count("\n") == 1 and shown.err.endswith("\n"), shown.err
    assert all(word in shown.err for word in words), shown.err


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_one_line_that_says_what_and_where(name: str, tmp_path: Path, cli: Cli) -> None:
    directory = damaged(tmp_path / "checkpoint", name)
    before = sorted(tmp_path.rglob("*"))
    assert_one_line(cli("--checkpoint", directory, "--prompt", "x"), str(directory), DAMAGES[name])
    assert sorted(tmp_path.rglob("*")) == before, "nothing is written"


MISTAKES = {
    "--prompt ''": "the prompt has no tokens",
    "--chat --prompt x --max-new-tokens 0": "--max-new-tokens must be 1 or more, not 0",
    "--max-new-tokens -3": "--max-new-tokens must be 1 or more, not -3",
    "--max-new-tokens many": "invalid int value: 'many'",
    "--temperature -1": "temperature must be 0 or more, not -1.0",
    "--temperature nan": "temperature must be 0 or more, not nan",
    "--top-p 0": "top-p must be above 0 and at most 1, not 0.0",
    "--top-p 1.5": "top-p must be above 0 and at most 1, not 1.5",
    "--top-k -1": "top-k must be 0 (off) or more, not -1",
    "--min-p 2": "min-p must lie between 0 and 1, not 2.0",
    "--repetition-penalty 0": "repetition penalty must lie between",
    "--repetition-penalty inf": "repetition penalty must lie between",
    f"--seed {1 << 63}": "seed must fit in 64 bits",
    f"--seed {(1 << 63) - 1} --num-samples 2": "seed must fit in 64 bits",
    "--num-samples 0": "--num-samples must be 1 or more, not 0",
    "--stop ''": "--stop must not be empty",
    "--dtype int3": "unknown dtype 'int3': auto, bf16, fp16, fp32",
    "--device tpu": "unknown device 'tpu'",
    "--device mps": "device mps: not available on this machine",
    "--max-seq-len 0": "--max-seq-len must be 1 or more",
    "--max-seq-len 513": "--max-seq-len 513: the model knows 512 positions",
    "--max-seq-len 4 --prompt abcde": "the prompt has 5 tokens, the context 4",
    f"--prompt {'x' * 513}": "the prompt has 513 tokens, the context 512",
    "--compile-mode fast": "invalid choice: 'fast'",
    "--kernels cuda": "invalid choice: 'cuda'",
    "--no-compile --kernels triton": "exclude --no-compile",
    "--compile --kernels triton": "kernels triton: ",
    "--frobnicate": "unrecognized arguments: --frobnicate",
    "--random tiny": "--checkpoint and --random exclude each other",
    "--quantize int8": "--quantize goes with --random",
    "--group-size 8": "--group-size goes with --quantize int4",
    "--interactive --prompt x": "--interactive asks for its own prompts",
    "--interactive --json": "--interactive excludes --json",
    "--nvtx": "--profile-gzip and --nvtx go with --profile",
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_a_mistake_is_one_line(
    arguments: str, tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status = generate.main(["--checkpoint", str(tiny), *(part.strip("'") for part in arguments.split(" "))])
    assert_one_line(Result(status, *capsys.readouterr()), MISTAKES[arguments])


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ("--random llama-9", "unknown shape 'llama-9': one of llama-3.1-8b"),
        ("--random tiny --prompt x", "--random has no tokenizer"),
        ("--random tiny --max-seq-len 999999", "--max-seq-len 999999: the model knows 2048 positions"),
        ("--random tiny --quantize int5", "invalid choice: 'int5'"),
        ("--checkpoint /nonexistent/model", "/nonexistent/model"),
    ],
)
def test_a_mistake_without_a_checkpoint_is_one_line(arguments: str, word: str, cli: Cli) -> None:
    assert_one_line(cli(*arguments.split()), word)


def test_no_chat_template_is_one_line(tmp_path: Path, cli: Cli) -> None:
    directory = tiny_checkpoint.write(tmp_path, template=None)
    for option in ("--chat", "--interactive"):
        assert_one_line(cli("--checkpoint", directory, option), str(directory), "no chat template")


def test_a_prompt_that_is_no_unicode_is_one_line(tiny: Path, cli: Cli) -> None:
    assert_one_line(cli("--checkpoint", tiny, "--prompt", "a\udcffb"), "surrogate")


def test_no_default_checkpoint_says_how_to_get_it(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert_one_line(cli("--prompt", "x"), "checkpoints/SmolLM2-135M-Instruct", "scripts/demo.sh")


def test_what_does_not_fit_into_memory_is_refused_with_the_figures(
    tiny: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "free_memory", lambda device: 300_000)
    loads = []
    monkeypatch.setattr(generate, "load_weights", lambda *rest, **more: loads.append(rest))
    weights = 4 * sum(tensor.numel() for tensor in tiny_checkpoint.weights(tiny_checkpoint.CONFIG).values())
    cache = 4 * 2 * 2 * 2 * 12 * 640  # bytes, keys and values, layers, heads, head_dim, slots
    figures = [f"{amount / 1e9:.2f} GB" for amount in (weights, cache)]
    shown = cli("--checkpoint", tiny, "--max-seq-len", 512)
    assert_one_line(shown, f"weights of {figures[0]} and a cache of {figures[1]} do not fit: cpu has 0.00 GB free")
    assert not loads, "before anything is loaded"
    assert_one_line(cli("--random", "llama-3.1-8b"), "weights of 16.06 GB and a cache of")


def test_a_failure_of_the_run_is_one_line_and_status_1(tiny: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*rest: Any, **more: Any) -> None:
        raise RuntimeError("the device\n  is gone")

    monkeypatch.setattr(generate.Generator, "start", failing)
    shown = cli("--checkpoint", tiny, "--prompt", "x")
    assert (shown.status, shown.out, shown.err) == (1, "", "error: the device is gone\n")


def test_logits_that_overflow_are_a_clear_error_and_not_endless_text(tmp_path: Path, cli: Cli) -> None:
    directory = tiny_checkpoint.write(tmp_path, torch.float16)
    held = tiny_checkpoint.weights(tiny_checkpoint.CONFIG, torch.float16)
    held["model.layers.1.mlp.down_proj.weight"].fill_(6e4)
    tiny_checkpoint.save_file(held, directory / "model.safetensors")
    shown = cli("--checkpoint", directory, "--prompt", "Hello", "--max-new-tokens", 20)
    assert shown.status == 1 and len(shown.out) < 20
    assert "error: the logits of row 0 are not numbers" in shown.err and "float16" in shown.err
    assert cli("--checkpoint", directory, "--prompt", "Hello", "--dtype", "fp32", "--max-new-tokens", 2).status == 0


@pytest.mark.parametrize("arguments", [["--max-new-tokens", "0"], ["--checkpoint", "/nonexistent"]])
def test_a_mistake_in_a_process_of_its_own(arguments: list[str], root: Path) -> None:
    shown = subprocess.run([sys.executable, "generate.py", *arguments], cwd=root, capture_output=True, text=True)
    assert_one_line(Result(shown.returncode, shown.stdout, shown.stderr))


# --- The command line: a conversation


def test_a_piped_conversation_answers_each_line_and_ends_with_its_input(
    tiny: Path, llm: TextGenerator, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = tmp_path / "lines"
    lines.write_bytes(b"Hello\n\n  \nAnd?\r\n" + b"x" * 600 + b"\nBye")
    with lines.open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        shown = cli("--checkpoint", tiny, "--interactive", "--seed", 4, "--max-new-tokens", 5)
    conversation = llm.chat()
    expected = []
    for turn, text in ((0, "Hello"), (1, "And?"), (3, "Bye")):
        params = SamplingParams(seed=4 + turn)
        expected.append("".join(conversation.send(text, params, max_new_tokens=5)))
    assert shown.status == 0 and shown.out == "".join(f"{answer}\n" for answer in expected)
    assert shown.err.count("> ") == 7 and shown.err.count("error: the prompt has") == 1
    assert "<|im_" not in shown.out + shown.err


def test_ctrl_c_ends_an_answer_and_ctrl_d_leaves(tmp_path: Path, root: Path) -> None:
    """At a real terminal: an answer broken off, Ctrl-C at the prompt, another answer, the end of the input."""
    directory = tiny_checkpoint.write(tmp_path, max_position_embeddings=100_000)
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "generate.py", "--checkpoint", directory, "--interactive", "--seed", "4", "--ignore-eos",
         "--max-new-tokens", "90000", "--max-seq-len", "99000", "--device", "cpu"],
        cwd=root, stdin=slave, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # Ctrl-C there is a signal here
    )  # fmt: skip
    os.close(slave)
    assert process.stdout is not None and process.stderr is not None

    def part(pipe: io.BufferedReader) -> bytes:
        assert select.select([pipe], [], [], 60)[0], "nothing came"
        return os.read(pipe.fileno(), 1 << 16)

    def await_prompt() -> None:
        seen = b""
        while b"> " not in seen:
            latest = part(process.stderr)
            assert latest, seen
            seen += latest
        while select.select([process.stdout], [], [], 0)[0]:
            part(process.stdout)  # the rest of an answer is no sign of the next

    try:
        await_prompt()
        for text in (b"Hello\n", b"half a li", b"", b"Again\n"):
            os.write(master, text)
            if text.endswith(b"\n"):
                assert part(process.stdout)
            os.write(master, b"\x03")
            await_prompt()
        os.write(master, b"\x04")
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0 and b"Traceback" not in err
    finally:
        process.kill()
        os.close(master)


def test_without_a_cxx_compiler_compilation_ends_in_one_line(tiny: Path, root: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "generate.py", "--checkpoint", tiny, "--prompt", "x", "--compile", "--device", "cpu"],
        cwd=root, capture_output=True, text=True, timeout=120,
        env=os.environ | {"CXX": "/nowhere/g++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 1 and done.stdout == ""
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "No working C++ compiler" in errors[0] and "Traceback" not in done.stderr


def test_ctrl_c_without_a_conversation_ends_the_program(tiny: Path, root: Path) -> None:
    # A shell starts what it runs in the background with the signal ignored, and a child inherits that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [sys.executable, "generate.py", "--checkpoint", tiny, "--prompt", "x", "--num-samples", "10000", "--device",
         "cpu"],
        cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    signal.signal(signal.SIGINT, before)
    assert process.stdout is not None
    os.read(process.stdout.fileno(), 1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and b"Traceback" not in err

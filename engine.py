"""Token ids in, token ids out: prefill, the decode loop, compilation, and the proof that graphs ran.

Owns the compiled functions, the caches and the rows' state of one model. Knows nothing of text, files or command lines.

Prefill puts all prompt ids but the last into the cache; the last one is the first decode step's input, so that sampling
exists in the decode step alone. On a GPU the host launches step n before it reads the tokens of step n-1, and never
waits for the device otherwise.
"""

import gc
import inspect
import math
import os
import random
import re
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import fused
from attention import CacheAttention, FlexAttention, ReducedAttention, SlicedAttention
from decoding import EOS_CAPACITY, NO_TOKEN, RING, DecodeState, DecodeStep
from model import Block, Linear, ModelConfig, Transformer, rotary_frequencies
from profiling import CompilationFacts, GraphProof, GraphWatch
from sampling import INVALID

COMPILE_MODES = ("reduce-overhead", "default", "max-autotune", "max-autotune-no-cudagraphs")
KERNELS = ("auto", "inductor", "triton")
PREFILL_CHUNKS = (16, 128, 512, 2048)  # sizes of compiled prefill: each compiles once
DEFAULT_CAPACITY = 4096

Decoder = Literal["eager", "compiled", "fused"]
DECODERS: dict[Decoder, dict[str, Any]] = {  # the settings of a Generator that ask for each
    "eager": {"compile": False},
    "compiled": {"compile": True, "kernels": "inductor"},
    "fused": {"compile": True, "kernels": "triton"},
}
FinishReason = Literal["eos", "stop", "length"]


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is drawn; the defaults are the project's."""

    temperature: float = 0.8  # 0: the most probable token, exactly
    top_k: int = 200  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    repetition_penalty: float = 1.0  # 1: off
    seed: int | None = None  # None: a random one, which the completion reports

    def __post_init__(self) -> None:
        def require(condition: bool, message: str) -> None:
            if not condition:
                raise ValueError(message)

        require(0 <= self.temperature < math.inf, f"temperature must be 0 or more, not {self.temperature}")
        require(self.top_k >= 0, f"top-k must be 0 (off) or more, not {self.top_k}")
        require(0 < self.top_p <= 1, f"top-p must be above 0 and at most 1, not {self.top_p}")
        require(0 <= self.min_p <= 1, f"min-p must lie between 0 and 1, not {self.min_p}")
        require(
            0.01 <= self.repetition_penalty <= 100,  # within the range of every precision
            f"repetition penalty must lie between 0.01 and 100, not {self.repetition_penalty}",
        )
        require(self.seed is None or -(1 << 63) <= self.seed < 1 << 63, f"seed must fit in 64 bits, not {self.seed}")

    def with_seed(self) -> "SamplingParams":
        """The same with a seed: its own, or a random one."""
        return self if self.seed is not None else replace(self, seed=random.SystemRandom().getrandbits(32))

    @property
    def sampler(self) -> str:
        if self.top_p < 1 or self.repetition_penalty != 1:
            return "full"
        return "top_k" if self.temperature > 0 else "greedy"


DEFAULT_SAMPLING = SamplingParams()


@dataclass
class Completion:
    """One row's outcome. Times in seconds, without compilation; rates in tokens per second."""

    prompt_tokens: int
    seed: int
    tokens: list[int] = field(default_factory=list)  # new ones, without the EOS that ended them
    finish_reason: FinishReason | None = None
    time_to_first_token_s: float | None = None  # prefill and the first step
    prefill_tok_per_s: float | None = None  # prompt tokens, but those still cached, over the time to the first token
    decode_tok_per_s: float | None = None  # decode steps only; None below two new tokens

    @property
    def new_tokens(self) -> int:
        return len(self.tokens)


class Generator:
    """A model ready to generate: `batch` rows of at most `max_seq_len` positions each.

    compile: torch.compile for the decode step; None: where there is CUDA. kernels: "inductor", "triton" (this
    project's) or "auto". compile_prefill: also prefill, once per chunk size. allow_no_graphs: a run whose CUDA
    graphs were skipped is reported and not refused. rotary_length: the longest that a conversation may become, for
    frequencies that depend on it; None: chosen for each prompt. project_settings: False leaves Inductor as the mode
    sets it, and products to the libraries. backend: of torch.compile; any but Inductor's is for tests. note: receives a
    line now and then (compilation takes a while).

    Raises ValueError for settings that cannot be served, RuntimeError when graphs were asked for and did not run.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        batch: int = 1,
        max_seq_len: int | None = None,
        eos_token_ids: Sequence[int] = (),
        compile: bool | None = None,
        kernels: str = "auto",
        compile_mode: str = "reduce-overhead",
        compile_prefill: bool = False,
        allow_no_graphs: bool = False,
        rotary_length: int | None = None,
        project_settings: bool = True,
        backend: str = "inductor",
        note: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
    ) -> None:
        self.model = model
        self.device = model.embed_tokens.weight.device
        self.batch = batch
        limit = most_positions(model.config)
        self.capacity = min(limit, DEFAULT_CAPACITY) if max_seq_len is None else max_seq_len
        self.eos_token_ids = tuple(eos_token_ids)
        self._note = note
        self._allow_no_graphs = allow_no_graphs
        self.compile_s = 0.0  # warm-up of everything compiled
        self.record_s = 0.0  # the part of it after each first call: recording, and a replay
        self.proof = GraphProof("none")
        if batch < 1 or self.capacity < 1:
            raise ValueError(f"batch and max-seq-len must be 1 or more, not {batch} and {self.capacity}")
        if self.capacity > limit:
            raise ValueError(f"max-seq-len {self.capacity}: the model knows {limit} positions")
        if compile_mode not in COMPILE_MODES:
            raise ValueError(f"unknown compile mode {compile_mode!r}: one of {', '.join(COMPILE_MODES)}")
        if kernels not in KERNELS:
            raise ValueError(f"unknown kernels {kernels!r}: one of {', '.join(KERNELS)}")
        if len(self.eos_token_ids) > EOS_CAPACITY:
            raise ValueError(f"{len(self.eos_token_ids)} EOS ids: at most {EOS_CAPACITY} are supported")
        compiled = self.device.type == "cuda" if compile is None else compile
        if compiled:
            _import_compiler()
        with _pinned_modes():
            model.allocate(batch, self.capacity, rotary_length)
            self.state = DecodeState(batch, model.config.vocab_size, self.device)
            self.decoder: Decoder = self._choose_decoder(kernels) if compiled else "eager"
            self._step: nn.Module = (
                fused.FusedStep(model, self.state) if self.decoder == "fused" else DecodeStep(model, self.state)
            )
        self.compile_mode = compile_mode if compiled else None
        self._backend = backend
        self.options = None
        if compiled and backend == "inductor":
            self.options = inductor_options(self.device, compile_mode, project_settings)
        self._compiled_steps: dict[str, Callable[[str, Tensor | None], None]] = {}
        self._compiled_prefills: dict[int, Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]] = {}
        self._drop_compiled = weakref.finalize(self, _drop, self._compiled_steps, self._compiled_prefills)
        self._drop_compiled.atexit = False
        self._compiles_prefill = compiled and compile_prefill
        self._choose_forms(compiled, project_settings)
        self._captures = compiled and self.device.type == "cuda" and captures_graphs(compile_mode)
        self._watch = GraphWatch(self.device, expect_graphs=self._captures)
        self._reader = _TokenReader(self.state, self.device)
        self._rotary_length = rotary_length
        self._cached: list[list[int]] = [[] for _ in range(batch)]  # ids whose keys and values each row holds
        self._lock, self._process, self._thread = threading.Lock(), os.getpid(), threading.get_ident()
        self._cache = model.layers[0].self_attn.cache.k  # tells whether the model's caches are still this Generator's
        self._prefilled = False  # whether anything has been
        self._begun = 0  # generations so far; only the last may go on
        self._closed = False

    def _choose_decoder(self, kernels: str) -> Decoder:
        if kernels == "inductor":
            return "compiled"
        reason = fused.unsupported(self.model, self.state, self.device)
        if reason is None:
            return "fused"
        if kernels == "triton":
            raise ValueError(f"kernels triton: {reason}")
        if self.device.type == "cuda":
            self._note(f"kernels: inductor, since triton's do not serve this: {reason}")
        return "compiled"

    def _choose_forms(self, compiled: bool, project_settings: bool) -> None:
        """Swap in the forms that Inductor compiles well, or the plain ones, since another Generator may have had the
        model before; the numbers stay the same up to rounding."""
        forms: dict[str, type[CacheAttention]] = {"cuda": FlexAttention, "cpu": ReducedAttention} if compiled else {}
        tuned = compiled and project_settings
        self.model.attention = forms.get(self.device.type, SlicedAttention)()
        # One block is compiled for all alike, and runs as fast: SmolLM2's step compiles in 17 s instead of 75 on CPU,
        # Llama 3.1 8B's in 74 s instead of 130 on an H200.
        self.model.run_block = torch.compiler.nested_compile_region(Block.__call__) if tuned else Block.__call__
        for module in self.model.modules():
            if isinstance(module, Linear):
                module.as_reduction = tuned

    # --- Prefill

    def prefill(self, ids: Sequence[int], row: int = 0, start: int = 0) -> None:
        """Put the keys and values of ids into the row's cache from position `start` on. Does not wait for the
        device."""
        with _pinned_modes():
            rows = None if self.batch == 1 else torch.tensor([row], device=self.device)
            self._prefilled = True
            del self._cached[row][start:]  # first: an interruption must not leave ids that are overwritten
            done = 0
            while done < len(ids):
                size = self._chunk(len(ids) - done)
                chunk = list(ids[done : done + size])
                self._prefill_chunk(chunk, size, start + done, rows)
                self._cached[row] += chunk
                done += len(chunk)

    def _chunk(self, remaining: int) -> int:
        if not self._compiles_prefill:
            return min(remaining, PREFILL_CHUNKS[-1])
        larger = [size for size in PREFILL_CHUNKS if size >= remaining]
        smaller = [size for size in PREFILL_CHUNKS if size <= remaining]
        # One padded chunk, unless padding would be the larger part of it.
        return larger[0] if larger and (not smaller or 2 * remaining > larger[0]) else smaller[-1]

    def _prefill_chunk(self, chunk: list[int], size: int, start: int, rows: Tensor | None) -> None:
        padded = chunk + [0] * (size - len(chunk))
        # Padding past the end goes to the scratch slot; before the end it is overwritten before anything can see it.
        positions = [min(position, self.capacity) for position in range(start, start + size)]
        inputs = torch.tensor([padded, positions]).to(self.device, non_blocking=True).unsqueeze(1)
        if self._compiles_prefill:
            self._compiled_prefill(size)(inputs[0], inputs[1], rows, self._slots_in_use(start + size))
        else:
            self.model(inputs[0], inputs[1], rows, start + size)

    def _compiled_prefill(self, size: int) -> Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]:
        if size not in self._compiled_prefills:
            model = self.model

            def prefill(tokens: Tensor, positions: Tensor, rows: Tensor | None, used: Tensor | None) -> Tensor:
                # Returned, though of no use: Inductor drops a block's call that nothing comes of, writes and all.
                return model(tokens, positions, rows, None if used is None else used.shape[0])

            scratch = torch.full((1, size), self.capacity, device=self.device)
            rows = None if self.batch == 1 else torch.zeros(1, dtype=torch.int64, device=self.device)
            inputs = (torch.zeros_like(scratch), scratch, rows, self._slots_in_use(size))
            self._compiled_prefills[size] = self._compile(f"prefill of {size} tokens", prefill, *inputs)
        return self._compiled_prefills[size]

    # --- Decode steps

    def warm_up(self, params: SamplingParams) -> None:
        """Compile and record the step that these settings need, if that has not happened yet."""
        sampler = params.sampler
        if self.device.type == "cuda" and not (self._prefilled or self._compiles_prefill):
            # The libraries' first use takes a second: it belongs here, and not in the first prompt's time.
            self.prefill([0, 0])
            self.synchronize()
            self._cached[0].clear()
        if self.decoder == "eager" or sampler in self._compiled_steps:
            return
        module = self._step

        def step(sampler: str, used: Tensor | None) -> None:
            module(sampler, None if used is None else used.shape[0])

        with _pinned_modes():
            self.state.done.fill_(True)  # finished rows write to the scratch slot alone
            inputs = (sampler, self._slots_in_use(2))
            self._compiled_steps[sampler] = self._compile(f"{self.decoder} decode step ({sampler})", step, *inputs)

    def _slots_in_use(self, count: int) -> Tensor | None:
        """What tells compiled functions on CPU how far the caches are filled: a tensor of that size, since a compiler
        takes sizes, not numbers, as symbols. A captured graph has one size for all; there the device knows the
        positions."""
        if self.device.type != "cpu":
            return None
        used = torch.empty(max(min(count, self.capacity), 2))  # a size of 1 would be compiled apart
        torch._dynamo.mark_dynamic(used, 0)
        return used

    def _compile(self, what: str, function: Callable[..., Any], *inputs: Any) -> Callable[..., Any]:
        """The function compiled, and called until it is steady. Raises RuntimeError where that fails."""
        compiled = self._wrapped(function)
        self._warm(what, lambda: compiled(*inputs))
        if self.options and self.options.get("triton.enable_pdl") and (kernels := unawaiting_kernels()):
            self._note(f"{kernels[0]} waits for no other kernel: compiling without programmatic dependent launch")
            self.options["triton.enable_pdl"] = False
            torch._dynamo.eval_frame.remove_from_cache(inspect.unwrap(compiled))
            return self._compile(what, function, *inputs)
        return compiled

    def _wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        # Dynamo keeps what it compiled by code object: a copy gives this Generator entries of its own, which neither
        # count against another's recompile limit nor outlive it.
        own = types.FunctionType(
            function.__code__.replace(), function.__globals__, function.__name__, None, function.__closure__
        )
        options = self.options and dict(self.options)  # torch.compile takes from what it is given
        return torch.compile(own, fullgraph=True, dynamic=False, backend=self._backend, options=options)

    def _warm(self, what: str, call: Callable[[], None]) -> None:
        self._note(f"compiling the {what}: seconds from the cache, up to a minute without ...")
        began = time.perf_counter()
        try:
            with _pinned_modes():
                call()  # compile and run
                self.synchronize()
                compiled = time.perf_counter()
                call()  # record
                call()  # replay
                self.synchronize()
        except torch._dynamo.exc.TorchDynamoException as error:
            raise RuntimeError(f"the {what} did not compile: {_in_a_line(error)}") from error
        now = time.perf_counter()
        took = now - began
        self.compile_s += took
        self.record_s += now - compiled
        self._note(f"compiled the {what} in {took:.1f} s")

    def begin(self, last: Sequence[int], positions: Sequence[int], params: SamplingParams) -> None:
        """Set every row's state: the id that its next step reads, and the position of that id. Rows beyond these are
        done. What the caches hold before these positions is the caller's matter."""
        state, rows = self.state, len(last)
        params = params.with_seed()
        with _pinned_modes():
            idle = self.batch - rows

            def put(name: str, values: Sequence[float]) -> None:
                buffer = getattr(state, name)
                buffer.copy_(torch.tensor([*values, *([0] * idle)], dtype=buffer.dtype), non_blocking=True)

            put("token", last)
            put("position", positions)
            put("done", [False] * rows)
            put("limit", [self.capacity] * rows)
            put("temperature", [params.temperature] * rows)
            vocab = self.model.config.vocab_size
            put("top_k", [min(params.top_k or vocab, vocab)] * rows)
            put("top_p", [params.top_p] * rows)
            put("min_p", [params.min_p] * rows)
            put("penalty", [params.repetition_penalty] * rows)
            put("seed", [params.seed or 0] * rows)
            state.done[rows:] = True
            state.eos.fill_(NO_TOKEN)
            state.count.zero_()
            state.seen.zero_()
        self._positions = list(positions)
        self._sampler = params.sampler

    def step(self) -> None:
        """Launch one decode step for all rows."""
        with _pinned_modes():
            self._launch()

    def _launch(self) -> None:
        self._require_caches()  # nothing else notices: the compiled step takes the modules as they were
        in_use = max(self._positions) + 1
        if self.decoder == "eager":
            self._step(self._sampler, in_use)
        else:
            self._compiled_steps[self._sampler](self._sampler, self._slots_in_use(in_use))
        self._positions = [position + 1 for position in self._positions]

    def run_steps(self, steps: int) -> float:
        """Launch decode steps without reading a token; -> seconds, from an idle device to an idle device."""
        self.synchronize()
        with _pinned_modes(), hot_loop(self.decoder != "eager"):
            self._begin_proof()
            began = time.perf_counter()
            for _ in range(steps):
                self._launch()
            self.synchronize()
            took = time.perf_counter() - began
            self._prove(steps)
        return took

    def _begin_proof(self) -> None:
        """Begin a watched segment of steps."""
        if self.decoder != "eager":
            self._watch.start(inspect.unwrap(self._compiled_steps[self._sampler]))

    def _prove(self, steps: int) -> None:
        """End it, and refuse what did not run as promised."""
        if self.decoder == "eager" or not steps:  # nothing was promised; what other threads compile is their matter
            self.proof = GraphProof("none")
            return
        self.proof = self._watch.stop(steps)
        if self.proof.failed and not self._allow_no_graphs:
            raise RuntimeError(f"the compiled step did not run as promised: {'; '.join(self.proof.reasons)}")

    @property
    def graphs(self) -> str:
        """Whether graphs ran in the last segment: verified, none or unverified."""
        return self.proof.status

    def compilation(self) -> CompilationFacts:
        """What the compiler did in this process since this Generator was made."""
        return self._watch.compilation()

    def synchronize(self) -> None:
        """Wait until the device has done all that was asked of it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()

    # --- Whole generations

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams = DEFAULT_SAMPLING,
        *,
        max_new_tokens: int,
        ignore_eos: bool = False,
        reuse: bool = False,
    ) -> "Run":
        """Prefill the prompts and return the generation, to be iterated. reuse: keep what a row's cache already
        holds of its prompt (the turns of a conversation). Raises ValueError for prompts that cannot be served."""
        if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise ValueError(f"max-new-tokens must be a whole number, 1 or more, not {max_new_tokens}")
        with self._at_work():
            self._check(prompts)
            return self._start(prompts, params.with_seed(), max_new_tokens, ignore_eos, reuse)

    def _check(self, prompts: Sequence[Sequence[int]]) -> None:
        """Refuse what cannot be prefilled."""
        if not 1 <= len(prompts) <= self.batch:
            raise ValueError(f"{len(prompts)} prompts: this generator serves 1 to {self.batch}")
        vocab = self.model.config.vocab_size
        for prompt in prompts:
            if not prompt:
                raise ValueError("the prompt has no tokens")
            if len(prompt) > self.capacity:
                raise ValueError(f"the prompt has {len(prompt)} tokens, the context {self.capacity}")
            if not 0 <= min(prompt) <= max(prompt) < vocab:
                raise ValueError(f"a prompt id lies outside the vocabulary of {vocab}")

    def _start(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        max_new_tokens: int,
        ignore_eos: bool,
        reuse: bool,
    ) -> "Run":
        self._begun += 1
        self.warm_up(params)
        if self._compiles_prefill:
            for prompt in prompts:
                self._warm_prefills(len(prompt) - 1)
        began = time.perf_counter()
        kepts = [_common_prefix(self._cached[row], prompt[:-1]) if reuse else 0 for row, prompt in enumerate(prompts)]
        if self.model.config.length_dependent_rotary and self._rotary_length is None and not any(kepts):
            self._fill_rotary([len(prompt) for prompt in prompts])
        for row, (prompt, kept) in enumerate(zip(prompts, kepts, strict=True)):
            self.prefill(prompt[kept:-1], row, kept)
        self.begin([prompt[-1] for prompt in prompts], [len(prompt) - 1 for prompt in prompts], params)
        with _pinned_modes():
            limits = [min(len(prompt) - 1 + max_new_tokens, self.capacity) for prompt in prompts]
            self.state.limit[: len(prompts)] = torch.tensor(limits).to(self.device)
            if not ignore_eos and self.eos_token_ids:
                self.state.eos[: len(self.eos_token_ids)] = torch.tensor(self.eos_token_ids).to(self.device)
            if params.sampler == "full":
                for row, prompt in enumerate(prompts):
                    self.state.seen[row, torch.tensor(prompt, device=self.device)] = True
        ends = frozenset(() if ignore_eos else self.eos_token_ids)
        return Run(self, prompts, kepts, params, limits, ends, began)

    def _fill_rotary(self, lengths: list[int]) -> None:
        """Choose the rotary frequencies that prompts of these lengths ask for."""
        config = self.model.config
        frequencies = [rotary_frequencies(config, length)[0] for length in lengths]
        if any(not torch.equal(frequencies[0], other) for other in frequencies[1:]):
            raise ValueError(
                f"prompts of {min(lengths)} and of {max(lengths)} tokens need different rotary frequencies: "
                "run them one by one, or set max-seq-len"
            )
        with _pinned_modes():
            self.model.rope.fill(config, max(lengths))

    @contextmanager
    def _at_work(self, generation: int | None = None) -> Iterator[None]:
        """One caller at a time, where this Generator can work: for a new generation, or for that one to go on."""
        if self._closed:
            raise RuntimeError("this Generator is closed")
        if os.getpid() != self._process:
            raise RuntimeError("this Generator was made before the process forked: make one in the new process")
        if self._captures and threading.get_ident() != self._thread:
            raise RuntimeError("CUDA graphs belong to a thread: use this Generator in the one that made it")
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("this Generator is at work in another thread")
        try:
            self._require_caches()
            if generation is not None and generation != self._begun:
                raise RuntimeError("another generation has begun on this Generator since")
            yield
        finally:
            self._lock.release()

    def _require_caches(self) -> None:
        if self.model.layers[0].self_attn.cache.k is not self._cache:
            raise RuntimeError("another Generator has been made of this model since")

    def _forget(self) -> None:
        """Clear the caches: a masked slot counts for nothing, but nothing times NaN is NaN."""
        for block in self.model.blocks():
            block.self_attn.cache.k.zero_()
            block.self_attn.cache.v.zero_()
        self._cached = [[] for _ in range(self.batch)]

    def _warm_prefills(self, length: int) -> None:
        while length > 0:
            size = self._chunk(length)
            self._compiled_prefill(size)
            length -= size

    def generate_ids(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        params: SamplingParams = DEFAULT_SAMPLING,
        ignore_eos: bool = False,
        on_token: Callable[[int, int], None] | None = None,
    ) -> list[Completion]:
        """Generate for every prompt at once; on_token(row, id) is called as tokens arrive."""
        run = self.start(prompts, params, max_new_tokens=max_new_tokens, ignore_eos=ignore_eos)
        for tokens in run:
            for row, token in enumerate(tokens):
                if token is not None and on_token is not None:
                    on_token(row, token)
        return run.completions

    # --- Size, and the end

    def bytes_per_step(self, position: int) -> int:
        """Bytes that a decode step at this position must move: weights once (the head included, of the embedding
        table the rows used), keys and values up to the position, logits."""
        config, table = self.model.config, self.model.embed_tokens.weight
        tensors = {tensor.data_ptr(): tensor for tensor in self.model.named_targets().values()}
        head = {tensor.data_ptr() for tensor in self.model.lm_head.parts(slice(None)).values()}
        if table.data_ptr() not in head:
            tensors.pop(table.data_ptr(), None)
        weights = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        embeddings = self.batch * config.hidden_size * table.element_size()
        per_slot = 2 * config.num_key_value_heads * config.head_dim * table.element_size()
        windows = [config.window(layer) or position + 1 for layer in range(config.num_hidden_layers)]
        cache = self.batch * per_slot * sum(min(position + 1, window) for window in windows)
        return weights + embeddings + cache + self.batch * config.vocab_size * 4

    def close(self) -> None:
        """Free weights, caches, compiled functions and graphs. The Generator is unusable afterwards."""
        self._closed = True
        self._watch.close()
        self._drop_compiled()
        for name in ("model", "state", "_step", "_reader", "_cache"):
            vars(self).pop(name, None)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            gc.collect()  # graphs and compiled functions hold each other
            torch.cuda.empty_cache()

    def __enter__(self) -> "Generator":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Run:
    """A generation under way. Iterating, once, launches steps and yields, per step, the id of every row or None where
    the row has ended; the EOS that ends a row is not yielded. `completions` fills up meanwhile."""

    def __init__(
        self,
        generator: Generator,
        prompts: Sequence[Sequence[int]],
        kepts: list[int],
        params: SamplingParams,
        limits: list[int],
        ends: frozenset[int],
        began: float,
    ) -> None:
        assert params.seed is not None
        self.completions = [Completion(len(prompt), params.seed) for prompt in prompts]
        self._generator, self._number, self._ends = generator, generator._begun, ends
        self._began = self._first = began
        self._iterated = False
        self._budgets = [limit - len(prompt) + 1 for limit, prompt in zip(limits, prompts, strict=True)]
        self._taken_in = [len(prompt) - kept for prompt, kept in zip(prompts, kepts, strict=True)]
        self._inputs = [prompt[-1] for prompt in prompts]  # what the step whose token comes next has read

    def stop(self, row: int) -> None:
        """End a row from outside (a stop string): its later tokens are dropped."""
        if self.completions[row].finish_reason is None:
            self.completions[row].finish_reason = "stop"

    @property
    def running(self) -> bool:
        return any(completion.finish_reason is None for completion in self.completions)

    def __iter__(self) -> Iterator[list[int | None]]:
        if self._iterated:
            raise RuntimeError("a run is iterated once")
        self._iterated = True
        generator = self._generator
        lag = 1 if generator.device.type == "cuda" else 0
        launched = read = 0
        with generator._at_work(self._number):
            generator._begin_proof()
        while self.running:
            with generator._at_work(self._number):
                while launched <= read + lag and launched < max(self._budgets):
                    generator.step()
                    generator._reader.launched(launched)
                    launched += 1
                ids = generator._reader.read(read)
                read += 1
                accepted = self._accept(ids, read, time.perf_counter())
            with generator._watch.aside():
                yield accepted
        with generator._at_work(self._number):
            generator.synchronize()
            generator._prove(launched)
            generator._begun += 1  # this one is over

    def _accept(self, ids: list[int], steps: int, now: float) -> list[int | None]:
        """Take in the ids of one step, the `steps`-th to be read."""
        self._first = now if steps == 1 else self._first
        accepted: list[int | None] = [None] * len(self.completions)
        for row, completion in enumerate(self.completions):
            if completion.finish_reason is not None:
                continue
            if ids[row] == INVALID:
                self._generator._forget()
                raise RuntimeError(
                    f"the logits of row {row} are not numbers after {completion.new_tokens} new tokens: "
                    f"an overflow of {self._generator.model.embed_tokens.weight.dtype}? (try --dtype bf16 or fp32)"
                )
            self._generator._cached[row].append(self._inputs[row])
            self._inputs[row] = ids[row]
            if ids[row] in self._ends:
                completion.finish_reason = "eos"
            else:
                accepted[row] = ids[row]
                completion.tokens.append(ids[row])
                if len(completion.tokens) == self._budgets[row]:
                    completion.finish_reason = "length"
            if steps == 1:
                completion.time_to_first_token_s = now - self._began
                completion.prefill_tok_per_s = self._taken_in[row] / (now - self._began)
            elif completion.new_tokens > 1:
                completion.decode_tok_per_s = (steps - 1) / (now - self._first)
        return accepted


class _TokenReader:
    """Brings the tokens of a step to the host without stopping the device: a copy from the ring to pinned memory, on a
    stream of its own, behind an event of the step."""

    def __init__(self, state: DecodeState, device: torch.device) -> None:
        self._state, self._device = state, device
        if device.type == "cuda":
            self._pinned = torch.empty(state.ring.shape, dtype=torch.int64, pin_memory=True)
            self._stream = torch.cuda.Stream(device)
            self._stepped = [torch.cuda.Event() for _ in range(RING)]
            self._copied = [torch.cuda.Event() for _ in range(RING)]

    def launched(self, step: int) -> None:
        if self._device.type != "cuda":
            return
        slot = step % RING
        self._stepped[slot].record()
        self._stream.wait_event(self._stepped[slot])
        with torch.cuda.stream(self._stream):
            self._pinned[slot].copy_(self._state.ring[slot], non_blocking=True)
            self._copied[slot].record()

    def read(self, step: int) -> list[int]:
        slot = step % RING
        if self._device.type != "cuda":
            return self._state.ring[slot].tolist()
        self._copied[slot].synchronize()
        return self._pinned[slot].tolist()


def most_positions(config: ModelConfig) -> int:
    """How many positions the model knows, as far as its rotary type stretches them."""
    known, rotary = config.max_position_embeddings, config.rotary
    factor = max(rotary.factor, 1.0) if rotary.rope_type in ("linear", "dynamic", "yarn") else 1.0
    if rotary.rope_type == "yarn" and rotary.original_max_position_embeddings:  # the stretch may be in `known` already
        return max(known, math.floor(rotary.original_max_position_embeddings * factor))
    return math.floor(known * factor)


def captures_graphs(compile_mode: str) -> bool:
    return compile_mode in ("reduce-overhead", "max-autotune")


def inductor_options(device: torch.device, compile_mode: str, project_settings: bool = True) -> dict[str, Any]:
    """Inductor's settings for one compiled function: the mode's own, and this project's with the reason for each.
    torch.compile takes either a mode or options, hence the mode is spelled out here."""
    options = dict(torch._inductor.list_mode_options(compile_mode))
    if not project_settings:
        return options
    # Checks at every step that no module has changed, and that every weight has its size, take up to a fifth of a small
    # model's time on CPU. A Generator sets its modules up before it compiles, and stops once another has the model.
    options["guard_filter_fn"] = torch.compiler.skip_guard_on_all_nn_modules_unsafe
    if device.type == "cpu":
        options["size_asserts"] = False
    elif device.type == "cuda":
        options["coordinate_descent_tuning"] = True  # tile shapes of the GEMV loops
        if torch.cuda.get_device_capability(device) >= (9, 0) and torch.version.hip is None:
            options["triton.enable_pdl"] = True  # a kernel starts while the one before drains
    return options


_GENERATED_KERNEL = re.compile(r"^(\w+) = async_compile\.triton\('\w+', '''(.*?)'''", re.MULTILINE | re.DOTALL)


def unawaiting_kernels() -> list[str]:
    """Names of the kernels that Inductor has generated in this process which start before the kernel before them has
    ended (programmatic dependent launch), and end without having waited for it.

    Inductor waits ahead of a kernel's first load, so a kernel that loads nothing never waits. Whoever comes next waits
    for that one alone, and may read what an earlier kernel has yet to write."""
    modules = torch._inductor.codecache.PyCodeCache.modules
    files = {Path(file) for module in modules if (file := getattr(module, "__file__", None))}
    texts = [file.read_text(encoding="utf-8") for file in sorted(files) if file.exists()]
    kernels = (match for text in texts for match in _GENERATED_KERNEL.finditer(text))
    return [match[1] for match in kernels if "'launch_pdl': True" in match[2] and "gdc_wait" not in match[2]]


@contextmanager
def _pinned_modes() -> Iterator[None]:
    """One grad mode for all that is compiled, whatever the caller's: a change of it would compile again."""
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextmanager
def hot_loop(compiled: bool) -> Iterator[None]:
    """While steps run, a recompilation is an error."""
    if not compiled:
        yield
        return
    with torch.compiler.set_stance("fail_on_recompile"):
        yield


def _drop(*compiled: dict[Any, Callable[..., Any]]) -> None:
    """Free what was compiled: Dynamo's table of code holds on to its own keys, and to graphs with them, until told."""
    for functions in compiled:
        for function in functions.values():
            torch._dynamo.eval_frame.remove_from_cache(inspect.unwrap(function))
        functions.clear()


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))


def _import_compiler() -> None:
    """torch's compiler makes its cache directory when it is imported."""
    try:
        import torch._inductor  # noqa: F401
    except OSError as error:
        raise RuntimeError(f"the compiler has no cache directory ({error}): set TORCHINDUCTOR_CACHE_DIR") from error


def _in_a_line(error: BaseException) -> str:
    """The beginning of the compiler's message, which goes on for pages; its first line often ends with a colon."""
    advice = ("Set TORCH", "For even more")
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith(advice)]
    return " ".join(lines[:2])[:300] or type(error).__name__

"""Prefill speed by prompt length, against the matrix rate.

A repetition puts one prompt of random ids into the cache and waits for the device; no token is drawn, so the head has
no part in it. The limit counts the multiplications that the layers need (causal attention: half a square) at the rate
that a large bf16 matrix product reaches on this device in the same run.
"""

import time
from dataclasses import replace

from bench import machine, rows, workload
from bench.bandwidth import matrix_rate
from bench.rows import Row, Spread, say
from engine import Generator
from generate import choose_device
from model import ModelConfig

COLUMNS = ("model", "precision", "decoder", "prompt", "prefill", "matrix_share", "compile", "memory")
LENGTHS = [16, 128, 512, 2048, 8192]


def floating_point_operations(config: ModelConfig, tokens: int) -> int:
    """Multiplications and additions of all layers for a prompt of so many tokens; without the head."""
    query, key_value = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    weights = config.hidden_size * (2 * query + 2 * key_value + 3 * config.intermediate_size)
    seen = tokens * (tokens + 1) // 2  # pairs of a query and a key that it may see
    return config.num_hidden_layers * (2 * weights * tokens + 4 * query * seen)


def measure(generator: Generator, tokens: int, repetitions: int, matrix_flop_per_s: float) -> Row:
    (prompt,) = workload.random_prompts(generator.model, 1, tokens)

    def once() -> float:
        generator.synchronize()
        began = time.perf_counter()
        generator.prefill(prompt)
        generator.synchronize()
        return time.perf_counter() - began

    once()  # compiles what this length needs
    once()
    seconds = Spread.of([once() for _ in range(repetitions)]).median
    operations = floating_point_operations(generator.model.config, tokens)
    return Row(
        decoder=generator.decoder,
        compile_mode=generator.compile_mode,
        batch=1,
        prompt_tokens=tokens,
        max_seq_len=generator.capacity,
        prefill_tok_per_s=tokens / seconds,
        compile_s=generator.compile_s or None,
        peak_memory_bytes=machine.peak_memory(generator.device),
        matrix_flop_per_s=matrix_flop_per_s,
        share_of_matrix_limit=operations / seconds / matrix_flop_per_s,
        **machine.gpu_facts(generator.device, once),
    )


def main() -> None:
    parser = workload.parser("prefill", __doc__)
    workload.add_decode_options(parser)
    workload.add_quantize_option(parser)
    group = parser.add_argument_group("measurement")
    group.add_argument("--decoders", type=workload.decoders, default=["eager", "compiled"], metavar="NAME,...")
    group.add_argument("--prompt-tokens", type=workload.listed(rows.whole(1)), default=LENGTHS, metavar="N,...")
    group.add_argument("--repetitions", type=rows.whole(1), default=7)
    options = parser.parse_args()
    device = choose_device(options.device)
    report = rows.Report(options, device, COLUMNS)
    for quantization in options.quantize:
        for decoder in options.decoders:
            matrix = matrix_rate(device).median
            say(f"bf16 matrix products at {matrix / 1e12:,.2f} TFLOP/s")
            subject = workload.load(options, quantization)
            machine.reset_peak_memory(device)  # building random weights, and quantising them, is no user's peak
            positions = max(options.prompt_tokens)
            settings = {"positions": positions, "compile_prefill": decoder != "eager"}
            with workload.generator(subject, decoder, options, **settings) as generator:
                for tokens in options.prompt_tokens:
                    limit = matrix * tokens / floating_point_operations(generator.model.config, tokens)
                    say(f"limit of {tokens} tokens: {limit:,.0f} tok/s")
                    row = measure(generator, tokens, options.repetitions, matrix)
                    report.add(replace(row, **subject.fields))
    report.finish()


if __name__ == "__main__":
    rows.run(main)

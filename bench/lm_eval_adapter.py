"""The model as EleutherAI's lm-evaluation-harness wants it: `python -m bench.lm_eval_adapter --tasks NAME,...`.

Likelihoods come from one forward pass each, generated text from eager decode steps. Tasks of one's own are YAML files
in the directory that `--include-path` names.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench import rows, workload
from bench.perplexity import one_pass
from engine import SamplingParams
from generate import DEFAULT_CHECKPOINT, Loaded, TextGenerator, load_model

try:
    import lm_eval
    from lm_eval.api.model import TemplateLM
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError:  # an extra; the command says how to install it
    lm_eval, TemplateLM = None, object

NEW_TOKENS = 256  # where a task does not say


class NearroofLM(TemplateLM):
    def __init__(self, loaded: Loaded, max_length: int) -> None:
        super().__init__()
        max_length = min(max_length, loaded.model.config.max_position_embeddings)
        self._llm = TextGenerator(loaded, compile=False, max_seq_len=max_length)
        self._tokenizer = loaded.tokenizer
        self._score = one_pass(loaded.model)
        self.max_length = max_length

    @property
    def eot_token_id(self) -> int:
        """Stands before a text that has no context."""
        for token in (self._tokenizer.bos_token_id, self._tokenizer.eos_token_id):
            if token is not None:
                return token
        raise ValueError("the tokenizer has neither a BOS nor an EOS token, so the first token cannot be predicted")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self._tokenizer.encode(string, bos=add_special_tokens)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """(texts, context ids, continuation ids) -> log-likelihood of the continuation, and whether greedy gives it."""
        answers = []
        for _texts, context, continuation in tqdm(requests, disable=disable_tqdm):
            inputs = [*context, *continuation][-self.max_length - 1 : -1]
            targets = continuation[-len(inputs) :]
            scores = self._score(inputs)[-len(targets) :].log_softmax(dim=-1).cpu()
            likelihood = sum(float(row[token]) for row, token in zip(scores, targets, strict=True))
            answers.append((likelihood, scores.argmax(dim=-1).tolist() == targets))
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        answers = []
        for request in tqdm(requests, disable=disable_tqdm):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
            pieces = [(("", ""), *make_disjoint_window(window)) for window in windows]
            answers.append(sum(likelihood for likelihood, _ in self._loglikelihood_tokens(pieces, disable_tqdm=True)))
        return answers

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        answers = []
        for request in tqdm(requests, disable=disable_tqdm):
            context, wishes = request.args
            until, new_tokens = wishes.get("until", []), wishes.get("max_gen_toks", NEW_TOKENS)
            params = SamplingParams(temperature=wishes.get("temperature", 0.0) if wishes.get("do_sample") else 0.0)
            prompt = self.tok_encode(context)[-max(self.max_length - new_tokens, 1) :]
            stop = [until] if isinstance(until, str) else until
            run = self._llm.run([prompt], params, max_new_tokens=new_tokens, stop=stop)
            answers.append("".join(piece for _row, piece in run))
        return answers


def main() -> None:
    parser = rows.parser("lm_eval_adapter", __doc__)
    parser.add_argument("--checkpoint", type=Path, default=DEFAULT_CHECKPOINT, metavar="DIR")
    parser.add_argument("--tasks", type=workload.listed(str), required=True, metavar="NAME,...")
    parser.add_argument("--include-path", metavar="DIR", help="tasks of your own")
    parser.add_argument("--limit", type=int, metavar="N", help="documents a task (all)")
    parser.add_argument("--max-seq-len", type=int, default=2048, metavar="N")
    parser.add_argument("--device", default="auto", help="cpu, cuda or mps (cuda where there is one, else cpu)")
    parser.add_argument("--dtype", default="auto", help="auto, bf16, fp16 or fp32 (auto: as stored)")
    options = parser.parse_args()
    if lm_eval is None:
        raise ValueError("lm-eval is not installed (pip install -e '.[eval]')")
    loaded = load_model(options.checkpoint, device=options.device, dtype=options.dtype)
    manager = TaskManager(include_path=options.include_path)
    model = NearroofLM(loaded, options.max_seq_len)
    done = lm_eval.simple_evaluate(model, tasks=options.tasks, task_manager=manager, limit=options.limit)
    print(json.dumps(done["results"]))


if __name__ == "__main__":
    rows.run(main)

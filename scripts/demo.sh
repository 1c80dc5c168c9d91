#!/usr/bin/env bash
# From a machine with Python 3.11 and nothing else to generated text. Run again, it generates within seconds.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

make_environment gguf
.venv/bin/python scripts/default_checkpoint.py
echo "Gravity is"
.venv/bin/python generate.py --prompt "Gravity is" --max-new-tokens 60 --temperature 0

cat <<'END'

Go on:
  source .venv/bin/activate
  python generate.py --prompt "Once upon a time"
  python generate.py --chat --prompt "What is the capital of France?"
  python generate.py --chat --interactive
  python generate.py --prompt "Gravity is" --profile profile
  python generate.py --help
  python scripts/download.py HuggingFaceTB/SmolLM2-1.7B-Instruct
END

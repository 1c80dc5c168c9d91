#!/usr/bin/env bash
# From a machine with Python 3.11 and nothing else to lint and all tests; those that need a GPU skip without one.
# Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

make_environment dev
.venv/bin/python scripts/default_checkpoint.py || echo "Without the default checkpoint, tests on it skip." >&2
.venv/bin/ruff check .
.venv/bin/python -m pytest "$@"

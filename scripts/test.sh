#!/usr/bin/env bash
# Style, layers, types and tests. Arguments go to pytest: scripts/test.sh -k config -x
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

# Two test processes share the cores; threads inside each would only get in each other's way.
export OMP_NUM_THREADS=1

echo "== ruff" >&2
ruff check .
ruff format --check --quiet . || { echo "error: not formatted; run: ruff format ." >&2; exit 1; }
echo "== import-linter" >&2
lint-imports
echo "== pyright" >&2
pyright
echo "== pytest" >&2
python -m pytest -n 2 "$@"

#!/usr/bin/env bash
# Everything a change must pass. Arguments go on to pytest, for example: tools/test.sh -k schedule, tools/test.sh -m long
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

step() {
    printf '\n== %s\n' "$*"
    "$@"
}

printf '== tools/setup.sh\n'
bash tools/setup.sh
export PATH="$PWD/.venv/bin:$PATH"
step ruff check .
step ruff format --check .
step lint-imports
step mypy mindspore_bmpipe
step pytest -n 2 --dist worksteal -m "not long" "$@"
printf '\n== all passed\n'

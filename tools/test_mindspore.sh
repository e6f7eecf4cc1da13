#!/usr/bin/env bash
# Runs the tests that meet MindSpore itself under another version of it: tools/test_mindspore.sh 2.9.0
# The version is installed into .venv-VERSION beside .venv. Further arguments go on to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

version=${1:?usage: tools/test_mindspore.sh VERSION [pytest arguments]}
shift
bash tools/setup.sh
venv=.venv-$version
wanted=$(cat setup.cfg pyproject.toml | sha256sum)
if [[ ! -f $venv/.bmpipe-stamp || $(<"$venv/.bmpipe-stamp") != "$wanted" ]]; then
    printf 'setup: installing MindSpore %s into %s\n' "$version" "$venv"
    .venv/bin/python -m venv --clear "$venv"
    "$venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check "mindspore==$version" --editable '.[test]'
    printf '%s\n' "$wanted" >"$venv/.bmpipe-stamp"
fi
exec "$venv/bin/python" -m pytest -n 2 --dist worksteal -m "not long" -p no:cacheprovider \
    tests/test_private_names.py tests/test_context_hooks.py tests/test_context.py tests/test_context_preserve.py \
    tests/test_apply_cells.py tests/test_graph_trace.py tests/test_graph_units.py tests/test_cli.py "$@"

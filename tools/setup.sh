#!/usr/bin/env bash
# Creates .venv with the project (editable) and its test tools. Does nothing when neither has changed.
# BMPIPE_PYTHON names the interpreter for a .venv that does not exist yet.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv
stamp=$venv/.bmpipe-stamp

fail() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

# MindSpore publishes wheels for CPython up to 3.12.
supported() {
    "$1" -c 'import sys; sys.exit(not ((3, 10) <= sys.version_info[:2] <= (3, 12)))' 2>/dev/null
}

find_python() {
    if [[ -n ${BMPIPE_PYTHON:-} ]]; then
        command -v "$BMPIPE_PYTHON" >/dev/null || fail "BMPIPE_PYTHON=$BMPIPE_PYTHON is not an executable"
        supported "$BMPIPE_PYTHON" || fail "BMPIPE_PYTHON=$BMPIPE_PYTHON is not Python 3.10, 3.11 or 3.12"
        printf '%s\n' "$BMPIPE_PYTHON"
        return
    fi
    local candidate
    for candidate in python3.12 python3.11 python3.10 python3; do
        if command -v "$candidate" >/dev/null && supported "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    fail "no Python 3.10, 3.11 or 3.12 found; install one or name it in BMPIPE_PYTHON"
}

fingerprint() {
    {
        cat setup.cfg pyproject.toml
        "$venv/bin/python" -c 'import sys; print(sys.version, sys.prefix)'
    } | sha256sum | cut -d' ' -f1
}

if ! supported "$venv/bin/python"; then
    python=$(find_python)
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        fail "$python has no venv module; on Debian and Ubuntu: apt-get install python3-venv"
    printf 'setup: creating %s with %s\n' "$venv" "$("$python" --version)"
    "$python" -m venv --clear "$venv"
fi

wanted=$(fingerprint)
if [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; then
    exit 0
fi
printf 'setup: installing the project and its test tools into %s\n' "$venv"
"$venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check --editable '.[test]'
printf '%s\n' "$wanted" >"$stamp"

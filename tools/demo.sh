#!/usr/bin/env bash
# Plans a LLaMA 7B network for one server of eight Ascend 910B cards. No accelerator is needed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash tools/setup.sh
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
.venv/bin/bmpipe plan tools.examples.llama:factory --set size=7b --set sequence=4096 \
    -c configs/pipelines/llama_7b_910b.yaml "$@"

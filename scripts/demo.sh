#!/usr/bin/env bash
# The main job on this machine: three nodes, the built-in model and tasks. SEED and LOG_PATH may be set.
set -euo pipefail
unset CDPATH # an exported one would make `cd` find another project's scripts/, and its runs/demo be removed
unset -f cd rm dirname
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
[ -x .venv/bin/run ] || { echo "scripts/demo.sh: no .venv/bin/run in $PWD; type: make demo" >&2 && exit 2; }
log_path="${LOG_PATH:-runs/demo}"
if [ -z "${LOG_PATH:-}" ]; then rm -rf -- "$log_path"; fi
exec .venv/bin/run local --num-nodes 3 --rank-weights 2,1,1 --log-path "$log_path" rollout.seed="${SEED:-0}"

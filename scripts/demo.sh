#!/usr/bin/env bash
# The main job on this machine: three nodes, the built-in model and tasks. SEED and LOG_PATH may be set.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
log_path="${LOG_PATH:-runs/demo}"
if [ -z "${LOG_PATH:-}" ]; then rm -rf "$log_path"; fi
exec .venv/bin/run local --num-nodes 3 --rank-weights 2,1,1 --log-path "$log_path" rollout.seed="${SEED:-0}"

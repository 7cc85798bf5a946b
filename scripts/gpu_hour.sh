#!/usr/bin/env bash
# Measures a machine with one GPU, in nine minutes. It needs python 3.12, torch 2.11 and transformers 5.17 or newer:
#   scripts/gpu_hour.sh wheels DIR           elsewhere, with a network: what else is needed, into DIR
#   scripts/gpu_hour.sh [--wheels DIR] ...   there: installs it beside the checkout; the rest goes to gpu_hour.py
set -euo pipefail
unset CDPATH
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}"
if [ "${1:-}" = wheels ]; then
  mkdir -p "${2:?the directory}"
  get=("$python" -m pip download -q --dest "$2" --constraint constraints.txt --only-binary=:all: --python-version 3.12
    --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64)
  "${get[@]}" pydantic typer rich filelock watchdog aiohttp psutil pyyaml jinja2 nvidia-ml-py safetensors pytest pytest-timeout
  "${get[@]}" --no-deps peft accelerate # their torch is there
  large="$(find "$2" -name '*.whl' -size +64M)"
  [ -z "$large" ] || { echo "scripts/gpu_hour.sh: above 64 MiB: $large" >&2 && exit 1; }
  exit 0
fi
if [ "${1:-}" = --wheels ]; then
  "$python" -m pip install -q --no-index --no-deps --upgrade --target .gpu_hour "$2"/*.whl
  shift 2
fi
exec env PYTHONPATH="$PWD/.gpu_hour:${PYTHONPATH:-}" "$python" scripts/bench/gpu_hour.py "$@"

#!/usr/bin/env bash
# The command `run` of this checkout, from any directory; makes .venv first if need be.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
[ -e "$here/.venv/.installed" ] || make --silent -C "$here" install >&2
exec "$here/.venv/bin/run" "$@"

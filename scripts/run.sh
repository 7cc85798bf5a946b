#!/usr/bin/env bash
# The command `run` of this checkout, from any directory; makes .venv first if need be.
set -euo pipefail
unset CDPATH # `cd` would search there first, and print what it finds
unset -f cd dirname
here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
[ -x "$here/.venv/bin/run" ] || make --silent -C "$here" install >&2
exec "$here/.venv/bin/run" "$@"

#!/usr/bin/env bash
# Builds the documentation into site/; a broken link or an unknown name is an error.
# `scripts/docs.sh serve` shows it at http://127.0.0.1:8000 and follows your changes.
set -euo pipefail
cd "$(dirname "$0")/.."
[ "${1:-build}" != build ] || set -- build --strict
# An environment of its own: nothing of torch is needed, because the code is read and not run.
NO_MKDOCS_2_WARNING=1 exec uv run --isolated --only-group docs mkdocs "$@"

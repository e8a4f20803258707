#!/usr/bin/env bash
# Runs every test that needs a GPU and prints why any was skipped.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec "${PYTHON:-python3}" -m pytest -q -rs --timeout 600 tests/gpu "$@"

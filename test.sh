#!/usr/bin/env bash
# Every check: format, lint, types, tests with coverage, and Bazel where it is installed.
# Bazel builds every target and runs the tests tagged "bazel" again, in its own sandbox and with its own
# dependencies: a few of each folder, which shows that the BUILD files are right. The rest ran already.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source ./environment.sh
make_environment

stage() {
  local name="$1" begin=$SECONDS
  shift
  echo "== $name"
  "$@" || {
    echo "FAILED: $name ($((SECONDS - begin)) s)"
    exit 1
  }
  echo "-- $name: passed in $((SECONDS - begin)) s"
}

export JAX_PLATFORMS=cpu
stage format "$python" -m ruff format --check --no-cache .
stage lint "$python" -m ruff check --no-cache .
stage types "$python" -m mypy --no-error-summary
stage tests "$python" -m pytest -q --cov --cov-report=term-missing "$@"
if command -v bazel >/dev/null; then
  stage bazel env PATH="$PWD/.venv/bin:$PATH" bazel test //...
else
  echo "== bazel: not installed, so the BUILD files were not checked"
fi
echo "all checks passed"

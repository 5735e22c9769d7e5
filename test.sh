#!/usr/bin/env bash
# Every check: format, lint, types, tests, and the build. Where Bazel is installed it builds everything and
# runs the tests, but for those that pytest has run before it: the optimizers', whose coverage is measured,
# and those that read the whole source tree. Without Bazel pytest runs all of them. Arguments are Bazel's.
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
# Tests compile the same small programs over and over: they share what has been compiled. It is thrown away first, since a
# program of several devices that XLA has loaded, and not compiled, may stand still (docs/limits.md).
export JAX_COMPILATION_CACHE_DIR="$PWD/.venv/compilation_cache"
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1
rm -rf "$JAX_COMPILATION_CACHE_DIR"
mkdir -p "$JAX_COMPILATION_CACHE_DIR"
stage format "$python" -m ruff format --check --no-cache .
stage lint "$python" -m ruff check --no-cache .
stage types "$python" -m mypy --no-error-summary
if command -v bazel >/dev/null && [[ $PWD != *" "* ]]; then
  # By file: a file's tests share what is slow to make.
  stage tests "$python" -m pytest -q -n 2 --dist=loadfile --cov --cov-report=term-missing \
    tests/optimizers tests/architecture_test.py tests/docs_test.py tests/package_test.py tests/reference_test.py \
    --ignore=tests/optimizers/golden_test.py
  stage bazel env PATH="$PWD/.venv/bin:$PATH" bazel test \
    "--sandbox_writable_path=$JAX_COMPILATION_CACHE_DIR" --test_env=JAX_COMPILATION_CACHE_DIR \
    --test_env=JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS \
    --test_env=JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES \
    --test_tag_filters=-measured,-source_tree --test_summary=short "$@" //...
else
  echo "== bazel: not installed, or in a path with spaces, which it refuses; BUILD files not checked"
  stage tests "$python" -m pytest -q --cov --cov-report=term-missing
fi
echo "all checks passed"

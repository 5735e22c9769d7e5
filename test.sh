#!/usr/bin/env bash
# The checks: format, lint, types, and the tests, first those of the update rules. Of large tables a sample is drawn, and
# long tests are left out; --all runs everything, and measures coverage (some hours). Where Bazel is installed, it builds
# every target and runs the tests; otherwise pytest runs them. Other arguments are Bazel's.
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
  echo "-- $name: passed in $((SECONDS - begin)) s, $SECONDS s in all"
}

all=()
arguments=()
for argument in "$@"; do
  if [ "$argument" = --all ]; then all=(--all); else arguments+=("$argument"); fi
done

export JAX_PLATFORMS=cpu
# Tests compile the same small programs over and over. Their processes, and later runs of any checkout on the same kind of
# processor, share what has been compiled. What was not used for two weeks is removed.
processor="$(uname -m)-$({ grep -m1 -E '^(flags|Features)' /proc/cpuinfo || sysctl -n machdep.cpu; } 2>/dev/null | cksum | cut -d' ' -f1)"
export JAX_COMPILATION_CACHE_DIR="${XDG_CACHE_HOME:-$HOME/.cache}/xshard/compiled/$processor"
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1
mkdir -p "$JAX_COMPILATION_CACHE_DIR"
find "$JAX_COMPILATION_CACHE_DIR" -type f -atime +14 -delete

stage format "$python" -m ruff format --check --no-cache .
stage lint "$python" -m ruff check --no-cache .
stage types "$python" -m mypy --no-error-summary --cache-dir=.venv/mypy
"$python" -c 'import tests; print(f"rows of large tables are drawn by seed {tests.SAMPLE_SEED}:",
  f"XSHARD_SAMPLE_SEED={tests.SAMPLE_SEED} ./test.sh draws the same")'
if command -v bazel >/dev/null && [[ $PWD != *" "* ]]; then
  # More tests than cores: tests of pods wait, for one another and for time to pass.
  options=(
    '--local_cpu_resources=HOST_CPUS*1.5' '--jobs=HOST_CPUS*1.5'
    "--sandbox_writable_path=$JAX_COMPILATION_CACHE_DIR" --test_env=JAX_COMPILATION_CACHE_DIR
    --test_env=XSHARD_SAMPLE_SEED
    --test_env=JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS --test_env=JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES
    --test_summary=short ${all[@]+--test_arg=--all} ${arguments[@]+"${arguments[@]}"}
  )
  export PATH="$PWD/.venv/bin:$PATH"
  stage "tests of the rules" bazel test "${options[@]}" //tests:heart
  # Bazel does not repeat a test that has passed, and keeps its log.
  stage "all tests, and the build" bazel test "${options[@]}" //...
  logs=bazel-testlogs/
else
  echo "== bazel: not installed, or in a path with spaces, which it refuses; BUILD files not checked"
  # By file: a file's tests share what is slow to make.
  pytest=("$python" -m pytest -q -n 2 --dist=loadfile ${all[@]+--all})
  logs=.venv/logs
  stage "tests of the rules" "${pytest[@]}" --junitxml="$logs/rules.xml" tests/optimizers
  stage "all other tests" "${pytest[@]}" --junitxml="$logs/others.xml" tests --ignore=tests/optimizers
fi
"$python" -m tests.durations "$logs" .venv/durations.txt
if [ ${#all[@]} -gt 0 ]; then
  stage coverage "$python" -m pytest -q -n 2 --dist=loadfile --all --cov --cov-report=term-missing \
    tests/optimizers tests/collectives_test.py
fi
echo "all checks passed in $SECONDS s"

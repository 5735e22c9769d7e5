# Makes an environment, by default .venv, with the locked dependencies, and sets `python` to its interpreter. Sourced by
# run.sh, test.sh and .ci/run, from the repository's root.

fail() {
  echo "error: $*" >&2
  exit 1
}

find_python() {
  local candidate candidates=(python3.13 python3.12 python3.11 python3 python3.14)
  # One that is named is the one, or an error.
  [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
  for candidate in "${candidates[@]}"; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  candidate="${PYTHON:-python3}"
  fail "Python 3.11 or later is needed; $candidate is" \
    "$({ "$candidate" --version || echo "not there"; } 2>/dev/null). PYTHON=/path/to/python names another."
}

is_made() {
  [ -x "$python" ] && [ "$(cat "$environment/installed" 2>/dev/null)" = "$wanted" ]
}

make_environment() {
  environment="${1:-.venv}"
  # What the caller has activated or exported must not reach in here.
  unset PYTHONPATH PYTHONHOME PYTHONSAFEPATH VIRTUAL_ENV PIP_USER PIP_TARGET PIP_PREFIX
  python="$PWD/$environment/bin/python"
  wanted="$(cksum <requirements/lock.txt) $PWD"
  if is_made; then return; fi
  # One at a time, where there is flock: another terminal may be at the same.
  if command -v flock >/dev/null; then
    exec 9<environment.sh
    flock -n 9 || {
      echo "waiting for the other run.sh or test.sh that makes $environment"
      flock 9
    }
  fi
  is_made || install_dependencies
  exec 9<&-
}

install_dependencies() {
  local base
  base="$(find_python)" || exit 1
  echo "making $environment with $("$base" --version) and the locked dependencies: some minutes, once"
  rm -rf "$environment"
  "$base" -m venv "$environment" || {
    rm -rf "$environment"
    fail "$base has no working 'venv' module; on Debian and Ubuntu: apt-get install $(basename "$base")-venv"
  }
  "$python" -m pip install --quiet --disable-pip-version-check --require-hashes \
    -r requirements/lock.txt || fail "the dependencies could not be installed; the same command tries again"
  # Last, so that an installation that was cut off is made again.
  echo "$wanted" >"$environment/installed"
}

# Makes .venv with the locked dependencies, and sets `python` to its interpreter. Sourced by run.sh and
# test.sh, from the repository's root.

fail() {
  echo "error: $*" >&2
  exit 1
}

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.13 python3.12 python3.11 python3 python3.14; do
    if [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 &&
      "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  fail "Python 3.11 or later is needed; found $(python3 --version 2>&1). PYTHON=/path/to/python names one."
}

make_environment() {
  # What the caller has activated or exported must not reach in here.
  unset PYTHONPATH PYTHONHOME VIRTUAL_ENV
  python="$PWD/.venv/bin/python"
  local wanted stamp=.venv/installed base
  wanted="$(cksum <requirements_lock.txt) $PWD"
  if [ -x "$python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    return
  fi
  base="$(find_python)" || exit 1
  echo "making .venv with $("$base" --version) and the locked dependencies: some minutes, once"
  rm -rf .venv
  "$base" -m venv .venv || {
    rm -rf .venv
    fail "$base has no working 'venv' module; on Debian and Ubuntu: apt-get install python3-venv"
  }
  "$python" -m pip install --quiet --disable-pip-version-check --require-hashes \
    -r requirements_lock.txt || fail "the dependencies could not be installed; run it again to go on"
  # Last, so that an installation that was cut off is made again.
  echo "$wanted" >"$stamp"
}

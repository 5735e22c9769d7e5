#!/usr/bin/env bash
# Trains, or goes on training: ./run.sh [--config=configs/digits.py] [--workdir=DIR] [--config.key=value ...]
# By default the handwritten digits, on eight virtual CPU devices, into runs/digits or $XSHARD_WORKDIR.
set -euo pipefail
caller="$PWD"
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
source ./environment.sh
make_environment

# The path as the caller means it, seen from here.
from_caller() {
  if [[ $1 == /* || -z $1 || $caller == "$PWD" ]]; then printf '%s' "$1"; else printf '%s' "$caller/$1"; fi
}

config=configs/digits.py
workdir="$(from_caller "${XSHARD_WORKDIR:-}")"
devices=8
arguments=()
while [ $# -gt 0 ]; do
  case "$1" in
    --config | --workdir | --cpu_devices)
      [ $# -gt 1 ] || fail "$1 needs a value: $1=..."
      set -- "$1=$2" "${@:3}"
      continue
      ;;
    --config=*)
      config="${1#*=}"
      # Or one of this repository's, wherever the caller is.
      if [ -e "$(from_caller "$config")" ]; then config="$(from_caller "$config")"; fi
      ;;
    --workdir=*) workdir="$(from_caller "${1#*=}")" ;;
    --cpu_devices=*) devices="${1#*=}" ;;
    *) arguments+=("$1") ;;
  esac
  shift
done
exec "$python" -m xshard.main "--config=$config" "--workdir=${workdir:-runs/$(basename "$config" .py)}" \
  "--cpu_devices=$devices" ${arguments[@]+"${arguments[@]}"}

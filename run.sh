#!/usr/bin/env bash
# Trains, or goes on training: ./run.sh [--config=configs/digits.py] [--workdir=DIR] [--config.key=value ...]
# By default the handwritten digits, into runs/digits, on eight virtual CPU devices.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source ./environment.sh
make_environment

config=configs/digits.py
defaults=()
given=" $* "
for argument in "$@"; do
  case "$argument" in --config=*) config="${argument#--config=}" ;; esac
done
[[ $given == *" --config="* ]] || defaults+=("--config=$config")
[[ $given == *" --workdir"* ]] || defaults+=("--workdir=runs/$(basename "$config" .py)")
[[ $given == *" --cpu_devices"* ]] || defaults+=("--cpu_devices=8")
exec "$python" -m xshard.main "${defaults[@]}" "$@"

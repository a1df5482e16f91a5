#!/usr/bin/env bash
# A build beside an earlier one, in turns: hot path, memory of recorded runs, copies, shrink. A short table; ends with 1 where the new one is
# worse beyond noise, with 3 where the same command has to be given again to end the rounds.
#
#   tests/gpu/house.sh NEW OLD [OUT [ARGUMENT OF house.py ...]]     NEW and OLD hold `glake` and libgmlake.so; OUT is bench-results
#
# Below eight minutes a call. `house.sh NEW OLD OUT --device sim` tries it without a GPU. PYTHON chooses the interpreter.
set -uo pipefail
case ${1:-} in "" | -*) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 2 ;; esac
[ $# -ge 2 ] || { echo "usage: $0 NEW OLD [OUT [ARGUMENT OF house.py ...]]" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
exec "${PYTHON:-python3}" "$here/house.py" "$1" "$2" --out "${3:-bench-results}" "${@:4}"

#!/usr/bin/env bash
# Every check of copies that needs GPUs, in under 8 minutes, then a short table; ends with 1 if one failed.
#
#   tests/gpu/copies.sh DIR [OLD [OUT [NAME ...]]]
#
# DIR holds the release build: libgmlake.so, libglake_preload.so and lib_glake.so; OLD the libgmlake.so of a build to
# compare with, or is "-". NAME: kinds peers foreign nccl order sanitize; all where none is given. Each one's output is
# kept in OUT/NAME.log (bench-results). A part that outlasts its time is ended and failed. It needs two GPUs, torch, a C
# compiler (CC names it) and, for the last part, compute-sanitizer.
set -uo pipefail
case ${1:-} in "" | -*) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2 ;; esac
dir=$(realpath -m -- "$1")
old=${2:--}
out=${3:-bench-results}
here=$(cd "$(dirname "$0")" && pwd)
package=$(cd "$here/../../ffi/python" && pwd)
benches=$(cd "$here/../../benches/gpu" && pwd)
python=${PYTHON:-python3}
names=("${@:4}")
[ ${#names[@]} -gt 0 ] || names=(kinds peers foreign nccl order sanitize)

for file in libgmlake.so libglake_preload.so lib_glake.so; do
    [ -f "$dir/$file" ] && continue
    echo "$0: there is no $file in $dir: cargo build --release --workspace makes it" >&2
    exit 2
done
if [ "$old" != - ]; then
    [ -f "$old/libgmlake.so" ] || { echo "$0: there is no libgmlake.so in $old" >&2; exit 2; }
    old=$(realpath -- "$old")
fi
limit_of() { # seconds
    case $1 in
        kinds) echo 170 ;; peers) echo 20 ;; foreign) echo 80 ;;
        nccl) echo 100 ;; order) echo 45 ;; sanitize) echo 60 ;;
        *) echo "$0: $1 is none of kinds, peers, foreign, nccl, order, sanitize" >&2; return 1 ;; esac
}
for name in "${names[@]}"; do limit_of "$name" >/dev/null || exit 2; done

if [ ! -e /dev/nvidiactl ]; then echo "copies: SKIPPED: no NVIDIA GPU on this machine"; exit 0; fi
mkdir -p "$out" || exit 2
# This package and this build, whichever is installed.
export PYTHONPATH="$package${PYTHONPATH:+:$PYTHONPATH}"
cp "$dir/lib_glake.so" "$package/glake/_glake.abi3.so" || exit 2
export GLAKE_LIBRARY="$dir/libgmlake.so" PYTHONUNBUFFERED=1
sanitizer="compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9"

sanitize() {
    command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer: SKIPPED: it is not installed"; return 0; }
    local failed=0
    # shellcheck disable=SC2086 # a command and its options
    timeout 30 $sanitizer "$python" "$here/torch/shapes.py" || failed=1
    # Each memory that a relay could touch and must not.
    "$python" "$here/kinds.py" "$dir" --only malloc,async,vmm --most 4 --wrap "$sanitizer" || failed=1
    return $failed
}
part() {
    case $1 in
        kinds) "$python" "$here/kinds.py" "$dir" --quick --out "$out/kinds.jsonl" ;;
        peers) "$python" "$here/kinds.py" "$dir" --only peers,malloc --most 64 --shared-gpus ;;
        foreign)
            local with=()
            [ "$old" = - ] || with=(--old "$old")
            "$python" "$benches/foreign.py" "$dir" "${with[@]}" --rounds 3 --out "$out" ;;
        nccl) "$python" "$here/torch/nccl_threads.py" ;;
        order) "$python" "$here/torch/order.py" --steps 10000 ;;
        sanitize) sanitize ;;
    esac
}
if [ "${COPIES_PART:-}" ]; then part "$COPIES_PART"; exit; fi

rows=() failed=0
for name in "${names[@]}"; do
    limit=$(limit_of "$name")
    echo "== $name (at most $limit s)"
    begin=$SECONDS
    COPIES_PART=$name timeout --kill-after 10 "$limit" "$here/copies.sh" "$dir" "$old" "$out" 2>&1 | tee "$out/$name.log"
    code=${PIPESTATUS[0]}
    case $code in
        0) word=ok; grep -q '\bSKIPPED\b' "$out/$name.log" && word=SKIPPED ;;
        124 | 137) word=TIMEOUT ;;
        *) word=FAILED ;;
    esac
    case $code in 0) ;; *) failed=$((failed + 1)) ;; esac
    last=$(grep -vE '^=|^\s*$' "$out/$name.log" | tail -n 1 | cut -c 1-90)
    rows+=("$(printf '%-8s %-9s %4d s  %s' "$word" "$name" $((SECONDS - begin)) "$last")")
done

echo
echo "== all parts, $SECONDS s"
printf '%s\n' "${rows[@]}"
echo "copies: ${#names[@]} parts, $failed failed"
[ $failed -eq 0 ]

#!/usr/bin/env bash
# What more than two links show, in parts: copies, regions, threads with NCCL, FSDP2. Give the same command again until it says that nothing
# is left: a part that is done is not run twice.
#
#   benches/gpu/four.sh DIR [OUT [PART ...]]     DIR holds the release build, as bars.sh wants it; OUT is bench-results
#
# PART: kinds foreign beside copies graphs order sanitize regions threads fsdp eight; all of these where none is given, in this order. A call
# starts no part that may end later than SECONDS_LEFT (480) seconds after it began. Each part's output is OUT/four/PART.log, its rows are in
# OUT. A table of all parts ends each call: the exit code is 0 where all are done and met their bars, 1 where one did not, 3 where some are
# left. OUT/four/PART.done: remove it, and the part is run again. `eight` needs eight GPUs, all other parts two; bars are for four.
set -uo pipefail
case ${1:-} in "" | -*) sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 2 ;; esac
dir=$(realpath -m -- "$1")
out=$(realpath -m -- "${2:-bench-results}")
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${PYTHON:-python3}
parts=(kinds foreign beside copies graphs order sanitize regions threads fsdp eight)
names=("${@:3}")
[ ${#names[@]} -gt 0 ] || names=("${parts[@]}")

# So many seconds a part takes at most.
limit_of() {
    case $1 in
        kinds) echo 150 ;; foreign) echo 200 ;; beside) echo 100 ;; copies) echo 240 ;; graphs) echo 60 ;; order) echo 150 ;;
        sanitize) echo 150 ;; regions) echo 120 ;; threads) echo 400 ;; fsdp) echo 470 ;; eight) echo 200 ;;
        *) echo "$0: $1 is none of ${parts[*]}" >&2; return 1 ;;
    esac
}
for name in "${names[@]}"; do limit_of "$name" >/dev/null || exit 2; done
for file in glake libgmlake.so libglake_preload.so lib_glake.so; do
    [ -f "$dir/$file" ] || { echo "$0: there is no $file in $dir: cargo build --release --workspace makes it" >&2; exit 2; }
done
if [ ! -e /dev/nvidiactl ]; then echo "four: SKIPPED: no NVIDIA GPU on this machine"; exit 0; fi
gpus=$(nvidia-smi -L | grep -c '^GPU ')
[ "$gpus" -ge 2 ] || { echo "four: SKIPPED: needs more than one GPU, here are $gpus"; exit 0; }
mkdir -p "$out/four"

if ! "$python" -c 'import glake' 2>/dev/null; then
    export PYTHONPATH="$root/ffi/python${PYTHONPATH:+:$PYTHONPATH}"
    cp "$dir/lib_glake.so" "$root/ffi/python/glake/_glake.abi3.so" || exit 1
fi
export GLAKE="$dir/glake" GLAKE_LIBRARY="$dir/libgmlake.so" PYTHONUNBUFFERED=1

part() {
    case $1 in
        kinds) "$python" "$here/links.py" --only small,alone,pool --out "$out" ;;
        foreign) "$python" "$here/links.py" --only foreign,mempool,pageable,scattered,broadcast --out "$out" ;;
        beside)
            local missed=0
            "$python" "$here/links.py" --only overhead,critical --out "$out" || missed=1
            "$python" "$here/preload.py" --out "$out" || missed=1
            return $missed ;;
        copies) "$python" "$here/copies.py" --only first,pulls,late,cores,gemm,nccl,preload --out "$out" ;;
        graphs)
            printf '[transfer]\ngraphs = true\n' >"$out/four/graphs.toml"
            GLAKE_CONFIG="$out/four/graphs.toml" "$python" "$here/copies.py" --only graphs --out "$out" ;;
        order) "$here/bars.sh" "$dir" "$out" order order-relays ;;
        sanitize) "$here/bars.sh" "$dir" "$out" sanitize ;;
        regions) "$python" "$here/shrink.py" --only links --out "$out" ;;
        threads) "$python" "$root/tests/gpu/torch/nccl_threads.py" --only connections-default-shared-on --limit 360 ;;
        fsdp) "$python" "$here/compare.py" fsdp_llama_full --runs 2 --time-limit 450 --out "$out" ;;
        eight)
            [ "$gpus" -ge 8 ] || { echo "eight: SKIPPED: needs eight GPUs, here are $gpus"; return 0; }
            "$GLAKE" topo --calibrate && "$GLAKE" bench copy --sizes 256MiB,1GiB,4GiB --runs 11 ;;
    esac
}
if [ "${FOUR_PART:-}" ]; then part "$FOUR_PART"; exit; fi

left=0
for name in "${names[@]}"; do
    [ ! -f "$out/four/$name.done" ] || continue
    limit=$(limit_of "$name")
    if [ $((SECONDS + limit)) -gt "${SECONDS_LEFT:-480}" ]; then left=$((left + 1)); continue; fi
    echo "== $name (at most $limit s)"
    begin=$SECONDS
    FOUR_PART=$name timeout --kill-after 10 "$limit" "$0" "$dir" "$out" 2>&1 | tee "$out/four/$name.log"
    code=${PIPESTATUS[0]}
    case $code in
        0) word=ok; ! grep -q '\bSKIPPED\b' "$out/four/$name.log" || word=SKIPPED ;;
        124 | 137) word=TIMEOUT ;;
        *) word=FAILED ;;
    esac
    echo "$word $((SECONDS - begin)) s" >"$out/four/$name.done"
done

failed=0
printf '\n== parts\n'
for name in "${names[@]}"; do
    said=$(cat "$out/four/$name.done" 2>/dev/null || echo left)
    case $said in FAILED* | TIMEOUT*) failed=$((failed + 1)) ;; esac
    printf '%-9s %-16s %s\n' "$name" "$said" "$(grep -hcE '^\S*.*MISSED\b' "$out/four/$name.log" 2>/dev/null || true) bars missed"
done
grep -hE '\b(MISSED|HANG|FAILED)\b' "$out"/four/*.log 2>/dev/null | cut -c 1-160
echo "four: ${#names[@]} parts on $gpus GPUs, $failed with misses, $left left"
[ $failed -eq 0 ] || exit 1
[ $left -eq 0 ] || exit 3

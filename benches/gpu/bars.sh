#!/usr/bin/env bash
# Every bar of copies, shrink and refill, one script after another, then what missed; ends with 1 if anything did.
#
#   benches/gpu/bars.sh DIR [OUT [NAME ...]]     DIR holds the release build: glake, libgmlake.so, libglake_preload.so, lib_glake.so
#
# NAME: links preload copies order order-relays sanitize shrink; all of these where none is given. By name alone: refill weights swap park serve
# engine sleep serving alloc. Each one's output is kept in OUT/NAME.log (bench-results), its rows in OUT/NAME.jsonl. GLAKE_COMMIT names the commit for the rows
# where this is no clone. What a script needs is in README.md beside this file. About ten minutes on four GPUs; each of the others takes its own.
set -uo pipefail
case ${1:-} in "" | -*) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 2 ;; esac
dir=$(realpath -m -- "$1")
out=${2:-bench-results}
here=$(cd "$(dirname "$0")" && pwd)
package=$(cd "$here/../../ffi/python" && pwd)
torch=$(cd "$here/../../tests/gpu/torch" && pwd)
python=${PYTHON:-python3}
for file in glake libgmlake.so libglake_preload.so lib_glake.so; do
    [ -f "$dir/$file" ] || { echo "$0: there is no $file in $dir: cargo build --release --workspace makes it" >&2; exit 2; }
done
command_of() {
    case $1 in
        links | preload | copies | shrink | refill | weights | swap | park | serve | engine | sleep | serving | alloc) echo "$python $here/$1.py --out $out" ;;
        order) echo "$python $torch/order.py --steps 10000" ;;
        order-relays) echo "$python $torch/order.py --steps 10000 --memory-on 1" ;;
        sanitize) echo sanitize ;;
        *) echo "$0: $1 is none of links, preload, copies, order, order-relays, sanitize, shrink, refill, weights, swap, park, serve, engine, sleep, serving, alloc" >&2; return 1 ;;
    esac
}

names=("${@:3}")
[ ${#names[@]} -gt 0 ] || names=(links preload copies order order-relays sanitize shrink)
for name in "${names[@]}"; do command_of "$name" >/dev/null || exit 2; done

if [ ! -e /dev/nvidiactl ]; then echo "bars: SKIPPED: no NVIDIA GPU on this machine"; exit 0; fi
mkdir -p "$out"

if ! "$python" -c 'import glake' 2>/dev/null; then
    export PYTHONPATH="$package${PYTHONPATH:+:$PYTHONPATH}"
    cp "$dir/lib_glake.so" "$package/glake/_glake.abi3.so" || exit 1
fi
export GLAKE="$dir/glake" GLAKE_LIBRARY="$dir/libgmlake.so"

sanitized() { compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 "$python" "$@"; }
sanitize() {
    command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer: SKIPPED: it is not installed"; return 0; }
    sanitized "$torch/order.py" --steps 400 --memory-on 1 && sanitized "$torch/shapes.py" && sanitized "$torch/leaving.py"
}

failed=()
for name in "${names[@]}"; do
    echo "== $name"
    $(command_of "$name") 2>&1 | tee "$out/$name.log" || failed+=("$name")
done

echo
echo "== missed, failed or skipped"
for name in "${names[@]}"; do grep -hE '(MISSED|FAILED|SKIPPED)\b' "$out/$name.log" | sed "s/^/$name: /"; done
echo "bars: ${#names[@]} scripts, ${#failed[@]} with misses${failed[*]:+: ${failed[*]}}"
[ ${#failed[@]} -eq 0 ]

#!/usr/bin/env bash
# Everything with torch that needs a GPU: the suite over both backends, copies in the order of their streams, then short programs
# under compute-sanitizer.
#
#   tests/gpu/torch.sh [DIR [ARGUMENT OF run.py ...]]
#
# glake is the installed package; or else ffi/python with the libgmlake.so that GLAKE_LIBRARY names, or that lies in DIR (with
# lib_glake.so, the package's module, beside it). PYTHON chooses the interpreter.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
package=$(cd "$here/../../ffi/python" && pwd)
python=${PYTHON:-python3}
dir=${1:-}
[ $# -gt 0 ] && shift

if ! "$python" -c 'import glake' 2>/dev/null; then
    export PYTHONPATH="$package${PYTHONPATH:+:$PYTHONPATH}"
    if [ -n "$dir" ] && [ -f "$dir/lib_glake.so" ]; then cp "$dir/lib_glake.so" "$package/glake/_glake.abi3.so"; fi
    if [ -z "${GLAKE_LIBRARY:-}" ] && [ -f "$dir/libgmlake.so" ]; then GLAKE_LIBRARY=$(realpath "$dir/libgmlake.so") && export GLAKE_LIBRARY; fi
fi

failed=0
"$python" "$here/torch/run.py" "$@" || failed=1
for memory in "" "--memory-on 1"; do
    # shellcheck disable=SC2086 # an option and its value
    output=$(timeout 150 "$python" "$here/torch/order.py" $memory 2>&1) && word="ok     " || { failed=1 && word="FAILED "; }
    echo "$word $(echo "$output" | grep -E "mismatches|SKIPPED|not find" || echo "$output" | tail -n 5)"
done
if command -v compute-sanitizer >/dev/null && "$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    if output=$(timeout 200 compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 "$python" "$here/torch/shapes.py" 2>&1) ||
        echo "$output" | grep -q "Device not supported"; then
        echo "ok      compute-sanitizer, copies: $(echo "$output" | grep -E "ERROR SUMMARY|not supported" | head -n 1)"
    else
        failed=1
        echo "FAILED  compute-sanitizer, copies"
        echo "$output" | tail -n 30
    fi
    for backend in compiled pluggable offload; do
        # API errors are left out: torch probes for functions that a driver may lack.
        output=$(timeout 150 compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 "$python" "$here/torch/sanitize.py" "$backend" 2>&1)
        code=$?
        if [ $code = 0 ]; then
            echo "ok      compute-sanitizer, $backend: $(echo "$output" | grep -E "ERROR SUMMARY|^sanitize:" | tr '\n' ' ')"
        elif echo "$output" | grep -q "Device not supported"; then
            echo "SKIPPED compute-sanitizer, $backend: it does not know this device"
        else
            failed=1
            echo "FAILED  compute-sanitizer, $backend (exit code $code)"
            echo "$output" | tail -n 30
        fi
    done
fi
exit $failed

#!/usr/bin/env bash
# The blocks of README and docs that need a GPU, from binaries that are already built; a line a block, and 1 if one failed.
#
#   tests/gpu/docs.sh [DIR]     DIR holds `glake` and, where the package is not installed, libgmlake.so, libglake_preload.so and
#                               lib_glake.so, the package's module (target/release)
#
# The blocks need torch. PYTHON chooses the interpreter.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
package=$(cd "$here/../../ffi/python" && pwd)
python=${PYTHON:-python3}
dir=$(realpath "${1:-$here/../../target/release}")

if [ ! -e /dev/nvidiactl ]; then
    echo "SKIPPED docs: no NVIDIA GPU on this machine (/dev/nvidiactl is missing)"
    exit 0
fi
if ! "$python" -c 'import glake' 2>/dev/null && [ -f "$dir/lib_glake.so" ]; then
    cp "$dir/lib_glake.so" "$package/glake/_glake.abi3.so"
fi
exec "$python" "$here/../docs.py" gpu "$dir"

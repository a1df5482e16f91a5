#!/usr/bin/env bash
# wheel.sh [--test] TARGET: builds the wheel of the package glake into TARGET/wheels, with libgmlake.so, its header and the sources of
# the compiled backend in it. With --test it is installed by itself and tested; where the build needs what cannot be had (maturin, from
# PyPI), that is said and passed over.
set -euo pipefail

maturin_version=1.9.6
test=
[ "$1" != --test ] || { test=yes && shift; }
target=$1
cd "$(dirname "$0")"
cargo=${CARGO:-cargo}
python=${PYTHON:-python3}
export CARGO_TARGET_DIR=$target

lacking() {
    echo "wheel: ${test:+SKIPPED, the package was tested in place only: }$1" >&2
    [ -n "$test" ] && exit 0 || exit 1
}

environment() { # FOLDER: a virtual environment
    [ -x "$1/bin/pip" ] || "$python" -m venv --clear "$1" >/dev/null 2>&1 ||
        lacking "$python cannot make a virtual environment (apt-get install python3-venv)"
}

maturin=$target/maturin-$maturin_version
environment "$maturin"
[ -x "$maturin/bin/maturin" ] ||
    "$maturin/bin/pip" install --quiet --disable-pip-version-check "maturin==$maturin_version" >/dev/null 2>&1 ||
    lacking "maturin $maturin_version cannot be installed from PyPI"

"$cargo" build --locked --quiet --release --package glake-ffi
cp ../include/gmlake.h glake/gmlake.h
cp "$target/release/libgmlake.so" glake/libgmlake.so
trap 'rm -f glake/libgmlake.so glake/gmlake.h' EXIT
command -v strip >/dev/null && strip --strip-unneeded glake/libgmlake.so

# maturin looks at the module only, libgmlake.so is what needs more of the system: so no promise of manylinux.
rm -rf "$target/wheels"
"$maturin/bin/maturin" build --quiet --locked --release --strip --compatibility linux --interpreter "$python" --out "$target/wheels"
wheel=$(echo "$target"/wheels/*.whl)
echo "wheel: $wheel"
[ -n "$test" ] || exit 0

environment "$target/wheel-test"
"$target/wheel-test/bin/pip" install --quiet --disable-pip-version-check --no-index --force-reinstall "$wheel"
echo "Python tests of the installed wheel"
env -u PYTHONPATH -u GLAKE_LIBRARY "$target/wheel-test/bin/python" -m unittest discover --start-directory tests

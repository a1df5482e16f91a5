#!/usr/bin/env bash
# wheel.sh [--test] TARGET: builds the wheel of the package glake into TARGET/wheels. One install is everything: the package, the command
# glake, libgmlake.so with its header, libglake_preload.so and the sources of the compiled backend. With --test it is made of what tests are
# built with, in TARGET/tested-wheels, installed by itself and tested; where the build needs what cannot be had (its tools, from PyPI), that
# is said, and the exit status is 3.
set -euo pipefail

tools_wanted=(setuptools==80.9.0 auditwheel==6.8.2 wheel==0.45.1)
newest_minor=34 # of manylinux_2_N: RHEL 9, Ubuntu 22.04, Debian 12 and whatever is later have such a C library
test= wheels=wheels profile=release built=release what=(--package glake --package glake-ffi --package glake-preload --package glake-python)
[ "$1" != --test ] || { test=yes wheels=tested-wheels profile=dev built=debug what=(--workspace --lib --bins --tests) && shift; }
target=$1 wheels=$1/$wheels
cd "$(dirname "$0")"
cargo=${CARGO:-cargo}
python=${PYTHON:-python3}
export CARGO_TARGET_DIR=$target

lacking() {
    echo "wheel: ${test:+SKIPPED, the package is tested in place only: }$1" >&2
    [ -n "$test" ] && exit 3 || exit 1
}

environment() { # FOLDER: a virtual environment
    [ -x "$1/bin/pip" ] || "$python" -m venv --clear "$1" >/dev/null 2>&1 ||
        lacking "$python cannot make a virtual environment (apt-get install python3-venv)"
}

tools=$target/wheel-tools
environment "$tools"
"$tools/bin/pip" install --quiet --disable-pip-version-check "${tools_wanted[@]}" >/dev/null 2>&1 ||
    lacking "${tools_wanted[*]} cannot be installed from PyPI"

# The packages of `make build`, and as there: with others beside them, dependencies have other features, and are built once more.
"$cargo" build --locked --profile "$profile" "${what[@]}"

# Made beside what cargo builds: neither the sources nor a package that is used in place change.
source=$target/wheel-source
rm -rf "$wheels" "$source"
mkdir -p "$source"
cp -r pyproject.toml setup.py README.md glake_switch.pth glake glake_switch ../../LICENSE "$source"
CARGO=$cargo "$python" licenses.py "$source/THIRD_PARTY_LICENSES"
cp ../include/gmlake.h "$source/glake"
for binary in glake libgmlake.so libglake_preload.so lib_glake.so; do
    copy=$source/glake/${binary/#lib_glake.so/_glake.abi3.so}
    cp "$target/$built/$binary" "$copy"
    ! command -v strip >/dev/null || strip --strip-unneeded "$copy"
done

"$tools/bin/pip" wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir "$wheels" "$source"
# The module torch_memory_saver, for programs that import it.
rm -rf "$target/wheel-saver"
cp -r saver "$target/wheel-saver"
"$tools/bin/pip" wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir "$wheels" "$target/wheel-saver"
wheel=$(echo "$wheels"/glake-*.whl)

# The tag has to hold for every binary.
found=$("$tools/bin/auditwheel" show --json "$wheel" 2>/dev/null)
tag=$("$tools/bin/python" -c 'import json, sys; print(json.load(sys.stdin)["overall_tag"])' <<<"$found")
case $tag in
    manylinux_2_*) minor=${tag#manylinux_2_} && minor=${minor%%_*} ;;
    *) minor=$((newest_minor + 1)) ;;
esac
[ "$minor" -le "$newest_minor" ] || {
    echo "wheel: the tag is $tag, newer than manylinux_2_$newest_minor, because of what its binaries need of this system:" >&2
    "$tools/bin/auditwheel" show "$wheel" 2>/dev/null >&2
}
"$tools/bin/wheel" tags --remove --platform-tag "$tag" "$wheel" >/dev/null
wheel=$(echo "$wheels"/glake-*.whl)
echo "wheel: $wheel"
[ -n "$test" ] || exit 0

environment "$target/wheel-test"
"$target/wheel-test/bin/pip" install --quiet --disable-pip-version-check --no-index --force-reinstall "$wheel"
echo "Python tests of the installed wheel"
tests=$PWD/tests
cd "$target/wheel-test" # not here, where the package's source would be found first
env -u PYTHONPATH -u GLAKE_LIBRARY -u GLAKE_PRELOAD GLAKE_WHEEL="$wheel" bin/python "$tests/run.py"

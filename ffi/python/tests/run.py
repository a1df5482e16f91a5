"""Runs the test files beside this one, each in its own process and three at a time: most of them wait for processes.

    python3 run.py          # with the package that Python finds

Of a file that fails all is shown; the last line says what ran.
"""

import concurrent.futures
import importlib.util
import pathlib
import re
import subprocess
import sys
import time

TESTS = pathlib.Path(__file__).resolve().parent
AT_A_TIME = 3
LIMIT_S = 900


def run(path):
    """Returns whether all tests of a file passed, their number, and the output."""
    command = [sys.executable, "-m", "unittest", path.stem]
    try:
        done = subprocess.run(command, cwd=TESTS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        return False, 0, f"{path.stem} ran longer than {LIMIT_S} s\n{error.stdout or ''}"
    ran = re.search(r"^Ran (\d+) tests?", done.stdout, re.MULTILINE)
    # Status 5: every test of the file is skipped here.
    return done.returncode in (0, 5) and ran is not None, int(ran[1]) if ran else 0, done.stdout


def _lacking():
    return "they need a GPU" if importlib.util.find_spec("torch") else "most need torch, which is not installed (pip install torch)"


def main():
    begun, count, skipped, failed = time.monotonic(), 0, 0, []
    # Large files take longest: they begin first.
    paths = sorted(TESTS.glob("test_*.py"), key=lambda path: -path.stat().st_size)
    with concurrent.futures.ThreadPoolExecutor(AT_A_TIME) as threads:
        for path, (passed, ran, said) in zip(paths, threads.map(run, paths)):
            count += ran
            last = said.rstrip().rsplit("\n", 1)[-1]
            skips = re.search(r"skipped=(\d+)", last)
            skipped += int(skips[1]) if skips else 0
            print(f"{path.stem}: {ran} tests, {last}" if passed else f"{path.stem}: FAILED\n{said}", flush=True)
            failed += [] if passed else [path.stem]
    if skipped:
        print(f"SKIPPED: {skipped} Python tests: {_lacking()}")
    print(f"Ran {count} tests in {time.monotonic() - begun:.1f} s", f"FAILED: {', '.join(failed)}" if failed else "OK", sep="\n")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())

"""Runs a piece of Python in a separate process: the library's state belongs to the process."""

import os
import pathlib
import subprocess
import sys
import textwrap

TESTS = pathlib.Path(__file__).resolve().parent
FAKE_TORCH = TESTS / "fake"


def run(code, *, device="sim", torch=None, **environment):
    """Returns the child's exit status, output and errors.

    ``device`` is GLAKE_DEVICE, or None for none; ``torch`` a folder to import torch from. An exit by a signal is negative.
    """
    names = {name: value for name, value in os.environ.items() if not name.startswith(("PYTORCH_", "GLAKE_DEVICE", "GLAKE_CONFIG"))}
    paths = [str(torch)] if torch else []
    names["PYTHONPATH"] = os.pathsep.join(paths + [path for path in (os.environ.get("PYTHONPATH"),) if path])
    if device:
        names["GLAKE_DEVICE"] = device
    names.update(environment)
    return subprocess.run(
        [sys.executable, "-W", "always", "-c", textwrap.dedent(code)],
        env=names,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def check(test, code, **options):
    """Runs the code and returns its output; fails the test with its errors if it does not succeed."""
    done = run(code, **options)
    test.assertEqual(done.returncode, 0, f"{done.stdout}\n{done.stderr}")
    return done.stdout

"""The ``glake`` command, which ``pip`` installs in the path. It replaces itself by the wheel's program."""

from __future__ import annotations

import os
import sys

from . import _library
from .errors import Error


def main() -> str:
    """Executes the program in place of this process; returns the error text if that fails."""
    try:
        command = _library.command()
    except Error as error:
        return f"glake: {error}"
    try:
        os.execv(command, ["glake", *sys.argv[1:]])
    except OSError as error:
        return f"glake: {command} cannot be executed: {error.strerror}"

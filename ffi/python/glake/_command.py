"""The ``glake`` command: this file's only function is what ``pip`` puts on the path, and it becomes the program of the wheel."""

from __future__ import annotations

import os
import sys

from . import _library
from .errors import Error


def main() -> str:
    """Executes the program in this process's place; returns why, where it cannot."""
    try:
        command = _library.command()
    except Error as error:
        return f"glake: {error}"
    try:
        os.execv(command, ["glake", *sys.argv[1:]])
    except OSError as error:
        return f"glake: {command} cannot be executed: {error.strerror}"

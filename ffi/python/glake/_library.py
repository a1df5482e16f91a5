"""Finds ``libgmlake.so`` and its companion files, and opens it.

The library that ``GLAKE_LIBRARY`` names goes before the one that lies beside this file. It is opened at the first call that
needs it, not at import, and stays open. The preload library and the command are those that lie beside it: one build has all.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any

from glake_switch import is_disabled

from .errors import Error

NAME = "libgmlake.so"
PRELOAD = "libglake_preload.so"
COMMAND = "glake"
PACKAGE = pathlib.Path(__file__).resolve().parent


def path() -> pathlib.Path:
    """Returns the path of the library, open or not.

    Raises:
        Error: ``GLAKE_LIBRARY`` names no file, or the package was installed without its library.
    """
    chosen = os.environ.get("GLAKE_LIBRARY")
    if chosen:
        library = pathlib.Path(chosen).resolve()
        if not library.is_file():
            raise Error(f"GLAKE_LIBRARY is {chosen!r}, and there is no such file: name {NAME}, or unset it")
        return library
    library = PACKAGE / NAME
    if not library.is_file():
        raise Error(f"{library} is missing: install the glake wheel, or set GLAKE_LIBRARY to a built {NAME}")
    return library


def include() -> pathlib.Path:
    """Returns the folder of ``gmlake.h``: the package's, or the source tree's if the package is used in place."""
    return PACKAGE if (PACKAGE / "gmlake.h").is_file() else PACKAGE.parent.parent / "include"


def preload() -> pathlib.Path:
    """Returns the path of the preload library: the file that ``GLAKE_PRELOAD`` names, else the one beside ``libgmlake.so``.

    Raises:
        Error: it is missing, or ``libgmlake.so`` is.
    """
    chosen = os.environ.get("GLAKE_PRELOAD")
    library = pathlib.Path(chosen).resolve() if chosen else path().with_name(PRELOAD)
    if not library.is_file():
        raise Error(f"{library} is missing: install the glake wheel, or set GLAKE_PRELOAD to a built {PRELOAD}")
    return library


def command() -> pathlib.Path:
    """Returns the path of the program ``glake``, beside ``libgmlake.so``.

    Raises:
        Error: it is missing, or ``libgmlake.so`` is.
    """
    program = path().with_name(COMMAND)
    if not program.is_file():
        raise Error(f"{program} is missing: install the glake wheel, or build it with make build")
    return program


_opened: Any = None


def api() -> Any:
    """Returns the functions of the library (see ``_glake.pyi``), opened on first use; with ``GLAKE_DISABLE=1`` those of `_disabled`.

    Raises:
        Error: the module or the library is missing or of another version.
    """
    global _opened
    if _opened is None and is_disabled():
        from ._disabled import Library

        _opened = Library()
    if _opened is None:
        try:
            from . import _glake
        except ImportError as error:
            raise Error(f"glake's module _glake cannot be loaded ({error}): install the glake wheel") from error
        if _glake.path() is None:
            _glake.open(path())
        _opened = _glake
    return _opened

"""``python -m glake``: what is installed, and which backend ``glake.enable()`` takes here, and why."""

from __future__ import annotations

import sys
from collections.abc import Callable

from . import __version__, _library
from ._enable import enable, enabled, supported_torch
from .errors import Error


def main() -> int:
    """Prints a line each, errors in their places; 0 where ``glake.enable()`` works, else 1."""
    works = [
        _line("glake", lambda: __version__),
        _line("library", _library_line),
        _line("torch", _torch_line),
        _line("backend", _backend_line),
        _line("device", _device_line),
    ]
    return 0 if all(works) else 1


def _line(name: str, text: Callable[[], str]) -> bool:
    try:
        print(f"{name:<8} {text()}")
        return True
    except Error as error:
        print(f"{name:<8} {type(error).__name__}: {error}")
        return False


def _library_line() -> str:
    api = _library.api()
    return f"{api.path()}, version {api.version()}, C API {api.abi()}"


def _torch_line() -> str:
    torch = supported_torch()
    return f"{torch.__version__}, CUDA {torch.version.cuda}"


def _backend_line() -> str:
    enable()
    state = enabled()
    return f"{state.backend} ({state.why})" if state else ""


def _device_line() -> str:
    api = _library.api()
    api.start()
    return f"{api.device_name()}, {api.device_count()} of it"


if __name__ == "__main__":
    sys.exit(main())

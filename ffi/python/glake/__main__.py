"""``python -m glake``: prints the installed versions, whether GLake would be on in a process like this one without a
call, and the backend that ``glake.enable()`` chooses here, with the reason.

With an option it prints one path, for other programs::

    library=$(python3 -m glake --library)
    cc -I"$(python3 -m glake --include)" my.c "$library" -Wl,-rpath,"$(dirname "$library")"
"""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Callable

import glake_switch

from . import __version__, _library
from ._enable import enable, enabled, supported_torch
from .errors import Error


PATHS = {
    "include": (_library.include, "the folder of gmlake.h"),
    "library": (_library.path, "libgmlake.so, to link with or to open"),
    "preload": (_library.preload, "libglake_preload.so, for LD_PRELOAD"),
    "command": (_library.command, "the program glake"),
}


def main() -> int:
    """Prints the requested path, or the installed versions. Returns 0 if the file exists, or if ``glake.enable()`` works, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m glake",
        description="Says what is installed, and which backend glake.enable() takes here, and why; with an option, prints one path.",
    )
    options = parser.add_mutually_exclusive_group()
    for name, (_, help) in PATHS.items():
        options.add_argument(f"--{name}", dest="path", action="store_const", const=name, help=help)
    wanted = parser.parse_args().path
    return _everything() if wanted is None else _path(wanted)


def _path(name: str) -> int:
    find, _ = PATHS[name]
    try:
        print(find())
        return 0
    except Error as error:
        print(f"glake: {error}", file=sys.stderr)
        return 1


def _everything() -> int:
    """Yields one line for each installed part, or its error."""
    works = [
        _line("glake", lambda: __version__),
        _line("library", _library_line),
        _line("torch", _torch_line),
        _line("switch", _switch_line),
        _line("vllm", _vllm_line),
        _line("backend", _backend_line),
        _line("device", _device_line),
    ]
    return 0 if all(works) else 1


def _line(name: str, text: Callable[[], str]) -> bool:
    try:
        _print(name, text())
        return True
    except Error as error:
        _print(name, f"{type(error).__name__}: {error}")
        return False


def _print(name: str, text: str) -> None:
    """Prints a line, broken between words on a terminal that is too narrow."""
    line = f"{name:<8} {text}"
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        line = textwrap.fill(line, width, subsequent_indent=" " * 9, break_long_words=False, break_on_hyphens=False)
    print(line)


def _library_line() -> str:
    if glake_switch.is_disabled():
        return f"{_library.path()}, not opened"
    api = _library.api()
    return f"{api.path()}, version {api.version()}, C API {api.abi()}"


def _torch_line() -> str:
    torch = supported_torch()
    return f"{torch.__version__}, CUDA {torch.version.cuda}"


def _switch_line() -> str:
    is_on, reason = glake_switch.allocator()
    return f"{'on' if is_on else 'off'} ({reason})"


def _vllm_line() -> str:
    is_on, reason = glake_switch.vllm()
    return f"{'on' if is_on else 'off'} ({reason})"


def _backend_line() -> str:
    if glake_switch.is_disabled():
        return f"none ({glake_switch.allocator()[1]}: glake.enable() does nothing)"
    enable()
    state = enabled()
    return f"{state.backend} ({state.why})" if state else ""


def _device_line() -> str:
    if glake_switch.is_disabled():
        return "not opened"
    api = _library.api()
    api.start()
    count = api.device_count()
    return f"{api.device_name()}, {count} GPU{'s' if count != 1 else ''}"


if __name__ == "__main__":
    sys.exit(main())

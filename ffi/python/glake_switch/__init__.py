"""Switches GLake on in a program that does not import it: ``GLAKE_ALLOCATOR=1`` makes it torch's allocator at the first use of CUDA.

::

    the interpreter starts ─► sitecustomize (path/, by glake run) ─┐
                           └► glake_switch.pth (the wheel)        ─┴─► watch ─► torch is imported ─► torch._C._cuda_init is wrapped
                                                                                the first use of CUDA calls it ─► glake.enable()

A process that never imports torch pays for the import of this module, one that never uses CUDA for the wrapper. No step of it fails a
program: an error becomes one warning, and torch keeps its own allocator.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["allocator", "is_disabled", "vllm", "watch"]

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "glake")


_disabled: str | None = None


def is_disabled() -> bool:
    """Returns whether ``GLAKE_DISABLE`` switches GLake off in this process: any value but 0 and the empty one. The first call reads the
    variable; later changes of it have no effect.
    """
    return _is_set(_value_of_disable())


def _value_of_disable() -> str:
    global _disabled
    if _disabled is None:
        _disabled = os.environ.get("GLAKE_DISABLE", "")
    return _disabled


def _is_set(disable: str) -> bool:
    return disable.strip() not in ("", "0")


def allocator() -> tuple[bool, str]:
    """Returns whether this process would get GLake as torch's allocator without a call of its own, and the reason."""
    return _allocator(_value_of_disable())


def _allocator(disable: str) -> tuple[bool, str]:
    value = os.environ.get("GLAKE_ALLOCATOR", "").strip()
    if _is_set(disable):
        return False, f"GLAKE_DISABLE={disable}"
    if value in ("", "0"):
        return False, f"GLAKE_ALLOCATOR={value}" if value else "GLAKE_ALLOCATOR is not set"
    if value != "1":
        return False, f"GLAKE_ALLOCATOR is {value!r}, which is neither 0 nor 1"
    if not _is_watching:
        return False, "GLAKE_ALLOCATOR=1, but this process was started with neither glake run --allocator nor the wheel's glake_switch.pth"
    return True, "GLAKE_ALLOCATOR=1"


def vllm() -> tuple[bool, str]:
    """Returns whether engines of vLLM in this process run over GLake, and the reason."""
    disable, value = _value_of_disable(), os.environ.get("GLAKE_VLLM", "").strip()
    if _is_set(disable):
        return False, f"GLAKE_DISABLE={disable}"
    if value in ("", "0"):
        return False, f"GLAKE_VLLM={value}" if value else "GLAKE_VLLM is not set"
    return (True, "GLAKE_VLLM=1") if value == "1" else (False, f"GLAKE_VLLM is {value!r}, which is neither 0 nor 1")


_is_watching = False
# Folders whose sitecustomize has run in this process, as real paths.
_visited: set[str] = set()


def watch() -> None:
    """Wraps the initialisation of CUDA, now or once torch is imported, if the environment asks for it. Repeated calls do nothing."""
    global _is_watching
    if _is_watching:
        return
    _is_watching = True
    # The program may still set GLAKE_DISABLE itself, before its first call of GLake.
    is_on, reason = _allocator(os.environ.get("GLAKE_DISABLE", ""))
    if not is_on:
        if os.environ.get("GLAKE_ALLOCATOR", "").strip() not in ("", "0", "1"):
            _warn(reason)
        return
    if "torch" in sys.modules:
        _wrap(sys.modules["torch"])
    else:
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds torch as the other finders do, and wraps its initialisation of CUDA once it is loaded. Stays in place until then: a program
    may look torch up without an import, and an import may fail.
    """

    def __init__(self) -> None:
        import threading

        self._searching = threading.local()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        # Another finder may look torch up in turn.
        if name != "torch" or getattr(self._searching, "is_on", False):
            return None
        self._searching.is_on = True
        try:
            spec = self._find(name, path, target)
        finally:
            self._searching.is_on = False
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader, self)
        return spec

    def _find(self, name: str, path: Any, target: Any) -> Any:
        for finder in list(sys.meta_path):
            if finder is not self and hasattr(finder, "find_spec"):
                spec: Any = finder.find_spec(name, path, target)
                if spec is not None:
                    return spec
        return None

    def remove(self) -> None:
        """Removes the finder from ``sys.meta_path``, if it is there."""
        import contextlib

        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)


class _Loader:
    """A loader of torch that calls another one."""

    def __init__(self, loader: Any, finder: _Finder) -> None:
        self._loader, self._finder = loader, finder

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":
            # A copy that is not yet initialised.
            raise AttributeError(name)
        return getattr(self._loader, name)

    def exec_module(self, module: Any) -> None:
        # Tools and pickles look at a module's loader: they find its own.
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._finder.remove()
        _wrap(module)


def _wrap(torch: Any) -> None:
    """Makes the initialisation of CUDA enable GLake first. It runs once in a process, on one thread, under torch's lock."""
    core: Any = getattr(torch, "_C", None)
    original = getattr(core, "_cuda_init", None)
    if original is None:
        # A torch without CUDA.
        return

    def initialise() -> Any:
        core._cuda_init = original
        try:
            _enable(torch)
        except Exception as error:
            _warn(f"{type(error).__name__}: {error}")
        return original()

    core._cuda_init = initialise


def _enable(torch: Any) -> None:
    import logging

    logger = logging.getLogger("glake")
    backend = torch.cuda.get_allocator_backend()
    if backend != "native":
        logger.info("GLAKE_ALLOCATOR=1 has no effect: the program chose torch's allocator %r itself", backend)
        return
    glake = _package()
    if glake.backend() is None:
        glake.enable()


def _package() -> Any:
    """Imports glake: the package that Python finds, else the one beside this module."""
    try:
        import glake
    except ModuleNotFoundError as error:
        if error.name != "glake":
            raise
        import importlib.util

        file = os.path.join(_PACKAGE, "__init__.py")
        spec: Any = importlib.util.spec_from_file_location("glake", file, submodule_search_locations=[_PACKAGE])
        glake = importlib.util.module_from_spec(spec)
        sys.modules["glake"] = glake
        try:
            spec.loader.exec_module(glake)
        except BaseException:
            del sys.modules["glake"]
            raise
    return glake


def _warn(reason: str) -> None:
    import warnings

    warnings.warn(f"GLake is not torch's allocator in process {os.getpid()}: {reason}", RuntimeWarning, stacklevel=2)

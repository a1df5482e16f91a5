"""The plain-ABI backend: torch's ``CUDAPluggableAllocator`` over ``libgmlake.so``, and a Python layer for the functions that it lacks.

::

    tensors ─► CUDAPluggableAllocator ─► gmlake_malloc, gmlake_free, … ┐
                                                                       ├► libgmlake.so
    torch.cuda.memory_stats, … ─► torch._C._cuda_memoryStats, … ─► api ┘
                                  (replaced here: they raise under a pluggable allocator)

It needs no compiler and works with every torch since 2.0. What only C++ can answer (see ``REFUSED``) raises an error that names
the compiled backend.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import warnings
from types import ModuleType
from typing import Any

from . import _layer
from ._patch import Patches
from .errors import StateError, TorchError

# Setters are found by name: each version of torch has some of them.
SETTERS = {
    "set_init_fn": "gmlake_init",
    "set_reset_fn": "gmlake_reset",
    "set_memory_fraction_fn": "gmlake_memory_fraction",
    "set_base_alloc_fn": "gmlake_base_alloc",
    "set_record_stream_fn": "gmlake_record_stream",
    "set_begin_allocate_to_pool": "gmlake_begin_allocate_to_pool",
    "set_end_allocate_to_pool_fn": "gmlake_end_allocate_to_pool",
    "set_release_pool": "gmlake_release_pool",
}

# Without these a graph's memory would be handed to others while the graph may still be replayed.
POOL_SETTERS = ("set_begin_allocate_to_pool", "set_end_allocate_to_pool_fn", "set_release_pool")

# What a Python layer cannot answer, and who asks for it.
REFUSED = {
    "_cuda_checkPoolLiveAllocations": 'torch.compile(mode="reduce-overhead")',
    "_cuda_getCheckpointState": 'torch.compile(mode="reduce-overhead")',
    "_cuda_setCheckpointPoolState": 'torch.compile(mode="reduce-overhead")',
}


def allocator(torch: ModuleType, library: os.PathLike[str]) -> Any:
    """Returns a ``CUDAPluggableAllocator`` over the library, with every function that this torch has a setter for.

    Whoever uses it must keep a reference: torch keeps none for a ``MemPool``.
    """
    path = str(pathlib.Path(library))
    built = torch.cuda.memory.CUDAPluggableAllocator(path, "gmlake_malloc", "gmlake_free")
    functions = ctypes.CDLL(path)
    inner = built.allocator()
    for setter, name in SETTERS.items():
        if hasattr(inner, setter):
            getattr(inner, setter)(ctypes.cast(getattr(functions, name), ctypes.c_void_p).value)
    return built


def enable(torch: ModuleType, api: ModuleType, library: os.PathLike[str]) -> tuple[Any, Patches]:
    """Makes the library torch's allocator, and replaces torch's memory functions by ones that report its state.

    Answers the allocator, which must stay referenced, and the replaced functions.

    Raises:
        StateError: torch's allocator is in use already.
        TorchError: this torch cannot change its allocator.
    """
    built = allocator(torch, library)
    try:
        torch.cuda.memory.change_current_allocator(built)
    except RuntimeError as error:
        if "already initialized" in str(error):
            raise StateError("torch's CUDA allocator is in use already: call glake.enable() before the first use of CUDA") from error
        raise TorchError(f"torch {torch.__version__} refuses another allocator: {error}") from error
    return built, patch(torch, api)


def patch(torch: ModuleType, api: ModuleType) -> Patches:
    """Replaces the functions of ``torch._C`` that raise, or describe another allocator, under a pluggable one."""
    patches = Patches(torch)
    inner = torch._C._CUDAPluggableAllocator
    if not all(hasattr(inner, setter) for setter in POOL_SETTERS) and hasattr(torch._C, "_CUDAGraph"):
        patches.attribute(torch._C._CUDAGraph, "capture_begin", _without_pools(torch))
    for name, function in _layer.functions(torch, api).items():
        patches.binding(name, function)
    for name, asker in REFUSED.items():
        patches.binding(name, _refusal(asker))
    if hasattr(torch._C, "_MemPool"):
        patches.attribute(torch._C._MemPool, "__init__", _refusal("torch.cuda.MemPool"))
    for method in ("_share_cuda_", "_new_shared_cuda"):
        patches.attribute(torch.UntypedStorage, method, _refusal("sharing a CUDA tensor with another process"))
    _hold_benchmark(torch, patches)
    _explain_peer_errors(torch, api, patches)
    return patches


def _refusal(what: str) -> Any:
    def refuse(*_arguments: Any, **_named: Any) -> Any:
        raise TorchError(
            f"{what} needs glake's compiled backend, and the plain-ABI backend is in use: install a C++ compiler (g++ or clang++), "
            "then glake.enable() takes the compiled one (python -m glake says what is missing)"
        )

    return refuse


def _without_pools(torch: ModuleType) -> Any:
    def refuse(*_arguments: Any, **_named: Any) -> Any:
        raise TorchError(
            f"torch {torch.__version__} does not tell a pluggable allocator which memory is a CUDA graph's, so that others would get it: "
            "capture graphs with a later torch (those that have set_begin_allocate_to_pool)"
        )

    return refuse


def _hold_benchmark(torch: ModuleType, patches: Patches) -> None:
    """Keeps ``cudnn.benchmark`` off: it queries the allocator's free memory (``cacheInfo``), which raises."""
    original = torch._C._set_cudnn_benchmark

    def set_benchmark(enabled: bool) -> None:
        if enabled:
            warnings.warn(
                "torch.backends.cudnn.benchmark stays off: it needs glake's compiled backend (install a C++ compiler)",
                RuntimeWarning,
                stacklevel=3,
            )
        original(False)

    # The property of torch.backends.cudnn took the function when its class was made.
    property_ = vars(type(torch.backends.cudnn)).get("benchmark")
    if getattr(property_, "setter", None) is original:
        patches.attribute(property_, "setter", set_benchmark)
    patches.binding("_set_cudnn_benchmark", set_benchmark)
    if torch._C._get_cudnn_benchmark():
        set_benchmark(True)


# cudaErrorInvalidValue, cudaErrorPeerAccessUnsupported, cudaErrorIllegalAddress, cudaErrorPeerAccessNotEnabled
PEER_CODES = frozenset({1, 217, 700, 705})


def _explain_peer_errors(torch: ModuleType, api: ModuleType, patches: Patches) -> None:
    """Explains errors of copies between GPUs whose memory is not mapped for both: the driver reports an invalid argument. A check
    before each copy would be too slow, so the reason is added when such an error is printed, if the process has memory on several
    GPUs.
    """
    error_class = getattr(torch, "AcceleratorError", None)
    if error_class is None:
        return

    def text(error: Any) -> str:
        told = str(RuntimeError.__str__(error))
        if getattr(error, "error_code", None) not in PEER_CODES or not _layer.lacks_peer_access(api):
            return told
        return (
            f"{told}\nglake: with the plain-ABI backend, work between GPUs (copies too) needs the pool's memory mapped for them: "
            'glake.enable({"pool": {"peer_access": True}}), or install a C++ compiler for the compiled backend.'
        )

    patches.attribute(error_class, "__str__", text)

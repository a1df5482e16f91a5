"""GLake: a memory runtime for GPU servers. Two lines before the first use of CUDA::

    import glake
    glake.enable()

and torch's CUDA memory comes from GLake's pool, which maps free pieces side by side instead of losing them to fragmentation.
All of torch's memory statistics (``torch.cuda.memory_stats`` and others) then describe that pool.
"""

from __future__ import annotations

import pathlib

from . import _library, asgi, generation, lease, offload, reports
from ._agent import join, leave
from ._blocks import allocate, free
from ._commit import commit, decommit
from ._copies import Copy, copy_, copy_evicted, copy_list, copy_stats, copy_to_all, multi_path
from ._enable import Backend, enable, enabled
from ._gate import active, gate
from ._live import live
from ._mem_pool import mem_pool
from ._modules import Following, follow
from ._regions import Region, fix, hooks, memory_usage, order, plain, prepare, refill, region, region_of, regions, seal, shrink, unfix, unseal, wait
from ._safepoint import safepoint, safepoint_async
from ._statistics import memory_stats, memory_summary, snapshot, trim
from .errors import (
    ClosedError,
    ConfigError,
    DriverError,
    Error,
    InvalidError,
    OutOfMemoryError,
    StateError,
    TimedOutError,
    TorchError,
    UnavailableError,
    UnsupportedError,
)

__version__ = "0.1.0"

__all__ = [
    "ClosedError",
    "ConfigError",
    "Copy",
    "DriverError",
    "Error",
    "Following",
    "InvalidError",
    "OutOfMemoryError",
    "Region",
    "StateError",
    "TimedOutError",
    "TorchError",
    "UnavailableError",
    "UnsupportedError",
    "active",
    "allocate",
    "asgi",
    "backend",
    "commit",
    "copy_",
    "copy_evicted",
    "copy_list",
    "copy_stats",
    "copy_to_all",
    "decommit",
    "enable",
    "fix",
    "follow",
    "free",
    "gate",
    "generation",
    "hooks",
    "join",
    "lease",
    "leave",
    "library_path",
    "live",
    "mem_pool",
    "memory_stats",
    "memory_summary",
    "memory_usage",
    "multi_path",
    "offload",
    "order",
    "plain",
    "prepare",
    "refill",
    "region",
    "region_of",
    "regions",
    "reports",
    "safepoint",
    "safepoint_async",
    "seal",
    "shrink",
    "snapshot",
    "trim",
    "unfix",
    "unseal",
    "wait",
]


def backend() -> Backend | None:
    """Returns the backend that connects torch to GLake: "compiled", "pluggable", or None before ``enable``."""
    state = enabled()
    return None if state is None else state.backend


def library_path() -> pathlib.Path:
    """Returns the path of ``libgmlake.so``: the file that ``GLAKE_LIBRARY`` names, else the package's own.

    Raises:
        Error: the file is missing.
    """
    return _library.path()

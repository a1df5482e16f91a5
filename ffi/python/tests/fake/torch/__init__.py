"""The parts of torch that glake touches, without a GPU: what raises under a pluggable allocator raises here, what is set is recorded."""

import types

from torch import _C, backends, cuda

__version__ = "2.11.0+fake"
version = types.SimpleNamespace(cuda="13.0")


class AcceleratorError(RuntimeError):
    pass


class Tensor:
    pass


class UntypedStorage(_C.StorageBase):
    pass


__all__ = ["AcceleratorError", "Tensor", "UntypedStorage", "backends", "cuda", "version"]

"""Addresses of tensors, and memory for reloaded bytes."""

from __future__ import annotations

from typing import Any, Protocol

from ..errors import OutOfMemoryError


def is_shortage(error: RuntimeError) -> bool:
    """Whether an error is a lack of memory: the pluggable backend raises torch's words, without a class of its own."""
    import torch

    return isinstance(error, (torch.OutOfMemoryError, OutOfMemoryError)) or str(error).startswith("CUDA out of memory")


class Memory(Protocol):
    """Memory operations of one kind of device."""

    def owns(self, tensor: Any) -> bool:
        """Whether saved bytes of such a tensor may be offloaded now."""

    def device(self, index: int) -> Any:
        """Returns the device of tensors on a GPU."""

    def stream(self, tensor: Any) -> int:
        """Returns the stream that uses the tensor."""

    def address(self, storage: Any) -> int:
        """Returns the address of a storage's bytes for the library."""

    def take(self, like: Any, size: int) -> tuple[Any, int]:
        """Allocates memory on the current stream: a storage and its address."""

    def wait(self, packed: Any, stream: int) -> None:
        """Makes a stream wait for a reload."""

    def use(self, like: Any, storage: Any) -> None:
        """Records a use of such memory on the current stream, which is not the one that it was allocated on."""


class Cuda:
    """Memory of GPUs, through torch."""

    def __init__(self) -> None:
        import torch

        self._is_capturing = torch.cuda.is_current_stream_capturing
        # The query that torch.compile's code uses: torch.cuda.current_stream creates an object each time, for 3 us.
        self._raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)

    def owns(self, tensor: Any) -> bool:
        return tensor.is_cuda and not self._is_capturing()

    def device(self, index: int) -> Any:
        import torch

        return torch.device("cuda", index)

    def stream(self, tensor: Any) -> int:
        return int(self._raw_stream(tensor.get_device()))

    def address(self, storage: Any) -> int:
        return int(storage.data_ptr())

    def take(self, like: Any, size: int) -> tuple[Any, int]:
        import torch

        storage = torch.empty(size, dtype=torch.uint8, device=like.device).untyped_storage()
        return storage, int(storage.data_ptr())

    def wait(self, packed: Any, stream: int) -> None:
        packed.wait(stream)

    def use(self, like: Any, storage: Any) -> None:
        import torch

        bytes_of = torch.empty(0, dtype=torch.uint8, device=like.device).set_(storage)
        bytes_of.record_stream(torch.cuda.current_stream(like.device))

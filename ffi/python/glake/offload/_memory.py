"""Where the bytes of tensors lie, and where memory for them comes from."""

from __future__ import annotations

from typing import Any, Protocol

from ..errors import OutOfMemoryError


def is_shortage(error: RuntimeError) -> bool:
    """Whether an error is want of memory: of the plugged backend it has torch's words, and no class of its own."""
    import torch

    return isinstance(error, (torch.OutOfMemoryError, OutOfMemoryError)) or str(error).startswith("CUDA out of memory")


class Memory(Protocol):
    """A kind of device's."""

    def owns(self, tensor: Any) -> bool:
        """Whether what is saved of such a tensor may leave now."""

    def stream(self, tensor: Any) -> int:
        """The stream that it is used on."""

    def address(self, storage: Any) -> int:
        """Where the library finds a storage's bytes."""

    def take(self, like: Any, size: int) -> tuple[Any, int]:
        """Memory of the current stream: a storage and its address."""

    def wait(self, packed: Any, stream: int) -> None:
        """What is enqueued on a stream from now on has what comes back there."""

    def use(self, like: Any, storage: Any) -> None:
        """Such memory is used on the current stream, which is another one than it was taken on."""


class Cuda:
    """GPUs, by way of torch."""

    def __init__(self) -> None:
        import torch

        self._is_capturing = torch.cuda.is_current_stream_capturing
        # As torch.compile's code asks: torch.cuda.current_stream makes an object each time, for 3 us.
        self._raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)

    def owns(self, tensor: Any) -> bool:
        return tensor.is_cuda and not self._is_capturing()

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

"""The interface of torch_memory_saver (version 0.0.10) over GLake's regions::

    from torch_memory_saver import torch_memory_saver

    with torch_memory_saver.region(tag="weights", enable_cpu_backup=True):
        model = load().cuda()
    torch_memory_saver.pause("weights")     # the memory leaves the GPU, the addresses stay
    torch_memory_saver.resume("weights")

Programs that use the other package run unchanged: install this one in its place. Nothing is preloaded. GLake becomes torch's allocator with
the first region, before the program's first use of CUDA, or before that through ``configure_subprocess`` and ``GLAKE_ALLOCATOR=1``.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import Any, Literal

import glake
import glake_switch

__all__ = ["TorchMemorySaver", "configure_subprocess", "torch_memory_saver"]

CpuBackupBackend = Literal["mmap", "pinned"]
HookMode = Literal["preload", "torch"]

_DEFAULT = "default"
# Memory that is allocated inside `disable`.
_DISABLED = "saver disabled"


class TorchMemorySaver:
    """Regions of GPU memory that are paused and resumed by their tags. The module's object ``torch_memory_saver`` is the one to use."""

    def __init__(self) -> None:
        self._regions: dict[str, set[str]] = {}
        self._disk: set[str] = set()
        self._hook_mode: HookMode = "preload"
        self._margin = 0
        self._folder = os.environ.get("TMS_DISK_BACKUP_DIR")
        self._retains = os.environ.get("TMS_RETAIN_CPU_BACKUP", "").lower() in ("1", "true")

    @contextlib.contextmanager
    def region(
        self,
        tag: str = _DEFAULT,
        enable_cpu_backup: bool = False,
        enable_disk_backup: bool = False,
        cpu_backup_backend: CpuBackupBackend | None = None,
    ) -> Iterator[None]:
        """Makes what the calling thread allocates in the block pausable under a tag. One tag may be used with several kinds of backup.

        Args:
            tag: the name for ``pause`` and ``resume``.
            enable_cpu_backup: the bytes are kept in pinned host memory while paused; without a backup they are undefined afterwards.
            enable_disk_backup: the bytes are kept in files, in the folder of ``set_disk_backup_dir`` or ``TMS_DISK_BACKUP_DIR``.
            cpu_backup_backend: accepted for compatibility: host memory is pinned, and given back to the system when it is not needed.

        Raises:
            ValueError: both backups, or a backend without ``enable_cpu_backup``, or an unknown one.
            glake.StateError: the program has used CUDA already, with torch's own allocator.
        """
        _check_backend(enable_cpu_backup, cpu_backup_backend)
        if enable_cpu_backup and enable_disk_backup:
            raise ValueError("enable_cpu_backup and enable_disk_backup exclude each other: choose one")
        if enable_disk_backup and not self._folder:
            raise ValueError("enable_disk_backup needs a folder: call set_disk_backup_dir(path) first, or set TMS_DISK_BACKUP_DIR")
        self._enable()
        kind = "kept" if enable_cpu_backup else "disk" if enable_disk_backup else "discarded"
        with self._region(tag, kind):
            yield

    @contextlib.contextmanager
    def cuda_graph(
        self,
        cuda_graph: Any,
        pool: Any = None,
        stream: Any = None,
        capture_error_mode: str = "global",
        tag: str = _DEFAULT,
        enable_cpu_backup: bool = False,
        cpu_backup_backend: CpuBackupBackend | None = None,
    ) -> Iterator[None]:
        """``torch.cuda.graph``, whose memory is paused and resumed with a tag. Its bytes are kept either way.

        Raises:
            ValueError: as ``region``.
        """
        import torch

        _check_backend(enable_cpu_backup, cpu_backup_backend)
        self._enable()
        with torch.cuda.graph(cuda_graph, pool=pool, stream=stream, capture_error_mode=capture_error_mode):
            yield
        self._regions.setdefault(tag, set()).add(f"graph {tuple(cuda_graph.pool())}")

    @contextlib.contextmanager
    def disable(self) -> Iterator[None]:
        """Makes what the calling thread allocates in the block ordinary memory, also inside of ``region``: no pause takes it."""
        self._enable()
        with glake.region(_DISABLED):
            yield

    def pause(self, tag: str | None = None) -> None:
        """Moves the memory of a tag, or of all tags, off the GPU. The addresses stay, and must not be used until ``resume``. Memory that
        is paused already, and a tag without memory, are passed over.

        Raises:
            glake.OutOfMemoryError: the host has too little memory for the backup; nothing is lost, and a repeated call continues.
            glake.DriverError: the driver or the disk refused; the same.
        """
        there = self._there(tag)
        for tier, tags in (("file", there & self._disk), ("host", there - self._disk)):
            if tags:
                glake.shrink(sorted(tags), tier=tier)

    def resume(self, tag: str | None = None) -> None:
        """Brings the memory of a tag, or of all tags, back to its addresses.

        Raises:
            glake.OutOfMemoryError: the GPU's memory is in use by others; nothing is lost, and a repeated call continues.
            glake.DriverError: the driver or the disk refused, or a digest does not match; the same.
        """
        there = self._there(tag)
        if there:
            glake.refill(sorted(there))

    @property
    def enabled(self) -> bool:
        """Whether regions can be paused in this process: False with ``GLAKE_DISABLE=1``."""
        return not glake_switch.is_disabled()

    @property
    def hook_mode(self) -> HookMode:
        """How the other package hooks allocations. Without a meaning here: set it to either."""
        return self._hook_mode

    @hook_mode.setter
    def hook_mode(self, mode: HookMode) -> None:
        if mode not in ("preload", "torch"):
            raise ValueError(f"hook_mode is {mode!r}: 'preload' and 'torch' are there")
        self._hook_mode = mode

    @property
    def memory_margin_bytes(self) -> int:
        """Bytes of each GPU that this process leaves free: an allocation beyond that is out of memory."""
        return self._margin

    @memory_margin_bytes.setter
    def memory_margin_bytes(self, value: int) -> None:
        import torch

        if value < 0:
            raise ValueError(f"memory_margin_bytes is {value}: bytes, 0 or more")
        self._enable()
        for device in range(torch.cuda.device_count()):
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(max(0.0, 1 - value / total), device)
        self._margin = value

    @property
    def retain_cpu_backup(self) -> bool:
        """Whether ``get_cpu_backup`` also answers for memory that is not paused. Pinned memory is reused by later pauses either way."""
        return self._retains

    @retain_cpu_backup.setter
    def retain_cpu_backup(self, value: bool) -> None:
        self._retains = bool(value)

    def get_cpu_backup(self, x: Any, zero_copy: bool = False) -> Any:
        """Returns a tensor in host memory with the bytes of a paused tensor; None if it has no backup in host memory. With
        ``retain_cpu_backup`` it returns the bytes of a tensor that is not paused too.

        Args:
            x: a contiguous CUDA tensor.
            zero_copy: accepted for compatibility: the result is always a copy, which stays valid.

        Raises:
            ValueError: ``x`` is on the CPU, or not contiguous.
        """
        import torch

        if not x.is_cuda:
            raise ValueError(f"x is on {x.device}: give a CUDA tensor")
        if not x.is_contiguous():
            raise ValueError(f"x has shape {tuple(x.shape)} and strides {x.stride()}: give a contiguous tensor")
        backup = torch.empty(x.shape, dtype=x.dtype)
        tag = glake.region_of(x)
        if tag is None or not any(tag in names for names in self._regions.values()) or tag.endswith(" discarded"):
            return None
        try:
            glake.copy_evicted(backup, x)
        except glake.InvalidError:
            is_here = self._retains and tag not in glake.gate()["closed"]
            return backup.copy_(x) if is_here else None
        return backup

    def set_disk_backup_dir(self, path: str | os.PathLike[str]) -> None:
        """Sets the folder for the files of ``enable_disk_backup``, created if needed. It has to come before the first region.

        Raises:
            glake.StateError: GLake is torch's allocator already, with another folder.
        """
        folder = os.path.abspath(os.fspath(path))
        os.makedirs(folder, exist_ok=True)
        if glake.backend() is not None and folder != self._folder:
            raise glake.StateError(
                f"GLake runs already, with {self._folder or 'no folder'} for files: call set_disk_backup_dir before the first region, "
                "or set TMS_DISK_BACKUP_DIR"
            )
        self._folder = folder

    def _enable(self) -> None:
        if glake.backend() is None:
            glake.enable({"tiers": {"files": os.path.abspath(self._folder)}} if self._folder else None)

    def _region(self, tag: str, kind: str) -> glake.Region:
        name = f"saver {tag} {kind}"
        self._regions.setdefault(tag, set()).add(name)
        if kind == "disk":
            self._disk.add(name)
        return glake.region(name, policy="discard" if kind == "discarded" else "keep")

    def _there(self, tag: str | None) -> set[str]:
        """Returns the regions of a tag that exist: one is forgotten with its last block."""
        wanted = set().union(*self._regions.values()) if tag is None else self._regions.get(tag, set())
        return wanted & {region["tag"] for region in glake.regions()} if wanted else set()


def _check_backend(enable_cpu_backup: bool, backend: CpuBackupBackend | None) -> None:
    if backend is not None and not enable_cpu_backup:
        raise ValueError("cpu_backup_backend requires enable_cpu_backup=True")
    if backend not in (None, "mmap", "pinned"):
        raise ValueError(f"cpu_backup_backend is {backend!r}: 'pinned' and 'mmap' are there")


@contextlib.contextmanager
def configure_subprocess() -> Iterator[None]:
    """Starts the Python processes that are created in the block with GLake as torch's allocator, from their first use of CUDA on."""
    path = str(pathlib.Path(glake_switch.__file__).resolve().parent / "path")
    behind = os.environ.get("PYTHONPATH", "")
    ours = {"GLAKE_ALLOCATOR": "1", "PYTHONPATH": os.pathsep.join([path] + [part for part in behind.split(os.pathsep) if part not in ("", path)])}
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


torch_memory_saver = TorchMemorySaver()

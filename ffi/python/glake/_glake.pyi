"""Doors to libgmlake.so: one C function each, called without Python's lock.

Sizes are bytes; addresses and streams are integers; a device of -1 means all where it says so. A failure raises the subclass of
``glake.Error`` for its status, with the library's text. Call ``open`` before anything else (``glake._library`` does).
"""

import os
import pathlib
from collections.abc import Callable

def open(path: str | os.PathLike[str]) -> None:
    """Opens the library for the life of the process. Error: not GLake's, of another version, or another one is open."""

def path() -> pathlib.Path | None:
    """The library that is open."""

def version() -> str: ...
def abi() -> int: ...
def configure(preset: str | None = None, file: str | None = None, overrides: str | None = None) -> None:
    """Sets the configuration, before the start. ``overrides`` is TOML text, above the environment."""

def start() -> None:
    """Opens the devices."""

def started() -> bool: ...
def device_count() -> int: ...
def device_name() -> str | None:
    """"cuda", "sim:h200x4"; None before the start."""

def alloc(device: int, size: int, stream: int = 0) -> int:
    """The address of a new block; 0 for a size of 0."""

def free(address: int) -> None:
    """Frees the block that begins at the address. InvalidError where none does."""

def find(address: int) -> tuple[int, int, int, int] | None:
    """Base, size, requested size and device of the block around the address; None where there is none."""

def record_stream(address: int, stream: int) -> None:
    """The block is used on the stream too. InvalidError where there is none."""

def largest(device: int) -> int:
    """The largest request that could be served now, stitching and growing counted."""

def trim(device: int = -1, keep: int = 0) -> int:
    """Releases free memory down to ``keep`` bytes reserved a device; answers the bytes released. -1: all devices."""

def set_fraction(device: int, fraction: float) -> None: ...
def fraction(device: int) -> float: ...
def pool_create(device: int, id: tuple[int, int]) -> None: ...
def pool_release(device: int, id: tuple[int, int]) -> None: ...
def pool_use_count(device: int, id: tuple[int, int]) -> int: ...
def pool_trim(device: int, id: tuple[int, int]) -> None: ...
def stats_json(device: int) -> str:
    """Torch's flat keys and ours under ``glake.``, as JSON."""

def snapshot_json() -> str:
    """Torch's snapshot, as JSON."""

def reset_peaks(device: int) -> None: ...
def reset_totals(device: int) -> None: ...
def record_history(enabled: bool, max_entries: int = ..., clear: bool = False) -> None: ...
def history_enabled() -> bool: ...
def on_out_of_memory(observer: Callable[[int, int, int, int], object] | None) -> None:
    """Called with device, requested, total and free bytes on the thread whose request fails; None removes it.

    One at a time, and each stays alive for the life of the process.
    """

def copy_async(to: int, from_: int, size: int, stream: int = 0, flags: int = 0) -> int:
    """Enqueues a copy between addresses, which the caller keeps until it is done. A handle for ``copy_wait``; 0 where nothing is
    left to wait for. ``flags`` are those of ``gmlake.h``."""

def copy_list(blocks: list[tuple[int, int, int]], stream: int = 0, flags: int = 0) -> int:
    """As ``copy_async``, for many blocks: to, from, size."""

def copy_to_all(to: list[int], from_: int, size: int, stream: int = 0, flags: int = 0) -> int:
    """As ``copy_async``, from one range of host memory to several GPUs."""

def copy_wait(handle: int) -> None:
    """Waits until the bytes are there, and ends the handle. InvalidError where it was ended before."""

def copy_done(handle: int) -> bool: ...
def copy_drop(handle: int) -> None:
    """Ends the handle of a copy, which goes on, without waiting for it."""

def device_of(address: int) -> int | None:
    """The GPU whose memory is at an address; None for the host's, and for memory that moves."""

def multi_path(on: bool = True) -> None: ...
def copy_stats_json() -> str: ...
class Packed:
    """Bytes of a block in host memory, by ``offload_begin``, until the object goes. Going waits for nothing, on whatever thread."""

    @property
    def bytes(self) -> int: ...
    def begin(self, stream: int, address: int) -> None:
        """Begins to copy them to memory that was allocated on the stream. Nothing may read or write there before ``wait``. Again and again, if
        need be."""

    def wait(self, stream: int) -> None:
        """Has a stream wait, on its GPU, for what ``begin`` began last. InvalidError where it began nothing."""

    def reload(self, stream: int, address: int) -> None:
        """``begin`` and ``wait`` for one stream."""

class Site:
    """Where a program offloads: it learns the order in which what a pass packs is read. Forgotten when this object goes."""

    def __init__(self) -> None: ...
    def ask(self, device: int, budget: int | None, preset: str) -> None:
        """What plans are for from the next pass on: ``"fit"``, ``"memory"``, ``"hidden"`` or ``"hybrid"``, in so much of what the GPU may show."""

    def needs(self, shape: int) -> bool:
        """Whether a forward of such a shape has to tell what it saves: not where the plan of one like it keeps everything."""

    def told_json(self, course: bool = False) -> str: ...
    def packed(
        self, size: int, link_size: int | None = None, scope: int = -1, leaf: int = 0, stream: int = 0
    ) -> tuple[int, int, list[int]]:
        """The next item of the pass; whether it stays (0), is to be offloaded (1), or is a leaf's output that is not to be stored, which nobody
        drops (2); and items whose reloads are to begin first, in this order."""

    def untimed(self) -> None:
        """Times of the pass that is under way do not count."""

    def leaf_begins(self) -> None:
        """A leaf is computed from here on, until its output is packed."""

    def replays(self, scope: int, begins: bool) -> None:
        """A scope is computed again: from here on, or until here."""

    def unpacked(self, item: int) -> list[int]:
        """An item is read: items whose reloads are to begin first, in this order. InvalidError: the pass has no such item."""

    def freed(self, item: int) -> None:
        """What was reloaded of an item is gone from its GPU, and it may be read again."""

    def dropped(self, item: int) -> None:
        """Nobody reads an item any more; with the last one the pass is over."""

    def check(self, save: int) -> int:
        """What is known of a save: 0 it is to be checked, 1 its bytes do not change, 2 they do, and should stay on their GPU."""

    def offload_checked(self, stream: int, address: int, bytes: int, save: int) -> Packed | None:
        """As ``offload_begin``, of a save that is to be checked: the bytes are copied again when the block is freed."""

def offload_begin(stream: int, address: int, bytes: int) -> Packed | None:
    """Copies bytes of a live block to host memory, after what is on the stream by now; the block may be freed at once. None, and the
    bytes are to stay where they are: there is no host memory, it is no memory of the library's, or the stream is captured."""

def offload_prepare(device: int, bytes: int) -> None:
    """Pins host memory ahead."""

def offload_stats_json() -> str: ...
def generation(address: int) -> int:
    """A number for the life of the live block that an address lies in."""

def is_private(address: int) -> bool:
    """Whether the live block that an address lies in is of a private pool: it is not offloaded."""

def stream_synchronize(device: int, stream: int) -> None: ...
def host_register(address: int, size: int) -> None:
    """Pins whole pages of host memory, which stay mapped until they are unpinned."""

def host_unregister(address: int) -> None: ...
def region_define(tag: str, policy: int, host_copy: int) -> None:
    """Policies: keep, sealed, discard. Host copies: drop, retain, prepare."""

def region_push(tag: str) -> None:
    """The calling thread's allocations go to the region until ``region_pop``. They stack."""

def region_pop() -> None: ...
def region_seal(tag: str, strict: bool = False) -> None: ...
def region_unseal(tag: str) -> None: ...
def region_prepare(tag: str) -> None: ...
def region_fix(address: int, fixed: bool) -> None: ...
def live_ranges(address: int, ranges: list[tuple[int, int]] | None) -> None:
    """Which bytes of the block that begins at an address count; None: all of them again."""

def live_callback(address: int, callback: Callable[[], list[tuple[int, int]]]) -> None:
    """As ``live_ranges``, asked at each shrink that takes the block."""

def decommit(address: int, bytes: int) -> int:
    """Gives the memory of a range of a live block up; returns how much."""

def commit(address: int, bytes: int) -> int:
    """Has memory for what was decommitted of a range of a live block; returns how much."""

def region_wait(tag: str, device: int, stream: int) -> None: ...
def region_order(tags: list[str]) -> None: ...
def region_of(address: int) -> str | None: ...
def regions_json() -> str: ...
def shrink(request: str) -> str:
    """Takes and answers JSON: the fields stand in ``gmlake.h``."""

def refill(request: str) -> str: ...
def memory_usage_json() -> str: ...
def use_begin(tags: list[str], when_closed: int, timeout_ms: int) -> int:
    """What ``use_end`` takes. When closed: refill, hold, refuse. A timeout of -1 is none."""

def gate_wait(tags: list[str], when_closed: int, timeout_ms: int) -> None:
    """As ``use_begin``, but begins no use."""

def use_end(use: int) -> None: ...
def use_join(use: int) -> None:
    """``ClosedError`` where the use is parked: the thread is not inside."""

def use_leave(use: int) -> None: ...
def safepoint_wanted() -> bool: ...
def use_wanted(use: int) -> bool:
    """Whether a shrink waits for this use, which may be parked now."""

class Parked:
    """Enters with whether any of the uses has to wait; ends when all have gone on. ``meanwhile`` is told now and then whether something
    asks for the memory."""

    def __init__(self, uses: list[int], meanwhile: Callable[[bool], object], votes: bool = False) -> None:
        """Where it votes nothing moves before ``vote``; who leaves the block without one is against it."""

    def __enter__(self) -> bool: ...
    def have_gone_on(self) -> bool: ...
    def asked(self, timeout_ms: int) -> int:
        """0: not yet; 1: all that wait are asked for their votes; -1: a shrink is over. Others run while it waits."""

    def vote(self, yes: bool) -> bool:
        """Whether it is heard. Those that are against it, and heard, go on at once."""
    def __exit__(self, kind: object, error: object, trace: object) -> bool: ...

def gate_json() -> str: ...
def hooks_set(before: Callable[[str], object] | None, after: Callable[[str], object] | None, timeout_ms: int) -> None:
    """Each is called with an event as JSON. Both stay alive for the life of the process."""

def hooks_end() -> None:
    """The interpreter ends: hooks that run are waited for, and none begins any more."""

def lease_set(device: int, bytes: int | None) -> None:
    """How much memory may be made; None: nothing bounds it but the limit."""

def lease_grant(device: int, bytes: int) -> None:
    """Adds to a lease; 0: there is none to give."""

def lease_take(device: int, bytes: int) -> int:
    """Lowers a lease by what is not made and by what is free; returns by how much."""

def lease_watch(watcher: Callable[[str, int, int], object] | None) -> None:
    """Is called with "want", "grow" or "returned", the device and bytes. It stays alive for the life of the process."""

def join(name: str | None, agent: str | None) -> None:
    """Joins the agent at a socket; None: that of the configuration, or of this user."""

def leave() -> None: ...
def enable_peer(device: int, peer: int) -> None:
    """Work of ``device`` may touch the pool's memory on ``peer``, present and future."""

def share(address: int) -> tuple[bytes, int]:
    """A handle for another process, and the address's offset in what it opens."""

def open_shared(handle: bytes, device: int) -> int:
    """The base address, here, of what another process shares."""

def close_shared(address: int) -> None: ...

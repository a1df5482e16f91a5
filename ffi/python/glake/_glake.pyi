"""Bindings to libgmlake.so: one C function each, called without the GIL.

Sizes are bytes; addresses and streams are integers; a device of -1 means all devices where stated. A failure raises the subclass of
``glake.Error`` for its status, with the library's text. Call ``open`` before anything else (``glake._library`` does).
"""

import os
import pathlib
from collections.abc import Callable

def open(path: str | os.PathLike[str]) -> None:
    """Opens the library for the life of the process. Error: not GLake's library, another version, or another library is open."""

def path() -> pathlib.Path | None:
    """Returns the path of the open library."""

def version() -> str: ...
def abi() -> int: ...
def configure(preset: str | None = None, file: str | None = None, overrides: str | None = None) -> None:
    """Sets the configuration before the start. ``overrides`` is TOML text, above the environment."""

def start() -> None:
    """Opens the devices."""

def started() -> bool: ...
def device_count() -> int: ...
def device_name() -> str | None:
    """Returns "cuda" or a simulated model such as "sim:h200x4"; None before the start."""

def alloc(device: int, size: int, stream: int = 0) -> int:
    """Returns the address of a new block; 0 for a size of 0."""

def free(address: int) -> None:
    """Frees the block that begins at the address. InvalidError if none does."""

def find(address: int) -> tuple[int, int, int, int] | None:
    """Returns base, size, requested size and device of the block that contains the address; None if there is none."""

def record_stream(address: int, stream: int) -> None:
    """Records that the block is used on the stream too. InvalidError if there is no block."""

def largest(device: int) -> int:
    """Returns the size of the largest request that could be served now, including stitching and growing."""

def trim(device: int = -1, keep: int = 0) -> int:
    """Releases free memory down to ``keep`` bytes reserved for each device; returns the bytes released. -1: all devices."""

def set_fraction(device: int, fraction: float) -> None: ...
def fraction(device: int) -> float: ...
def pool_create(device: int, id: tuple[int, int]) -> None: ...
def pool_release(device: int, id: tuple[int, int]) -> None: ...
def pool_use_count(device: int, id: tuple[int, int]) -> int: ...
def pool_fix(id: tuple[int, int], fixed: bool) -> None: ...
def pool_trim(device: int, id: tuple[int, int]) -> None: ...
def stats_json(device: int) -> str:
    """Returns torch's flat keys, and GLake's under ``glake.``, as JSON."""

def snapshot_json() -> str:
    """Returns a snapshot in torch's form, as JSON."""

def reset_peaks(device: int) -> None: ...
def reset_totals(device: int) -> None: ...
def record_history(enabled: bool, max_entries: int = ..., clear: bool = False) -> None: ...
def history_enabled() -> bool: ...
def on_out_of_memory(observer: Callable[[int, int, int, int], object] | None) -> None:
    """Sets the observer, called with device, requested, total and free bytes on the thread whose request fails; None removes it.

    There is at most one, and each stays alive for the life of the process.
    """

def copy_async(to: int, from_: int, size: int, stream: int = 0, flags: int = 0) -> int:
    """Enqueues a copy between addresses, which the caller keeps until it is complete. Returns a handle for ``copy_wait``; 0 if there is
    nothing left to wait for. ``flags`` are those of ``gmlake.h``."""

def copy_list(blocks: list[tuple[int, int, int]], stream: int = 0, flags: int = 0) -> int:
    """Enqueues many copies like ``copy_async``: to, from, size."""

def copy_to_all(to: list[int], from_: int, size: int, stream: int = 0, flags: int = 0) -> int:
    """Enqueues copies like ``copy_async`` from one range of host memory to several GPUs."""

def copy_wait(handle: int) -> None:
    """Waits until the copy is complete, and ends the handle. InvalidError if it was ended before."""

def copy_done(handle: int) -> bool: ...
def copy_drop(handle: int) -> None:
    """Ends the handle of a copy without waiting for it; the copy continues."""

def device_of(address: int) -> int | None:
    """Returns the GPU whose memory is at an address; None for host memory, and for managed memory."""

def multi_path(on: bool = True) -> None: ...
def copy_stats_json() -> str: ...
class Packed:
    """Offloaded bytes of a block, from ``offload_begin``. Dropping the object releases them without a wait, on any thread."""

    @property
    def bytes(self) -> int: ...
    def begin(self, stream: int, address: int) -> None:
        """Begins to copy the bytes to memory that was allocated on the stream. The memory must not be accessed before
        ``wait``. May be repeated."""

    def wait(self, stream: int) -> None:
        """Makes a stream wait, on its GPU, for the latest ``begin``. InvalidError without one."""

    def reload(self, stream: int, address: int) -> None:
        """Calls ``begin`` and ``wait`` for one stream."""

    def store(self, stream: int, address: int) -> None:
        """Copies the bytes of a block into reserved memory, after the work of the stream and the last ``begin``. The block may be freed
        at once; if this fails, it still has the bytes."""

    def host(self) -> int:
        """Waits for the copies of reserved memory, and returns its address: the same each time. InvalidError for offloaded bytes."""

class Site:
    """An offload site: it learns the order in which the packed items of a pass are read. Dropping the object forgets it."""

    def __init__(self) -> None: ...
    def ask(self, device: int, budget: int | None, preset: str) -> None:
        """Sets the goal of plans from the next pass on: a preset (``"fit"``, ``"memory"``, ``"hidden"`` or ``"hybrid"``)
        and the memory that the GPU may show."""

    def needs(self, shape: int) -> bool:
        """Returns whether a forward of such a shape has to report its saves; False if the plan of a similar one keeps
        everything."""

    def told_json(self, course: bool = False) -> str: ...
    def packed(
        self, size: int, link_size: int | None = None, scope: int = -1, leaf: int = 0, stream: int = 0
    ) -> tuple[int, int, list[int]]:
        """Returns the next item of the pass; a verdict: it stays (0), is to be offloaded (1), or is a leaf's output that is
        not stored and never dropped (2); and the items whose reloads begin first, in this order."""

    def untimed(self) -> None:
        """Excludes the current pass from time measurements."""

    def leaf_begins(self) -> None:
        """Begins the computation of a leaf, which ends when its output is packed."""

    def replays(self, scope: int, begins: bool) -> None:
        """Marks the beginning or the end of the recomputation of a scope."""

    def unpacked(self, item: int) -> list[int]:
        """Reports a read of an item; returns the items whose reloads begin first, in this order. InvalidError: the pass has
        no such item."""

    def freed(self, item: int) -> None:
        """Reports that the reloaded copy of an item was freed, while the item may be read again."""

    def dropped(self, item: int) -> None:
        """Reports that an item will not be read any more; the last one ends the pass."""

    def stream(self, places: list[tuple[int, int]]) -> None:
        """Sets the streamed weights, which are all away: the bytes of each, and the number of its block in the order of a forward."""

    def used(self, place: int, phase: int, first: bool, count: int) -> tuple[list[int], list[int]]:
        """Reports the use of one of ``count`` streamed weights; returns those to free, and those to reload, in this order. Phases: 0 a
        forward without gradients, 1 a forward, 2 a backward. ``first``: a new forward begins, and all copies were freed."""

    def check(self, save: int) -> int:
        """Returns the state of a save: 0 to be checked, 1 its bytes do not change, 2 they do, and should stay on their
        GPU."""

    def offload_checked(self, stream: int, address: int, bytes: int, save: int) -> Packed | None:
        """Begins an offload like ``offload_begin`` for a save to be checked: the bytes are copied again when the block is
        freed."""

def offload_begin(stream: int, address: int, bytes: int) -> Packed | None:
    """Copies bytes of a live block to host memory, after the work enqueued on the stream so far; the block may be freed at
    once. None if the bytes have to stay: no host memory, not the library's memory, or the stream is captured."""

def offload_room(device: int, bytes: int, freed: int) -> None:
    """Checks whether host memory can be had, while other memory of the process is freed. OutOfMemoryError: it cannot."""

def offload_reserve(device: int, bytes: int) -> Packed:
    """Reserves contiguous pinned host memory, whose contents are undefined. OutOfMemoryError: there is none."""

def offload_prepare(device: int, bytes: int) -> None:
    """Pins host memory ahead."""

def offload_stats_json() -> str: ...
def generation(address: int) -> int:
    """Returns a number for the lifetime of the live block that contains an address."""

def is_private(address: int) -> bool:
    """Returns whether the live block that contains an address belongs to a private pool: it is not offloaded."""

def stream_synchronize(device: int, stream: int) -> None: ...
def host_register(address: int, size: int) -> None:
    """Pins whole pages of host memory, which stay mapped until they are unpinned."""

def host_unregister(address: int) -> None: ...
def region_define(tag: str, policy: int, host_copy: int) -> None:
    """Defines a region. Policies: keep, sealed, discard. Host copies: drop, retain, prepare."""

def region_release(tag: str) -> None:
    """Takes back one ``region_define``; no-op in a forked child and at exit."""

def region_push(tag: str) -> None:
    """Makes the calling thread allocate from the region until ``region_pop``. Entries nest."""

def region_pop() -> None: ...
def plain_push() -> None:
    """Makes the calling thread allocate plain memory until ``plain_pop``. Entries nest."""

def plain_pop() -> None: ...
def region_seal(tag: str, strict: bool = False) -> None: ...
def region_unseal(tag: str) -> None: ...
def region_prepare(tag: str) -> None: ...
def region_fix(address: int, fixed: bool) -> None: ...
def live_ranges(address: int, ranges: list[tuple[int, int]] | None) -> None:
    """Declares the live bytes of the block that begins at an address; None: all bytes are live."""

def live_callback(address: int, callback: Callable[[], list[tuple[int, int]]]) -> None:
    """Declares live bytes by a function that each shrink of the block calls."""

def decommit(address: int, bytes: int) -> int:
    """Releases the memory of a range of a live block; returns the bytes released."""

def commit(address: int, bytes: int) -> int:
    """Creates memory for the decommitted part of a range of a live block; returns the bytes created."""

def read_evicted(to: int, from_: int, bytes: int) -> None:
    """Copies evicted bytes to host memory from their copy there. InvalidError: some are elsewhere."""

def region_wait(tag: str, device: int, stream: int) -> None: ...
def region_order(tags: list[str]) -> None: ...
def region_of(address: int) -> str | None: ...
def regions_json() -> str: ...
def shrink(request: str) -> str:
    """Takes and returns JSON, whose fields ``gmlake.h`` describes."""

def refill(request: str) -> str: ...
def memory_usage_json() -> str: ...
def use_begin(tags: list[str], when_closed: int, timeout_ms: int) -> int:
    """Returns the argument of ``use_end``. When closed: refill, hold, refuse. A timeout of -1 is none."""

def gate_wait(tags: list[str], when_closed: int, timeout_ms: int) -> None:
    """Waits like ``use_begin``, but begins no use."""

def use_end(use: int) -> None: ...
def use_join(use: int) -> None:
    """Adds a thread to a use. ``ClosedError`` if the use is parked: the thread is not inside."""

def use_leave(use: int) -> None: ...
def safepoint_wanted() -> bool: ...
def use_wanted(use: int) -> bool:
    """Returns whether a shrink waits for this use, which may be parked now."""

class Parked:
    """Context manager: its value tells whether any of the uses has to wait, and it ends when all have continued. ``meanwhile``
    is called repeatedly with whether the memory is requested back."""

    def __init__(self, uses: list[int], meanwhile: Callable[[bool], object], votes: bool = False) -> None:
        """With ``votes`` no memory moves before ``vote``; leaving the block without a vote is a no."""

    def __enter__(self) -> bool: ...
    def have_gone_on(self) -> bool: ...
    def asked(self, timeout_ms: int) -> int:
        """Returns 0 if not yet, 1 if all waiting uses are asked for their votes, -1 if a shrink has ended. Releases the
        GIL."""

    def vote(self, yes: bool) -> bool:
        """Returns whether the vote counts. Uses with a counted no continue at once."""
    def __exit__(self, kind: object, error: object, trace: object) -> bool: ...

def gate_json() -> str: ...
def hooks_set(before: Callable[[str], object] | None, after: Callable[[str], object] | None, timeout_ms: int) -> None:
    """Sets the hooks, which are called with an event as JSON. Both stay alive for the life of the process."""

def hooks_end() -> None:
    """Ends hooks at the end of the interpreter: waits for running ones, and none begins any more."""

def lease_set(device: int, bytes: int | None) -> None:
    """Sets the memory that may be created; None: only the limit bounds it."""

def lease_grant(device: int, bytes: int) -> None:
    """Adds to a lease; 0 denies pending requests."""

def lease_take(device: int, bytes: int) -> int:
    """Lowers a lease by its unused part and by free memory; returns the number of bytes."""

def lease_watch(watcher: Callable[[str, int, int], object] | None) -> None:
    """Sets the watcher, called with "want", "grow" or "returned", the device and bytes. It stays alive for the life of the
    process."""

def join(name: str | None, agent: str | None) -> None:
    """Joins the agent at a socket; None: that of the configuration, or of this user."""

def leave() -> None: ...
def enable_peer(device: int, peer: int) -> None:
    """Gives work on ``device`` access to the pool's memory on ``peer``, present and future."""

def share(address: int) -> tuple[bytes, int]:
    """Returns a handle for another process, and the offset of the address in the opened memory."""

def open_shared(handle: bytes, device: int) -> int:
    """Returns the local base address of memory that another process shares."""

def close_shared(address: int) -> None: ...

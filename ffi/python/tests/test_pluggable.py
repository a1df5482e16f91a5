"""The plain-ABI backend's layer on the simulated device, over a torch that is none and over the real one where it is installed."""

import importlib.util
import unittest

import child

AROUND = """
import warnings
warnings.simplefilter("ignore")
import glake, torch
from glake import _library, pluggable
api = _library.api()
api.start()
C = torch._C
held, patches = pluggable.enable(torch, api, _library.path())
warnings.simplefilter("error")
def has(*names):
    return all(hasattr(C, name) for name in names)
def refused(function, *arguments):
    try:
        function(*arguments)
    except glake.TorchError as error:
        assert "compiled backend" in str(error) and "C++ compiler" in str(error), error
    else:
        raise AssertionError("not refused")
"""


class Layer:
    """The tests; what torch they run over is the subclass's."""

    torch = None

    def layer(self, code):
        return child.check(self, AROUND + code, torch=self.torch)

    def test_statistics(self):
        self.layer(
            """
block = api.alloc(0, 20 << 20)
stats = C._cuda_memoryStats(0)
assert stats["allocated_bytes"]["all"]["current"] == 20 << 20, stats
assert stats["requested_bytes"]["large_pool"]["peak"] == 20 << 20
for key in ("num_alloc_retries", "num_ooms", "max_split_size", "num_sync_all_streams", "num_device_alloc", "num_device_free"):
    assert type(stats[key]) is int, key
for key in ("allocation", "segment", "active", "inactive_split", "reserved_bytes", "active_bytes", "inactive_split_bytes"):
    for pool in ("all", "small_pool", "large_pool"):
        assert set(stats[key][pool]) == {"current", "peak", "allocated", "freed"}, (key, pool)
assert set(stats["oversize_allocations"]) == set(stats["oversize_segments"]) == {"current", "peak", "allocated", "freed"}
assert "stitches" in stats["glake"]
if has("_accelerator_getDeviceStats"):
    assert C._accelerator_getDeviceStats(0) == stats
api.free(block)
C._cuda_resetPeakMemoryStats(0)
assert C._cuda_memoryStats(0)["allocated_bytes"]["all"]["peak"] == 0
C._cuda_resetAccumulatedMemoryStats(0)
assert C._cuda_memoryStats(0)["allocated_bytes"]["all"]["allocated"] == 0
if has("_accelerator_resetPeakStats"):
    C._accelerator_resetPeakStats(0)
    C._accelerator_resetAccumulatedStats(0)
"""
        )

    def test_snapshot_by_pool(self):
        self.layer(
            """
block = api.alloc(0, 3 << 20)
for argument in (None, (0, 0), (0, 0, True)):
    taken = C._cuda_memorySnapshot(argument)
    assert block in [part["address"] for segment in taken["segments"] for part in segment["blocks"]], argument
    assert set(taken) == {"segments", "device_traces", "allocator_settings", "external_annotations"}
assert C._cuda_memorySnapshot((4, 4))["segments"] == []
"""
        )

    def test_history(self):
        self.layer(
            """
if has("_cuda_recordMemoryHistory"):  # torch 2.0
    start, stop = (lambda: C._cuda_recordMemoryHistory(True, True, False, 1000, False)), lambda: C._cuda_recordMemoryHistory(False, False, False, 1, False)
else:
    start = lambda: C._cuda_record_memory_history("all", "all", "python", 1000, True, False, False, [])
    stop = lambda: C._cuda_record_memory_history(None, None, "all", 1, False, False, False, [])
assert not api.history_enabled()
start()
assert api.history_enabled()
api.free(api.alloc(0, 3 << 20))
actions = [entry["action"] for entry in C._cuda_memorySnapshot(None)["device_traces"][0]]
assert "alloc" in actions and "free_completed" in actions, actions
assert not any(C._cuda_memorySnapshot((0, 0, False))["device_traces"])
stop()
assert not api.history_enabled()
if has("_cuda_record_memory_history_legacy", "_cuda_isHistoryEnabled"):
    C._cuda_record_memory_history_legacy(True, True, 1000, False, False, True, False, False, [])
    assert C._cuda_isHistoryEnabled()
    C._cuda_record_memory_history_legacy(False)
    assert not C._cuda_isHistoryEnabled()
"""
        )

    def test_limits_and_backend(self):
        self.layer(
            """
assert C._cuda_getAllocatorBackend() == "glake"
C._cuda_setMemoryFraction(0.25, 0)
if has("_cuda_getMemoryFraction"):
    assert C._cuda_getMemoryFraction(0) == 0.25 and C._cuda_getMemoryFraction(1) == 1.0
assert api.fraction(0) == 0.25
try:
    C._cuda_setMemoryFraction(2.5, 0)
except glake.InvalidError as error:
    assert "2.5" in str(error)
else:
    raise AssertionError
try:
    names = ("_accelerator_setAllocatorSettings", "_cuda_cudaCachingAllocator_set_allocator_settings")
    getattr(C, next(filter(has, names)))("expandable_segments:True")
except RuntimeWarning as warning:
    assert "expandable_segments" in str(warning)
else:
    raise AssertionError("no warning")
"""
        )

    def test_observers_of_failed_requests(self):
        self.layer(
            """
seen = []
for name in "ab":
    C._cuda_attach_out_of_memory_observer(lambda *what, name=name: seen.append((name, what)))
# What a program does there: it saves a snapshot.
C._cuda_attach_out_of_memory_observer(lambda *what: C._cuda_memorySnapshot(None))
C._cuda_setMemoryFraction(0.01, 0)
try:
    api.alloc(0, 8 << 30)
except glake.OutOfMemoryError:
    pass
assert [(name, what[:2]) for name, what in seen] == [("a", (0, 8 << 30)), ("b", (0, 8 << 30))], seen
"""
        )

    def test_what_needs_cpp_is_refused_clearly(self):
        self.layer(
            """
for name, arguments in {"_cuda_checkPoolLiveAllocations": (0, (1, 1), set()), "_cuda_getCheckpointState": (0, (1, 1)), "_MemPool": ()}.items():
    if has(name):
        refused(getattr(C, name), *arguments)
refused(torch.UntypedStorage._share_cuda_, None)
refused(torch.UntypedStorage._new_shared_cuda, None)
"""
        )

    def test_benchmark_stays_off(self):
        self.layer(
            """
for turn_on in (lambda: C._set_cudnn_benchmark(True), lambda: setattr(torch.backends.cudnn, "benchmark", True)):
    try:
        turn_on()
    except RuntimeWarning as warning:
        assert "stays off" in str(warning)
    else:
        raise AssertionError("no warning")
    assert torch.backends.cudnn.benchmark is False
torch.backends.cudnn.benchmark = False
"""
        )

    def test_accelerator(self):
        self.layer(
            """
if not has("_accelerator_emptyCache"):
    raise SystemExit
C._accelerator_emptyCache()
assert C._accelerator_isAllocatorInitialized() == torch.cuda.is_initialized()
"""
        )

    def test_errors_between_gpus_say_what_to_do(self):
        self.layer(
            """
if not hasattr(torch, "AcceleratorError"):
    raise SystemExit
error = torch.AcceleratorError("CUDA error: invalid argument")
error.error_code = 1
assert str(error) == "CUDA error: invalid argument"
blocks = [api.alloc(0, 3 << 20), api.alloc(1, 3 << 20)]
assert "peer_access" in str(error), str(error)
error.error_code = 2
assert "peer_access" not in str(error)
"""
        )

    def test_patches_are_taken_back(self):
        self.layer(
            """
there = C._cuda_memoryStats
patches.undo()
assert C._cuda_memoryStats is not there
if hasattr(torch, "AcceleratorError"):
    assert str(torch.AcceleratorError("as it was")) == "as it was"
"""
        )


class FakeTorch(Layer, unittest.TestCase):
    torch = child.FAKE_TORCH

    def test_a_function_held_by_name_is_replaced_too(self):
        self.layer("assert torch.cuda.memory.snapshot_by_name()['segments'] == []")

    def test_a_torch_that_lacks_some(self):
        child.check(
            self,
            """
            import glake, torch
            from glake import _library, pluggable
            for name in ("_cuda_record_memory_history_legacy", "_accelerator_getDeviceStats", "_MemPool", "_cuda_checkPoolLiveAllocations"):
                delattr(torch._C, name)
            del torch.AcceleratorError, torch._C._CUDAPluggableAllocator.set_release_pool
            held, _ = pluggable.enable(torch, _library.api(), _library.path())
            assert "set_release_pool" not in held.allocator().functions
            assert not hasattr(torch._C, "_accelerator_getDeviceStats")
            try:
                torch._C._CUDAGraph().capture_begin()
            except glake.TorchError as error:
                assert "CUDA graph" in str(error), error
            else:
                raise AssertionError("captured without private pools")
            """,
            torch=self.torch,
        )

    def test_benchmark_that_is_on_is_turned_off(self):
        child.check(
            self,
            """
            import glake, torch, warnings
            from glake import _library, pluggable
            torch.backends.cudnn.benchmark = True
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                pluggable.enable(torch, _library.api(), _library.path())
            assert "stays off" in str(seen[0].message)
            assert torch.backends.cudnn.benchmark is False
            """,
            torch=self.torch,
        )

    def test_a_pool_for_some_tensors(self):
        child.check(
            self,
            """
            import glake, torch
            pool = glake.mem_pool()
            assert isinstance(pool, torch.cuda.MemPool) and "set_record_stream_fn" in pool.allocator.functions
            assert not torch._C.changed and glake.backend() is None
            """,
            torch=self.torch,
        )


@unittest.skipUnless(importlib.util.find_spec("torch"), "SKIPPED: torch is not installed")
class RealTorch(Layer, unittest.TestCase):
    def test_the_public_functions_answer(self):
        self.layer(
            """
block = api.alloc(0, 20 << 20)
torch.cuda.memory.is_initialized = lambda: True
stats = torch.cuda.memory_stats(0)
assert stats["active_bytes.all.current"] == 20 << 20 and stats["glake.stitches"] == 0
assert "Non-releasable" in torch.cuda.memory_summary(0)
assert torch.cuda.get_allocator_backend() == "glake"
if not has("_cuda_recordMemoryHistory"):  # torch 2.0 changes the current device on the way
    torch.cuda.memory._record_memory_history(True)
    torch.cuda.memory._record_memory_history(False)
    torch.cuda.memory._record_memory_history(max_entries=10)
    import torch.cuda._memory_viz as viz
    assert "html" in viz.trace_plot(torch.cuda.memory._snapshot()).lower()
    torch.cuda.memory._record_memory_history(None)
"""
        )

    def test_emptying_the_cache_reaches_the_library(self):
        self.layer(
            """
api.free(api.alloc(0, 64 << 20))
assert C._cuda_memoryStats(0)["reserved_bytes"]["all"]["current"] > 0
C._cuda_emptyCache()
assert C._cuda_memoryStats(0)["reserved_bytes"]["all"]["current"] == 0
"""
        )


if __name__ == "__main__":
    unittest.main()

"""Fake bindings: every function records its call; those of the allocator raise once the allocator was changed, as torch's do."""

calls = []
changed = []
initialized = []
benchmark = [False]


def _raising(name):
    def function(*arguments):
        raise RuntimeError(f"CUDAPluggableAllocator does not yet support {name}")

    function.__name__ = name
    return function


for _name in (
    "_cuda_memoryStats",
    "_cuda_resetPeakMemoryStats",
    "_cuda_resetAccumulatedMemoryStats",
    "_cuda_memorySnapshot",
    "_cuda_record_memory_history",
    "_cuda_record_memory_history_legacy",
    "_cuda_isHistoryEnabled",
    "_cuda_getMemoryFraction",
    "_cuda_attach_out_of_memory_observer",
    "_cuda_checkPoolLiveAllocations",
    "_cuda_getCheckpointState",
    "_cuda_setCheckpointPoolState",
    "_accelerator_getDeviceStats",
    "_accelerator_resetPeakStats",
    "_accelerator_resetAccumulatedStats",
    "_accelerator_getMemoryInfo",
    "_accelerator_setAllocatorSettings",
):
    globals()[_name] = _raising(_name)


class StorageBase:
    def _share_cuda_(self):
        raise RuntimeError("CUDAPluggableAllocator does not yet support shareIpcHandle")

    @classmethod
    def _new_shared_cuda(cls, *arguments):
        raise RuntimeError("CUDAPluggableAllocator does not yet support getIpcDevPtr")


class _CUDAGraph:
    def capture_begin(self):
        calls.append(("capture_begin",))


class _MemPool:
    def __init__(self, allocator=None, *arguments):
        self.allocator = allocator


class _CUDAPluggableAllocator:
    """Fake of torch 2.11's class: each setter stores its argument under its name."""

    def __init__(self, alloc, free):
        self.functions = {"alloc": alloc, "free": free}


def _setter(name):
    return lambda self, function: self.functions.__setitem__(name, function)


for _name in (
    "set_init_fn",
    "set_reset_fn",
    "set_memory_fraction_fn",
    "set_base_alloc_fn",
    "set_record_stream_fn",
    "set_begin_allocate_to_pool",
    "set_end_allocate_to_pool_fn",
    "set_release_pool",
):
    setattr(_CUDAPluggableAllocator, _name, _setter(_name))


def _cuda_customAllocator(alloc, free):
    return _CUDAPluggableAllocator(alloc, free)


def _cuda_changeCurrentAllocator(allocator):
    if initialized:
        raise RuntimeError("Can't swap an already initialized allocator")
    changed.append(allocator)


def _cuda_getAllocatorBackend():
    return "pluggable" if changed else "native"


def _cuda_init():
    initialized.append(True)


def _cuda_setMemoryFraction(fraction, device):
    calls.append(("_cuda_setMemoryFraction", fraction, device))


def _cuda_emptyCache():
    calls.append(("_cuda_emptyCache",))


def _accelerator_isAllocatorInitialized():
    return False


def _accelerator_emptyCache():
    calls.append(("_accelerator_emptyCache",))


def _get_cudnn_benchmark():
    return benchmark[0]


def _set_cudnn_benchmark(enabled):
    benchmark[0] = enabled

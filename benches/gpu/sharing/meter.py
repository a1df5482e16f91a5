"""Memory of a GPU that all processes use together: NVML through its C library, or the ledger of a simulated GPU that
processes share."""

import ctypes, fcntl, os, struct, threading, time

PERIOD = 0.05


class Nvml:
    """The first visible GPU."""

    class Memory(ctypes.Structure):
        _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]

    def __init__(self):
        self.library = ctypes.CDLL("libnvidia-ml.so.1")
        self._call("nvmlInit_v2")
        self.device = ctypes.c_void_p()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
        if visible.isdigit():
            self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(int(visible)), ctypes.byref(self.device))
        else:
            self._call("nvmlDeviceGetHandleByUUID", visible.encode(), ctypes.byref(self.device))

    def _call(self, name, *arguments):
        code = getattr(self.library, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} answers {code}")

    def used(self):
        memory = Nvml.Memory()
        self._call("nvmlDeviceGetMemoryInfo", self.device, ctypes.byref(memory))
        return memory.used


class Ledger:
    """The file gpu-0 in the folder of simulated GPUs: a row of four numbers a process, after one for the header."""

    def __init__(self, folder):
        self.path = os.path.join(folder, "gpu-0")

    def used(self):
        try:
            with open(self.path, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH)
                words = file.read()
        except FileNotFoundError:
            return 0
        rows = struct.iter_unpack("<4Q", words[32:])
        return sum(used for pid, _, used, _ in rows if pid)


def meter(device):
    return Ledger(device.split("@", 1)[1]) if device.startswith("sim") else Nvml()


class Watch:
    """The most that was used above what was used before anything began, looked at every 50 ms."""

    def __init__(self, of, before):
        self.of, self.before, self.most, self.over = of, before, 0, threading.Event()
        self.looked, self.longest = 0, 0.0
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self):
        last = time.monotonic()
        while True:
            self.most = max(self.most, self.of.used() - self.before)
            self.looked += 1
            now = time.monotonic()
            self.longest, last = max(self.longest, now - last), now
            if self.over.wait(PERIOD):
                return

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()

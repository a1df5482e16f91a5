"""vLLM's CPU worker under GLake's plugin: simulated GPU memory, in the regions in which an engine's own would be, moves for it."""

from vllm.v1.worker.cpu_worker import CPUWorker

import glake
from glake.vllm import _sleep, _worker

MIB = 1 << 20


class Worker(_worker.OverGLake, CPUWorker):
    def _enable(self):
        # torch computes in host memory here.
        return True

    def load_model(self, *args, **kwargs):
        super().load_model(*args, **kwargs)
        for tag, size in (("weights", 512), ("kv_cache", 256)):
            with _sleep.region(tag):
                glake.allocate(size * MIB)

    sleep = _worker.Worker.sleep
    wake_up = _worker.Worker.wake_up

    def _wake_up(self, engine, tags):
        _sleep.resume(engine, tags)

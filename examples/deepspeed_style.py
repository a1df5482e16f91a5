"""Runs the calls that GMLake's tutorial had to comment out in DeepSpeed; only `glake.enable()` is added.

    python deepspeed_style.py [--steps 20] [--backend compiled|pluggable]

The four places (see_memory_usage, the cache flushes of ZeRO stage 3, the throughput timer, the memory summary at the end) are as
DeepSpeed has them, over a stand-in for its get_accelerator.
"""

import argparse
import gc
import logging
import resource
import sys
import time

try:
    import torch
except ImportError:
    sys.exit("deepspeed_style.py needs torch 2.0 or later with CUDA: pip install torch")

import glake

logger = logging.getLogger("deepspeed_style")


class Accelerator:
    """Stand-in for deepspeed.accelerator on CUDA: torch's functions under their own names."""

    def __getattr__(self, name):
        return getattr(torch.cuda, name)


def get_accelerator():
    return Accelerator()


def see_memory_usage(message):
    """deepspeed/runtime/utils.py"""
    # python doesn't do real-time garbage collection so do it explicitly to get the correct RAM reports
    gc.collect()

    logger.info(message)
    logger.info(f"MA {round(get_accelerator().memory_allocated() / (1024 * 1024 * 1024),2 )} GB \
        Max_MA {round(get_accelerator().max_memory_allocated() / (1024 * 1024 * 1024),2)} GB \
        CA {round(get_accelerator().memory_reserved() / (1024 * 1024 * 1024),2)} GB \
        Max_CA {round(get_accelerator().max_memory_reserved() / (1024 * 1024 * 1024))} GB ")

    used_GB = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024**2), 2)
    logger.info(f'CPU memory of this process, at most: {used_GB} GB')

    # get the peak memory to report correct data, so reset the counter for the next call
    get_accelerator().reset_peak_memory_stats()


class Stage3:
    """deepspeed/runtime/zero/stage3.py, the end of a step"""

    def __init__(self):
        self.__n_caching_allocator_flushes = 0

    def step(self):
        # warn user about caching allocator flushes
        memory_stats = get_accelerator().memory_stats()
        alloc_retries = memory_stats["num_alloc_retries"] if memory_stats != None else 0
        if alloc_retries > self.__n_caching_allocator_flushes:
            logger.warning(
                "%d pytorch allocator cache flushes since last step. this happens "
                "when there is high memory pressure and is detrimental to "
                "performance. if this is happening frequently consider adjusting "
                "settings to reduce memory consumption. If you are unable to "
                "make the cache flushes go away consider adding "
                "get_accelerator().empty_cache() calls in your training loop to ensure "
                "that all ranks flush their caches at the same time",
                alloc_retries - self.__n_caching_allocator_flushes)
            self.__n_caching_allocator_flushes = alloc_retries


class ThroughputTimer:
    """deepspeed/utils/timer.py"""

    def __init__(self, batch_size):
        self.batch_size = batch_size
        self.started = time.perf_counter()
        self.micro_step_count = 0

    def stop(self, step_elapsed_time):
        self.micro_step_count += 1
        logger.info(
            "micro_step={}, RunningAvgSamplesPerSec={}, CurrSamplesPerSec={}, "
            "MemAllocated={}GB, MaxMemAllocated={}GB".format(
                self.micro_step_count,
                self.micro_step_count * self.batch_size / (time.perf_counter() - self.started),
                self.batch_size / step_elapsed_time,
                round(get_accelerator().memory_allocated() / 1024**3, 2),
                round(get_accelerator().max_memory_allocated() / 1024**3, 2),
            ))


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--steps", type=int, default=20)
    arguments.add_argument("--backend", choices=["compiled", "pluggable"])
    chosen = arguments.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    try:
        glake.enable(backend=chosen.backend)
    except glake.Error as error:
        sys.exit(f"deepspeed_style.py needs an NVIDIA GPU with its driver and a CUDA build of torch: {error}")

    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 4).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    zero, timer = Stage3(), ThroughputTimer(batch_size=16)
    see_memory_usage("before training")
    for step in range(chosen.steps):
        begun = time.perf_counter()
        tokens = torch.randn(16, 128 + 37 * (step * 7 % 11), 512, device="cuda")
        loss = (model(tokens) - tokens).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        zero.step()
        torch.cuda.synchronize()
        timer.stop(time.perf_counter() - begun)
    see_memory_usage("after training")
    print(torch.cuda.memory_summary())
    print(f"trained {chosen.steps} steps with the {glake.backend()} backend: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()

"""The worker of an engine (``--worker-cls``): its memory comes from GLake, and what touches it is a use."""

from __future__ import annotations

import inspect
import os
from contextlib import AbstractContextManager
from typing import Any

import vllm.v1.worker.gpu_worker as gpu_worker

import glake

from . import _engine, _sleep, logger
from ._engine import Engine

# Methods that touch no GPU memory, or that begin and end uses themselves.
_OUTSIDE = frozenset(
    """annotate_profile check_health discard execute_model get_cache_block_size_bytes get_compilation_match_table get_draft_model
    get_encoder_timing_stats get_kv_cache_spec get_kv_connector_handshake_metadata get_model get_model_inspection get_supported_tasks
    init_device list_loras load_model reset_encoder_cache reset_mm_cache shutdown sleep supports_draft_weight_updates
    synchronize_device take_draft_token_ids update_config update_max_model_len wake_up""".split()
)

# GPU memory beside the measured peak: the context, NCCL and captured graphs.
_BESIDE = 3 << 29


# A class of vLLM's that comes behind it in the order of bases.
_Behind: Any = object


class OverGLake(_Behind):  # type: ignore[misc]
    """What GLake adds to a worker class of vLLM."""

    glake: Engine | None = None

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        is_on = self._enable()
        if not is_on:
            _unchanged(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)
        if is_on:
            self.glake = Engine(vllm_config.instance_id)
            self._set_rank()
            for name in dir(type(self)):
                if not name.startswith("_") and name not in _OUTSIDE and inspect.isfunction(inspect.getattr_static(type(self), name)):
                    # An attribute of the object, so that a class mixed in by --worker-extension-cls is covered too.
                    setattr(self, name, self.glake.uses.within(self, name))

    def _enable(self) -> bool:
        if _engine.here():
            logger.warning("GLake leaves this worker alone: it serves another engine in this process")
            return False
        try:
            if glake.backend() is None:
                glake.enable()
            return True
        except glake.Error as error:
            logger.warning("GLake leaves this worker alone: %s", error)
            return False

    def _set_rank(self) -> None:
        """Names the rank to the node agent as launchers do."""
        world: int = self.vllm_config.parallel_config.world_size
        if world > 1:
            os.environ.setdefault("RANK", str(self.rank))
            os.environ.setdefault("WORLD_SIZE", str(world))

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        if self.glake is None:
            return super()._maybe_get_memory_pool_context(tag=tag)  # type: ignore[no-any-return]
        return _sleep.region(tag)

    def determine_available_memory(self, *args: Any, **kwargs: Any) -> int:
        if self.glake is not None and self.vllm_config.parallel_config.world_size > 1:
            # vLLM's all-reduce of several ranks shares the memory of captured graphs by handles that only plain memory has.
            for name in ("capture_model", "profile_cudagraph_memory"):
                if hasattr(self.model_runner, name):
                    setattr(self.model_runner, name, glake.plain()(getattr(self.model_runner, name)))
        cache, utilization = self.vllm_config.cache_config, _utilization(self.vllm_config)
        if self.glake is None or utilization is None or cache.kv_cache_memory_bytes is not None:
            return super().determine_available_memory(*args, **kwargs)  # type: ignore[no-any-return]
        import torch

        # Memory of other processes changes meanwhile: only the own peak is measured. With a given size vLLM does not measure itself.
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.reset_peak_memory_stats()
        cache.kv_cache_memory_bytes = total
        kept = total - super().determine_available_memory(*args, **kwargs)
        peak = torch.cuda.max_memory_allocated() + kept + _BESIDE
        cache.kv_cache_memory_bytes = max(int(total * utilization) - peak, 1)
        gib = 1 << 30
        logger.info(
            "The KV cache has %.2f GiB: %.0f %% of %.2f GiB, less %.2f GiB that the model takes. --kv-cache-memory-bytes sets another size.",
            cache.kv_cache_memory_bytes / gib, 100 * utilization, total / gib, peak / gib,
        )  # fmt: skip
        return int(cache.kv_cache_memory_bytes)

    def compile_or_warm_up_model(self, *args: Any, **kwargs: Any) -> Any:
        found = super().compile_or_warm_up_model(*args, **kwargs)
        if self.glake is not None:
            self._started(self.glake)
        return found

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        metadata = scheduler_output.kv_connector_metadata
        if self.glake is None or metadata is None:
            return super().execute_model(scheduler_output, *args, **kwargs)
        self.glake.step(metadata.is_empty)
        self.glake.told(metadata.taken, metadata.counted)
        found = super().execute_model(scheduler_output, *args, **kwargs)
        if metadata.is_empty:
            self.glake.uses.end()
        return found

    def shutdown(self) -> None:
        if self.glake is not None:
            self.glake.end()
            self.glake = None
        super().shutdown()

    def _started(self, engine: Engine) -> None:
        """From here on the engine's memory may be evicted between its uses."""
        engine.model = self.get_model()
        _sleep.seal()
        held = ", ".join(f"{one['tag']} {one['live'] / (1 << 30):.2f} GiB" for one in glake.regions() if one["live"])
        logger.info("GLake holds this engine's memory: %s", held)
        if os.environ.get("GLAKE_AGENT"):
            try:
                glake.join()
            except glake.Error as error:
                logger.warning("The engine has not joined the node agent: %s", error)
        engine.uses.is_started = True


def _utilization(config: Any) -> float | None:
    """vLLM's default utilization, if the user gave none: GLake then measures the cache's size."""
    found: float | None = config.kv_transfer_config.kv_connector_extra_config.get("utilization")
    return found


def _unchanged(config: Any) -> None:
    """Takes back what GLake has set for a worker that it serves."""
    utilization = _utilization(config)
    if utilization is not None:
        config.cache_config.gpu_memory_utilization = utilization
    if getattr(config.model_config, "sleep_mode_backend", None) == "glake":
        config.model_config.sleep_mode_backend = "cumem"


class Worker(OverGLake, gpu_worker.Worker):  # type: ignore[misc]
    """vLLM's worker over GLake."""

    def sleep(self, level: int = 1) -> None:
        if self.glake is None:
            return super().sleep(level)  # type: ignore[no-any-return]
        # Not vLLM's own: it copies buffers outside of a use, and expects that no other process takes what becomes free.
        if getattr(self.vllm_config.model_config, "enable_nccl_comm_suspend", False):
            gpu_worker.suspend_device_comms()
        _sleep.suspend(self.glake, level, getattr(self.vllm_config.model_config, "sleep_preserve_parameter_names", None) or ())

    def wake_up(self, tags: list[str] | None = None) -> None:
        if self.glake is None:
            return super().wake_up(tags)  # type: ignore[no-any-return]
        # What vLLM restores by itself is written while the memory cannot leave again.
        with glake.active(*_sleep.awake(self.glake, tags)):
            self._wake_up(self.glake, tags)

    # Versions with backends for the sleep mode call `_backend.Backend`.
    if hasattr(gpu_worker.Worker, "sleep_mode_backend"):

        def _wake_up(self, engine: Engine, tags: list[str] | None) -> None:
            super().wake_up(tags)
    else:

        def _wake_up(self, engine: Engine, tags: list[str] | None) -> None:
            _sleep.resume(engine, tags)
            if tags is None or "kv_cache" in tags:
                self.model_runner.post_kv_cache_wake_up()

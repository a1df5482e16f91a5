"""The arguments of an engine: with GLake it gets a worker class and a connector, where the user has left these at their defaults.

An engine that GLake does not support is started as without it, and one line says why.
"""

from __future__ import annotations

import copy
import functools
import os
from typing import Any

from . import _names, logger

# Lets vLLM start beside other processes, whatever is free: the cache's size then comes from the worker's own measurement.
LOW_UTILIZATION = 1e-6
# Longer than an engine is ever parked: the executor of several ranks gives a step that takes longer up.
_STEP_SECONDS = 7 * 24 * 3600
# Models whose workers end where a connector is set, whatever it does.
_WITHOUT_CONNECTORS = ("Step5", "Qwen4Exp")


def install() -> None:
    """Replaces ``EngineArgs.create_engine_config`` if the installed vLLM has all names that GLake relies on."""
    import vllm
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_engine_config
    if hasattr(original, "glake"):
        return
    package = os.path.dirname(os.path.abspath(vllm.__file__))
    missing = _names.missing(package)
    if missing:
        rest = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        tested = " and ".join(_names.VERSIONS)
        logger.warning(
            "GLake leaves vLLM %s alone, which lacks %s%s. GLake knows vLLM %s.", vllm.__version__, "; ".join(missing[:3]), rest, tested
        )
        return
    if _names.has_sleep_backend(package):
        from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory

        SleepModeBackendFactory.register_backend("glake", "glake.vllm._backend", "Backend")

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _config(original, self, args, kwargs)

    create_engine_config.glake = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config


def _config(original: Any, arguments: Any, args: Any, kwargs: Any) -> Any:
    reason = _refusal(arguments)
    if reason is None:
        try:
            config = original(_changed(arguments), *args, **kwargs)
            reason = _refusal_of(config)
            if reason is None:
                _accepted(config)
                return config
        except Exception as error:
            # The user's own error comes again, without GLake's arguments in it.
            reason = f"{type(error).__name__}: {error}"
    config = original(arguments, *args, **kwargs)
    logger.warning("GLake leaves this engine alone: %s", reason)
    return config


def _accepted(config: Any) -> None:
    """Completes the configuration of an engine that GLake serves, and the environment that its processes inherit."""
    if getattr(config.model_config, "sleep_mode_backend", None) == "cumem":
        config.model_config.sleep_mode_backend = "glake"
    os.environ.setdefault("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", str(_STEP_SECONDS))
    if config.parallel_config.world_size > 1:
        # Ranks that find the same name at the node agent get memory together.
        os.environ.setdefault("GLAKE_WORKER", f"vllm-{os.getpid()}")


def _refusal(arguments: Any) -> str | None:
    """Why GLake cannot serve an engine with these arguments."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return "it needs CUDA"
    if arguments.worker_cls != "auto":
        return f"--worker-cls {arguments.worker_cls} is set"
    if arguments.kv_transfer_config is not None or arguments.kv_offloading_size is not None:
        return "another KV connector is set (--kv-transfer-config, --kv-offloading-size)"
    if arguments.enable_return_routed_experts:
        return "--enable-return-routed-experts excludes KV connectors"
    if arguments.ec_transfer_config is not None:
        return "--ec-transfer-config is set, whose threads use GPU memory between steps"
    if arguments.enable_eplb:
        return "--enable-eplb is set, whose thread moves weights between steps"
    for flag in ("data_parallel_size", "pipeline_parallel_size", "nnodes"):
        if getattr(arguments, flag) > 1:
            return f"--{flag.replace('_', '-')} is above 1"
    if arguments.distributed_executor_backend not in (None, "uni", "mp"):
        return f"--distributed-executor-backend is {arguments.distributed_executor_backend}"
    return None


def _refusal_of(config: Any) -> str | None:
    """The same, for what only the model tells."""
    model = config.model_config
    if model.is_encoder_decoder:
        return "encoder-decoder models exclude KV connectors"
    if model.runner_type != "generate":
        return f"the model is run for {model.runner_type}, not to generate"
    refusing = [name for name in model.architectures or () if name.startswith(_WITHOUT_CONNECTORS)]
    if refusing:
        return f"{refusing[0]} excludes KV connectors"
    if getattr(getattr(config, "attention_config", None), "hisparse_config", None) is not None:
        return "HiSparse reads blocks that no request holds"
    if config.parallel_config.world_size > 1 and os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1").strip() == "0":
        return "several ranks need VLLM_ENABLE_V1_MULTIPROCESSING=1"
    return None


def _changed(arguments: Any) -> Any:
    """Returns a copy of the arguments with GLake's."""
    from vllm.config import KVTransferConfig

    changed, extra = copy.copy(arguments), {}
    default = type(arguments).gpu_memory_utilization
    if arguments.gpu_memory_utilization == default:
        changed.gpu_memory_utilization = LOW_UTILIZATION
        if arguments.kv_cache_memory_bytes is None:
            extra["utilization"] = default
    changed.worker_cls = "glake.vllm._worker.Worker"
    # A producer: consumers let clients of multimodal models send embeddings of their own.
    changed.kv_transfer_config = KVTransferConfig(
        kv_connector="Connector", kv_connector_module_path="glake.vllm._connector", kv_role="kv_producer", kv_connector_extra_config=extra
    )
    return changed

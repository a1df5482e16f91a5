"""Everything of vLLM that GLake relies on: names, parameters and fields, and the versions in which they were read.

``missing`` looks for them in vLLM's source files and imports none of them, so that the installed version and any wheel are judged alike.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from typing import NamedTuple

# Run with the first; the names of both were read in their wheels.
VERSIONS = ("0.23.0", "0.33.0")


class Name(NamedTuple):
    """A class, function or field in a module of vLLM."""

    module: str
    path: str
    # Parameters or, of a class, fields that GLake uses.
    has: tuple[str, ...] = ()
    use: str = ""


NAMES = (
    # Replaced: no public interface offers these.
    Name("engine.arg_utils", "EngineArgs.create_engine_config", ("usage_context", "headless"), "replaced: chooses worker and connector"),
    Name("v1.worker.gpu_worker", "Worker._maybe_get_memory_pool_context", ("tag",), "overridden: where memory comes from"),
    # Overridden in a subclass (--worker-cls).
    Name("v1.worker.gpu_worker", "Worker.__init__", ("vllm_config", "rank"), "overridden"),
    Name("v1.worker.gpu_worker", "Worker.determine_available_memory", (), "overridden: the cache's size"),
    Name("v1.worker.gpu_worker", "Worker.compile_or_warm_up_model", (), "overridden: the start ends"),
    Name("v1.worker.gpu_worker", "Worker.execute_model", ("scheduler_output",), "overridden: a use, and a safe point"),
    Name("v1.worker.gpu_worker", "Worker.shutdown", (), "overridden"),
    Name("v1.worker.gpu_worker", "Worker.sleep", ("level",), "overridden"),
    Name("v1.worker.gpu_worker", "Worker.wake_up", ("tags",), "overridden"),
    Name("v1.worker.gpu_worker", "Worker.get_model", (), "called"),
    Name("v1.worker.gpu_model_runner", "GPUModelRunner.capture_model", (), "called in plain memory"),
    # Fields of the arguments.
    Name(
        "engine.arg_utils",
        "EngineArgs",
        (
            "worker_cls",
            "kv_transfer_config",
            "kv_offloading_size",
            "gpu_memory_utilization",
            "kv_cache_memory_bytes",
            "data_parallel_size",
            "pipeline_parallel_size",
            "tensor_parallel_size",
            "distributed_executor_backend",
            "enable_return_routed_experts",
            "ec_transfer_config",
            "enable_eplb",
            "nnodes",
        ),
    ),
    Name("config.kv_transfer", "KVTransferConfig", ("kv_connector", "kv_connector_module_path", "kv_role", "kv_connector_extra_config")),
    Name("config.parallel", "ParallelConfig", ("world_size",)),
    Name("config.model", "ModelConfig", ("is_encoder_decoder", "runner_type", "architectures")),
    Name("config.vllm", "VllmConfig", ("instance_id", "model_config", "cache_config", "parallel_config", "kv_transfer_config")),
    Name("config.cache", "CacheConfig", ("kv_cache_memory_bytes",)),
    # The connector's public interface.
    Name("distributed.kv_transfer.kv_connector.v1.base", "KVConnectorBase_V1.__init__", ("vllm_config", "role", "kv_cache_config")),
    Name("distributed.kv_transfer.kv_connector.v1.base", "KVConnectorBase_V1.bind_gpu_block_pool", ("gpu_block_pool",)),
    Name("distributed.kv_transfer.kv_connector.v1.base", "KVConnectorBase_V1.register_kv_caches", ("kv_caches",)),
    Name("distributed.kv_transfer.kv_connector.v1.base", "KVConnectorBase_V1.start_load_kv", ("forward_context",)),
    Name("distributed.kv_transfer.kv_connector.v1.base", "KVConnectorBase_V1.wait_for_layer_load", ("layer_name",)),
    Name("distributed.kv_transfer.kv_connector.v1.base", "KVConnectorBase_V1.save_kv_layer", ("layer_name", "kv_layer", "attn_metadata")),
    Name("distributed.kv_transfer.kv_connector.v1.base", "KVConnectorBase_V1.wait_for_save"),
    Name("distributed.kv_transfer.kv_connector.v1.base", "KVConnectorBase_V1.get_num_new_matched_tokens", ("request", "num_computed_tokens")),
    Name("distributed.kv_transfer.kv_connector.v1.base", "KVConnectorBase_V1.update_state_after_alloc", ("request", "blocks", "num_external_tokens")),
    Name("distributed.kv_transfer.kv_connector.v1.base", "KVConnectorBase_V1.build_connector_meta", ("scheduler_output",)),
    Name("distributed.kv_transfer.kv_connector.v1.base", "KVConnectorBase_V1.request_finished", ("request", "block_ids")),
    Name("distributed.kv_transfer.kv_connector.v1.base", "SupportsHMA.request_finished_all_groups", ("request", "block_ids")),
    Name("distributed.kv_transfer.kv_connector.v1.base", "KVConnectorMetadata"),
    Name("v1.kv_cache_interface", "KVCacheConfig", ("num_blocks",)),
    # What a connector is told.
    Name("v1.core.sched.output", "SchedulerOutput", ("scheduled_new_reqs", "scheduled_cached_reqs", "kv_connector_metadata", "total_num_scheduled_tokens")),
    Name("v1.core.sched.output", "NewRequestData", ("block_ids",)),
    Name("v1.core.sched.output", "CachedRequestData", ("new_block_ids",)),
    Name("v1.core.kv_cache_utils", "KVCacheBlock", ("block_id", "ref_cnt", "is_null", "block_hash")),
    Name("v1.core.block_pool", "BlockPool", ("blocks",)),
)

# In versions that have backends for the sleep mode.
SLEEP_BACKEND = (
    Name("device_allocator.sleep_mode_backend", "SleepModeBackendFactory.register_backend", ("name", "module_path", "class_name")),
    Name("device_allocator.sleep_mode_backend", "SleepModeBackend.suspend", ("level",)),
    Name("device_allocator.sleep_mode_backend", "SleepModeBackend.resume", ("tags",)),
    Name("config.model", "ModelConfig", ("sleep_mode_backend",)),
)


def has_sleep_backend(package: str) -> bool:
    """Whether vLLM in this folder lets a plugin bring a backend for its sleep mode."""
    return os.path.exists(_file(package, SLEEP_BACKEND[0].module))


def missing(package: str) -> list[str]:
    """Returns the names that vLLM in this folder lacks, each with what is missing."""
    names = NAMES + (SLEEP_BACKEND if has_sleep_backend(package) else ())
    trees: dict[str, ast.Module | None] = {}
    found = []
    for name in names:
        if name.module not in trees:
            trees[name.module] = _parsed(_file(package, name.module))
        lack = _lack(trees[name.module], name)
        if lack:
            found.append(f"vllm.{name.module}.{name.path}: {lack}")
    return found


def _file(package: str, module: str) -> str:
    return os.path.join(package, *module.split(".")) + ".py"


def _parsed(file: str) -> ast.Module | None:
    try:
        with open(file, encoding="utf-8") as source:
            return ast.parse(source.read())
    except (OSError, SyntaxError, ValueError):
        return None


def _lack(tree: ast.Module | None, name: Name) -> str | None:
    if tree is None:
        return "the module's source is missing"
    node: ast.AST = tree
    for part in name.path.split("."):
        member = _member(node, part)
        if member is None:
            return "it is missing"
        node = member
    has = set(_fields(node) if isinstance(node, ast.ClassDef) else _parameters(node))
    lacks = [one for one in name.has if one not in has]
    return f"no {', '.join(lacks)}" if lacks else None


def _member(node: ast.AST, name: str) -> ast.AST | None:
    definitions = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    members = [one for one in getattr(node, "body", ()) if isinstance(one, definitions) and one.name == name]
    # The last one counts; overloads come before it.
    return members[-1] if members else None


def _parameters(node: ast.AST) -> Iterator[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        arguments = node.args
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            yield argument.arg


def _fields(node: ast.ClassDef) -> Iterator[str]:
    """Yields the attributes of a class: annotated or assigned in its body, properties, and what its methods assign to ``self``."""
    for one in ast.walk(node):
        if isinstance(one, (ast.AnnAssign, ast.Assign)):
            for target in one.targets if isinstance(one, ast.Assign) else (one.target,):
                if isinstance(target, ast.Name):
                    yield target.id
                elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                    yield target.attr
        elif isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield one.name

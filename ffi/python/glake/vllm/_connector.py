"""The engine's KV connector: it moves no blocks, and learns when the engine runs and which blocks count.

::

    scheduler  bind_gpu_block_pool, update_state_after_alloc, request_finished ─► build_connector_meta ─┐
    worker     register_kv_caches                                          _worker.Worker.execute_model ◄┘

The worker's hooks of a step come too late: by then a step has copied its inputs to the GPU.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA

from . import _engine


@dataclass
class Metadata(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler tells the workers with each step."""

    # The step has nothing to compute: it follows the last one that had.
    is_empty: bool
    # Blocks handed out for this step, if the workers are other processes.
    taken: list[int]
    # Runs of blocks that count, instead of all told before; with empty steps only.
    counted: list[tuple[int, int]] | None


class Connector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Scheduler's side and worker's side are objects of their own, in one process or in several."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._instance: str = vllm_config.instance_id
        self._blocks: int = kv_cache_config.num_blocks
        self._running: set[str] = set()
        # A program that calls the engine's steps itself makes none after its last request; elsewhere an empty one follows.
        self._is_stepped = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1").strip() == "0"
        self._pool: Any = None

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether blocks are handed to another engine: no."""
        return False

    # The scheduler's side.

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._pool = gpu_block_pool
        engine = _engine.of(self._instance)
        if engine is not None:
            engine.pool = gpu_block_pool

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._running.add(request.request_id)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        self._running.discard(request.request_id)
        if self._is_stepped and not self._running:
            engine = _engine.of(self._instance)
            if engine is not None:
                engine.uses.end()
        return False, None

    request_finished_all_groups = request_finished

    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        is_empty, is_here = scheduler_output.total_num_scheduled_tokens == 0, _engine.of(self._instance) is not None
        taken = [] if is_here else _taken(scheduler_output)
        counted = _engine.counted(self._pool) if is_empty and not is_here and self._pool is not None else None
        return Metadata(is_empty, taken, counted)

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        engine = _engine.of(self._instance)
        if engine is not None:
            engine.declare(kv_caches, self._blocks)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass


def _taken(output: Any) -> list[int]:
    """The numbers of all blocks that the step's requests have got, and of those that it copies."""
    of_new = [request.block_ids for request in output.scheduled_new_reqs]
    of_others = [groups for groups in output.scheduled_cached_reqs.new_block_ids if groups is not None]
    copies = [(pair,) for pair in getattr(output, "kv_cache_block_copies", None) or ()]
    return [number for groups in (*of_new, *of_others, *copies) for group in groups for number in group]

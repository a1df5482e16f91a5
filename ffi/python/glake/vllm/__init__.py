"""vLLM over GLake: ``pip install`` of the wheel, and one variable::

    GLAKE_VLLM=1 vllm serve MODEL            # or: glake run --vllm -- vllm serve MODEL

::

    register ─► arguments: the engine gets Worker and Connector         (each process; changes only what the user left at its default)
    Worker     its memory comes from GLake: weights, cache, graphs      (worker process)
    Connector  which blocks count, when an engine runs                  (scheduler), one use from the first running request to
               the last with a safe point before each step              (worker)

vLLM loads the plugin in each of its processes through the entry point ``vllm.general_plugins``. Without the variable it does nothing. What
it relies on stands in ``_names``; if a name is missing in the installed vLLM, one warning is logged, and vLLM runs as without GLake.
"""

from __future__ import annotations

import logging

import glake_switch

__all__ = ["register"]

# Below vLLM's logger, so that its handler prints the lines.
logger = logging.getLogger("vllm.glake")


def register() -> None:
    """Prepares vLLM's engines of this process for GLake if ``GLAKE_VLLM=1``. Repeated calls do nothing."""
    is_on, _ = glake_switch.vllm()
    if not is_on:
        return
    try:
        from . import _arguments

        _arguments.install()
    except Exception as error:
        logger.warning("GLake leaves vLLM alone: %s: %s", type(error).__name__, error)

"""The node agent, which divides the GPU memory of a server among its workers."""

from __future__ import annotations

import os

from . import _arguments, _library

__all__ = ["join", "leave"]


def join(name: str | None = None, agent: str | os.PathLike[str] | None = None) -> None:
    """Joins the node agent (``glake serve``): from then on it grants this process the memory that it may hold of each GPU, beginning
    with the memory held now. Further memory is requested as needed, and evicted when other workers need it, between uses
    (``glake.active``) and at safe points.

    With ``GLAKE_AGENT=PATH`` a process joins by itself when its first pool starts, and waits for its turn to load its memory. No memory is
    taken from it before it reports that the load is complete: by ``join()`` once it holds memory, or by its first use. A process whose
    simulated GPUs are its own does not join by itself.

    Args:
        name: the worker's name at the agent: 1 to 64 of ``A-Z a-z 0-9 . _ -``; None: the value of ``GLAKE_WORKER``, which the agent sets
            for workers that it starts, else the program's name and process id. Ranks of a launcher (``RANK``, ``WORLD_SIZE``) are called
            ``name/RANK``, and receive memory together.
        agent: the path of the agent's socket; None: ``GLAKE_AGENT``, else this user's (``XDG_RUNTIME_DIR/glake/agent.sock``).

    Joining again with the same arguments does nothing. If the reason of a refusal may pass, such as a name still held by an ending process,
    the call retries for up to 5 seconds.

    Raises:
        UnavailableError: no trusted agent answers, or the agent refuses this process; the text says why.
        InvalidError: the name is invalid, or another agent is joined.
    """
    if name is not None:
        _arguments.text(name, "name", "the worker's name")
    if agent is not None:
        if not isinstance(agent, (str, os.PathLike)):
            raise TypeError(f"agent is {agent!r}: the path of the agent's socket, or None")
        agent = _arguments.text(os.fsdecode(agent), "agent", "the path of the agent's socket")
    _library.api().join(name, agent)


def leave() -> None:
    """Leaves the agent: only its limits bound this process from then on. Does nothing if no agent is joined. Evicted memory stays
    evicted until it is needed (``glake.refill``).
    """
    _library.api().leave()

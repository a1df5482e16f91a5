"""The node agent: who shares the GPUs of a server among its workers, and grants each what it may hold."""

from __future__ import annotations

import os

from . import _library

__all__ = ["join", "leave"]


def join(name: str | None = None, agent: str | os.PathLike[str] | None = None) -> None:
    """Joins the node agent (``glake serve``): from then on it grants this process what it may hold of each GPU, beginning with what it
    holds. More is asked for as it is needed, and memory leaves when others need it, between uses (``glake.active``) and at safe points.

    With ``GLAKE_AGENT=PATH`` a process joins by itself when its first pool starts, and loads what it will hold in its turn. Nothing is
    taken of it before it says that all is loaded: by ``join()``, once it holds memory, or by its first use. Where GPUs are simulated for
    it alone it does not join by itself.

    Args:
        name: what the agent calls this worker: 1 to 64 of ``A-Z a-z 0-9 . _ -``; None: ``GLAKE_WORKER``'s, as the agent sets it
            for those that it starts, else the program and its number. Ranks of a launcher (``RANK``, ``WORLD_SIZE``) are called
            ``name/RANK``, and are given memory together.
        agent: the path of its socket; None: ``GLAKE_AGENT``'s, else this user's (``XDG_RUNTIME_DIR/glake/agent.sock``).

    To join again as the same does nothing else. A refusal whose reason may pass, as a name that a process that ends still has, is waited
    for, 5 seconds at most.

    Raises:
        UnavailableError: nobody answers there who can be trusted, or the agent refuses this process; the text says why.
        InvalidError: the name cannot be one, or another agent is joined.
    """
    _library.api().join(name, None if agent is None else os.fspath(agent))


def leave() -> None:
    """Leaves the agent: nothing but its limits bounds this process from then on. Where none is joined nothing is done. What is evicted by
    then stays so until it is asked for (``glake.refill``).
    """
    _library.api().leave()

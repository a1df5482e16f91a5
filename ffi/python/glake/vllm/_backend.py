"""GLake as a backend of vLLM's sleep mode, in versions that have such backends."""

from __future__ import annotations

from typing import Any

from vllm.device_allocator.sleep_mode_backend import SleepModeBackend

from . import _engine, _sleep


class Backend(SleepModeBackend):  # type: ignore[misc]
    """Suspends and resumes the engine of this process."""

    def suspend(self, level: int = 1) -> None:
        _sleep.suspend(_started(), level)
        self._state = "SUSPENDED"

    def resume(self, tags: list[str] | None = None) -> None:
        self._state = "RESUMING"
        _sleep.resume(_started(), tags)
        self._state = "RUNNING"

    def discard(self, tags: tuple[str, ...]) -> None:
        _sleep.discard(_started(), tags)
        self._state = "SUSPENDED"

    @classmethod
    def preserves_communicators(cls) -> bool:
        return True

    @classmethod
    def preserves_compiled_artifacts(cls) -> bool:
        return True

    @classmethod
    def preserves_graphs_with_communicators(cls) -> bool:
        return True


def _started() -> _engine.Engine:
    engine = _engine.here()
    if engine is None:
        raise RuntimeError("GLake's sleep mode needs GLake's worker: start vLLM with GLAKE_VLLM=1, or without --sleep-mode-backend glake")
    return engine

"""``glake.enable()``: replaces torch's CUDA allocator by GLake."""

from __future__ import annotations

import importlib
import logging
import os
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal, Optional

from glake_switch import is_disabled

from . import _layer, _library, compiled, pluggable
from ._configuration import Config, Configuration, configuration
from ._patch import Patches
from .errors import ConfigError, Error, InvalidError, StateError, TorchError, UnavailableError

Backend = Literal["compiled", "pluggable"]

logger = logging.getLogger("glake")

_GPU = "an NVIDIA GPU with its driver, and GLAKE_DEVICE unset; without a GPU, `glake demo` shows what there is, on a simulated one"


@dataclass
class Enabled:
    """The backend in force, and the objects that it needs alive."""

    asked: tuple[Configuration, Optional[Backend]]
    backend: Backend
    why: str
    pid: int = field(default_factory=os.getpid)
    held: tuple[Any, ...] = ()


_guard = threading.Lock()
_enabled: Enabled | None = None


def enabled() -> Enabled | None:
    """Returns the result of ``enable`` in this process or, before a fork, in its parent."""
    return _enabled


def enable(config: Config = None, *, backend: Backend | None = None) -> None:
    """Makes GLake torch's CUDA allocator, for the life of the process. Call it before the first use of CUDA.

    Args:
        config: None for the environment and the file that ``GLAKE_CONFIG`` names; the path of a TOML file (text with a
            separator, or ending in ``.toml``); the name of the preset ("serverless"); or a dict of the file's
            tables, over everything else: ``{"pool": {"borrow": "wait"}}``.
        backend: "compiled" (a subclass of torch's own allocator, built against its headers at first use), "pluggable" (torch's
            plain ABI), or None for the compiled one where a C++ compiler is present, else the plain one. The logger "glake" says
            at level INFO which one it became.

    A second call with the same arguments does nothing, and neither does any call with ``GLAKE_DISABLE=1``.

    Raises:
        ConfigError: the configuration does not parse.
        StateError: CUDA or torch's allocator runs already; another configuration is in force; the process was forked after it.
        TorchError: torch is missing, older than 2.0 or without CUDA, or cannot work on a simulated device.
        UnavailableError: no driver, or another copy of the library in this process.
        Error: ``libgmlake.so`` is missing, or ``backend="compiled"`` could not be built.
        InvalidError: ``backend`` is unknown.
    """
    global _enabled
    if backend is not None and not (isinstance(backend, str) and backend in ("compiled", "pluggable")):
        raise InvalidError(f"backend is {backend!r}: write 'compiled', 'pluggable' or None")
    asked = (configuration(config), backend)
    if is_disabled():
        logger.info("GLAKE_DISABLE is set: glake.enable() does nothing, and torch keeps its allocator")
        return
    with _guard:
        if _enabled is not None:
            _again(_enabled, asked)
            return
        torch = supported_torch()
        if torch.cuda.is_initialized():
            raise StateError("CUDA is initialised already, and torch keeps its allocator from then on: call glake.enable() first")
        _refuse_simulator(config)
        _warn_of_torch_settings()
        api = _library.api()
        _configure(api, asked[0])
        if torch.cuda.device_count() == 0:
            # Asked only here: opening the driver in a parent would take CUDA away from children that it forks.
            _start(api)
            raise TorchError("the driver answers, but torch sees no GPU: look at CUDA_VISIBLE_DEVICES")
        _enabled = _install(torch, api, asked)
    logger.info("glake %s: the %s backend is torch's allocator (%s)", api.version(), _enabled.backend, _enabled.why)


def _again(enabled: Enabled, asked: tuple[Configuration, Backend | None]) -> None:
    if enabled.pid != os.getpid():
        try:
            # Works in a child whose parent had not started; refused in any other child.
            _library.api().configure(*enabled.asked[0])
        except Error as error:
            raise StateError(f"glake was enabled in the parent of this process: {error}") from error
        enabled.pid = os.getpid()
    if enabled.asked != asked:
        raise StateError(
            f"glake is enabled already, with {enabled.asked[0]} and the {enabled.backend} backend: a process has one configuration"
        )


def supported_torch() -> ModuleType:
    """Returns the installed torch.

    Raises:
        TorchError: torch is missing, older than 2.0, or without CUDA.
    """
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise TorchError(f"glake.enable() needs torch 2.0 or later with CUDA, and import torch failed: {error}") from error
    version = str(torch.__version__)
    if int(version.partition(".")[0]) < 2:
        raise TorchError(f"torch {version} lacks the functions of a pluggable allocator: glake.enable() needs 2.0 or later")
    if torch.version.cuda is None:
        raise TorchError(f"torch {version} is built without CUDA: install a CUDA build of it, on a machine with an NVIDIA GPU")
    return torch


def _refuse_simulator(config: Config) -> None:
    device: Any = os.environ.get("GLAKE_DEVICE", "")
    if isinstance(config, Mapping) and isinstance(table := config.get("device"), Mapping):
        device = table.get("choice", device)
    if str(device).partition(":")[0] == "sim":
        raise TorchError(f"the device is {device!r}, and torch cannot compute on simulated memory: glake.enable() needs {_GPU}")


def _start(api: ModuleType) -> None:
    try:
        api.start()
    except UnavailableError as error:
        # The library's advice, the simulator, is none for torch.
        raise UnavailableError(f"{str(error).partition(';')[0]}: glake.enable() needs {_GPU}") from None


def _warn_of_torch_settings() -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        asks = _layer.without_effect(os.environ.get(name, ""))
        if asks:
            warnings.warn(
                f"{name} asks torch's own allocator for {', '.join(asks)}, which has no effect: glake takes its place. "
                "Unset it, and give glake.enable() a configuration instead",
                RuntimeWarning,
                stacklevel=3,
            )
    # torch takes any value for a yes.
    if "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ:
        warnings.warn(
            "PYTORCH_NO_CUDA_MEMORY_CACHING asks torch's own allocator to keep no freed memory, which has no effect: glake takes its place, and "
            "hands freed memory out again. Unset it, or run the program without glake.enable() to look for a use after a free",
            RuntimeWarning,
            stacklevel=3,
        )


def _configure(api: ModuleType, wanted: Configuration) -> None:
    try:
        api.configure(*wanted)
    except (InvalidError, UnavailableError) as error:
        if api.started():
            raise StateError(f"{error}: glake.enable() goes before every other use of glake in the process") from error
        raise ConfigError(str(error)) from error


def _install(torch: ModuleType, api: ModuleType, asked: tuple[Configuration, Backend | None]) -> Enabled:
    library = _library.path()
    backend = asked[1]
    why = "as asked for"
    if backend != "pluggable":
        try:
            compiled.load(library, _library.include())
            patches = Patches(torch)
            for name, function in _layer.settings(torch, pinned_only=False).items():
                patches.binding(name, function)
            return Enabled(asked, "compiled", why if backend else "a C++ compiler is present", held=(patches,))
        except compiled.CompileError as error:
            if backend == "compiled":
                raise Error(f"the compiled backend is not possible here: {error}") from error
            why = f"the compiled one is not possible: {error}"
        except RuntimeError as error:
            raise StateError(str(error)) from error
    compiled._switch_registration_off()
    return Enabled(asked, "pluggable", why, held=pluggable.enable(torch, api, library))

"""Exceptions of GLake. Every class is a RuntimeError, so that code written for torch's errors catches it too."""


class Error(RuntimeError):
    """A request to GLake failed. The text says what was requested, what was found, and what to do."""


class OutOfMemoryError(Error):
    """The device has no room for a request, after everything reclaimable was reclaimed."""


class InvalidError(Error, ValueError):
    """An argument is wrong: an address where no block begins, an unknown pool, a number out of range."""


class DriverError(Error):
    """The driver refused a call. The pool is unchanged, or reports from then on why it cannot continue."""


class UnavailableError(Error):
    """The library could not start: no driver, a second copy of it in the process, a forked child, or the end of the process."""


class UnsupportedError(Error):
    """The device, the driver or the library lacks a required feature."""


class ClosedError(Error):
    """Memory is evicted or being evicted and was not refilled in time, or uses did not end in time for a shrink."""


class ConfigError(Error, ValueError):
    """A configuration does not parse. The text names the key or variable, its value, and what is allowed."""


class TorchError(Error):
    """torch is missing, too old, without CUDA, or lacks a required feature."""


class StateError(Error):
    """The call comes at the wrong time: CUDA runs already, another configuration is in force, the process was forked."""

"""What GLake raises. Every class is a RuntimeError, so that code written for torch's errors catches it too."""


class Error(RuntimeError):
    """Something that was asked of GLake could not be done. The text says what was asked, found, and what to do."""


class OutOfMemoryError(Error):
    """The device has no room for a request, after everything that may be taken back was."""


class InvalidError(Error, ValueError):
    """An argument is wrong: an address where no block begins, an unknown pool, a number out of range."""


class DriverError(Error):
    """The driver refused a call. The pool is as it was before, or says from then on why it cannot go on."""


class UnavailableError(Error):
    """The library could not start: no driver, a second copy of it in the process, a forked child, a process that ends."""


class UnsupportedError(Error):
    """The device, the driver or the library does not have what was asked for."""


class ClosedError(Error):
    """Memory is evicted or leaving, and it was not back in time; or those who use it did not end in time for a shrink."""


class ConfigError(Error, ValueError):
    """A configuration does not parse. The text names the key or variable, its value, and what is allowed."""


class TorchError(Error):
    """torch is missing, too old, without CUDA, or does not have what was asked for."""


class StateError(Error):
    """The call comes at the wrong time: CUDA runs already, another configuration is in force, the process was forked."""

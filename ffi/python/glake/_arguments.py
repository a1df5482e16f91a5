"""Conversion of arguments. A wrong type is a ``TypeError``, a wrong value an ``InvalidError``, and each text names the argument, its value
and what is allowed.
"""

from __future__ import annotations

import numbers
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, Union

from .errors import InvalidError

Device = Union[None, int, str, Any]
Choice = TypeVar("Choice")

_WORDS, _INTS = 1 << 64, 1 << 31
# Milliseconds that a float holds exactly: 285,000 years.
_LONGEST_MS = 1 << 53


def text(value: Any, name: str, what: str) -> str:
    """Checks a text for the library.

    Raises:
        TypeError: it is no text.
        InvalidError: it has characters that C's texts or UTF-8 lack.
    """
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}: {what}, a text")
    if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
        raise InvalidError(f"{name} is {value!r}: {what}, a text without null characters and surrogates")
    return value


def tag(value: Any, name: str = "tag") -> str:
    """Checks the tag of a region.

    Raises:
        As ``text``.
    """
    return text(value, name, "the name of a region")


def tags(value: Any, name: str = "tags") -> list[str]:
    """Checks the tags of regions: one text, or several.

    Raises:
        TypeError: it is neither.
        InvalidError: as ``text``.
    """
    return [tag(each, f"a tag of {name}") for each in several(value, name, "the name of a region, or several")]


def several(value: Any, name: str, what: str) -> list[Any]:
    """Returns the items of an iterable, of which a text is one item.

    Raises:
        TypeError: it is no iterable.
    """
    if isinstance(value, str):
        return [value]
    if isinstance(value, (bytes, bytearray)) or not isinstance(value, Iterable):
        raise TypeError(f"{name} is {value!r}: {what}")
    return list(value)


def flag(value: Any, name: str) -> bool:
    """Checks a truth value; 0 and 1, and numpy's, are accepted.

    Raises:
        TypeError: it is none.
    """
    plain = value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value
    if isinstance(plain, int) and plain in (0, 1):
        return bool(plain)
    raise TypeError(f"{name} is {value!r}: True or False")


def choice(value: Any, name: str, allowed: dict[str, Choice]) -> Choice:
    """Looks a word up.

    Raises:
        InvalidError: it is not there.
    """
    if not isinstance(value, str) or value not in allowed:
        *others, last = map(repr, allowed)
        raise InvalidError(f"{name} is {value!r}: {', '.join(others)} and {last} are there")
    return allowed[value]


def function(value: Any, name: str, what: str) -> Any:
    """Checks that a value can be called.

    Raises:
        TypeError: it cannot.
    """
    if not callable(value):
        raise TypeError(f"{name} is {value!r}: {what}")
    return value


def optional_function(value: Callable[..., object] | None, name: str, what: str) -> None:
    """Checks a function that may be None.

    Raises:
        TypeError: it is neither.
    """
    if value is not None:
        function(value, name, f"{what}, or None")


def milliseconds(timeout: Any, name: str = "timeout") -> int:
    """Converts seconds to milliseconds.

    Raises:
        TypeError: it is no number.
        InvalidError: it is below 0, no time at all, or longer than any process lives.
    """
    return int(seconds(timeout, name) * 1000)


def seconds(value: Any, name: str) -> float:
    """Checks a number of seconds.

    Raises:
        As ``milliseconds``.
    """
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {value!r}: seconds, 0 or more, or None")
    span: Any = value
    if not 0 <= span < _LONGEST_MS / 1000:
        raise InvalidError(f"{name} is {value}: seconds, 0 or more, or None")
    return float(span)


def amount(value: Any, name: str) -> int:
    """Converts a number of bytes; numpy's types are accepted.

    Raises:
        TypeError: it is no whole number.
        InvalidError: it is below 0, or does not fit into 64 bits.
    """
    return number(value, name, "a number of bytes, 0 or more")


def number(value: Any, name: str, what: str) -> int:
    """Converts a whole number of at most 64 bits.

    Raises:
        TypeError: it is no whole number.
        InvalidError: it is below 0, or does not fit into 64 bits.
    """
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}: {what}")
    if not 0 <= int(value) < _WORDS:
        raise InvalidError(f"{name} is {value}: {what}, of at most 64 bits")
    return int(value)


def handle(value: Any, name: str) -> int:
    """Checks the handle of a stream.

    Raises:
        TypeError: it is no whole number.
        InvalidError: it is below 0, or does not fit into 64 bits.
    """
    return number(value, name, "a torch.cuda.Stream, an object with __cuda_stream__, or a handle")


def device(value: Device, name: str = "device") -> int:
    """Converts the number of a device.

    Raises:
        InvalidError: no index, and no text that is "cuda" or "cuda:N".
    """
    if value is None:
        torch = sys.modules.get("torch")
        return int(torch.cuda.current_device()) if torch is not None and torch.cuda.is_initialized() else 0
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        number = int(value)
    else:
        kind, _, digits = str(value).partition(":")
        if kind != "cuda" or (digits and not (digits.isascii() and digits.isdecimal())):
            raise InvalidError(f"{name} is {value!r}: give an index, 'cuda' or 'cuda:N'")
        number = int(digits) if digits else device(None)
    if not 0 <= number < _INTS:
        raise InvalidError(f"{name} is {value!r}: devices are counted from 0, and there is no such one")
    return number

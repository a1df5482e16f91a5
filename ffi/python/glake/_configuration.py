"""Conversion of the accepted forms of a configuration: a preset's name, a file, or TOML text."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Union

from .errors import ConfigError

Value = Union[str, int, float, bool, Sequence["Value"], Mapping[str, "Value"]]
Config = Union[None, str, "os.PathLike[str]", Mapping[str, Value]]


class Configuration(NamedTuple):
    """Arguments of ``glake_configure``. Equal values mean equal configurations."""

    preset: str | None = None
    file: str | None = None
    overrides: str | None = None


def configuration(config: Config) -> Configuration:
    """Distinguishes the forms of a configuration: a mapping is tables over the environment; text that looks like a path (a separator,
    or the ending ``.toml``) is a file; other text is a preset.

    Raises:
        ConfigError: the file does not exist, or a mapping contains a value that TOML lacks.
        TypeError: the value has none of these forms.
    """
    if config is None:
        return Configuration()
    if isinstance(config, Mapping):
        return Configuration(overrides=_toml(config))
    if isinstance(config, str) and os.sep not in config and not config.endswith(".toml"):
        return Configuration(preset=config)
    if isinstance(config, (str, os.PathLike)):
        file = os.path.abspath(os.fspath(config))
        if not os.path.isfile(file):
            raise ConfigError(f"there is no configuration file {file}: give a TOML file, the name of a preset, or a dict of tables")
        return Configuration(file=file)
    raise TypeError(f"config is {config!r}: give None, a path, the name of a preset, or a dict of tables")


def _toml(tables: Mapping[str, Value]) -> str:
    lines: list[str] = []
    _table((), tables, lines)
    return "\n".join(lines) + "\n"


def _table(name: tuple[str, ...], table: Mapping[str, Value], lines: list[str]) -> None:
    """Formats a table as TOML, its own keys first, then its subtables, each sorted by name: equal dicts give equal text."""
    if name:
        lines.append("[" + ".".join(map(_key, name)) + "]")
    inner: list[tuple[str, Mapping[str, Value]]] = []
    for key in sorted(table, key=str):
        value = table[key]
        if isinstance(value, Mapping):
            inner.append((key, value))
        else:
            lines.append(f"{_key(key)} = {_value((*name, key), value)}")
    for key, value in inner:
        _table((*name, key), value, lines)


def _key(key: object) -> str:
    if not isinstance(key, str):
        raise ConfigError(f"{key!r} is not a key: keys of a configuration are text")
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else _text(key)


def _value(name: tuple[str, ...], value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(name, item) for item in value) + "]"
    raise ConfigError(f"{'.'.join(map(str, name))} is {value!r}: a value is text, a number, true or false, a list, or a table")


def _text(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c >= " " and c != "\x7f" else f"\\u{ord(c):04x}" for c in escaped) + '"'

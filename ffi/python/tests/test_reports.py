"""The types in `glake.reports` are those of the dictionaries that the library returns."""

import inspect
import os
import pathlib
import re
import types
import typing
import unittest

os.environ["GLAKE_DEVICE"] = "sim:h200x2"

import glake  # noqa: E402
from glake import _library, reports  # noqa: E402

from regions import MIB, made  # noqa: E402

PAGE = pathlib.Path(__file__).resolve().parents[3] / "docs/PYTHON.md"


class Reports(unittest.TestCase):
    def is_of(self, value, kind, seen, where="report"):
        """Compares a value with its type, down to the last key; adds the keys of each dictionary to `seen`."""
        origin, parts = typing.get_origin(kind), typing.get_args(kind)
        if origin is typing.Literal:
            self.assertIn(value, parts, where)
        elif origin in (typing.Union, types.UnionType):
            if value is not None:
                kinds = [part for part in parts if part is not type(None)]
                if len(kinds) > 1:
                    kinds = [part for part in kinds if set(value) >= part.__required_keys__]
                self.is_of(value, kinds[0], seen, where)
            else:
                self.assertIn(type(None), parts, where)
        elif origin is list:
            self.assertIsInstance(value, list, where)
            for item in value:
                self.is_of(item, parts[0], seen, f"{where}[]")
        elif origin is dict:
            for key, item in value.items():
                self.is_of(key, parts[0], seen, where)
                self.is_of(item, parts[1], seen, f"{where}[{key!r}]")
        elif typing.is_typeddict(kind):
            hints = typing.get_type_hints(kind)
            self.assertLessEqual(kind.__required_keys__, set(value), where)
            self.assertLessEqual(set(value), set(hints), where)
            seen.setdefault(kind, set()).update(value)
            for key, item in value.items():
                self.is_of(item, hints[key], seen, f"{where}.{key}")
        else:
            self.assertIsInstance(value, kind, where)

    def test_every_key_is_typed_and_every_typed_key_is_there(self):
        events, seen = [], {}
        tag, arrays = made(size=40 * MIB, policy="sealed", host_copy="retain", clean=True)
        glake.hooks(before=events.append, after=events.append)
        glake.fix(arrays[0])
        found = [(reports.ShrinkReport, glake.shrink(tag)), (reports.ShrinkReport, glake.shrink())]
        glake.unfix(arrays[0])
        glake.memory_usage()
        for tier in ("host", "peer:1"):
            found.append((reports.ShrinkReport, glake.shrink(tag, tier=tier)))
            found.append((reports.RegionState, next(state for state in glake.regions() if state["tag"] == tag)))
            found.append((reports.GateState, glake.gate()))
            found.append((reports.RefillReport, glake.refill(tag, bytes=1)))
            found.append((reports.RefillReport, glake.refill()))
        glake.shrink(tag)
        arrays.append(made()[1][0])
        with glake.region(tag, policy="sealed", host_copy="retain", clean=True):
            # A touch brings the region back.
            arrays.append(type(arrays[0])(4096))
        glake.shrink(tag)
        found.append((reports.RefillReport, glake.refill(wait=False)))
        with glake.active():
            pass
        with self.assertRaises(glake.OutOfMemoryError):
            _library.api().set_fraction(0, 1e-9)
            glake.shrink(tag)
            glake.refill(tag)
        _library.api().set_fraction(0, 1.0)
        glake.refill()
        glake.hooks()
        found += [(reports.RegionState, state) for state in glake.regions()]
        found += [(reports.MemoryUsage, usage) for usage in glake.memory_usage()]
        found += [(reports.HookEvent, event) for event in events]
        for kind, value in found:
            self.is_of(value, kind, seen)
        for name in reports.__all__:
            kind = getattr(reports, name)
            with self.subTest(name):
                self.assertEqual(seen.get(kind), set(typing.get_type_hints(kind)))

    def test_every_key_is_documented(self):
        rows = re.findall(r"^\| `(\w+)`[^|]* \| ([^|]+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
        page = {name: set(re.findall(r"`(\w+)`", keys)) for name, keys in rows if name in reports.__all__}
        for name in reports.__all__:
            kind = getattr(reports, name)
            keys = list(typing.get_type_hints(kind))
            documented = re.findall(r"^    (\w+): ", inspect.getdoc(kind), re.MULTILINE)
            with self.subTest(name):
                self.assertEqual((sorted(documented), page.get(name)), (sorted(keys), set(keys)))


if __name__ == "__main__":
    unittest.main()

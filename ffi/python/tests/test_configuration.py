"""The forms of a configuration."""

import pathlib
import tempfile
import unittest

import child

from glake import ConfigError
from glake._configuration import Configuration, configuration


class Forms(unittest.TestCase):
    def test_nothing(self):
        self.assertEqual(configuration(None), Configuration())

    def test_a_preset(self):
        self.assertEqual(configuration("serverless"), Configuration(preset="serverless"))

    def test_a_file(self):
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "a.toml"
            file.write_text("[pool]\n", encoding="utf-8")
            for form in (file, str(file)):
                self.assertEqual(configuration(form), Configuration(file=str(file)))
        for missing in (file, "b.toml", "./serverless"):
            with self.assertRaisesRegex(ConfigError, "no configuration file"):
                configuration(missing)

    def test_tables(self):
        tables = {
            "pool": {"wait": {"split": False}, "borrow": "wait", "reuse_limit": 2.5, "limit": 10},
            "log": {"filter": 'a"\\\n'},
            "transfer": {"exclude": [2, "3b:00.0"]},
        }
        self.assertEqual(
            configuration(tables).overrides,
            '[log]\nfilter = "a\\"\\\\\\u000a"\n[pool]\nborrow = "wait"\nlimit = 10\nreuse_limit = 2.5\n[pool.wait]\nsplit = false\n'
            '[transfer]\nexclude = [2, "3b:00.0"]\n',
        )
        self.assertEqual(configuration(tables), configuration(dict(reversed(tables.items()))))

    def test_what_toml_cannot_hold(self):
        for tables, text in [({"pool": {"limit": None}}, "pool.limit is None"), ({"pool": {1: 2}}, "1 is not a key")]:
            with self.assertRaisesRegex(ConfigError, text):
                configuration(tables)
        with self.assertRaises(TypeError):
            configuration(5)


class Library(unittest.TestCase):
    def test_it_takes_every_form(self):
        child.check(
            self,
            """
            import glake, tempfile
            from glake import _library
            from glake._configuration import configuration
            api = _library.api()
            with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
                file.write("[pool]\\nlimit = \\"3GiB\\"\\n")
                file.flush()
                api.configure(*configuration("serverless"))
                api.configure(*configuration({"transfer": {"exclude": [2, "3b:00.0"]}}))
                api.configure(*configuration({"pool": {"limit": "2GiB"}, "tiers": {"extent": "4MiB"}}))
                for wrong in ({"pool": {"borrow": "maybe"}}, {"pool": {"nonsense": 1}}, "trainig"):
                    try:
                        api.configure(*configuration(wrong))
                    except glake.Error as error:
                        assert any(part in str(error) for part in ("maybe", "nonsense", "trainig")), error
                    else:
                        raise AssertionError(wrong)
                api.configure(*configuration(file.name))
                api.start()
                assert api.started() and api.device_name().startswith("sim"), api.device_name()
                assert api.fraction(0) == 1.0, api.fraction(0)
            try:
                api.configure("serverless")
            except glake.InvalidError as error:
                assert "started" in str(error), error
            else:
                raise AssertionError("configured while running")
            """,
        )


if __name__ == "__main__":
    unittest.main()

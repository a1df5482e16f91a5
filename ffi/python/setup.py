"""The wheel: binaries that cargo has built, and a file beside the packages that the interpreter reads as it starts."""

import pathlib
import shutil

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py


class BuildPy(build_py):
    def run(self):
        super().run()
        shutil.copy("glake_switch.pth", pathlib.Path(self.build_lib))


class OfOnePlatform(Distribution):
    def has_ext_modules(self):
        return True


# One wheel for each Python from 3.10 on: the module has the limited API.
setup(cmdclass={"build_py": BuildPy}, distclass=OfOnePlatform, options={"bdist_wheel": {"py_limited_api": "cp310"}})

"""Imported by the interpreter as it starts, from the folder that ``glake run --allocator`` puts first in PYTHONPATH: runs the
sitecustomize behind it, if there is one, then watches for torch. It leaves no name behind but the module's.
"""


def _behind(here: str) -> None:
    """Executes the sitecustomize that the interpreter would find without this folder, in place of this module."""
    import importlib.machinery
    import importlib.util
    import os
    import sys

    folders = [folder for folder in sys.path if os.path.abspath(folder or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", folders)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


def _watch(here: str) -> None:
    import importlib.util
    import os
    import sys

    name = "glake_switch"
    if name not in sys.modules:
        # By its file: this interpreter may have no package glake.
        folder = os.path.dirname(here)
        spec = importlib.util.spec_from_file_location(name, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder])
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    sys.modules[name].watch()


def _start() -> None:
    import os

    here = os.path.dirname(os.path.abspath(__file__))
    try:
        _watch(here)
    finally:
        _behind(here)


_start()

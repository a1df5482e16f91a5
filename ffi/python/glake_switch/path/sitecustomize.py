"""Imported by the interpreter as it starts, from the folder that ``glake run --allocator`` puts first in PYTHONPATH: runs the
sitecustomize behind it, if there is one, then watches for torch. It leaves no name behind but the module's.
"""


def _behind(here: str) -> None:
    """Executes the next sitecustomize in the search path, in place of this module. Folders that were visited before are left out: the search
    path may have this folder twice, and the folders of two installations.
    """
    import importlib.machinery
    import importlib.util
    import os
    import sys

    visited = vars(sys.modules.get("glake_switch", sys)).setdefault("_visited", set())
    visited.add(here)
    folders = [folder for folder in sys.path if os.path.realpath(folder or ".") not in visited]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", folders)
    if spec is None or spec.loader is None:
        return
    if spec.origin is not None:
        visited.add(os.path.dirname(os.path.realpath(spec.origin)))
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

    here = os.path.dirname(os.path.realpath(__file__))
    try:
        _watch(here)
    finally:
        _behind(here)


_start()

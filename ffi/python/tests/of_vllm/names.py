"""What GLake's plugin needs of vLLM, looked up in a wheel, an unpacked one, or the newest on PyPI.

    python3 ffi/python/tests/of_vllm/names.py                     # the newest release: only the files that are looked at are fetched
    python3 ffi/python/tests/of_vllm/names.py 0.23.0              # that release
    python3 ffi/python/tests/of_vllm/names.py vllm-….whl FOLDER   # files here
    … --write                                                  # also writes VERSION.txt beside this script, which the tests read

Ends with 1 if a name is missing.
"""

import argparse
import ast
import importlib.util
import io
import json
import pathlib
import re
import sys
import tempfile
import urllib.parse
import urllib.request
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
SOURCE = HERE.parents[1] / "glake" / "vllm" / "_names.py"


def table():
    """The module with the names, of this tree and without its package: the table needs neither the library nor vLLM."""
    spec = importlib.util.spec_from_file_location("vllm_names", SOURCE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Remote(io.RawIOBase):
    """A file at an address, of which parts are fetched."""

    def __init__(self, url):
        self.url, self.at = url, 0
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=20) as answer:
            self.size = int(answer.headers["Content-Length"])

    def seekable(self):
        return True

    def readable(self):
        return True

    def seek(self, offset, whence=io.SEEK_SET):
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.size}[whence]
        return self.at

    def tell(self):
        return self.at

    def readinto(self, buffer):
        end = min(self.at + len(buffer), self.size) - 1
        if end < self.at:
            return 0
        with urllib.request.urlopen(urllib.request.Request(self.url, headers={"Range": f"bytes={self.at}-{end}"}), timeout=20) as answer:
            if answer.status != 206:
                raise OSError(f"{self.url}: the server sends no parts")
            found = answer.read()
        buffer[: len(found)] = found
        self.at += len(found)
        return len(found)


def released(version):
    """Returns the wheel of a release on PyPI, by default of the newest, and its version."""
    index = "https://pypi.org/simple/vllm/"
    with urllib.request.urlopen(urllib.request.Request(index, headers={"Accept": "application/vnd.pypi.simple.v1+json"}), timeout=20) as answer:
        files = json.load(answer)["files"]
    wheels = {}
    for file in files:
        found = re.fullmatch(r"vllm-(\d+(?:\.\d+)*)(?:-\d+)?-.*x86_64\.whl", file["filename"])
        if found:
            wheels[found[1]] = urllib.parse.urljoin(index, file["url"])
    version = version or max(wheels, key=lambda one: tuple(map(int, one.split("."))))
    if version not in wheels:
        sys.exit(f"names.py: PyPI has no wheel of vllm {version}")
    return zipfile.ZipFile(io.BufferedReader(Remote(wheels[version]), 1 << 16)), version


def sources(wheel, names):
    """Returns the source of each module in which a name is looked up."""
    there = set(wheel.namelist())
    files = {name.module: "vllm/" + name.module.replace(".", "/") + ".py" for name in names}
    return {module: wheel.read(file).decode() for module, file in files.items() if file in there}


def skeleton(source, asked):
    """The named classes and functions of a module, with signatures and the named fields and without code."""
    wanted = {name.path.split(".")[0] for name in asked}
    methods = {tuple(name.path.split(".")) for name in asked if "." in name.path}
    used = {field for name in asked for field in name.has}
    kept = []
    for node in ast.parse(source).body:
        if getattr(node, "name", None) not in wanted:
            continue
        if isinstance(node, ast.ClassDef):
            fields = [one for one in node.body if isinstance(one, ast.AnnAssign) and getattr(one.target, "id", None) in used]
            for one in fields:
                one.value = None
            defs = [one for one in node.body if isinstance(one, ast.FunctionDef)]
            # Attributes that a method sets, and properties.
            sets = [one for one in ast.walk(node) if isinstance(one, (ast.Assign, ast.AnnAssign)) and _attribute(one) in used]
            named = [ast.parse(f"{name}: object").body[0] for name in dict.fromkeys(map(_attribute, sets))]
            asked = [one for one in defs if (node.name, one.name) in methods or one.name in used]
            node.body = fields + named + [_bare(one) for one in asked] or [ast.Pass()]
            node.decorator_list = []
        else:
            node = _bare(node)
        kept.append(ast.unparse(ast.fix_missing_locations(node)))
    return "\n\n".join(kept) + "\n"


def _attribute(assignment):
    target = assignment.target if isinstance(assignment, ast.AnnAssign) else assignment.targets[0]
    return target.attr if isinstance(target, ast.Attribute) and getattr(target.value, "id", None) == "self" else None


def _bare(function):
    function.body, function.decorator_list, function.returns = [ast.Expr(ast.Constant(...))], [], None
    arguments = function.args
    for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if one is not None:
            one.annotation = None
    arguments.defaults = [ast.Constant(...) for _ in arguments.defaults]
    arguments.kw_defaults = [default and ast.Constant(...) for default in arguments.kw_defaults]
    return function


def unpack(version, folder):
    """Writes the kept skeleton of a version as a package, and returns its folder."""
    package = pathlib.Path(folder, "vllm")
    file = None
    for line in (HERE / f"{version}.txt").read_text().splitlines(keepends=True):
        if line.startswith("### "):
            file = package / line[4:].strip()
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        elif file is not None:
            with file.open("a") as out:
                out.write(line)
    return package


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("where", nargs="*", default=[""], help="a wheel, a folder that has vllm/, or a version; none: the newest release")
    parser.add_argument("--write", action="store_true", help="keep the signatures, for the tests")
    asked = parser.parse_args()
    names = table()
    failed = False
    for where in asked.where:
        if where and pathlib.Path(where).exists():
            version = next((part for part in pathlib.Path(where).name.split("-")[1:2]), where)
            wheel = zipfile.ZipFile(where) if where.endswith(".whl") else Folder(where)
        else:
            wheel, version = released(where)
        found = sources(wheel, names.NAMES + names.SLEEP_BACKEND)
        with tempfile.TemporaryDirectory() as folder:
            for module, source in found.items():
                file = pathlib.Path(folder, *module.split(".")).with_suffix(".py")
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(source)
            missing = names.missing(folder)
        failed |= bool(missing)
        print(f"vllm {version}: " + ("every name is there" if not missing else "\n  ".join(["", *missing])))
        if asked.write:
            asked_of = {module: [name for name in names.NAMES + names.SLEEP_BACKEND if name.module == module] for module in found}
            text = "".join(f"### {module.replace('.', '/')}.py\n{skeleton(source, asked_of[module])}\n" for module, source in sorted(found.items()))
            (HERE / f"{version}.txt").write_text(text)
    return int(failed)


class Folder:
    """A folder, read as a wheel is."""

    def __init__(self, root):
        self.root = pathlib.Path(root)

    def namelist(self):
        return [str(file.relative_to(self.root)) for file in self.root.glob("vllm/**/*.py")]

    def read(self, name):
        return (self.root / name).read_bytes()


if __name__ == "__main__":
    sys.exit(main())

"""licenses.py [FILE]: the licences of what others wrote and the wheel carries, with the texts that lie in each crate's folder.

A crate is in the wheel where one of its binaries is linked with it: neither what only builds them, nor macros, which run in the
compiler. Equal texts are written once. A crate without a text is an error, but where the licence is MIT, whose text is one for all.
"""

from __future__ import annotations

import html
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

BINARIES = ("glake", "glake-ffi", "glake-preload", "glake-python")
TARGET = "x86_64-unknown-linux-gnu"
TEXT = re.compile(r"(licen[cs]e|copying|copyright|notice|unlicense)", re.IGNORECASE)
MIT = """Copyright (c) {authors}

Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated documentation files (the
"Software"), to deal in the Software without restriction, including without limitation the rights to use, copy, modify, merge, publish,
distribute, sublicense, and/or sell copies of the Software, and to permit persons to whom the Software is furnished to do so, subject to
the following conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial portions of the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF
MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR
ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH
THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
"""


class Work(NamedTuple):
    """What somebody else wrote."""

    name: str
    license: str
    home: str
    texts: list[str]


def linked(metadata: dict[str, Any], binaries: Iterable[str] = BINARIES) -> list[dict[str, Any]]:
    """Of cargo's metadata the packages of others that are linked into these binaries, by name and version."""
    packages = {package["id"]: package for package in metadata["packages"]}
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    todo = [id for id, package in packages.items() if package["name"] in binaries and package["source"] is None]
    found: dict[str, dict[str, Any]] = {}
    while todo:
        package = packages[todo.pop()]
        if package["id"] in found or any("proc-macro" in target["kind"] for target in package["targets"]):
            continue
        found[package["id"]] = package
        for needed in nodes[package["id"]]["deps"]:
            if any(kind["kind"] is None for kind in needed["dep_kinds"]):
                todo.append(needed["pkg"])
    others = [package for package in found.values() if package["source"] is not None]
    return sorted(others, key=lambda package: (package["name"], package["version"]))


def work(package: dict[str, Any]) -> Work:
    """A crate and the texts in its folder.

    Raises:
        LookupError: there is none, and the licence is not MIT.
    """
    folder = pathlib.Path(package["manifest_path"]).parent
    files = [file for file in sorted(folder.iterdir()) if TEXT.match(file.name) and file.is_file()]
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    name, license = f"{package['name']} {package['version']}", package["license"] or package["license_file"] or "unknown"
    if not texts and license == "MIT":
        texts = [MIT.format(authors=", ".join(package["authors"]) or f"the authors of {package['name']}")]
    if not texts:
        raise LookupError(f"{name} ({license}) has no licence text in {folder}: ask its authors for one, or do without the crate")
    return Work(name, license, package["repository"] or package["homepage"] or "", texts)


def standard_library() -> Work:
    """Rust's own, which every binary is linked with, and what it is built of."""
    rustc = os.environ.get("RUSTC", "rustc")
    version, root = (
        subprocess.run([rustc, *what], check=True, capture_output=True, text=True).stdout.strip()
        for what in (["--version"], ["--print", "sysroot"])
    )
    documents = pathlib.Path(root, "share/doc/rust")
    texts = []
    for file in ("COPYRIGHT-library.html", "licenses/MIT.txt", "licenses/Apache-2.0.txt"):
        try:
            text = (documents / file).read_text(encoding="utf-8")
        except FileNotFoundError:
            print(f"licenses: {documents / file} is missing: the standard library's text is left out", file=sys.stderr)
            continue
        texts.append(plain(text) if file.endswith(".html") else text)
    return Work(f"Rust's standard library ({version})", "MIT OR Apache-2.0", "https://github.com/rust-lang/rust", texts)


def plain(page: str) -> str:
    """The text of a page."""
    text = html.unescape(re.sub(r"<head>.*?</head>|<[^>]+>", "", page, flags=re.DOTALL))
    return re.sub(r"\n\s*\n", "\n\n", "\n".join(line.strip() for line in text.splitlines()))


def document(works: list[Work]) -> str:
    """All of them, and below them each text once."""
    texts: dict[str, list[str]] = {}
    for one in works:
        for text in one.texts:
            texts.setdefault(text.replace("\r\n", "\n").strip(), []).append(one.name)
    numbers = {text: number for number, text in enumerate(texts, 1)}
    lines = ["GLake is licensed under Apache-2.0. This wheel carries the work of others too, under the licences named here.", ""]
    for one in works:
        own = sorted({numbers[text.replace("\r\n", "\n").strip()] for text in one.texts})
        lines += [f"{one.name}: {one.license}", f"    {one.home}", f"    text {', '.join(map(str, own))}"]
    for text, number in numbers.items():
        lines += ["", "=" * 80, f"text {number}, of {', '.join(dict.fromkeys(texts[text]))}", "=" * 80, "", text]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Writes the document to the file that is named, or to standard output; 1 where a text is missing."""
    cargo = [os.environ.get("CARGO", "cargo"), "metadata", "--locked", "--format-version", "1", "--filter-platform", TARGET]
    metadata = json.loads(subprocess.run(cargo, check=True, capture_output=True, text=True).stdout)
    try:
        text = document([*map(work, linked(metadata)), standard_library()])
    except LookupError as error:
        print(f"licenses: {error}", file=sys.stderr)
        return 1
    if len(sys.argv) > 1:
        pathlib.Path(sys.argv[1]).write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())

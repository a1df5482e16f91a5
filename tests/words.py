"""Checks that doc comments can be read without the code below them.

    tests/words.py                  # a table for each crate; fails above the limits below
    tests/words.py --list [PREFIX]  # the comments that fail, of files whose path begins so

A doc comment begins with a noun phrase ("Number of extents in use.") or a verb in the third person ("Returns the ..."). A riddle is
one whose first sentence begins with a bare pronoun or a free relative clause ("What was there before.", "Who waits"), and one of
up to three words ("How much."). Counted: items and modules of Rust, docstrings of Python; not those of tests.
"""

import ast
import collections
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIMIT = 0.10
CRATE_LIMIT = 0.18
RIDDLE = re.compile(
    r"(what|who|whom|whose|whoever|whatever|it|they|those|these|that|this one|nothing|nobody|one|all|as|so|or|and|but|of"
    r"|else|how|when|where|which)\b",
    re.IGNORECASE,
)


class Comment(NamedTuple):
    file: str
    line: int
    text: str
    item: bool

    @property
    def first_sentence(self) -> str:
        return re.split(r"(?<=[.!?:]) ", " ".join(self.text.split()))[0]

    @property
    def is_riddle(self) -> bool:
        sentence = self.first_sentence
        return bool(RIDDLE.match(sentence)) or (self.item and len(sentence.split()) <= 3)


def rust_comments(file: str, text: str) -> Iterator[Comment]:
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        mark = lines[number].strip()[:3]
        if mark not in ("///", "//!") or lines[number].strip().startswith("////"):
            number += 1
            continue
        begin = number
        while number < len(lines) and lines[number].strip().startswith(mark):
            number += 1
        body = " ".join(line.strip()[3:].strip() for line in lines[begin:number])
        yield Comment(file, begin + 1, body, mark == "///")


def python_comments(file: str, text: str) -> Iterator[Comment]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if docstring := ast.get_docstring(node):
                yield Comment(file, getattr(node, "lineno", 1), docstring, False)


def comments() -> Iterator[Comment]:
    listed = subprocess.run(["git", "ls-files", "*.rs", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    for file in listed.stdout.split():
        if "/tests" in file or file.startswith("tests/") or not (ROOT / file).is_file():
            continue
        read = rust_comments if file.endswith(".rs") else python_comments
        yield from (comment for comment in read(file, (ROOT / file).read_text()) if comment.text.strip())


def crate(file: str) -> str:
    """The folder of the nearest Cargo.toml, else the first folder."""
    for folder in (ROOT / file).parents:
        if folder != ROOT and (folder / "Cargo.toml").is_file():
            return str(folder.relative_to(ROOT))
    return file.split("/", maxsplit=1)[0]


def main(arguments: list[str]) -> int:
    """Prints the list or the table, and returns the exit status."""
    if arguments[:1] == ["--list"]:
        prefix = arguments[1] if len(arguments) > 1 else ""
        for comment in comments():
            if comment.is_riddle and comment.file.startswith(prefix):
                print(f"{comment.file}:{comment.line}: {comment.first_sentence}")
        return 0
    count: collections.Counter[str] = collections.Counter()
    riddles: collections.Counter[str] = collections.Counter()
    for comment in comments():
        for name in (crate(comment.file), "total"):
            count[name] += 1
            riddles[name] += comment.is_riddle
    failed = []
    for name in sorted(count, key=lambda name: (name == "total", -riddles[name] / count[name])):
        part = riddles[name] / count[name]
        print(f"{name:24} {count[name]:6} doc comments {riddles[name]:5} riddles {part:5.1%}")
        if part > (LIMIT if name == "total" else CRATE_LIMIT):
            failed.append(name)
    if failed:
        print(f"words: too many doc comments of {', '.join(failed)} cannot be read without their code: "
              f"at most {LIMIT:.0%} in total and {CRATE_LIMIT:.0%} in a crate; tests/words.py --list PREFIX names them")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

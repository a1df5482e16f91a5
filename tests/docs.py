"""Checks the documentation: links and anchors lead somewhere, what it names exists, and the blocks of sh and Python in it run.

    tests/docs.py links             # every relative link and anchor of every page, every file, key and option that a page names in
                                    # backticks, and lines of prose over 120 characters; nothing is built
    tests/docs.py blocks [DIR]      # runs what needs no GPU, on simulated ones, with the libraries in DIR (target/release) and the
                                    # `glake` there, or in the folder debug beside it
    tests/docs.py gpu [DIR]         # runs what needs a GPU; with the installed package, or DIR's
    tests/docs.py list              # which block goes where

Blocks are those of README, docs, examples that are marked sh or python. The first line of a block may say what it needs:
"# needs a GPU", or "# needs: ..." for anything else, which is listed and passed over. The blocks of a page run one after the other, each
a process of its own, in a folder of the page that is empty at first. A block of C whose first line names a file is that file.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIMIT_S = 120
GPU = "# needs a GPU"
OTHER = "# needs: "


class Block(NamedTuple):
    page: pathlib.Path
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def where(self) -> str:
        """"ci", "gpu" or what it needs."""
        first = self.text.split("\n", 1)[0].strip()
        if first == GPU:
            return "gpu"
        return first.removeprefix(OTHER) if first.startswith(OTHER) else "ci"


def pages() -> list[pathlib.Path]:
    """Every page that git has, or would take; without git, every page there is."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    asked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    names = asked.stdout.split() or [str(page.relative_to(ROOT)) for page in ROOT.rglob("*.md")]
    return [ROOT / name for name in sorted(set(names)) if (ROOT / name).is_file()]


def blocks() -> list[Block]:
    """The blocks that are run or listed, in order."""
    found = []
    for page in pages():
        top = page.relative_to(ROOT).parts[0]
        if top not in ("README.md", "docs", "examples"):
            continue
        language, begun, lines = None, 0, []
        for number, line in enumerate(page.read_text().split("\n"), 1):
            if not line.startswith("```"):
                lines.append(line)
            elif language is None:
                language, begun, lines = line[3:].strip(), number, []
            else:
                if language in ("sh", "python", "c"):
                    found.append(Block(page, begun, language, "\n".join(lines) + "\n"))
                language = None
    return found


def anchors(page: pathlib.Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    names: set[str] = set()
    for heading in re.findall(r"^#+ +(.*)$", text, flags=re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", plain.lower()).strip().replace(" ", "-")
        again = 1
        while name in names:
            name, again = f"{name.rsplit('-', 1)[0] if again > 1 else name}-{again}", again + 1
        names.add(name)
    return names


def broken_links() -> list[str]:
    """Relative links that lead nowhere, and C blocks that are not the file they name."""
    wrong = []
    for page in pages():
        text = re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), page.read_text(), flags=re.MULTILINE | re.DOTALL)
        text = re.sub(r"`[^`\n]*`", "", text)
        for link in re.finditer(r"\]\(([^)\s]+)\)", text):
            target = link[1]
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            to = (page.parent / path).resolve() if path else page
            at = f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, link.start()) + 1}"
            if not to.exists():
                wrong.append(f"{at}: {target}: there is no such file")
            elif anchor and (to.suffix != ".md" or anchor not in anchors(to)):
                wrong.append(f"{at}: {target}: there is no such heading")
    for block in blocks():
        if block.language == "c" and block.text != (ROOT / "examples" / "pool.c").read_text():
            wrong.append(f"{block.name}: the block is not examples/pool.c")
    return wrong


WIDTH = 120
FILES = (".rs", ".py", ".sh", ".md", ".toml", ".c", ".h", ".cu", ".cpp", ".jsonl", ".svg", ".gz", ".yml")
# Pages that tell of what is no more.
HISTORY = ("CHANGELOG.md",)


def prose(page: pathlib.Path) -> str:
    """A page without its blocks, with as many lines."""
    return re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), page.read_text(), flags=re.MULTILINE | re.DOTALL)


def keys() -> set[str]:
    """Every key of the configuration, as table.key."""
    found, table = set(), ""
    for line in (ROOT / "configs" / "default.toml").read_text().split("\n"):
        if line.startswith("["):
            table = line.strip("[]")
        elif key := re.match(r"#?(\w+) = ", line):
            found.add(f"{table}.{key[1]}")
    return found


def options() -> set[str]:
    """Every option of the command, read from its arguments in the source."""
    found = {"--help", "--version"}
    argument = re.compile(r"#\[arg\(((?:[^()]|\([^()]*\))*)\)\]\s*(?:#\[[^\n]*\n\s*|//[^\n]*\n\s*)*(?:pub(?:\([a-z]+\))? )?(\w+):")
    for source in (ROOT / "runtime" / "cli" / "src").rglob("*.rs"):
        for attributes, field in argument.findall(source.read_text()):
            if re.search(r"\blong\b", attributes):
                name = re.search(r'long\s*=\s*"([^"]+)"', attributes)
                found.add("--" + (name[1] if name else field.replace("_", "-")))
    return found


class Names:
    """What may be named in backticks: files of the repository, keys of the configuration, options of the command."""

    def __init__(self) -> None:
        asked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
        self.files = asked.stdout.split() or [str(path.relative_to(ROOT)) for path in ROOT.rglob("*")]
        self.folders = {str(folder) for name in self.files for folder in pathlib.PurePosixPath(name).parents}
        self.tops = {name.split("/")[0] for name in self.files}
        self.keys = keys()
        self.tables = {key.split(".")[0] for key in self.keys}
        self.options = options()

    def file(self, page: pathlib.Path, word: str) -> bool:
        """Whether a word that looks like a file of the repository is one, or the end of one's path."""
        if not re.fullmatch(r"\w[\w.-]*(/[\w.-]*)*", word) or re.search(r"\b(NAME|DIR2?|OUT|OLD|NEW)\b", word):
            return True
        if not (word.endswith(FILES) or ("/" in word and word.split("/")[0] in self.tops)):
            return True
        name = word.rstrip("/")
        if (ROOT / name).exists() or (page.parent / name).exists():
            return True
        return any(known == name or known.endswith(f"/{name}") for known in [*self.files, *self.folders])

    def key(self, word: str) -> bool:
        """Whether a word that looks like a key of the configuration is one."""
        found = re.fullmatch(r"(\w+)\.(\w+)", word)
        return not found or found[1] not in self.tables or word in self.keys or word.endswith(FILES)

    def option(self, text: str, word: str) -> bool:
        """Whether an option of `glake …` is one of the command's."""
        ours = re.match(r"glake \w+", text) and " -- " not in text
        return not ours or not word.startswith("--") or word == "--" or word.split("=")[0] in self.options


def wrong_names(names: Names) -> list[str]:
    """Files, keys and options that are named in backticks and do not exist, and lines of prose that are too long."""
    wrong = []
    for page in pages():
        if page.name in HISTORY and page.parent == ROOT:
            continue
        text, at = prose(page), page.relative_to(ROOT)
        for found in re.finditer(r"`([^`\n]+)`", text):
            line = text.count("\n", 0, found.start()) + 1
            for word in re.split(r"[\s,=]+", found[1]):
                if not names.file(page, word):
                    wrong.append(f"{at}:{line}: {word}: there is no such file")
                if not names.key(word):
                    wrong.append(f"{at}:{line}: {word}: there is no such key")
            for word in found[1].split():
                if not names.option(found[1], word):
                    wrong.append(f"{at}:{line}: {found[1]}: the command has no {word}")
        for number, line in enumerate(text.split("\n"), 1):
            if len(line) > WIDTH and not line.startswith(("|", "![")):
                wrong.append(f"{at}:{number}: {len(line)} characters, at most {WIDTH}")
    return wrong


def environment(build: pathlib.Path, simulated: bool) -> dict[str, str]:
    """That of a user: glake on the PATH, the package to import, and a simulated device or none named."""
    names = {name: value for name, value in os.environ.items() if name not in ("GLAKE_DEVICE", "GLAKE_CONFIG")}
    names["PATH"] = os.pathsep.join([str(build), str(build.parent / "debug"), names["PATH"]])
    package = ROOT / "ffi" / "python"
    if simulated or subprocess.run([sys.executable, "-c", "import glake"], capture_output=True, check=False).returncode != 0:
        names["PYTHONPATH"] = os.pathsep.join([str(package)] + [path for path in (names.get("PYTHONPATH"),) if path])
        names["GLAKE_LIBRARY"] = names.get("GLAKE_LIBRARY") or str(build / "libgmlake.so")
    if simulated:
        names["GLAKE_DEVICE"] = "sim"
    return names


def run(where: str, build: pathlib.Path) -> list[str]:
    """Runs the blocks of a kind, and answers the names of those that failed."""
    failed = []
    names = environment(build, simulated=where == "ci")
    shown = [block for block in blocks() if block.language != "c"]
    for page in sorted({block.page for block in shown}):
        with tempfile.TemporaryDirectory() as folder:
            for name in ("tests", "examples", "ffi"):
                os.symlink(ROOT / name, pathlib.Path(folder, name))
            pathlib.Path(folder, "target").mkdir()
            os.symlink(build, pathlib.Path(folder, "target", "release"))
            for block in (block for block in shown if block.page == page and block.where == where):
                command = ["bash", "-euo", "pipefail", "-c"] if block.language == "sh" else [sys.executable, "-c"]
                begun = time.monotonic()
                try:
                    done = subprocess.run(
                        [*command, block.text], cwd=folder, env=names, capture_output=True, text=True, timeout=LIMIT_S, check=False
                    )
                    code, said = done.returncode, done.stdout + done.stderr
                except subprocess.TimeoutExpired as error:
                    code, said = 124, f"it ran longer than {LIMIT_S} s\n{error.stdout or ''}"
                print(f"{'ok      ' if code == 0 else 'FAILED  '}{block.name} ({time.monotonic() - begun:.1f} s)", flush=True)
                if code != 0:
                    failed.append(block.name)
                    print("\n".join(f"        {line}" for line in said.rstrip().split("\n")[-20:]))
    for block in shown:
        if where == "ci" and block.where not in ("ci", "gpu"):
            print(f"SKIPPED {block.name}: needs {block.where}")
    return failed


def main() -> int:
    asked = sys.argv[1] if len(sys.argv) > 1 else ""
    build = pathlib.Path(sys.argv[2] if len(sys.argv) > 2 else ROOT / "target" / "release").resolve()
    if asked == "links":
        wrong = broken_links() + wrong_names(Names())
        print("\n".join(wrong) or f"docs: the links of {len(pages())} pages lead somewhere, and what they name exists")
        return bool(wrong)
    if asked in ("blocks", "gpu"):
        failed = run("ci" if asked == "blocks" else "gpu", build)
        print(f"docs: {len(failed)} blocks failed" if failed else "docs: all blocks ran")
        return bool(failed)
    if asked == "list":
        for block in blocks():
            print(f"{block.name}: {'compared' if block.language == 'c' else block.where}")
        return 0
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main())

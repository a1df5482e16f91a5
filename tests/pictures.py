"""Makes the pictures of `glake top` in docs/, on simulated GPUs: needs tmux, Python 3.10 and a build.

    tests/pictures.py target/debug          # or target/release: where glake and libgmlake.so are

Two scenes on a screen of 80 columns and 24 lines: workers of an agent, one of which waits (docs/top.svg), and processes without an agent
(docs/top-alone.svg). Each is a screen of tmux, written as SVG with its own text.
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from xml.sax.saxutils import escape

ROOT = pathlib.Path(__file__).resolve().parent.parent
COLUMNS, LINES = 80, 24
MIB = 1 << 20
GPU = '{ name = "Simulated GPU", memory = "6144MiB", socket = 0, link = { to_gpu = 24.3, from_gpu = 24.3 }, local = 400.0, latency = 7.0 }'
TOPOLOGY = f"""name = "small"
gpus = [{GPU}, {GPU}]
[host]
read = 1000000.0
write = 1000000.0
pageable_to_gpu = 9.5
pageable_from_gpu = 19.4
"""
NODE = """[node]
reserve = "256MiB"
"""


def worker(name: str, gpu: int, mebibytes: int) -> str:
    command = ["python3", __file__, "--worker", name, "--gpu", str(gpu), "--mebibytes", str(mebibytes)]
    words = ", ".join(f'"{word}"' for word in command)
    return f'[[worker]]\nname = "{name}"\nweights = "{mebibytes}MiB"\ngpus = [{gpu}]\nmax_pause = 30.0\ncommand = [{words}]\n'


def work(name: str, gpu: int, mebibytes: int, is_fragmented: bool, is_asleep: bool) -> None:
    """A program with memory: it uses it while the file NAME.use is there, and ends with its folder."""
    import glake

    folder = pathlib.Path(os.environ["PICTURES"])
    with glake.region("weights"):
        blocks = [glake.allocate(64 * MIB, device=gpu) for _ in range(mebibytes // 64)]
    if is_fragmented:
        small = [glake.allocate(24 * MIB, device=gpu) for _ in range(40)]
        for address in small[::2]:
            glake.free(address)
    (folder / f"{name}.loaded").touch()
    if is_asleep:
        glake.shrink()
    elif not is_fragmented:
        glake.join(name)
    while folder.exists():
        if (folder / f"{name}.use").exists():
            with glake.active("weights"):
                (folder / f"{name}.uses").touch()
                while folder.exists() and (folder / f"{name}.use").exists():
                    time.sleep(0.02)
        if is_fragmented:
            glake.free(glake.allocate(32 * MIB, device=gpu))
        time.sleep(0.02)
    assert blocks


class Scene:
    """A folder with simulated GPUs, and a screen on which `glake top` runs."""

    def __init__(self, build: pathlib.Path) -> None:
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="glake-top-"))
        (self.folder / "small.toml").write_text(TOPOLOGY)
        self.device = f"sim:{self.folder}/small.toml@{self.folder}/gpus"
        self.glake = build / "glake"
        self.children: list[subprocess.Popen[bytes]] = []
        self.environment = {
            **os.environ,
            "PATH": f"{build}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "ffi/python"),
            "GLAKE_LIBRARY": str(build / "libgmlake.so"),
            "GLAKE_DEVICE": self.device,
            "GLAKE_AGENT": str(self.folder / "agent.sock"),
            "PICTURES": str(self.folder),
            "TERM": "tmux-256color",
            "COLORTERM": "truecolor",
        }
        self.environment.pop("NO_COLOR", None)

    def __enter__(self) -> "Scene":
        return self

    def __exit__(self, *_exception: object) -> None:
        self.tmux("kill-server", check=False)
        subprocess.run([self.glake, "stop", "--all"], env=self.environment, capture_output=True)
        for child in self.children:
            child.terminate()
            child.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self, *words: object, has_agent: bool = True) -> None:
        log = open(self.folder / f"log-{len(self.children)}", "wb")
        agent = {} if has_agent else {"GLAKE_AGENT": ""}
        self.children.append(
            subprocess.Popen([str(word) for word in words], env={**self.environment, **agent}, stdout=log, stderr=log)
        )

    def tmux(self, *words: str, check: bool = True) -> str:
        command = ["tmux", "-f", "/dev/null", "-S", str(self.folder / "tmux"), *words]
        return subprocess.run(command, env=self.environment, check=check, capture_output=True, text=True).stdout

    def until(self, what: str, so: "object") -> None:
        end = time.monotonic() + 60
        while not so():  # type: ignore[operator]
            if time.monotonic() > end:
                sys.exit(f"not within a minute: {what}\n{self.tmux('capture-pane', '-p', check=False)}")
            time.sleep(0.1)

    def top(self, more: str = "") -> None:
        self.tmux("new-session", "-d", "-x", str(COLUMNS), "-y", str(LINES), f"{self.glake} --device {self.device} top {more}")
        self.tmux("set", "status", "off")
        self.tmux("resize-window", "-x", str(COLUMNS), "-y", str(LINES))

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()

    def shows(self, *texts: str) -> bool:
        shown = self.tmux("capture-pane", "-p")
        return all(text in shown for text in texts)

    def screen(self) -> str:
        # The folder's name and process ids would make each picture another one.
        return self.tmux("capture-pane", "-e", "-p").replace(str(self.folder), "/run/glake")


def waiting(build: pathlib.Path) -> str:
    with Scene(build) as scene:
        workers = [worker("chat", 0, 1536), worker("code", 0, 1280), worker("draft", 0, 2560), worker("summaries", 1, 2560)]
        (scene.folder / "node.toml").write_text(NODE + "".join(workers))
        scene.start(scene.glake, "--device", scene.device, "serve", scene.folder / "node.toml", "--socket", scene.folder / "agent.sock", "--logs", scene.folder / "logs")
        scene.top()
        for name in ["chat", "code", "draft", "summaries"]:
            scene.until(f"{name} is loaded", lambda name=name: scene.has(f"{name}.loaded"))
        scene.start("python3", __file__, "--worker", "other", "--gpu", "1", "--mebibytes", "768", "--fragmented", has_agent=False)
        (scene.folder / "code.use").touch()
        scene.until("code works", lambda: scene.has("code.uses"))
        time.sleep(4)
        (scene.folder / "code.use").unlink()
        (scene.folder / "chat.use").touch()
        scene.until("chat works", lambda: scene.has("chat.uses"))
        time.sleep(20)
        (scene.folder / "draft.use").touch()
        scene.until("draft waits for chat", lambda: scene.shows("waits for memory", "chat"))
        time.sleep(1.5)
        return scene.screen()


def alone(build: pathlib.Path) -> str:
    with Scene(build) as scene:
        scene.environment.pop("GLAKE_AGENT")
        scene.environment["XDG_RUNTIME_DIR"] = str(scene.folder)
        scene.top()
        (scene.folder / "train.py").symlink_to(__file__)
        (scene.folder / "serve.py").symlink_to(__file__)
        scene.start("python3", scene.folder / "train.py", "--worker", "train", "--mebibytes", "2048", "--fragmented")
        time.sleep(12)
        scene.start("python3", scene.folder / "serve.py", "--worker", "serve", "--mebibytes", "1536", "--asleep")
        time.sleep(12)
        # Other programs of this user with a pool would be on the screen too.
        scene.until("serve sleeps, and nothing else has a pool", lambda: scene.shows("2 processes", "asleep"))
        return scene.screen()


PALETTE = ["#000000", "#cd3131", "#0dbc79", "#e5e510", "#2472c8", "#bc3fbc", "#11a8cd", "#e5e5e5"]
GROUND, INK = "#16181d", "#d8dade"
WIDTH, HEIGHT, MARGIN = 8.4, 18, 10


def indexed(number: int) -> str:
    if number < 16:
        return PALETTE[number % 8]
    if number >= 232:
        return "#" + f"{8 + 10 * (number - 232):02x}" * 3
    levels = [0, 95, 135, 175, 215, 255]
    red, green, blue = (number - 16) // 36, (number - 16) // 6 % 6, (number - 16) % 6
    return f"#{levels[red]:02x}{levels[green]:02x}{levels[blue]:02x}"


class Style:
    """Colours and weight of a cell, as escape sequences set them."""

    def __init__(self) -> None:
        self.fore, self.back, self.is_bold, self.is_dim, self.is_reversed = INK, "", False, False, False

    def apply(self, codes: list[int]) -> None:
        codes = codes or [0]
        while codes:
            code = codes.pop(0)
            if code in (38, 48):
                kind = codes.pop(0)
                colour = indexed(codes.pop(0)) if kind == 5 else "#" + "".join(f"{codes.pop(0):02x}" for _ in range(3))
                if code == 38:
                    self.fore = colour
                else:
                    self.back = colour
            elif code == 0:
                self.__init__()  # type: ignore[misc]
            elif code == 1:
                self.is_bold = True
            elif code == 2:
                self.is_dim = True
            elif code == 7:
                self.is_reversed = True
            elif 30 <= code <= 37:
                self.fore = PALETTE[code - 30]
            elif 40 <= code <= 47:
                self.back = PALETTE[code - 40]
            elif code == 39:
                self.fore = INK
            elif code == 49:
                self.back = ""

    def key(self) -> tuple[str, str, bool, bool]:
        fore, back = (self.back or GROUND, self.fore) if self.is_reversed else (self.fore, self.back)
        return fore, back, self.is_bold, self.is_dim


def svg(screen: str) -> str:
    """Returns a screen with escape sequences as a picture whose text is text."""
    width, height = COLUMNS * WIDTH + 2 * MARGIN, LINES * HEIGHT + 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" font-family="DejaVu Sans Mono,Menlo,Consolas,monospace" '
        f'font-size="14">',
        f'<rect width="100%" height="100%" rx="6" fill="{GROUND}"/>',
    ]
    for row, line in enumerate(screen.split("\n")[:LINES]):
        style, column = Style(), 0
        runs: list[tuple[int, str, tuple[str, str, bool, bool]]] = []
        for piece in re.split(r"(\x1b\[[0-9;]*m)", line):
            if piece.startswith("\x1b["):
                style.apply([int(code or 0) for code in piece[2:-1].split(";")] if piece != "\x1b[m" else [])
            elif piece:
                runs.append((column, piece, style.key()))
                column += len(piece)
        for column, text, (fore, back, is_bold, is_dim) in runs:
            x, y = MARGIN + column * WIDTH, MARGIN + row * HEIGHT
            if back:
                parts.append(f'<rect x="{x:.1f}" y="{y}" width="{len(text) * WIDTH:.1f}" height="{HEIGHT}" fill="{back}"/>')
            # Blocks of words, so that blanks cost nothing and columns stay where they are.
            for found in re.finditer(r"\S+(?: \S+)*", text):
                word, at = found[0], MARGIN + (column + found.start()) * WIDTH
                weight = ' font-weight="bold"' * is_bold + ' opacity=".6"' * is_dim
                parts.append(
                    f'<text x="{at:.1f}" y="{y + 14}" textLength="{len(word) * WIDTH:.1f}" fill="{fore}"{weight}>{escape(word)}</text>'
                )
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path, nargs="?", help="folder with glake and libgmlake.so")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--mebibytes", type=int, default=512, help=argparse.SUPPRESS)
    parser.add_argument("--gpu", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--fragmented", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--asleep", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work(options.worker, options.gpu, options.mebibytes, options.fragmented, options.asleep)
    if not options.build:
        parser.error("name the folder of the build, such as target/debug")
    if not shutil.which("tmux"):
        sys.exit("tests/pictures.py needs tmux (apt-get install tmux)")
    build = options.build.resolve()
    for name, scene in [("top", waiting), ("top-alone", alone)]:
        path = ROOT / f"docs/{name}.svg"
        path.write_text(svg(scene(build)))
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()

"""The compiled backend: a subclass of torch's own CUDA allocator, built against the torch that is installed.

torch's C++ classes have no stable ABI, so that nobody can ship this. It is one file of C++ over c10's headers; it is built when it is
first asked for, and cached per user under a key of everything that it depends on.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("allocator.cpp")
OLDEST = (2, 8)
"""The oldest torch whose headers it has been compiled against; the newest is 2.11, where it was run too."""

_COMPILE_SECONDS = 600
_built: ctypes.CDLL | None = None
"""What is torch's allocator in this process."""


class CompileError(RuntimeError):
    """The allocator cannot be built here. The plain-ABI backend needs no build."""


@dataclass(frozen=True)
class Torch:
    """Properties of an installed torch."""

    version: str
    cuda: str | None
    root: Path
    cxx11_abi: bool

    @staticmethod
    def installed() -> Torch:
        """Returns the torch of this process."""
        import torch

        return Torch(
            version=str(torch.__version__),
            cuda=torch.version.cuda,
            root=Path(torch.__file__).parent,
            cxx11_abi=bool(getattr(torch._C, "_GLIBCXX_USE_CXX11_ABI", True)),
        )

    def release(self) -> tuple[int, int]:
        found = re.match(r"(\d+)\.(\d+)", self.version)
        return (int(found[1]), int(found[2])) if found else (0, 0)


@dataclass(frozen=True)
class Recipe:
    """All inputs of a build."""

    compiler: tuple[str, ...]
    source: Path
    include: tuple[Path, ...]
    system: tuple[Path, ...]
    flags: tuple[str, ...]
    libraries: tuple[str, ...]
    stamp: str

    def command(self, out: Path) -> list[str]:
        return [
            *self.compiler,
            *self.flags,
            *(f"-I{folder}" for folder in self.include),
            *(word for folder in self.system for word in ("-isystem", str(folder))),
            str(self.source),
            "-o",
            str(out),
            *self.libraries,
        ]

    def key(self) -> str:
        """Returns a digest of the command, the compiler, the sources and `stamp` (the version of torch's headers)."""
        digest = hashlib.sha256()
        for word in (*self.command(Path("out")), self.stamp, _version_of(self.compiler)):
            digest.update(word.encode() + b"\0")
        for path in sorted(_own_files(self.source, self.include)):
            digest.update(path.name.encode() + b"\0" + hashlib.sha256(_read(path)).digest())
        return digest.hexdigest()[:32]


def load(libgmlake: str | os.PathLike[str], include_dir: str | os.PathLike[str]) -> None:
    """Builds the allocator if needed, loads it and makes it torch's.

    Raises `CompileError` where it cannot be built or loaded, and `RuntimeError` where torch's allocator is in use already.
    """
    path = build(recipe(Torch.installed(), Path(include_dir)))
    # Its symbols are what the allocator is resolved against.
    ctypes.CDLL(os.fspath(libgmlake), mode=ctypes.RTLD_GLOBAL)
    global _built
    try:
        built = ctypes.CDLL(str(path))
        install = built.glake_torch_install
    except (OSError, AttributeError) as error:
        raise CompileError(f"the allocator built for this torch, {path}, does not load: {error}") from error
    install.restype = ctypes.c_char_p
    reason = install()
    if reason is not None:
        raise RuntimeError(reason.decode(errors="replace"))
    built.glake_torch_foreign.argtypes = [ctypes.c_int, *[ctypes.POINTER(ctypes.c_uint64)] * 3]
    built.glake_torch_foreign.restype = ctypes.c_bool
    _built = built
    _switch_registration_off()


def foreign(device: int) -> dict[str, int]:
    """Returns the bytes of torch's pools with allocators of their own on a device; empty if this is not torch's allocator."""
    names = ("pools", "allocated_bytes", "reserved_bytes")
    figures = [ctypes.c_uint64() for _ in names]
    if _built is None or not _built.glake_torch_foreign(device, *map(ctypes.byref, figures)):
        return {}
    return {name: figure.value for name, figure in zip(names, figures)}


def _switch_registration_off() -> None:
    # torch registers its segments with NCCL as they come and go, but not its expandable segments, which are mapped in place as
    # the pool's are: it ignores the setting then, and has no way to know that it should now.
    for name in ("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"):
        if os.environ.get(name, "0").strip().lower() in {"1", "y", "yes", "t", "true"}:
            warnings.warn(
                f"{name} is switched off: as torch's expandable segments, glake's memory is mapped in place and cannot be registered"
                " with NCCL as it comes. Unset it",
                RuntimeWarning,
                stacklevel=4,
            )
            os.environ[name] = "0"


def recipe(torch: Torch, include_dir: Path) -> Recipe:
    """Returns the recipe to build the allocator for `torch`."""
    if torch.cuda is None:
        raise CompileError(f"torch {torch.version} is built without CUDA")
    if torch.release() < OLDEST:
        raise CompileError(
            f"torch {torch.version} is older than {OLDEST[0]}.{OLDEST[1]}, the oldest that the compiled backend knows"
        )
    if not (torch.root / "include" / "c10" / "cuda" / "CUDACachingAllocator.h").is_file():
        raise CompileError(f"torch {torch.version} was installed without its headers: none in {torch.root / 'include'}")
    if not (include_dir / "gmlake.h").is_file():
        raise CompileError(f"gmlake.h is not in {include_dir}: the package is not installed as a whole")
    return Recipe(
        compiler=tuple(compiler()),
        source=SOURCE,
        include=(include_dir,),
        system=(torch.root / "include", *cuda_headers(torch)),
        flags=(
            "-O2",
            "-DNDEBUG",
            "-shared",
            "-fPIC",
            "-fvisibility=hidden",
            "-std=c++17" if torch.release() <= (2, 11) else "-std=c++20",
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.cxx11_abi)}",
        ),
        libraries=(f"-L{torch.root / 'lib'}", "-lc10", "-lc10_cuda", "-ltorch_cuda"),
        stamp=f"torch {torch.version} cuda {torch.cuda}",
    )


def compiler() -> list[str]:
    """Returns the C++ compiler: `CXX` (with its arguments), or the first of c++, g++ and clang++ in `PATH`."""
    asked = shlex.split(os.environ.get("CXX", ""))
    for name in asked[:1] or ["c++", "g++", "clang++"]:
        found = shutil.which(name)
        if found:
            return [found, *asked[1:]]
    if asked:
        raise CompileError(f"CXX names {asked[0]!r}, which is not in PATH")
    raise CompileError("no C++ compiler (c++, g++, clang++) is in PATH, and CXX is not set")


def cuda_headers(torch: Torch) -> list[Path]:
    """Returns the folders of CUDA's headers: those for torch's major version if installed, and another for headers that they lack.

    The pip package of the runtime leaves out the folder `crt`; it comes with nvcc's package, a toolkit, or triton.
    """
    folders = [folder for folder in _cuda_folders(torch) if folder.is_dir()]
    major = (torch.cuda or "").split(".")[0]
    runtimes = [folder for folder in folders if (folder / "cuda_runtime.h").is_file()]
    runtimes.sort(key=lambda folder: _cuda_major(folder) != major)
    if not runtimes:
        raise CompileError(
            "CUDA's headers are not here (no cuda_runtime.h): set CUDA_HOME, or install the pip package nvidia-cuda-runtime"
        )
    if (runtimes[0] / "crt" / "host_config.h").is_file():
        return runtimes[:1]
    for folder in folders:
        if (folder / "crt" / "host_config.h").is_file():
            return [runtimes[0], folder]
    raise CompileError(
        f"CUDA's headers in {runtimes[0]} lack crt/host_config.h: set CUDA_HOME, or install the pip package nvidia-cuda-crt"
        " (with CUDA 12, nvidia-cuda-nvcc-cu12)"
    )


def build(recipe: Recipe) -> Path:
    """Returns the library of `recipe`: the cached one if it is complete, else a new one.

    Processes that ask at the same time wait for the first one's.
    """
    key = recipe.key()
    folder = cache_folder()
    library = folder / f"allocator-{key}.so"
    with _locked(folder / f"allocator-{key}.lock"):
        if not _is_whole(library):
            _compile(recipe, library)
    return library


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/glake`, or `~/.cache/glake`; where that cannot be written, a folder of this user below the temporary one.

    What is loaded from it runs as this user, so nobody else may write to it.
    """
    home = os.environ.get("XDG_CACHE_HOME", "")
    caches = Path(home) if os.path.isabs(home) else Path(os.path.expanduser("~")) / ".cache"
    for folder in (caches / "glake", Path(tempfile.gettempdir()) / f"glake-{os.getuid()}"):
        if folder.is_absolute() and _is_private(folder):
            return folder
    return Path(tempfile.mkdtemp(prefix="glake-"))


def _is_private(folder: Path) -> bool:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return False
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
    return ours and os.access(folder, os.W_OK | os.X_OK)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w", encoding="ascii") as lock:
        # A file system without locks costs a build more: what is built gets its name in one step anyway.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compile(recipe: Recipe, library: Path) -> None:
    # The digest stands beside the library. It comes last: a library without one was not finished.
    with tempfile.TemporaryDirectory(prefix="build-", dir=library.parent) as work:
        out = Path(work) / library.name
        command = recipe.command(out)
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_COMPILE_SECONDS, check=False)
        except (OSError, subprocess.SubprocessError) as error:
            raise CompileError(f"{recipe.compiler[0]} could not be run: {error}") from error
        if done.returncode != 0 or not out.is_file():
            raise CompileError(_first_errors(command, done))
        digest = Path(work) / "digest"
        digest.write_text(hashlib.sha256(_read(out)).hexdigest(), encoding="ascii")
        os.replace(out, library)
        os.replace(digest, library.with_suffix(".sha256"))


def _is_whole(library: Path) -> bool:
    try:
        digest = library.with_suffix(".sha256").read_text(encoding="ascii")
        return hashlib.sha256(library.read_bytes()).hexdigest() == digest
    except (OSError, UnicodeDecodeError):
        return False


def _first_errors(command: Sequence[str], done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in done.stderr.splitlines() if "error" in line.lower()] or done.stderr.splitlines()
    found = "\n  ".join(lines[:5]) or "(it printed nothing)"
    return f"the allocator does not compile here; {command[0]} ended with {done.returncode}:\n  {found}\nThe command was: {shlex.join(command)}"


def _version_of(compiler: Iterable[str]) -> str:
    try:
        done = subprocess.run([*compiler, "--version"], capture_output=True, text=True, errors="replace", timeout=60, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise CompileError(f"the compiler could not be run: {error}") from error
    return done.stdout


def _own_files(source: Path, include: Iterable[Path]) -> list[Path]:
    headers = [path for folder in (source.parent / "native", *include) for path in folder.glob("*.h")]
    return [source, *headers]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CompileError(f"{path} cannot be read: {error}") from error


def _cuda_major(folder: Path) -> str:
    text = ""
    with contextlib.suppress(OSError):
        text = (folder / "cuda_runtime_api.h").read_text(encoding="utf-8", errors="replace")
    found = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text)
    return str(int(found[1]) // 1000) if found else ""


def _cuda_folders(torch: Torch) -> Iterator[Path]:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            yield Path(os.environ[name]) / "include"
    nvcc = shutil.which("nvcc")
    if nvcc:
        yield Path(nvcc).resolve().parents[1] / "include"
    beside = torch.root.parent / "nvidia"
    for packages in (beside, *_package("nvidia")):
        yield from sorted(packages.glob("cu[0-9]*/include"), reverse=True)
        yield packages / "cuda_runtime" / "include"
        yield packages / "cuda_nvcc" / "include"
    yield Path("/usr/local/cuda/include")
    for package in (torch.root.parent / "triton", *_package("triton")):
        yield package / "backends" / "nvidia" / "include"


def _package(name: str) -> list[Path]:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return []
    return [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []

"""saver.py --theirs DIR [--gib N]: one program against both packages that are called torch_memory_saver.

DIR holds the unpacked wheel of the other one. Each package starts the program through its own configure_subprocess; what the program sees
has to be the same, and the table has the median times of pause and resume. Needs a GPU, and glake in Python's path.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

OURS = pathlib.Path(__file__).resolve().parents[2] / "ffi/python/saver"
RUNS = 5


def program(gib: int) -> None:
    import torch
    from torch_memory_saver import TorchMemorySaver
    from torch_memory_saver import torch_memory_saver as saver

    saver.hook_mode = "preload"
    seen: dict[str, object] = {"is": isinstance(saver, TorchMemorySaver), "enabled": saver.enabled}
    size = gib << 30
    half = size // 2

    def free() -> int:
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0]

    def fails(kind: type, call) -> str:
        try:
            call()
        except kind:
            return "raised"
        return "passed"

    with saver.region(tag="weights", enable_cpu_backup=True):
        weights = torch.arange(size // 4, dtype=torch.int32, device="cuda")
        with saver.region(tag="nested", enable_cpu_backup=True):
            nested = torch.full((1 << 20,), 5, dtype=torch.uint8, device="cuda")
    # Not in saver.disable(): with torch 2.11 the other package ends the process there (captures_underway.empty()).
    plain = torch.full((1 << 20,), 6, dtype=torch.uint8, device="cuda")
    with saver.region(tag="cache"):
        cache = torch.full((half,), 7, dtype=torch.uint8, device="cuda")
    square = torch.eye(1024, device="cuda")
    given = torch.full((1024, 1024), 2.0, device="cuda")
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        (given @ square).relu()
    torch.cuda.synchronize()
    with saver.cuda_graph(graph, tag="graph"):
        answer = (given @ square).relu() + 1
    graph.replay()
    torch.cuda.synchronize()
    seen["graph"] = float(answer.sum())
    address = weights.data_ptr()

    def is_there() -> bool:
        return bool((weights[:: 1 << 12] == torch.arange(size // 4, device="cuda", dtype=torch.int32)[:: 1 << 12]).all())

    before = free()
    saver.pause("cache")
    seen["cache left"] = free() - before >= half * 0.99
    saver.pause("weights")
    seen["weights left"] = free() - before >= (half + size) * 0.99
    seen["others stay"] = (int(nested.sum()), int(plain.sum()))
    backup = saver.get_cpu_backup(weights[: 1 << 20])
    seen["backup"] = (str(backup.device), str(backup.dtype), list(backup.shape), bool((backup == torch.arange(1 << 20, dtype=torch.int32)).all()))
    view = saver.get_cpu_backup(weights[: 1 << 10], zero_copy=True)
    seen["zero copy"] = int(view.sum())
    del view
    saver.resume("weights")
    seen["same address"] = weights.data_ptr() == address
    seen["bytes"] = is_there()
    seen["backup after"] = saver.get_cpu_backup(weights[:1024]) is None
    saver.resume("cache")
    cache.fill_(8)
    seen["cache again"] = int(cache[-1])
    saver.pause("graph")
    saver.resume("graph")
    graph.replay()
    torch.cuda.synchronize()
    seen["graph again"] = float(answer.sum())
    saver.pause()
    saver.resume()
    seen["all"] = (is_there(), int(nested.sum()), int(plain.sum()))
    seen["both backups"] = fails((AssertionError, ValueError), lambda: saver.region(enable_cpu_backup=True, enable_disk_backup=True).__enter__())
    seen["backend alone"] = fails(ValueError, lambda: saver.region(cpu_backup_backend="pinned").__enter__())
    seen["on the CPU"] = fails((AssertionError, ValueError), lambda: saver.get_cpu_backup(torch.zeros(1)))

    times: dict[str, list[float]] = {}

    def timed(name: str, call) -> None:
        torch.cuda.synchronize()
        begun = time.monotonic()
        call()
        torch.cuda.synchronize()
        times.setdefault(name, []).append(time.monotonic() - begun)

    for retains in (False, True):
        saver.retain_cpu_backup = retains
        for _ in range(RUNS):
            word = ", retained" if retains else ""
            timed(f"pause weights{word}", lambda: saver.pause("weights"))
            timed(f"resume weights{word}", lambda: saver.resume("weights"))
    seen["retained"] = (saver.retain_cpu_backup, bool((saver.get_cpu_backup(weights[:1024]) == torch.arange(1024, dtype=torch.int32)).all()))
    saver.retain_cpu_backup = False
    for _ in range(RUNS):
        timed("pause cache", lambda: saver.pause("cache"))
        timed("resume cache", lambda: saver.resume("cache"))
    seen["bytes at the end"] = is_there()
    del cache
    torch.cuda.empty_cache()
    saver.memory_margin_bytes = torch.cuda.mem_get_info()[0] - (1 << 30)

    def much() -> None:
        with saver.region(tag="much"):
            torch.empty(8 << 30, dtype=torch.uint8, device="cuda")

    seen["margin"] = fails(torch.OutOfMemoryError, much)
    print(json.dumps({"seen": seen, "times": {name: statistics.median(all) for name, all in times.items()}}))


def spawn(gib: str) -> int:
    from torch_memory_saver import configure_subprocess

    with configure_subprocess():
        return subprocess.run([sys.executable, __file__, "--program", "--gib", gib], check=False, timeout=500).returncode


def result(package: pathlib.Path, gib: int) -> dict[str, dict[str, object]]:
    path = os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, __file__, "--spawn", "--gib", str(gib)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode != 0:
        sys.exit(f"{package}: {done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    found: dict[str, dict[str, object]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--theirs", type=pathlib.Path, help="folder of the other package, unpacked")
    parser.add_argument("--gib", type=int, default=8, help="GiB of weights (default: %(default)s)")
    parser.add_argument("--program", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--spawn", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.program:
        program(options.gib)
        return 0
    if options.spawn:
        return spawn(str(options.gib))
    theirs, ours = (result(package, options.gib) for package in (options.theirs.resolve(), OURS))
    differ = [name for name in theirs["seen"] if theirs["seen"][name] != ours["seen"][name]]
    for name in differ:
        print(f"DIFFERS: {name}: theirs {theirs['seen'][name]}, ours {ours['seen'][name]}")
    print(f"{len(theirs['seen']) - len(differ)} of {len(theirs['seen'])} results are the same")
    print(f"{'':28}{'theirs s':>10}{'ours s':>10}{'ratio':>8}")
    for name, time_s in theirs["times"].items():
        print(f"{name:28}{time_s:>10.4f}{ours['times'][name]:>10.4f}{time_s / ours['times'][name]:>8.1f}")
    return bool(differ)


if __name__ == "__main__":
    sys.exit(main())

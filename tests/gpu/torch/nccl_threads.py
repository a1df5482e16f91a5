#!/usr/bin/env python3
"""All-reduces of several GPUs, each driven by a thread of one process, with copies over relays between: nothing may hang.

    python tests/gpu/torch/nccl_threads.py [--gpus N] [--steps 2000] [--only NAME,...] [--patience 20] [--limit 90]

Each step all threads enqueue an NCCL all-reduce on their own GPU's stream, one of them a copy of 64 MiB between pinned
memory and the pool before it (GPU 0's, then GPU 1's and so on, for equal parts of the run; in the last tenth all), and
from time to time all wait and torch.cuda.empty_cache() is called. A GPU's copy may stand behind another GPU's
all-reduce in a hardware queue, which waits for this GPU's: that is how it would hang. Sums and bytes are compared. Four
configurations, each in a process of its own: CUDA_DEVICE_MAX_CONNECTIONS=1 or unset, transfer.shared_gpus off or on.
With shared_gpus, bytes over relays must have grown in every 100 steps while one GPU copies; without, all GPUs are used
and lend nothing. GPUs: all that are visible, or N.

After 20 s without a step all stacks are printed and it is a HANG. A line a configuration. Ends with 1 if one failed,
with 0 and a word where there are no two GPUs.
"""
import argparse
import ctypes
import faulthandler
import glob
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import threading
import time

MIB = 1 << 20
WORDS = 4 * MIB       # floats of an all-reduce: 16 MiB
COPY = 64 * MIB
EVERY = 100           # steps between two looks at the relays' bytes
FLOAT, SUM = 7, 0     # ncclFloat32, ncclSum
CONFIGURATIONS = {
    f"connections-{connections or 'default'}-shared-{'on' if shared else 'off'}": (connections, shared)
    for connections in ("1", None) for shared in (False, True)
}
HERE = pathlib.Path(__file__).resolve()


def libnccl():
    """torch's NCCL: the one that it has loaded, or else that of Python's packages."""
    for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
        if "libnccl.so" in line:
            return line.split(maxsplit=5)[5]
    for folder in sys.path:
        found = sorted(glob.glob(os.path.join(folder, "nvidia", "nccl", "lib", "libnccl.so*")))
        if found:
            return found[-1]
    return "libnccl.so.2"


class Nccl:
    """One communicator a GPU, all of this process."""

    def __init__(self, gpus):
        self.library = ctypes.CDLL(libnccl())
        self.library.ncclGetErrorString.restype = ctypes.c_char_p
        pointer, number = ctypes.c_void_p, ctypes.c_int
        self.library.ncclAllReduce.argtypes = [pointer, pointer, ctypes.c_size_t, number, number, pointer, pointer]
        self.communicators = (pointer * gpus)()
        made = self.library.ncclCommInitAll(self.communicators, gpus, (number * gpus)(*range(gpus)))
        self.check("ncclCommInitAll", made)

    def check(self, what, error):
        if error != 0:
            raise RuntimeError(f"{what}: {self.library.ncclGetErrorString(error).decode()}")

    def all_reduce(self, gpu, tensor, stream):
        address, on = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_void_p(stream.cuda_stream)
        communicator = ctypes.c_void_p(self.communicators[gpu])
        enqueued = self.library.ncclAllReduce(address, address, tensor.numel(), FLOAT, SUM, communicator, on)
        self.check("ncclAllReduce", enqueued)


class Watch:
    """Tells a hang: no step of any thread for so long. Where no Python runs any more, faulthandler's thread tells."""

    def __init__(self, patience, gpus):
        self.patience, self.last, self.done = patience, time.monotonic(), False
        self.steps = [0] * gpus
        threading.Thread(target=self.look, daemon=True).start()

    def step(self, gpu):
        self.steps[gpu] += 1
        self.last = time.monotonic()

    def look(self):
        while not self.done:
            faulthandler.dump_traceback_later(self.patience + 10, exit=True)
            time.sleep(0.5)
            if time.monotonic() - self.last > self.patience:
                print(f"HANG: no step in {self.patience} s; steps so far {self.steps}", flush=True)
                faulthandler.dump_traceback(all_threads=True)
                os._exit(1)
        faulthandler.cancel_dump_traceback_later()


def relay_bytes(glake):
    return sum(path["bytes"] for path in glake.copy_stats()["paths"] if path["relay"] != path["target"])


class Rank:
    """A thread's GPU, and what it works on."""

    def __init__(self, torch, gpu):
        self.gpu, self.torch = gpu, torch
        torch.cuda.set_device(gpu)
        self.stream = torch.cuda.Stream(gpu)
        self.tensor = torch.zeros(WORDS, device=f"cuda:{gpu}")
        self.host = torch.randint(0, 255, (COPY,), dtype=torch.uint8).pin_memory()
        self.back = torch.zeros(COPY, dtype=torch.uint8).pin_memory()
        torch.cuda.synchronize(gpu)


class Steps:
    """What all threads do, step by step."""

    def __init__(self, torch, glake, a, watch):
        self.torch, self.glake, self.count, self.shared, self.watch = torch, glake, a.steps, a.shared, watch
        self.gpus = a.gpus
        self.ranks = [Rank(torch, gpu) for gpu in range(a.gpus)]
        self.nccl = Nccl(a.gpus)
        self.meet = threading.Barrier(a.gpus)
        self.failures, self.seen = [], 0
        # Where another GPU begins to copy; from the last on all do.
        self.switches = [a.steps * 9 * gpu // (10 * a.gpus) for gpu in range(a.gpus + 1)]

    def copiers(self, step):
        """The GPUs that copy in a step."""
        one = [gpu for gpu in range(self.gpus) if self.switches[gpu] <= step < self.switches[gpu + 1]]
        return tuple(one or range(self.gpus))

    def copy(self, rank, rng):
        """There, behind that a kernel, and back; the block goes back to the pool with work under way."""
        torch, glake = self.torch, self.glake
        with torch.cuda.stream(rank.stream):
            block = torch.empty(COPY, dtype=torch.uint8, device=f"cuda:{rank.gpu}")
            if rng.random() < 0.5:
                glake.copy_(block, rank.host, stream=rank.stream)
                block.add_(1)
            else:
                glake.copy_(block, rank.host, stream=rank.stream)
                glake.copy_(rank.back, block, stream=rank.stream)
            del block

    def check(self, rank, step):
        """All of the stream's work is done, and the sum is right."""
        rank.stream.synchronize()
        first, last = float(rank.tensor[0]), float(rank.tensor[-1])
        if first != last or first != self.gpus:
            raise RuntimeError(f"step {step}, GPU {rank.gpu}: the sum is {first} and {last}, not {self.gpus}")

    def look(self, step):
        """Whether bytes went over relays in the steps since the last look, in all of which one GPU copied."""
        before, self.seen = self.seen, relay_bytes(self.glake)
        alone = len(self.copiers(step)) == 1 and self.copiers(step - EVERY + 1) == self.copiers(step)
        if self.shared and alone and self.seen <= before:
            raise RuntimeError(f"step {step}: no bytes went over relays in {EVERY} steps")

    def run(self, gpu):
        try:
            self.torch.cuda.set_device(gpu)
            rank, rng = self.ranks[gpu], random.Random(gpu)
            for step in range(self.count):
                if step in self.switches:
                    # GPUs whose copies met keep their links to themselves for half a second.
                    rank.stream.synchronize()
                    self.meet.wait()
                    time.sleep(0.7)
                if gpu in self.copiers(step):
                    self.copy(rank, rng)
                with self.torch.cuda.stream(rank.stream):
                    rank.tensor.fill_(1)
                self.nccl.all_reduce(gpu, rank.tensor, rank.stream)
                if step % 20 == 19:
                    # All have enqueued: whoever waits on the host now waits for work that ends.
                    self.meet.wait()
                    if step % (20 * self.gpus) == 19 + 20 * gpu:
                        self.torch.cuda.empty_cache()
                    self.meet.wait()
                    self.check(rank, step)
                if step % EVERY == EVERY - 1:
                    self.meet.wait()
                    if gpu == 0:
                        self.look(step)
                self.watch.step(gpu)
            rank.stream.synchronize()
            self.torch.cuda.synchronize(gpu)
            self.glake.copy_(rank.back, self.loaded(rank), stream=rank.stream)
            rank.stream.synchronize()
            if not self.torch.equal(rank.back, rank.host):
                raise RuntimeError(f"GPU {gpu}: the bytes that came back are others")
        except Exception as error:  # told by the main thread; the others are not to wait for this one
            text = f"step {self.watch.steps[gpu]}, GPU {gpu}: {type(error).__name__}: {error}"
            print(text, flush=True)
            self.failures.append(text)
            self.meet.abort()

    def loaded(self, rank):
        with self.torch.cuda.stream(rank.stream):
            block = self.torch.empty(COPY, dtype=self.torch.uint8, device=f"cuda:{rank.gpu}")
            self.glake.copy_(block, rank.host, stream=rank.stream)
        return block


def one(a):
    """One configuration, in this process."""
    import torch
    import glake
    glake.enable()
    glake.multi_path(True)
    steps = Steps(torch, glake, a, watch := Watch(a.patience, a.gpus))
    # Relays, and the paths of the streams; without shared_gpus there is nothing to be ready.
    end = time.monotonic() + (15 if a.shared else 4)
    while time.monotonic() < end:
        for rank in steps.ranks[:1]:
            torch.cuda.set_device(rank.gpu)
            steps.copy(rank, random.Random(0))
            rank.stream.synchronize()
        watch.last = time.monotonic()
        if a.shared and relay_bytes(glake) > 0:
            break
    else:
        if a.shared:
            print(f"FAILED: nothing went over relays in 15 s: {glake.copy_stats()}")
            watch.done = True
            return 1
    begin, before = time.monotonic(), relay_bytes(glake)
    watch.last, steps.seen = begin, before
    threads = [threading.Thread(target=steps.run, args=(gpu,), name=f"GPU {gpu}") for gpu in range(a.gpus)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    watch.done = True
    took, over = time.monotonic() - begin, relay_bytes(glake) - before
    # A broken barrier is only what another thread's failure did.
    failures = [text for text in steps.failures if "BrokenBarrierError" not in text] or steps.failures
    for text in failures:
        print(f"FAILED: {text}")
    print(f"{a.gpus} GPUs, {a.steps} steps in {took:.1f} s, {over / 2**30:.1f} GiB over relays", flush=True)
    sys.stdout.flush()
    os._exit(1 if failures else 0)  # streams of a failed run may never end


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--gpus", type=int, help="so many of those that are visible [default: all]")
    p.add_argument("--steps", type=int, default=2000)
    p.add_argument("--only", default=",".join(CONFIGURATIONS), help="of " + ", ".join(CONFIGURATIONS))
    p.add_argument("--patience", type=int, default=20, help="seconds without a step that are a hang")
    p.add_argument("--limit", type=int, default=90, help="seconds for one configuration")
    p.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--shared", action="store_true", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.one:
        return one(a)
    names = a.only.split(",")
    for name in names:
        if name not in CONFIGURATIONS:
            p.error(f"--only: {name!r} is none of {', '.join(CONFIGURATIONS)}")
    try:
        import torch
        gpus = torch.cuda.device_count()
    except ImportError as error:
        print(f"nccl_threads: SKIPPED: {error}")
        return 0
    wanted = gpus if a.gpus is None else a.gpus
    if a.gpus is not None and a.gpus < 2:
        p.error(f"--gpus: {a.gpus}: at least 2")
    if gpus < max(wanted, 2):
        print(f"nccl_threads: SKIPPED: needs {max(wanted, 2)} GPUs, here are {gpus}")
        return 0
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            connections, shared = CONFIGURATIONS[name]
            config = pathlib.Path(folder) / "glake.toml"
            config.write_text(f"[transfer]\nshared_gpus = {'true' if shared else 'false'}\n")
            env = dict(os.environ, GLAKE_CONFIG=str(config), PYTHONUNBUFFERED="1")
            env.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
            if connections:
                env["CUDA_DEVICE_MAX_CONNECTIONS"] = connections
            command = [sys.executable, str(HERE), "--one", "--steps", str(a.steps), "--patience", str(a.patience), "--gpus", str(wanted)]
            command += ["--shared"] if shared else []
            try:
                done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=a.limit)
                code, out = done.returncode, done.stdout
            except subprocess.TimeoutExpired as error:
                code, out = None, error.stdout or b""
            out = out.decode(errors="replace")
            hang = code is None or "HANG" in out or "Timeout (" in out
            lines = out.strip().splitlines()
            word = "ok     " if code == 0 else "HANG   " if hang else "FAILED "
            why = lines[-1] if lines and code == 0 else f"exit code {code}"
            print(f"{word} {name}: {why}", flush=True)
            if code != 0:
                failed += 1
                print("\n".join(f"          {line}" for line in lines[-60:]), flush=True)
    print(f"nccl_threads: {len(names)} configurations, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

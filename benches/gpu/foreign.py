"""Copies of memory that is not the pool's, beside pool memory: a new build, an old one and native ones in turns.

    python benches/gpu/foreign.py DIR [--old DIR2] [--rounds 5] [--processes 1] [--memory pool,malloc,async]
                                  [--sizes 2,4,8,16,64,256,1024] [--out DIR]

DIR and DIR2 hold a libgmlake.so. Each library has a process of its own that lives for the whole run and is told over
pipes to time copies between pinned memory and GPU 0: of pool memory, of cudaMalloc's and of cudaMallocAsync's, both
directions. `native` copies with cudaMemcpyAsync; `new` and `old` with glake_copy_async, relays on and ready, and the
other GPUs idle; `shared` is the new library with transfer.shared_gpus = true in a program that has memory on every GPU.
Only one process copies at a time. Where a process's memory lies moves its figures: with --processes N each role has N
processes, all in one median. Old libraries are not asked for cudaMallocAsync's memory: their relays may fault.

Bars, each of the medians of all rounds: pool memory 0.98 of old; cudaMalloc's 0.80 of old at 16 MiB, 0.85 at 64 MiB,
0.95 from 256 MiB on; cudaMallocAsync's 0.9 of the new library's cudaMalloc; shared_gpus 0.98 of native everywhere.
Every way is compared byte by byte once. Writes DIR/foreign.jsonl. Ends with 1 if a bar was missed or a process died.
"""
import collections
import ctypes
import json
import mmap
import os
import pathlib
import select
import statistics
import subprocess
import sys
import tempfile
import time

import launch
import preload

MIB, GIB = 1 << 20, 1 << 30
PERIOD = MIB + 7  # no two pages of a pattern are alike
MEMORY = ["pool", "malloc", "async"]
DIRECTIONS = ["h2d", "d2h"]
PATIENCE = 120    # seconds for one answer
HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2


# ---- the process that copies ----

class Cuda:
    """CUDA's runtime, its errors raised."""

    def __init__(self, file):
        self.library = ctypes.CDLL(file, mode=ctypes.RTLD_GLOBAL)

    def __getattr__(self, name):
        function = getattr(self.library, name)

        def call(*arguments):
            error = function(*arguments)
            if error != 0:
                raise RuntimeError(f"{name}: CUDA error {error}")

        setattr(self, name, call)
        return call


class Glake:
    """libgmlake.so, its errors raised."""

    def __init__(self, file):
        self.library = library = ctypes.CDLL(file)
        library.glake_last_error.restype = ctypes.c_char_p
        library.gmlake_malloc.restype = library.glake_copy_stats_json.restype = ctypes.c_void_p
        library.glake_string_free.argtypes = [ctypes.c_void_p]

    def done(self, name, *arguments):
        status = getattr(self.library, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name}: status {status}: {self.library.glake_last_error().decode()}")

    def stats(self):
        text = self.library.glake_copy_stats_json()
        if not text:
            raise RuntimeError(f"glake_copy_stats_json: {self.library.glake_last_error().decode()}")
        try:
            return json.loads(ctypes.string_at(text))
        finally:
            self.library.glake_string_free(text)


class Copier:
    """Copies as one library makes them, and what they are made between."""

    def __init__(self, role, cudart, library, most):
        self.role, self.most = role, most
        self.cuda, self.glake = Cuda(cudart), Glake(library)
        self.libc = ctypes.CDLL(None)
        self.libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        count = ctypes.c_int()
        self.cuda.cudaGetDeviceCount(ctypes.byref(count))
        if role == "shared":  # a program that uses every GPU
            self.kept = []
            for gpu in range(count.value):
                self.cuda.cudaSetDevice(gpu)
                self.kept.append(self.allocated("cudaMalloc", 16 * MIB))
        self.cuda.cudaSetDevice(0)
        self.stream = ctypes.c_void_p()
        self.cuda.cudaStreamCreateWithFlags(ctypes.byref(self.stream), 1)
        if role != "native":
            self.glake.done("glake_multi_path", 1)
        self.host, self.back = self.pinned(most), self.pinned(most)
        pattern = os.urandom(PERIOD)
        for at in range(0, most, PERIOD):
            ctypes.memmove(self.host + at, pattern, min(PERIOD, most - at))
        self.memory = {}

    def allocated(self, name, size, *more):
        memory = ctypes.c_void_p()
        getattr(self.cuda, name)(ctypes.byref(memory), ctypes.c_size_t(size), *more)
        return memory.value

    def pinned(self, size):
        area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                area.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass
        start = ctypes.addressof(ctypes.c_char.from_buffer(area))
        ctypes.memset(start, 0, size)
        self.kept_areas = [*getattr(self, "kept_areas", []), area]
        if self.role == "native":
            self.cuda.cudaHostRegister(ctypes.c_void_p(start), ctypes.c_size_t(size), 1)
        else:
            self.glake.done("glake_host_register", ctypes.c_void_p(start), ctypes.c_size_t(size))
        return start

    def of_kind(self, kind):
        if kind not in self.memory:
            if kind == "pool":
                found = self.glake.library.gmlake_malloc(ctypes.c_size_t(self.most), 0, None)
                if not found:
                    raise RuntimeError(f"gmlake_malloc: {self.glake.library.glake_last_error().decode()}")
            elif kind == "malloc":
                found = self.allocated("cudaMalloc", self.most)
            else:
                found = self.allocated("cudaMallocAsync", self.most, self.stream)
                self.cuda.cudaStreamSynchronize(self.stream)
            self.memory[kind] = found
        return self.memory[kind]

    def copy(self, to, source, size, kind):
        to, source, size = ctypes.c_void_p(to), ctypes.c_void_p(source), ctypes.c_size_t(size)
        if self.role == "native":
            self.cuda.cudaMemcpyAsync(to, source, size, kind, self.stream)
        else:
            self.glake.done("glake_copy_async", to, source, size, self.stream, 0, None)

    def once(self, memory, size, direction, host):
        """Returns the time of a copy and its wait, in microseconds."""
        into = direction == "h2d"
        ends = (memory, host) if into else (host, memory)
        begin = time.perf_counter_ns()
        self.copy(*ends, size, HOST_TO_DEVICE if into else DEVICE_TO_HOST)
        self.cuda.cudaStreamSynchronize(self.stream)
        return (time.perf_counter_ns() - begin) / 1e3

    def warm(self, seconds):
        """Copies until relays are ready, and the stream's paths; what the statistics say then."""
        if self.role == "native":
            return {}
        begin, ready = time.time(), None
        while time.time() - begin < seconds and (ready is None or time.time() - ready < 0.5):
            for kind in ("pool", "malloc"):
                for direction in DIRECTIONS:
                    host = self.host if direction == "h2d" else self.back
                    self.once(self.of_kind(kind), min(self.most, 64 * MIB), direction, host)
            if ready is None and self.glake.stats()["ready"]:
                ready = time.time()
        return {"ready": ready is not None, "seconds": round(time.time() - begin, 1), "stats": self.stats()}

    def stats(self):
        """Returns what relays carried and cost, from the statistics."""
        said = self.glake.stats() if self.role != "native" else {}
        relayed = sum(path["bytes"] for path in said.get("paths", []) if path["relay"] != path["target"])
        return {"relays": said.get("relays"), "relay_costs": said.get("relay_costs"), "relay_bytes": relayed}

    def compared(self, kind, size):
        """Whether the bytes of one copy each way are right."""
        memory, wrong = self.of_kind(kind), []
        self.cuda.cudaMemset(ctypes.c_void_p(memory), 0, ctypes.c_size_t(size))
        self.cuda.cudaDeviceSynchronize()
        self.once(memory, size, "h2d", self.host)
        for at in range(0, size, 512 << 10):  # natively
            part = ctypes.c_size_t(min(size - at, 512 << 10))
            self.cuda.cudaMemcpy(ctypes.c_void_p(self.back + at), ctypes.c_void_p(memory + at), part, DEVICE_TO_HOST)
        if self.libc.memcmp(self.back, self.host, size) != 0:
            wrong.append("h2d")
        ctypes.memset(self.back, 0, size)
        for at in range(0, size, 512 << 10):
            part = ctypes.c_size_t(min(size - at, 512 << 10))
            self.cuda.cudaMemcpy(ctypes.c_void_p(memory + at), ctypes.c_void_p(self.host + at), part, HOST_TO_DEVICE)
        self.once(memory, size, "d2h", self.back)
        if self.libc.memcmp(self.back, self.host, size) != 0:
            wrong.append("d2h")
        return wrong

    def answer(self, asked):
        what = asked["what"]
        if what == "warm":
            return self.warm(asked["seconds"])
        if what == "compare":
            return {"wrong": self.compared(asked["memory"], asked["size"])}
        if what == "stats":
            return self.stats()
        memory, direction = self.of_kind(asked["memory"]), asked["direction"]
        host = self.host if direction == "h2d" else self.back
        self.once(memory, asked["size"], direction, host)
        return {"us": [self.once(memory, asked["size"], direction, host) for _ in range(asked["count"])]}


def child(role, cudart, library, most):
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print is none of the answers
    copier = None
    for line in sys.stdin:
        try:
            if copier is None:
                copier = Copier(role, cudart, library, most)
            answer = copier.answer(json.loads(line))
        except Exception as error:  # told to the parent, which decides
            answer = {"error": f"{type(error).__name__}: {error}"}
        out.write(json.dumps(answer) + "\n")
        out.flush()


# ---- the run ----

class Child:
    """A process that copies; dead for good once it failed."""

    def __init__(self, role, cudart, library, most, config=None):
        self.role, self.why = role, None
        env = launch.environment()
        for name in ("LD_PRELOAD", "GLAKE_MULTI_PATH"):
            env.pop(name, None)
        if config:
            env["GLAKE_CONFIG"] = config
        command = [sys.executable, __file__, "--child", role, cudart, library, str(most)]
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.buffer = b""

    def ask(self, **asked):
        """The answer; None of a process that is dead or has failed."""
        if self.why:
            return None
        try:
            self.process.stdin.write((json.dumps(asked) + "\n").encode())
            self.process.stdin.flush()
        except OSError:
            return self.failed(f"it ended: exit code {self.process.wait()}")
        end = time.time() + PATIENCE
        while b"\n" not in self.buffer:
            if not select.select([self.process.stdout], [], [], max(end - time.time(), 0))[0]:
                self.process.kill()
                return self.failed(f"no answer in {PATIENCE} s to {asked}")
            more = os.read(self.process.stdout.fileno(), 1 << 16)
            if not more:
                return self.failed(f"it ended at {asked}: exit code {self.process.wait()}")
            self.buffer += more
        line, self.buffer = self.buffer.split(b"\n", 1)
        answer = json.loads(line)
        return self.failed(f"{answer['error']} at {asked}") if "error" in answer else answer

    def failed(self, why):
        self.why = why
        return None

    def end(self):
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def count_of(size):
    return 20 if size <= 16 * MIB else 8 if size <= 64 * MIB else 5 if size <= 256 * MIB else 3


def bars(rates, memory, size):
    """Returns the figures of a size with their bars: (name, value, least)."""
    new, old, native, shared = (rates.get(role) for role in ("new", "old", "native", "shared"))
    of_malloc = {16 * MIB: 0.80, 64 * MIB: 0.85}.get(size, 0.95 if size >= 256 * MIB else None)
    least = {"pool": 0.98, "malloc": of_malloc}.get(memory)
    if new and old and least:
        yield "new of old", new / old, least
    if memory == "async" and new and rates.get("new malloc"):
        yield "async of cudaMalloc", new / rates["new malloc"], 0.9
    if shared and native:
        yield "shared of native", shared / native, 0.98


def main():
    if sys.argv[1:2] == ["--child"]:
        return child(*sys.argv[2:5], int(sys.argv[5]))
    p = launch.Parser(__doc__)
    p.add_argument("dir", help="the folder with the new libgmlake.so")
    p.add_argument("--old", metavar="DIR2", help="the folder with the old one; without it nothing is compared with it")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--processes", type=int, default=1, metavar="N", help="processes of each role")
    p.add_argument("--memory", default=",".join(MEMORY), help="which memory, with commas")
    p.add_argument("--sizes", default="2,4,8,16,64,256,1024", help="in MiB")
    p.add_argument("--relays", type=float, default=20, help="seconds in which relays must get ready")
    p.add_argument("--cudart", help="libcudart, if not that of Python's packages or of /usr/local/cuda")
    a = p.parse_args()
    if not a.cudart and len(launch.needs_gpus("foreign.py")) < 2:
        print("foreign.py: SKIPPED: needs two GPUs")
        return 0
    try:
        sizes = sorted(int(size) * MIB for size in a.sizes.split(","))
    except ValueError:
        p.error("--sizes: numbers of MiB with commas")
    if a.processes < 1:
        p.error("--processes: at least one")
    a.memory = a.memory.split(",")
    if not set(a.memory) <= set(MEMORY):
        p.error(f"--memory: {', '.join(MEMORY)} are there")
    files = {"new": a.dir, **({"old": a.old} if a.old else {})}
    for role, folder in files.items():
        files[role] = os.path.join(os.path.abspath(folder), "libgmlake.so")
        if not os.path.isfile(files[role]):
            p.error(f"there is no libgmlake.so in {folder}")
    cudart, most = a.cudart or preload.cudart(), sizes[-1]
    log, missed = launch.Log(a.out, "foreign.jsonl", launch.Clock(float("inf"))), []
    with tempfile.TemporaryDirectory() as folder:
        config = os.path.join(folder, "shared.toml")
        pathlib.Path(config).write_text("[transfer]\nshared_gpus = true\n")
        roles = [("native", "new", None), ("new", "new", None), *([("old", "old", None)] if a.old else []), ("shared", "new", config)]
        children = [Child(role, cudart, files[build], most, settings) for _ in range(a.processes) for role, build, settings in roles]
        try:
            measure(children, sizes, a, log, missed)
        finally:
            for one in children:
                one.end()
    print(f"foreign: {len(log.rows)} figures in {log.clock.spent():.0f} s, {len(missed)} missed", flush=True)
    for line in missed:
        print(f"MISSED  {line}")
    return 1 if missed else 0


def measure(children, sizes, a, log, missed):
    dead = set()

    def bury():
        for one in children:
            if one.why and one not in dead:
                dead.add(one)
                missed.append(f"the process of {one.role}: {one.why}")
                log.say(f"FAILED  {one.role}: {one.why}")

    def asked_for(role, memory):
        return not (role == "old" and memory == "async")

    for one in children:
        warm = one.ask(what="warm", seconds=a.relays)
        if warm:
            log.say(f"{one.role}: relays ready {warm['ready']} after {warm['seconds']} s: {warm['stats']}")
        if warm and not warm["ready"]:
            missed.append(f"{one.role}: relays were not ready after {a.relays:g} s")
    bury()
    for one in children:
        for memory in a.memory:
            for size in sizes:
                right = one.ask(what="compare", memory=memory, size=size) if asked_for(one.role, memory) else None
                for direction in right["wrong"] if right else []:
                    missed.append(f"{one.role}: WRONG bytes, {memory} {direction} {size // MIB} MiB")
        if not one.why:
            log.say(f"{one.role}: bytes compared")
    bury()
    times = collections.defaultdict(list)
    for turn in range(a.rounds):
        for memory in a.memory:
            for size in sizes:
                for direction in DIRECTIONS:
                    first = turn % len(children)
                    for one in children[first:] + children[:first]:
                        if not asked_for(one.role, memory):
                            continue
                        answer = one.ask(what="time", memory=memory, size=size, direction=direction,
                                         count=count_of(size))
                        if answer:
                            times[one.role, memory, size, direction] += answer["us"]
        log.say(f"round {turn + 1} of {a.rounds}")
        bury()
    for one in children:
        after = one.ask(what="stats")
        for cost in (after or {}).get("relay_costs") or []:
            log.say(f"{one.role}: relay {cost['relay']}: slots {cost['slot_bytes'] / MIB:.1f} MiB, "
                    f"context {cost['context_bytes'] / MIB:.0f} MiB")
        if after and one.role != "native":
            log.say(f"{one.role}: {after['relay_bytes'] / GIB:.1f} GiB over relays")
    bury()
    roles = list(dict.fromkeys(one.role for one in children))
    print("\nGB/s      MiB  way " + "".join(f"{role:>9}" for role in roles) + "   bars")
    rates = {}
    for memory in a.memory:
        for size in sizes:
            for direction in DIRECTIONS:
                here = {}
                for role in roles:
                    found = times.get((role, memory, size, direction))
                    here[role] = size / statistics.median(found) / 1e3 if found else None
                rates[memory, size, direction] = here["new"]
                told, name = [], f"{memory} {direction} {size // MIB} MiB"
                beside = {**here, "new malloc": rates.get(("malloc", size, direction))}
                for what, value, least in bars(beside, memory, size):
                    good = value >= least
                    told.append(f"{what} {value:.3f} ({least}){'' if good else ' MISSED'}")
                    if not good:
                        missed.append(f"{name}: {what} {value:.3f}, at least {least}")
                row = {"memory": memory, "bytes": size, "direction": direction, "gbps": here, "bars": told}
                log.rows.append(row)
                log.file.write(json.dumps(row) + "\n")
                columns = "".join(f"{rate:9.1f}" if rate else f"{'-':>9}" for rate in here.values())
                print(f"{memory:7} {size // MIB:5}  {direction} {columns}   {'  '.join(told)}")
    log.file.flush()


if __name__ == "__main__":
    sys.exit(main())

"""Copies over every link, beside native ones in the same run: what they do to each other, to kernels and to the processor.

    python benches/gpu/copies.py [--only NAME,...] [--out DIR]

Sizes and kinds of memory, and critical copies beside background ones, are `glake bench copy`'s. Here: the first copy to new memory, several
GPUs at once, both directions at once, processor time, a GEMM and an NCCL all-reduce beside a copy, and an unchanged program under the preload library.
Each bar is a ratio of this run. Writes DIR/copies.jsonl. Ends with 1 if a bar was missed.
"""
import os, resource, statistics, subprocess, sys, threading, time

import launch

MIB, GIB = 1 << 20, 1 << 30


def scenario(name, gpus):
    """Marks a scenario: its name, and how many GPUs it needs."""
    def mark(function):
        function.gpus = gpus
        SCENARIOS[name] = function
        return function
    return mark


SCENARIOS = {}


def native(dst, src):
    dst.copy_(src, non_blocking=True)


def engine(dst, src, **options):
    import glake
    glake.copy_(dst, src, **options)


def settle():
    import torch
    for gpu in range(torch.cuda.device_count()):
        torch.cuda.synchronize(gpu)


def seconds(work):
    """From the call to the end of all GPUs' work."""
    settle()
    begin = time.perf_counter()
    work()
    settle()
    return time.perf_counter() - begin


def pinned(size):
    """Returns pinned memory whose bytes repeat every 16 MiB; sizes are multiples of that."""
    import torch
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    host.view(-1, 16 * MIB).copy_(torch.randint(0, 255, (16 * MIB,), dtype=torch.uint8))
    return host


def on(gpu, size):
    import torch
    return torch.empty(size, dtype=torch.uint8, device=f"cuda:{gpu}")


def alternate(repeat, **works):
    """Medians of each work, the works in turn."""
    times = {name: [] for name in works}
    for work in works.values():
        seconds(work)
    for _ in range(repeat):
        for name, work in works.items():
            times[name].append(seconds(work))
    return {name: statistics.median(measured) for name, measured in times.items()}


@scenario("first", 1)
def first(report):
    """To memory that was just allocated."""
    import glake, torch
    for size in (16 * MIB, 256 * MIB):
        src, times = pinned(size), {native: [], engine: []}
        for _ in range(21):
            for copy, measured in times.items():
                settle()
                glake.trim()
                dst = on(0, size)
                begin = time.perf_counter()
                copy(dst, src)
                torch.cuda.synchronize(0)
                measured.append(time.perf_counter() - begin)
                assert torch.equal(dst[-4096:].cpu(), src[-4096:])
                del dst
        plain, ours = (statistics.median(times[copy][1:]) for copy in (native, engine))
        report(f"first copy, {size // MIB} MiB", plain / ours, 0.95, native_us=plain * 1e6, engine_us=ours * 1e6)


@scenario("pulls", 2)
def pulls(report):
    """Measures pulls of all GPUs at once, then of half of them while the others are idle."""
    import torch
    gpus = torch.cuda.device_count()
    for count, least in ((gpus, 0.98), (gpus // 2, 1.7)):
        pairs = [(on(gpu, GIB), pinned(GIB)) for gpu in range(gpus)]

        def all_at_once(copy, back, gpus, size):
            for gpu, (device, host) in enumerate(pairs[:gpus]):
                with torch.cuda.device(gpu):
                    copy(*((host[:size], device[:size]) if back else (device[:size], host[:size])))

        for back, name in ((False, "h2d"), (True, "d2h")):
            times = alternate(20, native=lambda: all_at_once(native, back, count, GIB), engine=lambda: all_at_once(engine, back, count, GIB),
                              limit=lambda: all_at_once(native, back, gpus, GIB * count // gpus))
            rates = {f"{which}_gbps": count * GIB / took / 1e9 for which, took in times.items()}
            report(f"{count} GPUs pull 1 GiB each, {name}", times["native"] / times["engine"], least, **rates)


@scenario("both", 2)
def both(report):
    """Copies of 64 MiB of both ways at once, each way on a stream of its own; and one of 256 MiB to the GPU that begins behind many from it."""
    import torch
    size, count, gpus = 64 * MIB, 32, torch.cuda.device_count()
    ends = [((pinned(GIB), on(gpu, GIB)), (on(gpu, GIB), pinned(GIB)), torch.cuda.Stream(gpu), torch.cuda.Stream(gpu)) for gpu in range(gpus)]
    for (_, leaves), *_ in ends:
        leaves.random_(0, 255)

    def copies(copy, used):
        for number in range(count):
            out, into, away, back = ends[number % used]
            at = slice(number // used % 16 * size, (number // used % 16 + 1) * size)
            for (dst, src), stream in ((out, away), (into, back)):
                with torch.cuda.stream(stream):
                    copy(dst[at], src[at])

    def behind(copy):
        """Seconds until the copy to the GPU has ended."""
        settle()
        (host, gpu), into, away, back = ends[0]
        with torch.cuda.stream(away):
            for _ in range(4):
                copy(host, gpu)
        begin = time.perf_counter()
        with torch.cuda.stream(back):
            copy(*(end[:256 * MIB] for end in into))
        back.synchronize()
        return time.perf_counter() - begin

    works = dict(native=lambda: copies(native, 1), engine=lambda: copies(engine, 1), limit=lambda: copies(native, gpus))
    times = alternate(10, **works)
    for dst, _ in ends[0][:2]:
        dst.zero_()
    seconds(works["engine"])
    assert all(torch.equal(dst.cpu(), src.cpu()) for dst, src in ends[0][:2])
    rates = {f"{which}_gbps": 2 * count * size / took / 1e9 for which, took in times.items()}
    report("both ways at once, 64 MiB, of native", times["native"] / times["engine"], 1.0, **rates)
    report("the same, of the limit", times["limit"] / times["engine"], 0.9)
    times = {native: [], engine: []}
    for _ in range(7):
        for copy, measured in times.items():
            measured.append(behind(copy))
    took = {copy: statistics.median(measured) for copy, measured in times.items()}
    report("256 MiB to the GPU behind 4 GiB from it, of native", took[native] / took[engine], 0.98, native_ms=took[native] * 1e3, engine_ms=took[engine] * 1e3)


@scenario("late", 2)
def late(report):
    """A background copy that is waited for, whose parts are given to links as these have room, beside one whose shares are fixed when it
    is enqueued: while every link is idle, and while a program keeps a relay's own one busy."""
    import glake, torch
    size = GIB
    ours, others = (on(0, size), pinned(size)), (on(1, 256 * MIB), pinned(256 * MIB))
    stream = torch.cuda.Stream(1)
    for back, name in ((False, "h2d"), (True, "d2h")):
        dst, src = ours[::-1] if back else ours
        busy = others[::-1] if back else others
        src.random_(0, 255)

        def keep_busy():
            with torch.cuda.stream(stream):
                for _ in range(8):
                    native(*busy)

        def waited(copy, before):
            settle()
            dst.zero_()
            settle()
            before()
            begin = time.perf_counter()
            copy()
            took = time.perf_counter() - begin
            settle()
            assert torch.equal(dst[-16 * MIB:].cpu(), src[-16 * MIB:].cpu())
            return took

        copies = {
            "native": lambda: (native(dst, src), torch.cuda.current_stream(0).synchronize()),
            "fixed": lambda: glake.copy_(dst, src, priority="background").wait(),
            "late": lambda: glake.copy_(dst, src, priority="background", wait=True),
        }
        for before, state, least in ((lambda: None, "every link idle", 0.95), (keep_busy, "a relay's link busy", 1.0)):
            times = {which: [] for which in copies}
            for _ in range(21):
                for which, copy in copies.items():
                    times[which].append(waited(copy, before))
            took = {which: statistics.median(measured[1:]) for which, measured in times.items()}
            report(f"waited background copy of 1 GiB {name}, {state}, of one with fixed shares", took["fixed"] / took["late"], least,
                   **{f"{which}_gbps": size / seconds / 1e9 for which, seconds in took.items()})


@scenario("cores", 2)
def cores(report):
    """Processor time of the whole process while all paths are full, and while nothing is asked."""
    import torch
    dst, src = on(0, 4 * GIB), pinned(4 * GIB)

    def used(work):
        before, begin = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        work()
        after = resource.getrusage(resource.RUSAGE_SELF)
        return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / (time.perf_counter() - begin)

    def full():
        done = torch.cuda.Event(blocking=True)
        for _ in range(60):
            engine(dst, src)
            done.record()
            done.synchronize()

    engine(dst, src)
    settle()
    report("processor cores with all paths full", used(full), 0.3, most=True)
    report("processor cores, idle", used(lambda: time.sleep(2)), 0.01, most=True)


def beside(report, name, work, least):
    """The time of some work alone, beside native copies to GPU 0 and beside the engine's of the same bytes."""
    import torch
    dst, src, stream = on(0, 2 * GIB), pinned(2 * GIB), torch.cuda.Stream(0)
    work()
    times = {}
    for copy in (None, native, engine, native, engine):
        going = threading.Event()

        def keep_copying():
            torch.cuda.set_device(0)
            with torch.cuda.stream(stream):
                while going.is_set():
                    copy(dst, src)
                    stream.synchronize()

        going.set()
        thread = threading.Thread(target=keep_copying) if copy else None
        if thread:
            thread.start()
            time.sleep(0.2)
        measured = statistics.median(work() for _ in range(5))
        going.clear()
        if thread:
            thread.join()
        times.setdefault(copy, []).append(measured)
    plain, ours = min(times[native]), min(times[engine])
    report(name, plain / ours, least, alone_ms=times[None][0] * 1e3, beside_native_ms=plain * 1e3, beside_engine_ms=ours * 1e3)


@scenario("gemm", 2)
def gemm(report):
    """A matrix product on a relay."""
    import torch
    a, b = (torch.randn(8192, 8192, device="cuda:1") for _ in range(2))

    def work():
        torch.cuda.synchronize(1)
        begin = time.perf_counter()
        for _ in range(10):
            a @ b
        torch.cuda.synchronize(1)
        return (time.perf_counter() - begin) / 10

    beside(report, "GEMM 8192 on a relay, of its speed beside a native copy", work, 0.97)


@scenario("nccl", 2)
def nccl(report):
    """An all-reduce over all GPUs, which cross the same NVLinks as the relays."""
    import torch
    tensors = [torch.ones(64 * MIB, device=f"cuda:{gpu}") for gpu in range(torch.cuda.device_count())]

    def work():
        def reduce():
            for _ in range(10):
                torch.cuda.nccl.all_reduce(tensors, op=torch.cuda.nccl.SUM)
        for tensor in tensors:
            tensor.fill_(1)
        return seconds(reduce) / 10

    beside(report, f"NCCL all-reduce of 256 MiB over {len(tensors)}, of its speed beside a native copy", work, 0.97)


@scenario("graphs", 2)
def graphs(report):
    """A captured copy, replayed with bytes that came later."""
    import torch
    for size in (4 * MIB, 16 * MIB, 64 * MIB, GIB):
        for back, name in ((False, "h2d"), (True, "d2h")):
            dst, src = (lambda pair: pair[::-1] if back else pair)((on(0, size), torch.empty(size, dtype=torch.uint8, pin_memory=True)))
            for _ in range(20):  # the stream's paths are made in the background
                engine(dst, src)
            settle()

            def captured(copy):
                graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
                with torch.cuda.graph(graph, stream=stream):
                    copy(dst, src)
                return graph

            plain, ours = captured(native), captured(engine)
            fresh = torch.randint(0, 255, (size,), dtype=torch.uint8)
            src.copy_(fresh)
            dst.zero_()
            seconds(ours.replay)
            if not torch.equal(dst.cpu(), fresh):
                raise RuntimeError(f"a replay of {size} bytes {name} brought others")
            times = alternate(20, native=plain.replay, engine=ours.replay)
            report(f"replay of a captured copy of {size // MIB} MiB {name}", times["native"] / times["engine"], None, native_gbps=size / times["native"] / 1e9, engine_gbps=size / times["engine"] / 1e9)


UNCHANGED = """
import statistics, sys, time, torch
host = torch.empty(4 << 30, dtype=torch.uint8).pin_memory()
host.random_()
device = host.to("cuda"); torch.cuda.synchronize()
time.sleep(4)  # the first copy makes the relays' contexts, in the background
def median(work, repeat=20):
    times = []
    for _ in range(repeat):
        torch.cuda.synchronize(); begin = time.perf_counter(); work(); torch.cuda.synchronize(); times.append(time.perf_counter() - begin)
    return statistics.median(times)
def to():
    global device
    device = host.to("cuda", non_blocking=True)
print(median(to), median(lambda: host.copy_(device, non_blocking=True)), int(torch.equal(device[::4097].cpu(), host[::4097])))
"""


@scenario("preload", 2)
def preload(report):
    """tensor.to("cuda") of 4 GiB of pinned memory in a program that knows nothing of glake."""
    command = [sys.executable, "-c", UNCHANGED]
    gpus = len(launch.needs_gpus("copies.py"))
    times = []
    for prefix in ([], [os.environ.get("GLAKE", "glake"), "run", "--multi-path", "--"]):
        run = subprocess.run([*prefix, *command], capture_output=True, text=True, env=launch.environment(), timeout=180)
        if run.returncode != 0:
            raise RuntimeError(run.stderr[-800:])
        *measured, right = map(float, run.stdout.split())
        if not right:
            raise RuntimeError("bytes differ")
        times.append(measured)
    for index, name in enumerate(('to("cuda") of 4 GiB, preload', "copy back to pinned memory, preload")):
        report(name, times[0][index] / times[1][index], (3.0 if gpus >= 4 else None) if index == 0 else None, native_s=times[0][index], engine_s=times[1][index])


def main():
    p = launch.Parser(__doc__, SCENARIOS)
    a = p.parse_args()
    visible = launch.needs_gpus("copies.py")
    clock = launch.Clock(float("inf"))
    log, missed = launch.Log(a.out, "copies.jsonl", clock), []

    def report(what, value, bar, most=False, **more):
        good = bar is None or (value <= bar if most else value >= bar)
        if not good:
            missed.append(what)
        said = "" if bar is None else f"{'at most' if most else 'at least'} {bar}"
        extra = "  ".join(f"{name} {number:.4g}" for name, number in more.items())
        log.add({"what": what, "value": value, "bar": bar, "most": most, **more}, f"{'ok     ' if good else 'MISSED '} {what}: {value:.3f} ({said}) {extra}")

    if "preload" in a.only and len(visible) >= SCENARIOS["preload"].gpus:  # before this process takes memory
        attempt(log, missed, "preload", report)
    import glake
    glake.enable({"transfer": {"graphs": True, "shared_gpus": True}})
    import torch
    torch.cuda.init()
    glake.multi_path(True)
    time.sleep(4)  # contexts of the relays
    for name in a.only:
        if name == "preload":
            continue
        if len(visible) < SCENARIOS[name].gpus:
            log.say(f"SKIPPED {name}: needs {SCENARIOS[name].gpus} GPUs")
            continue
        attempt(log, missed, name, report)
        torch.cuda.empty_cache()
    print(f"copies: {len(log.rows)} figures in {clock.spent():.0f} s, {len(missed)} bars missed", flush=True)
    sys.exit(1 if missed else 0)


def attempt(log, missed, name, report):
    try:
        SCENARIOS[name](report)
    except Exception as error:  # the other scenarios still run
        missed.append(name)
        log.say(f"FAILED  {name}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()

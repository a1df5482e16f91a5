"""Regions that leave a GPU and come back, beside the link's own speed, the per-tensor algorithm of serving engines and torch_memory_saver.

    python benches/gpu/shrink.py [--only NAME,...] [--out DIR] [--gib 16]

Each scenario is a process of its own: a first shrink has nothing prepared. 16 GiB are 64 tensors of 256 MiB. Bars are ratios to what is
measured in the same process: one link's native copies of 1 GiB of pinned memory, or the same work done otherwise. Every byte is compared.
Writes DIR/shrink.jsonl. Ends with 1 if a bar was missed. torch_memory_saver is measured where it is installed.
"""
import argparse, json, os, pathlib, statistics, subprocess, sys, tempfile, threading, time

import launch

MIB, GIB = 1 << 20, 1 << 30
PIECE = 256 * MIB
SCENARIOS = {}


def scenario(name, gpus=1):
    def mark(function):
        function.gpus = gpus
        SCENARIOS[name] = function
        return function
    return mark


def report(what, value, bar=None, most=False, **more):
    print(json.dumps({"what": what, "value": value, "bar": bar, "most": most, **more}), flush=True)


def links(device=0, size=GIB, repeat=7):
    """GB/s of one link, to the host and from it, by native copies of pinned memory."""
    import torch
    host, gpu = torch.empty(size, dtype=torch.uint8, pin_memory=True), torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}")
    def speed(dst, src):
        times = []
        for _ in range(repeat):
            torch.cuda.synchronize(device)
            begin = time.perf_counter()
            dst.copy_(src, non_blocking=True)
            torch.cuda.synchronize(device)
            times.append(time.perf_counter() - begin)
        return size / statistics.median(times) / 1e9
    return speed(host, gpu), speed(gpu, host)


def all_at_once(size=GIB):
    """A function that tells GB/s of every GPU's native copies to and from its own memory, all at once: out and back."""
    import torch
    gpus = range(torch.cuda.device_count())
    pairs = [(torch.empty(size, dtype=torch.uint8, pin_memory=True), torch.empty(size, dtype=torch.uint8, device=f"cuda:{gpu}")) for gpu in gpus]
    def speed(out):
        for gpu in gpus:
            torch.cuda.synchronize(gpu)
        begin = time.perf_counter()
        for gpu, pair in zip(gpus, pairs):
            with torch.cuda.device(gpu):
                dst, src = pair if out else pair[::-1]
                dst.copy_(src, non_blocking=True)
        for gpu in gpus:
            torch.cuda.synchronize(gpu)
        return len(gpus) * size / (time.perf_counter() - begin) / 1e9
    return lambda: (speed(True), speed(False))


def stamp(tensors, seed=0):
    import torch
    for number, tensor in enumerate(tensors):
        flat = tensor.view(torch.int64)
        torch.arange(flat.numel(), out=flat)
        flat.mul_(2654435761).add_(seed * 1000003 + number)


def check(tensors, seed=0):
    import torch
    for number, tensor in enumerate(tensors):
        flat = tensor.view(torch.int64)
        place = torch.arange(flat.numel(), device=flat.device).mul_(2654435761).add_(seed * 1000003 + number)
        if not torch.equal(flat, place):
            raise RuntimeError(f"tensor {number} came back with other bytes")
    del place
    torch.cuda.empty_cache()


def tensors(size, device=0):
    import torch
    return [torch.empty(PIECE, dtype=torch.uint8, device=f"cuda:{device}") for _ in range(size // PIECE)]


def glake_with(relays=False, **tables):
    """glake as torch's allocator; with relays, GPUs that the program uses too among them, once they are ready."""
    import glake
    if relays:
        tables.setdefault("transfer", {})["shared_gpus"] = True
    glake.enable(tables or None)
    import torch
    torch.cuda.init()
    if relays:
        wake_relays(glake)
    return glake


def wake_relays(glake):
    import torch
    glake.multi_path(True)
    deadline = time.time() + 20
    while len(glake.copy_stats()["relays"]) + 1 < torch.cuda.device_count() and time.time() < deadline:
        time.sleep(0.1)
    time.sleep(1)


def seconds(work):
    import torch
    torch.cuda.synchronize()
    begin = time.perf_counter()
    answer = work()
    return time.perf_counter() - begin, answer


def cycle(glake, tags=None, **options):
    """Seconds of a shrink and of a refill of what it took out, and the shrink's report."""
    out, gone = seconds(lambda: glake.shrink(tags, **options))
    back, _ = seconds(lambda: glake.refill(tags))
    return out, back, gone


def whole(gone, size):
    if gone["freed"] < size or gone["resident"]:
        raise RuntimeError(f"asked for {size} bytes, freed {gone['freed']}, left {gone['resident']}: {json.dumps(gone)[:600]}")


def warm(size, relays, times=5):
    """Medians of seconds out and back once everything is pinned, the first cycle's, one link's GB/s, and all links' in turns with that."""
    glake = glake_with(relays)
    with glake.region("weights"):
        held = tensors(size)
    stamp(held)
    glake.trim()
    first = cycle(glake, "weights")
    whole(first[2], size)
    check(held)
    together = all_at_once()
    together()
    later = [(*cycle(glake, "weights")[:2], *together()) for _ in range(times)]
    check(held)
    out, back, *limit = (statistics.median(column) for column in zip(*later))
    return (out, back), first, links(), limit


@scenario("one")
def one_gpu(size):
    """16 GiB in 64 tensors, one GPU's link; first with nothing prepared."""
    (out, back), first, (d2h, h2d), _ = warm(size, relays=False)
    report("first shrink, nothing prepared, GB/s", size / first[0] / 1e9, 8.0)
    report("warm shrink of a link's D2H", size / out / 1e9 / d2h, 0.92, gbps=size / out / 1e9, link=d2h)
    report("warm refill of a link's H2D", size / back / 1e9 / h2d, 0.92, gbps=size / back / 1e9, link=h2d)


@scenario("links", 2)
def all_links(size):
    """The same with idle peers."""
    import torch
    gpus = torch.cuda.device_count()
    (out, back), first, (d2h, h2d), limit = warm(size, relays=True)
    four = gpus >= 4
    report(f"warm shrink over {gpus} links, of one link", size / out / 1e9 / d2h, 2.4 if four else None, gbps=size / out / 1e9, link=d2h)
    report(f"warm refill over {gpus} links, of one link", size / back / 1e9 / h2d, 3.0 if four else None, gbps=size / back / 1e9, link=h2d)
    for name, took, most in (("shrink", out, limit[0]), ("refill", back, limit[1])):
        report(f"warm {name} over {gpus} links, of native copies of all GPUs at once", size / took / 1e9 / most, 0.92 if four else None, limit=most)
    report(f"first shrink over {gpus} links, GB/s", size / first[0] / 1e9, 8.0)


@scenario("prepare")
def prepared(size):
    """The first shrink after prepare."""
    glake = glake_with()
    with glake.region("weights", host_copy="prepare"):
        held = tensors(size)
        begin = time.perf_counter()
    pinning = time.perf_counter() - begin
    stamp(held)
    out, back, gone = cycle(glake, "weights")
    whole(gone, size)
    check(held)
    later = statistics.median(cycle(glake, "weights")[0] for _ in range(3))
    d2h, _ = links()
    report("first shrink after prepare, of a warm one", later / out, 0.95, gbps=size / out / 1e9, link=d2h, pinning_gbps=size / pinning / 1e9)


@scenario("clean")
def clean(size):
    """A sealed region of twice the size, shrunk again."""
    glake, size = glake_with(), 2 * size
    with glake.region("weights", policy="sealed", host_copy="retain"):
        held = tensors(size)
    stamp(held)
    glake.seal("weights")
    cycle(glake, "weights")
    times = []
    for _ in range(5):
        out, back, gone = cycle(glake, "weights")
        whole(gone, size)
        times.append(out)
        if gone["copied"]:
            raise RuntimeError(f"{gone['copied']} bytes of a clean region were copied")
    check(held)
    report(f"clean sealed {size // GIB} GiB shrunk again, ms", statistics.median(times) * 1e3, 60.0, most=True)


def cleaned(glake, tag, timeout=120):
    """Seconds until all live bytes of a region are clean."""
    begin = time.perf_counter()
    while True:
        each, = (region for region in glake.regions() if region["tag"] == tag)
        if each["clean"]["now"] == each["live"]:
            return time.perf_counter() - begin
        if time.perf_counter() - begin > timeout:
            raise RuntimeError(f"it is not clean after {timeout} s: {each}")
        time.sleep(0.01)


@scenario("idle")
def idle(size):
    """The first shrink of a region that was written to, and of one that was cleaned since while nobody used it; then of one of which a kernel
    that no use covers has changed one tensor."""
    import torch
    glake = glake_with(tiers={"clean_after_ms": 200})
    took = {}
    for tag, clean in (("dirty", False), ("cleaned", True)):
        with glake.active(), glake.region(tag, clean=clean):
            held = tensors(size)
            stamp(held)
        torch.cuda.synchronize()
        waited = cleaned(glake, tag) if clean else 0.0
        out, back, gone = cycle(glake, tag)
        whole(gone, size)
        check(held)
        if gone["clean"] != (size if clean else 0):
            raise RuntimeError(f"{gone['clean']} bytes were clean: {json.dumps(gone)[:600]}")
        took[tag] = out
        report(f"first shrink, {tag}, GB/s", size / out / 1e9, seconds=out, back=back, waited=waited)
        if not clean:
            del held
            torch.cuda.empty_cache()
    report("first shrink, cleaned, of a dirty one's time", took["cleaned"] / took["dirty"], 0.2, most=True)
    cleaned(glake, "cleaned")
    # Outside of any use, and nobody tells.
    stamp(held[:1], seed=7)
    torch.cuda.synchronize()
    gone = glake.shrink("cleaned")
    glake.refill("cleaned")
    check(held[:1], seed=7)
    stamp(held[:1])
    check(held)
    if gone["copied"] < PIECE or gone["clean"] + gone["copied"] != size:
        raise RuntimeError(f"copied {gone['copied']}, clean {gone['clean']}")
    report("a write that nobody told of: bytes copied, of what changed", gone["copied"] / PIECE)


@scenario("first-layer")
def first_layer(size):
    """A kernel on the first of 16 regions, while the others come back."""
    import torch
    glake, held, tags = glake_with(), [], [f"layer{n}" for n in range(16)]
    for tag in tags:
        with glake.region(tag):
            held.append(tensors(size // 16))
    for number, group in enumerate(held):
        stamp(group, number)
    cycle(glake, tags)
    glake.order(tags)
    ratios = []
    for _ in range(5):
        glake.shrink(tags)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        glake.refill(tags, wait=False)
        glake.wait(tags[0])
        held[0][0].add_(0)
        torch.cuda.current_stream().synchronize()
        first = time.perf_counter() - begin
        for tag in tags:
            glake.wait(tag)
        torch.cuda.synchronize()
        ratios.append(first / (time.perf_counter() - begin))
    for number, group in enumerate(held):
        check(group, number)
    report("first kernel on the first of 16 regions, of the full refill", statistics.median(ratios), 1 / 8, most=True)


@scenario("exchange")
def exchange(size):
    """Region A in, region B out, with 1 GiB free."""
    import torch
    glake = glake_with(pool={"limit": f"{size // GIB + 1}GiB"})
    with glake.region("a"):
        a = tensors(size)
    stamp(a, 1)
    glake.shrink("a")
    with glake.region("b"):
        b = tensors(size)
    stamp(b, 2)
    def swap(out, into):
        failed = []
        def leave():
            try:
                glake.shrink(out)
            except Exception as error:
                failed.append(error)
        leaving = threading.Thread(target=leave)
        leaving.start()
        glake.refill(into)
        leaving.join()
        if failed:
            raise failed[0]
    def turns(out, into):
        glake.shrink(out)
        glake.refill(into)
    # Both have host memory by now.
    swap("b", "a")
    check(a, 1)
    swap("a", "b")
    times = {"at once": [], "in turns": []}
    for _ in range(3):
        for name, work in (("in turns", turns), ("at once", swap)):
            for out, into in (("b", "a"), ("a", "b")):
                times[name].append(seconds(lambda: work(out, into))[0])
    check(b, 2)
    both, after = (statistics.median(times[name]) for name in ("at once", "in turns"))
    report("one in while another goes out, of in turns", both / after, 0.65, most=True, at_once_s=both, in_turns_s=after)


@scenario("peer", 2)
def peer(size):
    """To another GPU's memory and back."""
    glake = glake_with(relays=True)
    with glake.region("weights"):
        held = tensors(size)
    stamp(held)
    cycle(glake, "weights", tier="peer:1")
    check(held)
    later = [cycle(glake, "weights", tier="peer:1") for _ in range(5)]
    check(held)
    d2h, h2d = links()
    for name, index, link in (("shrink to a peer", 0, d2h), ("refill from a peer", 1, h2d)):
        gbps = size / statistics.median(column[index] for column in later) / 1e9
        report(f"{name}, of one PCIe link", gbps / link, 4.0, gbps=gbps, link=link)


@scenario("file")
def file(size):
    """To files and back: what the disk gives; no bar."""
    size = min(size, 4 * GIB)
    with tempfile.TemporaryDirectory() as folder:
        glake = glake_with(tiers={"files": folder})
        with glake.region("weights"):
            held = tensors(size)
        stamp(held)
        out, back, gone = cycle(glake, "weights", tier="file")
        whole(gone, size)
        check(held)
    report("shrink to files, GB/s", size / out / 1e9)
    report("refill from files, GB/s", size / back / 1e9)


@scenario("verify")
def verify(size):
    """With digests before and after."""
    glake = glake_with()
    with glake.region("weights"):
        held = tensors(size)
    stamp(held)
    cycle(glake, "weights", verify=True)
    times = {False: [], True: []}
    for _ in range(4):
        for on in times:
            out, back, _ = cycle(glake, "weights", verify=on)
            times[on].append(out + back)
    check(held)
    plain, checked = (statistics.median(times[on]) for on in (False, True))
    report("out and back with verification, of without", checked / plain, 1.10, most=True, verified_s=checked, plain_s=plain)


def used():
    """Returns the used memory of the first GPU, of all processes."""
    import torch
    free, total = torch.cuda.mem_get_info(0)
    return total - free


@scenario("left")
def left(size):
    """Measures memory that stays on the GPU after a shrink, beyond that of a plain torch process with the same kernels."""
    import torch
    bare = subprocess.run([sys.executable, "-c", BARE, str(size)], capture_output=True, text=True, timeout=60, cwd=pathlib.Path(__file__).parent, check=True)
    bare, registered = map(float, bare.stdout.split())
    glake = glake_with()
    with glake.region("weights"):
        held = tensors(size)
    loose = tensors(PIECE)
    stamp(held)
    stamp(loose, 1)
    check(loose, 1)
    gone = glake.shrink()
    taken = (used() - bare) / MIB
    tables = sum(holder["bytes"] for holder in gone["gpu"] if "page tables" in holder["holder"]) / MIB
    report("left on the GPU after a full shrink but for the driver's tables of pinned memory, MiB", taken - float(registered), 16.0, most=True,
           with_tables=taken, plain_torch_mib=bare / MIB)
    report("those tables, by cudaHostRegister of as much in a process of plain torch, MiB", float(registered), reckoned=tables)
    for holder in gone["gpu"]:
        report(f"the report names: GPU {holder['device']}: {holder['holder']}, MiB", holder["bytes"] / MIB)
    glake.refill()
    check(held)
    check(loose, 1)


BARE = """
import shrink, torch
torch.cuda.init()
one = shrink.tensors(shrink.PIECE)
shrink.stamp(one); shrink.check(one)
del one
torch.cuda.empty_cache(); torch.cuda.synchronize()
bare = shrink.used()
import mmap, sys
memory = mmap.mmap(-1, int(sys.argv[1]))
memory.madvise(mmap.MADV_HUGEPAGE)
pages = torch.frombuffer(memory, dtype=torch.uint8)
pages[::4096] = 1
torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(pages.data_ptr(), pages.numel(), 1)))
print(bare, (shrink.used() - bare) / shrink.MIB)
"""


@scenario("rest", 2)
def rest(size):
    """With relays: what a full shrink leaves on every GPU, and what the refill takes that wakes them."""
    before = everywhere()
    glake = glake_with(relays=True)
    with glake.region("weights"):
        held = tensors(size)
    stamp(held)
    cycle(glake, "weights")
    awake, backs = everywhere(), []
    for _ in range(5):
        out, gone = seconds(glake.shrink)
        asleep = everywhere()
        back, _ = seconds(glake.refill)
        backs.append(back)
        check(held)
    d2h, h2d = links()
    for gpu, (bare, full, rested) in enumerate(zip(before, awake, asleep)):
        if gpu:
            report(f"left on GPU {gpu}, a relay, after a full shrink, MiB", rested - bare, 16.0, most=True, awake_mib=full - bare)
    gbps = size / statistics.median(backs) / 1e9
    report("refill that wakes the relays, of one link", gbps / h2d, gbps=gbps, first=size / backs[0] / 1e9)
    _, back, _ = min((cycle(glake, "weights") for _ in range(5)), key=lambda column: column[1])
    report("refill once they are awake, of one link", size / back / 1e9 / h2d, gbps=size / back / 1e9)


def everywhere():
    """MiB that are taken of each visible GPU, asked without a context on it."""
    asked = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True, text=True, check=True)
    return [float(line) for line in asked.stdout.split()]


@scenario("engines")
def engines(size):
    """Measures the way of serving engines: a pinned buffer for each tensor, a blocking copy, unmap, and a map at the same addresses."""
    import torch
    from cuda.bindings import driver as cu
    torch.cuda.init()
    torch.empty(1, device="cuda")
    def done(answer):
        error, *values = answer
        if int(error):
            raise RuntimeError(f"{error}")
        return values[0] if values else None
    prop = cu.CUmemAllocationProp()
    prop.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type, prop.location.id = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, 0
    access = cu.CUmemAccessDesc()
    access.location.type, access.location.id = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, 0
    access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    count = size // PIECE
    places = [done(cu.cuMemAddressReserve(PIECE, 0, 0, 0)) for _ in range(count)]
    handles, buffers = [None] * count, [None] * count
    def make(n):
        handles[n] = done(cu.cuMemCreate(PIECE, prop, 0))
        done(cu.cuMemMap(places[n], PIECE, 0, handles[n], 0))
        done(cu.cuMemSetAccess(places[n], PIECE, [access], 1))
    for n in range(count):
        make(n)
        done(cu.cuMemsetD8(places[n], n, PIECE))
    def sleep():
        for n in range(count):
            if buffers[n] is None:
                buffers[n] = torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)
            done(cu.cuMemcpyDtoH(buffers[n].data_ptr(), places[n], PIECE))
            done(cu.cuMemUnmap(places[n], PIECE))
            done(cu.cuMemRelease(handles[n]))
    def wake():
        for n in range(count):
            make(n)
            done(cu.cuMemcpyHtoD(places[n], buffers[n].data_ptr(), PIECE))
    for name in ("first", "buffers kept"):
        out, back = seconds(sleep)[0], seconds(wake)[0]
        report(f"per tensor, {name}: sleep, GB/s", size / out / 1e9)
        report(f"per tensor, {name}: wake, GB/s", size / back / 1e9)
    last = torch.empty(PIECE, dtype=torch.uint8)
    done(cu.cuMemcpyDtoH(last.data_ptr(), places[-1], PIECE))
    if int(last.min()) != (count - 1) % 256 or int(last.max()) != (count - 1) % 256:
        raise RuntimeError("bytes differ")


@scenario("saver")
def saver(size):
    """torch_memory_saver, with a copy in host memory."""
    try:
        from torch_memory_saver import torch_memory_saver
    except ImportError:
        report("torch_memory_saver is not installed", 0)
        return
    import torch
    torch_memory_saver.hook_mode = "torch"
    with torch_memory_saver.region(tag="weights", enable_cpu_backup=True):
        held = tensors(size)
    stamp(held)
    for name in ("first", "second"):
        out, back = seconds(lambda: torch_memory_saver.pause("weights"))[0], seconds(lambda: torch_memory_saver.resume("weights"))[0]
        report(f"torch_memory_saver, {name}: pause, GB/s", size / out / 1e9)
        report(f"torch_memory_saver, {name}: resume, GB/s", size / back / 1e9)
    os._exit(0)  # it ends the process with an error where memory that it did not give out is freed


def main():
    p = launch.Parser(__doc__, SCENARIOS)
    p.add_argument("--gib", type=int, default=16, help="GiB that leave; a multiple of 4")
    p.add_argument("--time-limit", type=float, default=90, help="seconds a scenario")
    p.add_argument("--child", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.child:
        SCENARIOS[a.child](a.gib * GIB)
        return
    visible = launch.needs_gpus("shrink.py")
    clock = launch.Clock(float("inf"))
    log, missed = launch.Log(a.out, "shrink.jsonl", clock), []
    for name in a.only:
        if len(visible) < SCENARIOS[name].gpus:
            log.say(f"SKIPPED {name}: needs {SCENARIOS[name].gpus} GPUs")
            continue
        log.say(f"{name}: {SCENARIOS[name].__doc__.splitlines()[0]}")
        missed += launch.scenario(log, __file__, name, ["--gib", a.gib], a.time_limit)
    print(f"shrink: {len(log.rows)} figures in {clock.spent():.0f} s, {len(missed)} bars missed", flush=True)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()

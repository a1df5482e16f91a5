"""A refill of three regions of one process beside the link's own speed, and a first shrink beside touching memory alone.

    python benches/gpu/refill.py [--gib 50] [--first-gib 16] [--repeat 5] [--out DIR] [--only three,first]

three: half of --gib is a sealed region whose host copies are retained, three eighths are tensors of many sizes in the default region, one
eighth is the pool of a CUDA graph. All of it is shrunk and refilled, once to pin what the copies need, then --repeat times; the link is
measured beside it in the same process, by native copies of 1 GiB of pinned memory. Then each region by itself, which shows where time
goes: `seconds` against `at_link`, what its bytes take on the link. Every byte is compared.
first: the first shrink of a process, beside as much private memory on huge pages that 16 threads touch, in two ways, before it and after it.
Each is a process of its own, which holds its memory until the last has ended: none is given what another has touched, and on a machine that
has just started all get memory that it never touched. So run it there first; it needs five times --first-gib of host memory. A way's figure
is the mean of before and after, and the bar is of the faster way. Beside them stand the memory that was free when each began, and for how
long the machine had been up.
Writes DIR/refill.jsonl. Ends with 1 if a bar was missed.
"""
import argparse, concurrent.futures, ctypes, functools, json, mmap, pathlib, statistics, subprocess, sys, time

import launch
import shrink
from shrink import GIB, MIB, report

HUGE = 2 * MIB
TOUCHED = 32 * MIB  # what a thread touches at a time
THREADS = 16
MADV_POPULATE_WRITE = 23
SIZES = [256 << 10, 1 * MIB, 3 * MIB, 5 * MIB, 14 * MIB, 34 * MIB, 96 * MIB, 160 * MIB]


def mixed(size):
    """Tensors of many sizes that fill `size`."""
    import torch
    held, number = [], 0
    while size >= SIZES[0]:
        fits = [each for each in SIZES if each <= size]
        each = min(SIZES[number % len(SIZES)], fits[-1])
        held.append(torch.empty(each, dtype=torch.uint8, device="cuda"))
        size, number = size - each, number + 1
    return held


def captured(size):
    """A graph and its tensors, which lie in the graph's own pool."""
    import torch
    graph, held = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for _ in range(size // shrink.PIECE):
            held.append(torch.empty(shrink.PIECE, dtype=torch.uint8, device="cuda").fill_(1))
    return graph, held


def three(size, _, repeat):
    glake = shrink.glake_with()
    import torch
    with glake.region("weights", policy="sealed", host_copy="retain"):
        weights = shrink.tensors(size // 2)
    loose = mixed(size * 3 // 8)
    graph, pool = captured(size // 8)
    graph.replay()
    groups = [weights, loose, pool]
    for number, group in enumerate(groups):
        shrink.stamp(group, number)
    torch.cuda.synchronize()
    glake.seal("weights")
    def compare():
        for number, group in enumerate(groups):
            shrink.check(group, number)
    out, back, gone = shrink.cycle(glake)
    report("regions, GiB", [[each["tag"], round(each["evicted"] / GIB, 3)] for each in gone["regions"]] if "regions" in gone else gone["freed"] / GIB)
    report("first: out, back, s", out, back=back)
    compare()
    took, rates, moved, links = [], [], 0, []
    for _ in range(repeat):
        # Before the shrink: what is allocated while the default region is evicted brings it back.
        links.append(shrink.links(repeat=3)[1])
        torch.cuda.empty_cache()
        glake.shrink()
        back, answer = shrink.seconds(glake.refill)
        moved = answer["copied"]
        took.append(back)
        rates.append(moved / back / 1e9)
    compare()
    link = statistics.median(links)
    report("refill of all regions, of the link", statistics.median(rates) / link, 0.95, gbps=statistics.median(rates), link=link,
           gib=moved / GIB, seconds=statistics.median(took), slowest=min(rates), fastest=max(rates))
    tags = [each["tag"] for each in glake.regions()]
    for tag in tags:
        each = []
        for _ in range(3):
            glake.shrink(tag)
            back, answer = shrink.seconds(lambda: glake.refill(tag))
            each.append((back, answer["copied"]))
        back, copied = statistics.median(one for one, _ in each), each[-1][1]
        report(f"  {tag} alone, of the link", copied / back / 1e9 / link, gib=copied / GIB, seconds=back, at_link=copied / link / 1e9)
    compare()


def touched(way, size):
    """Private memory on huge pages, and the seconds in which threads have touched it. None of them holds Python's lock meanwhile."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.memset.argtypes, libc.memset.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), ctypes.c_void_p
    memory = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    start = -(-ctypes.addressof(ctypes.c_char.from_buffer(memory)) // HUGE) * HUGE

    def touch(at):
        if way == "memset":
            libc.memset(start + at, 1, TOUCHED)
        elif libc.madvise(start + at, TOUCHED, MADV_POPULATE_WRITE):
            raise OSError(ctypes.get_errno(), "MADV_POPULATE_WRITE was refused")

    with concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
        begin = time.perf_counter()
        list(threads.map(touch, range(0, size, TOUCHED)))
        return memory, time.perf_counter() - begin


def now():
    """The host's free memory, and for how long it has been up."""
    sizes = dict(line.split(":") for line in pathlib.Path("/proc/meminfo").read_text().splitlines())
    uptime = pathlib.Path("/proc/uptime").read_text().split()[0]
    return {"free_gib": int(sizes["MemFree"].split()[0]) * 1024 / GIB, "uptime_s": float(uptime)}


def tell(size, took, begun):
    """Tells who started this process, and holds what it has until that one lets go."""
    print(json.dumps({"gbps": size / took / 1e9, **begun}), flush=True)
    sys.stdin.read()


def touch_first(way, size):
    begun = now()
    memory, took = touched(way, size)
    tell(size, took, begun)
    del memory


def shrink_first(size):
    glake = shrink.glake_with()
    with glake.region("weights", host_copy="retain", policy="sealed"):
        held = shrink.tensors(size)
    shrink.stamp(held)
    glake.seal("weights")
    begun = now()
    out, _, gone = shrink.cycle(glake, "weights")
    shrink.whole(gone, size)
    shrink.check(held)
    tell(size, out, begun)


# What runs in a process of its own, and in which order: what changes steadily while they run weighs on the shrink and on both ways alike.
PARTS = {**{way: functools.partial(touch_first, way) for way in ("populate", "memset")}, "shrink": shrink_first}
ORDER = ["populate", "memset", "shrink", "memset", "populate"]


def first(_, size, __):
    parts, said = [], {name: [] for name in PARTS}
    try:
        for name in ORDER:
            command = [sys.executable, __file__, "--child", name, "--first-gib", str(size // GIB)]
            parts.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=launch.environment()))
            line = next((line for line in parts[-1].stdout if line.startswith("{")), None)
            if line is None:
                raise RuntimeError(f"{name} ended early")
            said[name].append(json.loads(line))
    finally:
        for part in parts:
            part.stdin.close()
        for part in parts:
            with part:
                pass  # it is waited for
    compare(*said.pop("shrink"), said)


def compare(shrunk, ways):
    """A first shrink beside what was touched before it and after it."""
    rates = {way: statistics.mean(each["gbps"] for each in pair) for way, pair in ways.items()}
    alone = max(rates.values())
    report("first shrink, of touching alone", shrunk["gbps"] / alone, 0.9, gbps=shrunk["gbps"], touching=alone, free_gib=shrunk["free_gib"],
           uptime_s=shrunk["uptime_s"])
    for way, (before, after) in ways.items():
        report(f"  touched by {way}, {THREADS} threads, GB/s", rates[way], before=before["gbps"], free_before_gib=before["free_gib"],
               uptime_before_s=before["uptime_s"], after=after["gbps"], free_after_gib=after["free_gib"], uptime_after_s=after["uptime_s"])


SCENARIOS = {"first": first, "three": three}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", default="first,three", help="of " + ", ".join(SCENARIOS))
    p.add_argument("--out", default="bench-results")
    p.add_argument("--gib", type=int, default=50, help="GiB that come back")
    p.add_argument("--first-gib", type=int, default=16, help="GiB of the first shrink")
    p.add_argument("--repeat", type=int, default=5)
    p.add_argument("--time-limit", type=float, default=180, help="seconds a scenario")
    p.add_argument("--child", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.child in PARTS:
        PARTS[a.child](a.first_gib * GIB)
        return
    if a.child:
        # Whole tensors of the sealed region and of the graph's pool.
        SCENARIOS[a.child](max(a.gib // 2, 1) * 2 * GIB, a.first_gib * GIB, a.repeat)
        return
    arguments = ["--gib", a.gib, "--first-gib", a.first_gib, "--repeat", a.repeat]
    launch.scenarios(__file__, launch.chosen(p, a.only, SCENARIOS), arguments, a.out, a.time_limit)


if __name__ == "__main__":
    main()

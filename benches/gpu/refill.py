"""A refill of three regions of one process beside the link's own speed, and a first shrink beside touching memory alone.

    python benches/gpu/refill.py [--gib 50] [--first-gib 16] [--repeat 5] [--out DIR] [--only three,first]

three: half of --gib is a sealed region whose host copies are retained, three eighths are tensors of many sizes in the default region, one
eighth is the pool of a CUDA graph. All of it is shrunk and refilled, once to pin what the copies need, then --repeat times; the link is
measured beside it in the same process, by native copies of 1 GiB of pinned memory. Then each region by itself, which shows where time
goes: `seconds` against `at_link`, what its bytes take on the link. Every byte is compared.
first: the first shrink of a process, three times, and before, between and behind them as much private memory on huge pages that 16 threads
write to. Each is a process of its own, which holds its memory until the last has ended: none is given what another has touched, and on a
machine that has just started all get memory that it never touched. So run it there first; it needs seven times --first-gib of host memory, and
a little. A shrink's figure is of the mean of its two neighbours, for a machine that makes its memory as it is touched does so at a pace that
changes; the bar is of the median. Beside it stands the memory that was free when it began, and for how long the machine had been up.
Writes DIR/refill.jsonl. Ends with 1 if a bar was missed.
"""
import argparse, concurrent.futures, ctypes, json, mmap, pathlib, statistics, subprocess, sys, time

import launch
import shrink
from shrink import GIB, MIB, report

HUGE = 2 * MIB
TOUCHED = 32 * MIB  # what a thread touches at a time
THREADS = 16
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


def touched(size):
    """Private memory on huge pages, and the seconds in which threads have written to it. None of them holds Python's lock meanwhile."""
    libc = ctypes.CDLL(None)
    libc.memset.argtypes, libc.memset.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), ctypes.c_void_p
    memory = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    start = -(-ctypes.addressof(ctypes.c_char.from_buffer(memory)) // HUGE) * HUGE
    with concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
        begin = time.perf_counter()
        list(threads.map(lambda at: libc.memset(start + at, 1, TOUCHED), range(0, size, TOUCHED)))
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


def touch_first(size):
    begun = now()
    memory, took = touched(size)
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


PARTS = {"touch": touch_first, "shrink": shrink_first}
ORDER = ["touch", "shrink"] * 3 + ["touch"]


def first(_, size, __):
    parts, said = [], []
    try:
        for name in ORDER:
            command = [sys.executable, __file__, "--child", name, "--first-gib", str(size // GIB)]
            parts.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=launch.environment()))
            line = next((line for line in parts[-1].stdout if line.startswith("{")), None)
            if line is None:
                raise RuntimeError(f"{name} ended early")
            said.append(json.loads(line))
    finally:
        for part in parts:
            part.stdin.close()
        for part in parts:
            with part:
                pass  # it is waited for
    compare(said)


def compare(said):
    """First shrinks, each beside what was touched before it and after it."""
    ratios = []
    for before, shrunk, after in zip(said[0::2], said[1::2], said[2::2]):
        ratios.append(shrunk["gbps"] / statistics.mean((before["gbps"], after["gbps"])))
        report("  a first shrink, of touching alone", ratios[-1], gbps=shrunk["gbps"], before=before["gbps"], after=after["gbps"],
               free_gib=shrunk["free_gib"], uptime_s=shrunk["uptime_s"])
    report(f"first shrink, of touching alone with {THREADS} threads", statistics.median(ratios), 0.9, lowest=min(ratios), highest=max(ratios))


SCENARIOS = {"first": first, "three": three}


def main():
    p = launch.Parser(__doc__, SCENARIOS, default="first,three")
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
    launch.scenarios(__file__, a.only, arguments, a.out, a.time_limit)


if __name__ == "__main__":
    main()

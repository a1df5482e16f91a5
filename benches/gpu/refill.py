"""A refill of three regions of one process beside the link's own speed, and a first shrink beside touching memory alone.

    python benches/gpu/refill.py [--gib 50] [--first-gib 16] [--repeat 5] [--out DIR] [--only three,first]

three: half of --gib is a sealed region whose host copies are retained, three eighths are tensors of many sizes in the default region, one
eighth is the pool of a CUDA graph. All of it is shrunk and refilled, once to pin what the copies need, then --repeat times; the link is
measured beside it in the same process, by native copies of 1 GiB of pinned memory. Then each region by itself, which shows where time
goes: `seconds` against `at_link`, what its bytes take on the link. Every byte is compared.
first: the first shrink of a process, then, while the memory that it pinned stays pinned, as much touched alone by 16 threads: neither is
given what the other has touched. On a machine that has just started both get memory that it never touched.
Writes DIR/refill.jsonl. Ends with 1 if a bar was missed.
"""
import argparse, json, mmap, statistics, sys, threading, time

import launch
import shrink
from shrink import GIB, MIB, report

HUGE = 2 * MIB
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


def touching(size, threads=16):
    """GB/s at which memory on huge pages is touched for the first time, by so many threads that hold no lock."""
    import torch
    torch.set_num_threads(threads)
    memory = mmap.mmap(-1, size + HUGE)
    memory.madvise(mmap.MADV_HUGEPAGE)
    pages = torch.frombuffer(memory, dtype=torch.uint8)[:size]
    part = size // threads
    begin = time.perf_counter()
    workers = [threading.Thread(target=lambda at=at: pages[at * part:(at + 1) * part:4096].fill_(1)) for at in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    took = time.perf_counter() - begin
    del pages
    memory.close()
    return size / took / 1e9


def first(_, size, __):
    import os
    os.environ["OMP_NUM_THREADS"] = "1"
    glake = shrink.glake_with()
    with glake.region("weights", host_copy="retain", policy="sealed"):
        held = shrink.tensors(size)
    shrink.stamp(held)
    glake.seal("weights")
    out, _, gone = shrink.cycle(glake, "weights")
    shrink.whole(gone, size)
    shrink.check(held)
    alone = touching(size)
    report("first shrink, of touching alone", size / out / 1e9 / alone, 0.9, gbps=size / out / 1e9, touching=alone)
    report("  touching again, GB/s", touching(size))


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
    if a.child:
        # Whole tensors of the sealed region and of the graph's pool.
        SCENARIOS[a.child](max(a.gib // 2, 1) * 2 * GIB, a.first_gib * GIB, a.repeat)
        return
    arguments = ["--gib", a.gib, "--first-gib", a.first_gib, "--repeat", a.repeat]
    launch.scenarios(__file__, launch.chosen(p, a.only, SCENARIOS), arguments, a.out, a.time_limit)


if __name__ == "__main__":
    main()

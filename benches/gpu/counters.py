"""What reading torch's counters takes with many private pools, under torch's own allocator and under GLake, in turns.

    python benches/gpu/counters.py --pools 1000 --runs 3 --out DIR

Each pool is a torch.cuda.MemPool with one tensor. Under GLake memory_stats is read after 4,000 tags too. The bar is twice torch's time.
Writes DIR/counters.jsonl.
"""
import json
import statistics
import subprocess
import sys

import launch

BAR = 2.0
CALLS = {"memory_allocated": 300, "memory_stats": 100}
PROGRAM = """
import json, sys, time, torch
alloc, pools = sys.argv[1], int(sys.argv[2])
if alloc == "glake":
    import glake
    glake.enable(backend="compiled")
torch.zeros(1, device="cuda")
def read():
    found = {}
    for name, count in json.loads(sys.argv[3]).items():
        call = getattr(torch.cuda, name)
        call()
        begun = time.perf_counter()
        for _ in range(count):
            call()
        found[name] = (time.perf_counter() - begun) / count * 1e3
    return found
rows = {"none": read()}
held = []
for _ in range(pools):
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        held.append((pool, torch.empty(4096, device="cuda")))
rows["pools"] = read()
if alloc == "glake":
    for number in range(4000):
        with glake.region(f"tag {number}"):
            torch.empty(1024, device="cuda")
    rows["tags"] = read()
print(json.dumps(rows))
"""


def main():
    p = launch.Parser(__doc__)
    p.add_argument("--pools", type=int, default=1000)
    p.add_argument("--runs", type=int, default=3)
    a = p.parse_args()
    visible = launch.needs_gpus("counters.py")
    log = launch.Log(a.out, "counters.jsonl", launch.Clock(600))
    rows = []
    for run in range(1, a.runs + 1):
        for alloc in ("native", "glake"):
            command = [sys.executable, "-c", PROGRAM, alloc, str(a.pools), json.dumps(CALLS)]
            done = subprocess.run(command, env=launch.environment(visible[:1]), capture_output=True, text=True, timeout=200, check=False)
            if done.returncode:
                sys.exit(f"{alloc}: {done.stderr[-2000:]}")
            row = {"alloc": alloc, "run": run, "ms": json.loads(done.stdout.splitlines()[-1])}
            rows.append(row)
            log.add(row, f"{alloc:8} run {run}: {row['ms']['pools']['memory_allocated']:.3f} ms")
    missed = 0
    print(f"{'':18}{'with':>8}{'torch ms':>12}{'glake ms':>12}{'ratio':>8}")
    for name in CALLS:
        for place in ("none", "pools", "tags"):
            # Torch has no tags: its time is the one with pools.
            mine, theirs = (
                statistics.median(row["ms"][place if place in row["ms"] else "pools"][name] for row in rows if row["alloc"] == alloc)
                for alloc in ("glake", "native")
            )
            missed += name == "memory_allocated" and mine > BAR * theirs
            print(f"{name:18}{place:>8}{theirs:>12.3f}{mine:>12.3f}{mine / theirs:>8.2f}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

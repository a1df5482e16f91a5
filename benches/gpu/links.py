"""Every bar of copies over the links of all GPUs that `glake bench copy` measures, in one table.

    python benches/gpu/links.py [--only NAME,...] [--runs 21] [--device cuda] [--out DIR]

Calibrates first (kept where `glake topo --calibrate` keeps it), then measures each kind of memory, each beside native copies and what the
links give at once, in turns. Bars of four links hold where four GPUs are visible, "never worse" everywhere. Other scenarios are in copies.py,
preload.py and shrink.py. GLAKE names the command. Writes DIR/links.jsonl. Ends with 1 if a bar was missed.
"""
import os, sys

import launch

MIB, GIB = 1 << 20, 1 << 30
SMALL = ["--runs", "201", "--memory", "pool,foreign", "--sizes"]
# What is asked of `glake bench copy`.
KINDS = {
    "small": [*SMALL, "1MiB,1536KiB,2MiB,4MiB,16MiB"],
    "alone": [*SMALL, "1MiB,2MiB,4MiB,64MiB", "--paths", "1"],
    "pool": ["--sizes", "64MiB,256MiB,1GiB,4GiB"],
    "foreign": ["--memory", "foreign", "--sizes", "64MiB,256MiB,1GiB,4GiB"],
    "mempool": ["--memory", "mempool", "--sizes", "16MiB,64MiB,256MiB,1GiB,4GiB"],
    "pageable": ["--memory", "pageable", "--sizes", "64MiB,1GiB"],
    "scattered": ["--memory", "scattered", "--sizes", "1600MiB"],
    "broadcast": ["--memory", "broadcast", "--sizes", "4GiB"],
    "overhead": ["--overhead", "--sizes", "4KiB,16KiB,64KiB,256KiB,512KiB"],
    "critical": ["--critical", "--runs", "1000"],
}


def bars(row, four):
    """Returns the figures of a copy's row with their bars: (what, value, least)."""
    of_native, of_limit = row["native_us"] / row["engine_us"], row["limit_us"] / row["engine_us"]
    size, memory, out = row["bytes"], row["memory"], row["direction"] == "d2h"
    least = {("pool", 4 * MIB): 1.8, ("pool", 16 * MIB): 2.8, ("foreign", 16 * MIB): 2.2, ("pageable", GIB): 3 if out else 5, ("broadcast", 4 * GIB): 3}
    yield "of native", of_native, least.get((memory, size), 0.98) if four else 0.98
    if not four:
        return
    if memory == "pool" and size >= 256 * MIB:
        yield "of the limit", of_limit, 0.92 if out else 0.95
    if memory in ("foreign", "mempool") and size >= 256 * MIB:
        # cuMemAllocAsync's memory is to have nine tenths of what cuMemAlloc's has.
        yield "of the limit", of_limit, 0.88 if memory == "foreign" else 0.79
    if memory == "pool" and size == 64 * MIB:
        yield "of the limit", of_limit, 0.80
    if memory == "scattered" and not out:
        yield "GB/s", row["engine_gbps"], 80


def measured(kind, row, four):
    """Every figure of a row: (name, value, bar, whether the bar is the most, what else is told)."""
    size = row["bytes"]
    name = f"{row['direction']} {size / MIB:g} MiB" if size >= MIB else f"{row['direction']} {size // 1024} KiB"
    if kind == "overhead":
        yield f"{name}, us over native", row["overhead_us"], 0.3, True, f"native {row['native_us']:.2f} us"
    elif kind == "critical":
        told = f"alone {row['alone_us']:.0f}/{row['alone_p99_us']:.0f}, beside {row['beside_us']:.0f}/{row['beside_p99_us']:.0f} us"
        yield f"critical {name}, p99 of the median alone", row["beside_p99_us"] / row["alone_us"], 1.5, True, told
    else:
        told = f"native {row['native_gbps']:.1f}, engine {row['engine_gbps']:.1f}, limit {row['limit_gbps']:.1f} GB/s over {row['paths']}, call {row['host_us']:.1f} us"
        for what, value, least in bars(row, four and kind != "alone"):
            yield f"{row['memory']} {name}, {what}", value, least, False, told


def main():
    p = launch.Parser(__doc__, KINDS)
    p.add_argument("--runs", type=int, default=21, help="of large copies")
    p.add_argument("--device", default="cuda", help="as glake takes it; sim:h200x4 tries the script without a GPU")
    a = p.parse_args()
    four = a.device.endswith("x4") or (a.device == "cuda" and len(launch.needs_gpus("links.py")) >= 4)
    glake = os.environ.get("GLAKE", "glake")
    log, missed = launch.Log(a.out, "links.jsonl", launch.Clock(float("inf"))), 0
    _, error = launch.call([glake, "topo", "--device", a.device, "--calibrate", "--json"], None, 60)
    if error:
        log.say(f"FAILED  calibration: {error}")
        missed += 1
    for name in a.only:
        asked = KINDS[name] if "--runs" in KINDS[name] or name == "overhead" else ["--runs", str(a.runs), *KINDS[name]]
        rows, error = launch.call([glake, "bench", "copy", "--device", a.device, "--json", *asked], None, 300)
        if error:
            log.say(f"FAILED  {name}: {error}")
            missed += 1
        for row in rows:
            for what, value, bar, most, told in measured(name, row, four):
                good = value <= bar if most else value >= bar
                missed += not good
                log.add({**row, "what": what, "value": value, "bar": bar, "most": most}, f"{'ok     ' if good else 'MISSED '} {what}: {value:.3f} ({'at most' if most else 'at least'} {bar})  {told}")
    print(f"links: {len(log.rows)} figures in {log.clock.spent():.0f} s, {missed} bars missed", flush=True)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()

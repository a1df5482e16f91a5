"""Measures what the preload library adds to a copy below 1 MiB: the hooked cudaMemcpyAsync and the real one in turns.

    python benches/gpu/preload.py [--pairs 1000] [--cudart FILE] [--library FILE] [--out DIR]

preload.c is compiled with $CC (cc) and run by `glake run --multi-path`, or with LD_PRELOAD=FILE where --library names one. 4 KiB to 512 KiB
of pinned memory, to and from memory of cudaMalloc; the time of the call alone, and with the wait for its stream. The bar is on the
difference of the medians. Writes DIR/preload.jsonl. Ends with 1 if a bar was missed.
"""
import glob, os, subprocess, sys, tempfile

import launch

BAR_US = 0.5


def cudart():
    """libcudart of this Python's packages, or else the system's."""
    for folder in sys.path:
        found = sorted(glob.glob(os.path.join(folder, "nvidia", "*", "lib", "libcudart.so.*")))
        if found:
            return found[-1]
    found = sorted(glob.glob("/usr/local/cuda*/lib64/libcudart.so.*"))
    return found[-1] if found else "libcudart.so"


def main():
    p = launch.Parser(__doc__)
    p.add_argument("--pairs", type=int, default=1000)
    p.add_argument("--cudart", help="libcudart, if not that of Python's packages or of /usr/local/cuda")
    p.add_argument("--library", help="libglake_preload.so, without `glake run`; GLAKE_LIBRARY then names libgmlake.so")
    a = p.parse_args()
    if a.cudart is None:
        launch.needs_gpus("preload.py")
    log, missed = launch.Log(a.out, "preload.jsonl", launch.Clock(float("inf"))), 0
    with tempfile.TemporaryDirectory() as folder:
        program = os.path.join(folder, "preload")
        subprocess.run([os.environ.get("CC", "cc"), "-std=gnu11", "-O2", "-Wall", "-Wextra", str(launch.HERE / "preload.c"), "-o", program, "-ldl"], check=True)
        prefix = [os.environ.get("GLAKE", "glake"), "run", "--multi-path", "--"]
        if a.library:
            prefix = ["env", f"LD_PRELOAD={a.library}", "GLAKE_MULTI_PATH=1"]
        rows, error = launch.call([*prefix, program, a.cudart or cudart(), str(a.pairs)], None, 300)
    for row in rows:
        added = row["hooked_us"] - row["real_us"]
        good = added <= BAR_US
        missed += not good
        log.add({**row, "added_us": round(added, 3), "bar_us": BAR_US},
                f"{'ok     ' if good else 'MISSED '} {row['direction']} {row['bytes'] >> 10:4} KiB {'with its wait' if row['synced'] else 'the call alone'}: real {row['real_us']:.2f} us, "
                f"hooked {row['hooked_us']:.2f}: {added:+.2f} (at most {BAR_US}; of pairs {row['difference_us']:+.2f})")
    if error:
        log.say(f"FAILED  {error}")
    print(f"preload: {len(rows)} figures, {missed} bars missed", flush=True)
    sys.exit(1 if missed or error else 0)


if __name__ == "__main__":
    main()

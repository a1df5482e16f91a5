"""Runs one training or inference workload on a GPU under one allocator and prints one JSON line.

    python harness.py --alloc native|expandable|glake|glake-pluggable|glake-wait --workload NAME [--module FILE.py]
    torchrun --nproc-per-node 4 harness.py --alloc ... --workload fsdp_llama_full     (names that begin with fsdp_)

It needs torch and transformers, peft or torchvision for the workloads that use them. `glake` is `import glake;
glake.enable()` before the first CUDA call; `glake-pluggable` asks for that backend; `glake-wait` sets `borrow = wait`.
Figures are torch's own counters, read through torch.cuda.memory_stats(), whatever the allocator: an allocator under which
they raise has failed. Weights are random: nothing is downloaded.

Fields: active_peak, reserved_peak, requested_peak (torch's counters) and taken_peak (what mem_get_info shows taken since the
context stood, sampled) in bytes; utilization = requested_peak / taken_peak; step_ms (median); steady_s (all steps after two, of each job);
losses (a checksum: equal between allocators on one GPU up to kernel non-determinism); oom if it ran out of memory;
window_s and window_steps where jobs run side by side: the wall time in which all of them ran, and their steps in it.
Under glake also: backend, completion_lags and completion_lag_ms_p50, _p95, _max (how far the GPU was behind the host when memory was
asked for), gpu_wait_ms (GPU time in the waits of borrow = wait), stitches, alias_reuses, extent_maps, stream_waits.
"""
import argparse, gzip, importlib.util, json, os, pathlib, random, sys, threading, time, warnings

GLAKE = {
    "glake": {},
    "glake-pluggable": {"backend": "pluggable"},
    "glake-wait": {"config": {"pool": {"borrow": "wait"}}},
}


def glake_figures(stats):
    """Our own figures out of the "glake." keys; those that this build lacks are left out."""
    ours = {key.removeprefix("glake."): value for key, value in stats.items() if key.startswith("glake.")}
    counts = ["completion_lags", "stitches", "alias_reuses", "extent_maps", "stream_waits"]
    times = ["completion_lag_us_p50", "completion_lag_us_p95", "completion_lag_us_max", "gpu_wait_us"]
    figures = {name: ours[name] for name in counts if name in ours}
    figures.update({name.replace("_us", "_ms"): round(ours[name] / 1e3, 3) for name in times if name in ours})
    return figures


def write_trace(torch, path, rank, workload, active, reserved):
    rows, live, streams, nid = [], {}, {}, 0
    trace = torch.cuda.memory._snapshot()["device_traces"][rank]
    start = trace[0]["time_us"]
    for e in trace:
        t, addr, what = e["time_us"] - start, e["addr"], e["action"]
        if what == "alloc":
            live[addr] = nid
            rows.append(f"a {nid} {e['size']} {streams.setdefault(e['stream'], len(streams))} {t}\n")
            nid += 1
        elif what == "free_requested" and addr in live:
            rows.append(f"r {live[addr]} {t}\n")
        elif what == "free_completed" and addr in live:
            rows.append(f"f {live.pop(addr)} {t}\n")
    with gzip.open(path, "wt") as f:
        f.write('# trace v1: "a id bytes stream t_us" alloc | "r id t_us" free requested | "f id t_us" free completed\n')
        f.write(f"# workload {workload}; torch {torch.__version__}; {torch.cuda.get_device_name()}\n")
        f.write(f"# native caching allocator on this run: active_peak {active} reserved_peak {reserved}\n")
        f.writelines(rows)


def arguments():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--alloc", choices=["native", "expandable", *GLAKE], required=True)
    p.add_argument("--workload", required=True)
    p.add_argument("--trace", help="write the allocator trace of a native run here")
    p.add_argument("--fraction", type=float, help="torch.cuda.set_per_process_memory_fraction")
    p.add_argument("--batch", type=int, help="batch size, for the workloads that take one (opt13_*)")
    p.add_argument("--steps", type=int, help="only the first steps, for the workloads that take it (opt13_*, gpt2_full, fsdp_*, graphs)")
    p.add_argument("--scale", type=float, help="size of the graphs, of the workload that takes it (graphs)")
    p.add_argument("--module", default=str(pathlib.Path(__file__).with_name("workloads.py")))
    a = p.parse_args()
    if a.trace and a.alloc != "native":
        p.error("--trace: traces are recorded from torch's own allocator (--alloc native)")
    return a


def main():
    a = arguments()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore")
    if a.alloc == "expandable":
        os.environ["PYTORCH_ALLOC_CONF"] = os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    begin = time.time()
    import torch
    glake = None
    if a.alloc in GLAKE:
        import glake
        glake.enable(**GLAKE[a.alloc])
    rank = int(os.environ.get("LOCAL_RANK", 0))
    torch.cuda.set_device(rank)
    random.seed(0)
    torch.manual_seed(0)
    if a.trace and rank == 0:
        torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=4_000_000)

    spec = importlib.util.spec_from_file_location("workloads", a.module)
    workloads = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(workloads)
    workloads.BATCH = a.batch or workloads.BATCH
    workloads.STEPS = a.steps
    if a.scale:
        workloads.SCALE = a.scale
    if not hasattr(workloads, a.workload):
        sys.exit(f"harness: no workload {a.workload!r} in {a.module}")
    torch.ones(1, device="cuda").add_(1)
    torch.cuda.synchronize()
    if a.fraction:
        torch.cuda.set_per_process_memory_fraction(a.fraction, rank)

    base = lowest = torch.cuda.mem_get_info(rank)[0]
    done = threading.Event()

    def sample():
        nonlocal lowest
        while not done.wait(0.004):
            lowest = min(lowest, torch.cuda.mem_get_info(rank)[0])

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    t0, oom = time.time(), None
    try:
        steps, losses = getattr(workloads, a.workload)()
        torch.cuda.synchronize()
    except RuntimeError as e:  # torch.OutOfMemoryError is one; the plain ABI can raise no other class
        if not isinstance(e, torch.OutOfMemoryError) and not str(e).startswith("CUDA out of memory."):
            raise
        steps, losses, oom = [0.0], [], str(e).splitlines()[0][:200]
    wall = time.time() - t0
    done.set()
    sampler.join()
    lowest = min(lowest, torch.cuda.mem_get_info(rank)[0])

    s = torch.cuda.memory_stats()
    active, reserved, requested = (s[f"{name}_bytes.all.peak"] for name in ("active", "reserved", "requested"))
    if rank == 0:
        row = dict(
            workload=a.workload, alloc=a.alloc, active_peak=active, reserved_peak=reserved, requested_peak=requested,
            taken_peak=base - lowest, utilization=round(requested / max(base - lowest, 1), 4), oom=oom,
            allocations=s["allocation.all.allocated"], retries=s.get("num_alloc_retries"),
            step_ms=round(sorted(steps)[len(steps) // 2] * 1e3, 1), steady_s=round(sum(steps[2:]), 3),
            total_s=round(sum(steps), 2), wall_s=round(wall, 1), startup_s=round(t0 - begin, 1),
            losses=[round(x, 3) for x in losses], device=torch.cuda.get_device_name(), torch=torch.__version__,
        )
        if a.batch:
            row["batch"] = a.batch
        if a.scale:
            row["scale"] = a.scale
        row.update(getattr(workloads, "FIGURES", {}))
        if glake:
            row.update(backend=glake.backend(), **glake_figures({**s, **glake.memory_stats()}))
        print(json.dumps(row), flush=True)
        if a.trace:
            write_trace(torch, a.trace, rank, a.workload, active, reserved)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

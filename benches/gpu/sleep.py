"""A whole vLLM engine leaves the GPU and comes back: `glake.shrink()` of an unchanged engine, beside vLLM's own sleep.

    python benches/gpu/sleep.py [--cycles 3] [--only glake,vllm] [--eager] [--out DIR]

It needs vLLM (measured with 0.23); the model has the shape of Llama 8B and random weights, nothing is downloaded. Each engine is a process of
its own that answers 128 prompts of 50 to 1,500 tokens, 128 tokens each: twice, then once after each return. All tokens are compared.
glake: the engine under `glake.enable()` without a sleep mode. `glake.shrink()` takes weights, KV cache and captured graphs off the GPU, with
every byte of them; `glake.refill()` brings all back to the same addresses.
vllm: native, with vLLM's sleep mode at level 1: weights are copied to the host, the KV cache is dropped.
The two move different amounts: read seconds beside GiB. The link is measured in glake's process by native copies of 1 GiB of pinned memory.
A run of one engine compares with the other's rows in the same DIR. Writes DIR/sleep.jsonl. Ends with 1 if a bar was missed.
"""
import argparse, json, statistics, sys

import launch, serving

GIB = 1 << 30
ENGINES = ["glake", "vllm"]
BAR = 0.9  # of the link


def engine(name, cycles, eager):
    """Runs one engine and prints its figures as a line of JSON."""
    one = serving.Engine("glake" if name == "glake" else "native", name == "vllm", eager)
    one.answer()
    one.answer()
    if name == "vllm":
        for _ in range(cycles):
            one.cycle(lambda: one.llm.sleep(level=1), one.llm.wake_up)
    else:
        import glake
        import shrink
        import torch

        out, back = shrink.links(repeat=3)
        torch.cuda.empty_cache()
        moved = [one.cycle(glake.shrink, glake.refill) for _ in range(cycles)]
        for cycle, said in zip(one.figures["sleeps"], moved):
            cycle.update(copied_gib=said["copied"] / GIB, resident_gib=said["resident"] / GIB)
        one.figures.update(link_out=out, link_in=back)
    print(json.dumps({"engine": name, **one.figures}), flush=True)


def bars(rows):
    """Returns rows with bars, from the last row of each engine."""
    last = {row["engine"]: row for row in rows if "engine" in row and "error" not in row}
    def bar(what, value, bar=None, most=False, **more):
        return {"what": what, "value": value, "bar": bar, "most": most, **more}
    for name, row in last.items():
        first, later = row["sleeps"][0], row["sleeps"][1:] or row["sleeps"]
        out, back = (statistics.median(one[key] for one in later) for key in ("sleep_s", "wake_s"))
        yield bar(f"{name}: first time out, s", first["sleep_s"], back=first["wake_s"])
        yield bar(f"{name}: out, s", out, freed_gib=later[-1]["freed_gib"])
        yield bar(f"{name}: back, s", back)
        if name == "glake":
            copied = later[-1]["copied_gib"] * GIB
            yield bar("glake: out, of the link", copied / out / 1e9 / row["link_out"], BAR, copied_gib=copied / GIB, resident_gib=later[-1]["resident_gib"])
            yield bar("glake: back, of the link", copied / back / 1e9 / row["link_in"], BAR)
        yield bar(f"{name}: different answers", len(set(row["digests"])) - 1, 0, most=True, answers=len(row["digests"]))
    if len(last) == len(ENGINES):
        digests = {digest for row in last.values() for digest in row["digests"]}
        yield bar("both: different answers", len(digests) - 1, 0, most=True)
        freed = [last[name]["sleeps"][-1]["freed_gib"] for name in ENGINES]
        yield bar("freed by glake.shrink(), of what vLLM's sleep frees", freed[0] / max(freed[1], 0.1), 0.99)


def main():
    p = launch.Parser(__doc__, ENGINES)
    p.add_argument("--cycles", type=int, default=3, help="how often an engine leaves and comes back")
    p.add_argument("--eager", action="store_true", help="without CUDA graphs")
    p.add_argument("--engine-limit", type=float, default=230, help="seconds an engine")
    p.add_argument("--child", choices=ENGINES, help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.cycles < 1:
        p.error("--cycles: at least one")
    if a.child:
        return engine(a.child, a.cycles, a.eager)
    launch.needs_gpus("sleep.py")
    serving.needs_vllm("sleep.py")
    log, missed = launch.Log(a.out, "sleep.jsonl", launch.Clock(float("inf"))), 0
    for name in a.only:
        row = {"engine": name, **serving.run(__file__, ["--child", name, "--cycles", str(a.cycles), *["--eager"] * a.eager], a.engine_limit)}
        missed += "error" in row
        log.add(row, f"{name}: " + (f"FAILED {row['error']}" if "error" in row else f"up after {row['start_s']} s, tokens/s {row['speeds']}"))
    found = list(bars([row for _, rows in launch.runs(log.path) for row in rows]))
    missed += len(launch.told(log, "engines", found))
    print(f"sleep: {len(found)} figures in {log.clock.spent():.0f} s, {missed} missed", flush=True)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()

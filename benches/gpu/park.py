"""Measures the cost of a safe point, and parks a busy program: how fast its memory leaves, and whether its tokens change.

    python benches/gpu/park.py [--only call,busy] [--parks 60] [--streams 32] [--out DIR]

call: nanoseconds of a safe point inside a use where nobody waits, in C (compiled with cc, the library's own function) and in Python.
busy: a transformers Llama with random weights (bfloat16, sealed, their host copies retained) generates for --streams sequences at once,
greedily, with a static cache, in a use with a safe point after each token. Attention is eager: with other kernels two undisturbed runs of
torch alone differ. It is shrunk and refilled --parks times meanwhile, and its tokens are compared with those of a run that nobody
disturbed. `want` is the time from the call of shrink until all memory is gone: the rest of a step, the copy of the cache (the weights have
their copy), and giving the memory back. Beside it: the same shrink while nothing runs, a step, and what the copied bytes take on the link,
measured in the same process.
Writes DIR/park.jsonl. Ends with 1 if a bar was missed.
"""
import argparse, ctypes, pathlib, statistics, subprocess, sys, tempfile, threading, time

import launch
import shrink
from shrink import GIB, report

CALLS = """
#include <stdint.h>
#include <time.h>
double nanoseconds(int32_t (*call)(uint64_t), uint64_t use, long count) {
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (long i = 0; i < count; i++) call(use);
    clock_gettime(CLOCK_MONOTONIC, &end);
    return ((end.tv_sec - begin.tv_sec) * 1e9 + (end.tv_nsec - begin.tv_nsec)) / count;
}
"""


def call(_):
    glake = shrink.glake_with()
    import torch
    torch.ones(1, device="cuda")
    with tempfile.TemporaryDirectory() as folder:
        source, library = pathlib.Path(folder, "calls.c"), pathlib.Path(folder, "calls.so")
        source.write_text(CALLS)
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
        calls = ctypes.CDLL(str(library))
    calls.nanoseconds.restype = ctypes.c_double
    ours = ctypes.CDLL(str(glake.library_path()))
    use = ctypes.c_uint64()
    if ours.glake_use_begin(None, ctypes.c_size_t(0), 0, ctypes.c_int64(-1), ctypes.byref(use)):
        raise RuntimeError("no use could begin")
    in_c = min(calls.nanoseconds(ours.glake_safepoint, use, ctypes.c_long(5_000_000)) for _ in range(5))
    ours.glake_use_end(use)
    report("a safe point in C, ns", in_c, 20, most=True)
    with glake.active():
        best = float("inf")
        for _ in range(5):
            begin = time.perf_counter()
            for _ in range(200_000):
                glake.safepoint()
            best = min(best, (time.perf_counter() - begin) / 200_000)
    report("a safe point in Python, ns", best * 1e9, 1000, most=True)


def llama(streams):
    import torch, transformers
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=16,
        max_position_embeddings=2048, attn_implementation="eager")
    torch.manual_seed(0)
    with torch.device("cuda"):
        return transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()


def busy(a):
    glake = shrink.glake_with()
    import torch
    with glake.region("weights", policy="sealed", host_copy="retain"):
        model = llama(a.streams)
    glake.seal("weights")
    torch.manual_seed(1)
    prompt = torch.randint(0, 32000, (a.streams, 384), device="cuda")
    steps = []

    class Criterion(glake.generation.SafePoint):
        def __call__(self, input_ids, scores, **more):
            steps.append(time.perf_counter())
            return super().__call__(input_ids, scores, **more)

    def tokens():
        with glake.active(), torch.no_grad():
            return model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=128, min_new_tokens=128, do_sample=False, pad_token_id=0,
                cache_implementation="static", disable_compile=True, stopping_criteria=[Criterion()]).cpu()

    tokens()
    alone = tokens()
    if not torch.equal(alone, tokens()):
        raise RuntimeError("two undisturbed runs differ: greedy generation is not deterministic here")
    step = statistics.median(after - before for before, after in zip(steps[-100:], steps[-99:]))
    link_out, link_in = shrink.links()
    torch.cuda.empty_cache()
    glake.shrink()
    glake.refill()
    idle = []
    for _ in range(5):
        took, _ = shrink.seconds(glake.shrink)
        idle.append(took)
        glake.refill()
    runs, over = [], threading.Event()

    def generate():
        torch.cuda.set_device(0)
        while not over.is_set():
            runs.append(tokens())

    worker = threading.Thread(target=generate)
    worker.start()
    wants, backs, copied, parked = [], [], [], 0
    try:
        while len(wants) < a.parks:
            time.sleep(0.35)
            took, gone = shrink.seconds(lambda: glake.shrink(timeout=60))
            was = glake.gate()["parked"]
            back, answer = shrink.seconds(glake.refill)
            if was:
                wants.append(took)
                backs.append(back)
                copied.append(gone["copied"])
                parked += was
    finally:
        over.set()
        worker.join()
    wrong = sum(not torch.equal(alone, run) for run in runs)
    report("runs whose tokens differ", wrong, 0, most=True, runs=len(runs), parks=parked, tokens=alone[:, 384:].numel() * len(runs))
    wants.sort()
    p95 = wants[int(len(wants) * 0.95) - 1]
    out = statistics.median(copied) / link_out / 1e9
    report("want to gone, s: p95 over the step and the copied bytes on the link", p95 / (step + out), p95=p95, median=statistics.median(wants), most_s=max(wants),
           step=step, on_link=out, idle_shrink=statistics.median(idle), copied_gib=statistics.median(copied) / GIB)
    report("back, s", statistics.median(backs), link=link_in, slowest=max(backs))


SCENARIOS = {"call": call, "busy": busy}


def main():
    p = launch.Parser(__doc__, SCENARIOS, default="call,busy")
    p.add_argument("--parks", type=int, default=60)
    p.add_argument("--streams", type=int, default=32, help="sequences that are generated at once")
    p.add_argument("--time-limit", type=float, default=240, help="seconds a scenario")
    p.add_argument("--child", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.child:
        SCENARIOS[a.child](a)
        return
    arguments = ["--parks", a.parks, "--streams", a.streams]
    launch.scenarios(__file__, a.only, arguments, a.out, a.time_limit)


if __name__ == "__main__":
    main()

"""Frozen weights that stream beside weights that stay: seconds a step, memory, bytes.

    python benches/gpu/streaming.py [--only PART,...] [--tokens 8192,16384] [--steps 12] [--out FILE]
    python benches/gpu/streaming.py --device cpu --tokens 64 --steps 3        # tiny, over simulated memory: only that it runs

Parts, each in a process of its own; a Llama of random weights in bfloat16, peft's LoRA of rank 16 on all projections, layers recomputed, the
loss 1,024 tokens at a time, AdamW. Parts of a size run in this order and then in the reverse, and the lesser time of two counts:

    resident       8B, all weights on the GPU, glake.offload at all of its memory
    streamed       8B, all blocks stream, over the GPU's own link
    streamed-multi the same over every link (glake.multi_path())
    fsdp           8B with FSDP2's CPUOffloadPolicy on one rank, layers recomputed
    large          70B, filled by load= with random values, what fits kept: --budget

Bars: streamed at most 1.03 (16,384 tokens) and 1.06 (8,192) of resident; GPU memory less by .85 of the blocks' bytes at least; bytes in at
most 1.01 of streamed bytes x uses; none out; fsdp at least 1.3 x slower; large at least .93 of the tokens/s of resident scaled by FLOP, and
host memory at most the streamed bytes + a block + 4 GiB. Ends with 1 if a bar was missed, and with 0 without a GPU.
"""

import argparse, importlib.util, json, os, pathlib, statistics, subprocess, sys, threading, time

HERE = pathlib.Path(__file__).resolve()
ROOT = HERE.parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(HERE.parent)]
GIB = 1 << 30
PARTS = ["resident", "streamed", "streamed-multi", "fsdp", "large"]
# Parameters of a token's products: of blocks and head.
WEIGHTS = {"8b": 8.03e9 - 0.53e9, "70b": 70.6e9 - 1.05e9, "tiny": 1e6}


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    p.add_argument("--only", default=",".join(PARTS))
    p.add_argument("--tokens", default="16384,8192")
    p.add_argument("--steps", type=int, default=12, help="the first six do not count")
    p.add_argument("--budget", default="130GiB", help="of large")
    p.add_argument("--once", action="store_true", help="do not run the parts again in the reverse order")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    p.add_argument("--out", type=pathlib.Path, help="one JSON line a part")
    p.add_argument("--one", help=argparse.SUPPRESS)
    a = p.parse_args()
    unknown = set(a.only.split(",")) - set(PARTS)
    if unknown:
        p.error(f"--only: there is no {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return a


class Most:
    """The most GPU memory, and the most memory of this process on the host, looked at every 50 ms."""

    def __init__(self, device):
        from sharing.meter import meter

        self.meter = meter(device) if device == "cuda" else None
        self.before = self.meter.used() if self.meter else 0
        self.gpu = self.host = 0
        self.is_over = False
        threading.Thread(target=self.look, daemon=True).start()

    def look(self):
        while not self.is_over:
            self.gpu = max(self.gpu, self.meter.used() - self.before if self.meter else 0)
            status = pathlib.Path("/proc/self/status").read_text()
            self.host = max(self.host, int(status.split("VmRSS:")[1].split()[0]) << 10)
            time.sleep(0.05)


def one(a):
    """Runs a part and prints its row."""
    most = Most(a.device)
    import torch
    import glake
    import finetune_70b as example

    tokens, part = int(a.tokens), a.one
    if a.device == "cuda" and part != "fsdp":
        glake.enable()
    if part == "streamed-multi":
        glake.multi_path()
    size = "tiny" if a.device == "cpu" else "70b" if part == "large" else "8b"
    chosen = argparse.Namespace(size=size, model=None, tokens=tokens)
    config = example.shape(chosen)
    tuned = example.Tuned(config)
    fill = example.Filler(tuned, config, None)
    handle, begun = None, time.perf_counter()
    if part == "large":
        handle = glake.offload(tuned, budget=a.budget, load=fill) if a.device == "cuda" else laid(tuned, fill)
    elif part in ("streamed", "streamed-multi"):
        handle = laid(tuned, fill)
    elif part == "fsdp":
        example.resident(tuned, fill)
        sharded(torch, tuned)
    else:
        example.resident(tuned, fill)
        tuned.to(a.device)
        handle = glake.offload(tuned) if a.device == "cuda" else None
    placed = time.perf_counter() - begun
    optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=1e-4)
    torch.manual_seed(1)
    times, losses, moved = [], [], []
    for _ in range(a.steps):
        ids = torch.randint(config.vocab_size, (1, tokens)).to(a.device)
        begin = time.perf_counter()
        loss = tuned(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        times.append(time.perf_counter() - begin)
        told = handle.told()["weights"] if handle is not None else None
        moved.append(told or {})
    most.is_over = True
    steady = times[min(6, len(times) - 1) :]
    row = {"part": part, "size": size, "tokens": tokens, "step_s": statistics.median(steady), "times": times, "losses": losses, "placed_s": placed}
    row |= {"gpu_bytes": most.gpu, "host_bytes": most.host, "weights": moved[-1]}
    if len(moved) > 1 and moved[-1]:
        row["step_bytes_in"] = moved[-1]["bytes_in"] - moved[-2]["bytes_in"]
    if handle is not None and a.device == "cuda":
        row["exposed_us"] = handle.told()["real_exposed_us"]
    print(json.dumps(row), flush=True)


def laid(tuned, fill):
    """Streams all blocks, whatever the budget has room for."""
    import torch
    from glake.offload._budget import Offloaded
    from glake.offload._memory import Cuda

    if torch.cuda.is_available():
        memory, least = Cuda(), 256 << 10
    else:
        sys.path.append(str(ROOT / "ffi/python/tests"))
        from test_activations import Laid

        memory, least = Laid(), 1024
    handle = Offloaded(tuned, None, "fit", least, memory)
    handle._bytes = 1 << 40 if not torch.cuda.is_available() else None
    handle.place(tuned, load=fill, step=1 << 50)
    return handle


def sharded(torch, tuned):
    """FSDP2 on one rank, with parameters on the host."""
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29555", RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    policy = {"offload_policy": CPUOffloadPolicy(pin_memory=torch.cuda.is_available())}
    for layer in tuned.model.get_base_model().model.layers:
        fully_shard(layer, **policy)
    fully_shard(tuned, **policy)
    # Buffers are no part of it.
    for module in tuned.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and torch.cuda.is_available():
                module._buffers[name] = buffer.cuda()


def run(a, part, tokens):
    command = [sys.executable, str(HERE), "--one", part, "--tokens", str(tokens), "--steps", str(a.steps), "--budget", a.budget, "--device", a.device]
    environment = dict(os.environ)
    if a.device == "cpu":
        environment["GLAKE_DEVICE"] = "sim"
    if not importlib.util.find_spec("glake"):
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "ffi/python"), environment.get("PYTHONPATH", "")])
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    rows = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not rows:
        print(f"{part}, {tokens} tokens: FAILED (exit code {done.returncode})", flush=True)
        return None
    row = json.loads(rows[-1])
    said = row["weights"]
    streamed = f", streamed {said['streamed_bytes'] / GIB:.1f} GiB, in {row.get('step_bytes_in', 0) / GIB:.1f} a step, out {said['bytes_out'] / GIB:.1f}" if said else ""
    print(
        f"{part:14}  {tokens:6} tokens  {row['step_s']:7.3f} s  GPU {row['gpu_bytes'] / GIB:6.1f} GiB  host {row['host_bytes'] / GIB:6.1f} GiB{streamed}",
        flush=True,
    )
    if a.out:
        with a.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
    return row


def main():
    a = arguments()
    if a.one:
        one(a)
        return 0
    if a.device == "cuda" and not pathlib.Path("/dev/nvidiactl").exists():
        print("streaming.py: there is no NVIDIA GPU here: passed over (--device cpu only shows that it runs)")
        return 0
    only, best, failed = a.only.split(","), {}, 0
    for tokens in map(int, a.tokens.split(",")):
        order = [part for part in PARTS if part in only and (part != "large" or tokens <= 8192)]
        for part in order if a.once else order + [part for part in reversed(order) if part != "large"]:
            row = run(a, part, tokens)
            failed += row is None
            known = best.get((part, tokens))
            if row is not None and (known is None or row["step_s"] < known["step_s"]):
                best[part, tokens] = row

    def bar(name, value, most, is_least=False):
        nonlocal failed
        is_met = value >= most if is_least else value <= most
        failed += not is_met
        print(f"{'ok    ' if is_met else 'MISSED'}  {name}: {value:.3f}, at {'least' if is_least else 'most'} {most}")

    for (part, tokens), row in best.items():
        resident, said = best.get(("resident", tokens)), row["weights"]
        if part in ("streamed", "streamed-multi"):
            uses = row["step_bytes_in"] / said["streamed_bytes"] / 2
            bar(f"{part}, {tokens} tokens: bytes in of streamed bytes x uses", uses, 1.01)
            bar(f"{part}, {tokens} tokens: bytes out", said["bytes_out"], 0)
            if resident:
                bar(f"{part}, {tokens} tokens: step of resident", row["step_s"] / resident["step_s"], 1.03 if tokens >= 16384 else 1.06)
                less = (resident["gpu_bytes"] - row["gpu_bytes"]) / said["streamed_bytes"]
                bar(f"{part}, {tokens} tokens: GPU memory less, of the blocks' bytes", less, 0.85, True)
                bar(f"{part}, {tokens} tokens: losses that differ", sum(x != y for x, y in zip(row["losses"], resident["losses"])), 0)
            if ("fsdp", tokens) in best:
                bar(f"{part}, {tokens} tokens: speed of fsdp's", best["fsdp", tokens]["step_s"] / row["step_s"], 1.3, True)
        if part == "large" and resident:
            speed = lambda of: of["tokens"] * WEIGHTS[of["size"]] / of["step_s"]
            bar(f"large, {tokens} tokens: FLOP/s of resident's", speed(row) / speed(resident), 0.93, True)
            block = (said["kept_bytes"] + said["streamed_bytes"]) / max(said["kept_blocks"] + said["streamed_blocks"], 1)
            bar(f"large, {tokens} tokens: host GiB above streamed bytes and a block", (row["host_bytes"] - said["streamed_bytes"] - block) / GIB, 4)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())

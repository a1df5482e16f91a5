"""Activations of a fine-tuning step that are offloaded, beside keeping, checkpointing and what others have.

    python benches/gpu/offload.py [--only PART,...] [--layers N] [--tokens N] [--steps N] [--out DIR]
    python benches/gpu/offload.py --device cpu --layers 2 --hidden 64 --tokens 64 --only keep,checkpoint,blind --blind-bytes 0.01

Parts, each in a process of its own; a Llama of random weights in bfloat16 with peft's LoRA on all projections, one loss
in chunks, AdamW:

    links         bare copies of pinned memory, each way: over the GPU's own link, and over all links at once where there are several GPUs
    keep          nothing leaves; also counts, by hooks of its own, the unique bytes that autograd saves
    checkpoint    each layer is recomputed
    save-on-cpu   torch's save_on_cpu(pin_memory=True)
    hf-offload    each layer is recomputed, with transformers' offload=True
    trl           TRL's OffloadActivations; trl-inputs: each layer is recomputed too
    torchtune     torchtune's OffloadActivations
    offload       glake.offload.activations over the GPU's own link, with all the memory there is; multi-path: over every link
    inputs        glake.offload(model, preset="memory") at the least memory of trl-inputs and hf-offload, each layer recomputed too;
                  without these two at that of checkpoint, from 131,072 tokens on at 0.74 of it
    memory        glake.offload(model, preset="memory") at 1.04 of the least memory of save-on-cpu, trl and torchtune;
                  memory-multi-path: over every link
    hybrid        glake.offload(model, preset="hybrid") at 1.02 of checkpoint's memory; hybrid-multi-path over every link
    blind         nothing leaves, beside blind copies of as many bytes as hybrid moved out and in; blind-multi-path over every link,
                  of as many as hybrid-multi-path
    digest        six steps each of memory, hybrid and inputs: a digest of each saved tensor beside that of what came back of it
    ddp-checkpoint, ddp-hybrid    the same on two GPUs at once, a rank of DDP each, over its own link
    fit           GPT-2 small, bound by the host, under a budget in which all fits, beside none, in pairs of steps
    budget        200 steps of varying length under a budget, beside 80 each of five fractions of the layers set by hand
    exact         tiny models for 50 steps with and without: losses and gradients to the bit; needs a GPU
    exact-ranks   the same of DDP and FSDP2 on two GPUs
    calls         microseconds of a pack that keeps, and of one that offloads, on the host

Each part has a step before those that count, with layers recomputed by torch and no hooks, after which the allocator's free memory
goes back: what torch's own cold start costs is no part of "first step". `keep` has its cold first step there, told without a bar.

Of 131,072 tokens: --tokens 131072 --length 131072 --steps 3 --layers 24, a part takes four steps of 38 s on an H200; checkpoint has 80 GiB
on the GPU, more than one of 80 GB has, and 1 GiB a layer goes to the host.

A part takes what it needs from those before it in the list, or in --beside's rows: the bytes of blind copies, and budgets. Rates have a bar
where links stands beside them. What a machine cannot run is said and passed over. Host memory is touched before the first part, and again for
a moment before each. Memory is the GPU's, of all processes, every 50 ms, above what was used before. Writes DIR/offload.jsonl; ends with 1 if
a bar was missed.
"""

import argparse, pathlib, sys

import launch
from offloading import bare, bars, baselines, budget, digest, exact, host, steps

PARTS = [
    "links", "keep", "checkpoint", "save-on-cpu", "hf-offload", "trl", "trl-inputs", "torchtune", "offload", "inputs", "multi-path",
    "memory", "memory-multi-path", "hybrid", "hybrid-multi-path", "blind", "blind-multi-path", "digest", "ddp-checkpoint", "ddp-hybrid", "fit",
    "budget", "exact", "exact-ranks", "calls",
]
# Ours beside those that offload all that is saved.
MEMORY, WHOLE = ("memory", "memory-multi-path"), ("save-on-cpu", "trl", "torchtune")
RANKED = ("ddp-checkpoint", "ddp-hybrid", "exact-ranks")
CHILDREN = {
    "links": bare.links, "digest": digest.digest, "exact": exact.exact, "exact-ranks": exact.ranks, "calls": exact.calls, "fit": steps.fit,
    "budget": budget.varying,
}
# Host memory that is touched, and seconds that this may take: before the first part, and before each.
TOUCHED, TOUCHED_AGAIN = (96 * host.GIB, 20), (32 * host.GIB, 3)


def arguments():
    p = launch.Parser(__doc__, PARTS)
    p.add_argument("--layers", type=int, default=32)
    p.add_argument("--hidden", type=int, default=4096)
    p.add_argument("--tokens", type=int, default=8192, help="in sequences of --length")
    p.add_argument("--length", type=int, default=4096)
    p.add_argument("--steps", type=int, default=12, help="the first six are no steady ones; of fewer the first is none")
    p.add_argument("--host-memory", type=float, help="GiB that glake.offload pins before the first step; else steps pin what they need")
    p.add_argument("--budget", type=float, help="GiB, for parts that have one; else of what was measured before")
    p.add_argument("--blind-bytes", type=float, nargs="+", help="GiB out, and GiB in if that differs; else what hybrid moved")
    p.add_argument("--beside", type=pathlib.Path, help="rows of an earlier call of the same shape on the same machine: they count as this call's")
    p.add_argument("--device", default="cuda")
    p.add_argument("--time-limit", type=float, default=540)
    p.add_argument("--case", default="", help="of exact, those with this in their name")
    p.add_argument("--one", help=argparse.SUPPRESS)
    p.add_argument("--fraction", type=float, help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.beside and not a.beside.is_file():
        p.error(f"--beside: there is no file {a.beside}")
    a.budget = None if a.budget is None else int(a.budget * (1 << 30))
    a.blind_bytes = [int(value * (1 << 30)) for value in a.blind_bytes or []]
    return a


class Runs:
    """The parts, one after another, and what a part needs of those before it."""

    def __init__(self, a):
        self.a, self.clock, self.failed = a, launch.Clock(a.time_limit), 0
        self.log = launch.Log(a.out, "offload.jsonl", self.clock)
        self.before = launch.rows_of(a.beside.read_text()) if a.beside else []
        others = {(row["layers"], row["tokens"]) for row in self.before if "layers" in row} - {(a.layers, a.tokens)}
        if others:
            sys.exit(f"offload.py: {a.beside} has rows of (layers, tokens) {sorted(others)}: they are not beside {a.layers}, {a.tokens}")

    def part(self, name):
        """Runs it."""
        if name == "budget":
            for fraction in budget.FRACTIONS:
                self._run(name, "--fraction", fraction)
        missing = self._missing(name)
        if missing:
            self.log.add({"run": name, "skipped": missing}, f"{name}: SKIPPED: {missing}")
        else:
            self._run(name, *self._needs(name))

    def rows(self):
        """Returns the rows of successful parts; an earlier call's file also has rows of bars and of the machine."""
        done = [row for row in self.before + self.log.rows if "run" in row]
        return [row for row in done if "error" not in row and "skipped" not in row]

    def _least(self, *names):
        """The least memory of parts."""
        return min((row["most_bytes"] for row in self.rows() if row["run"] in names), default=0)

    def _least_of_inputs(self):
        """Returns the least memory of baselines that offload the inputs of recomputed layers, else the target for long sequences."""
        part = 0.74 if self.a.tokens >= 131072 else 1.0
        return self._least("trl-inputs", "hf-offload") or part * self._of("checkpoint").get("most_bytes", 0)

    def _of(self, name):
        """The last row of a part."""
        return next((row for row in reversed(self.rows()) if row["run"] == name), {})

    def _needs(self, name):
        """The options of a part that come from others' rows, in GiB."""
        gib = lambda size: size / (1 << 30)
        if name.startswith("blind"):
            of = self._of(name.replace("blind", "hybrid"))
            sizes = self.a.blind_bytes or [of[key] for key in ("step_bytes", "step_bytes_in") if key in of]
            # Rows from before bytes in were counted are of older plans.
            return ["--blind-bytes", *map(gib, sizes)] if self.a.blind_bytes or len(sizes) == 2 else []
        if name == "digest":
            # As hybrid's, and room for what takes digests.
            size = self.a.budget or int(1.02 * self._of("checkpoint").get("most_bytes", 0))
            return ["--budget", gib(size + (1 << 30))] if size else []
        if "hybrid" in name:
            size = self.a.budget or int(1.02 * self._of("ddp-checkpoint" if name in RANKED else "checkpoint").get("most_bytes", 0))
            return ["--budget", gib(size)] if size else []
        if name in ("inputs", *MEMORY):
            size = self.a.budget or int(self._least_of_inputs() if name == "inputs" else 1.04 * self._least(*WHOLE))
            return ["--budget", gib(size)] if size else []
        if name == "budget":
            # Half way between all that stays and all that leaves.
            peaks = [row["most_bytes"] for row in self.rows() if row["run"] == "budget" and row["most_bytes"] and "out_of_memory" not in row]
            size = self.a.budget or (min(peaks) + max(peaks)) // 2 if self.a.budget or peaks else 0
            return ["--budget", gib(size)] if size else []
        return []

    def _missing(self, name):
        if name.startswith("blind") and not self._needs(name):
            return f"how many bytes: --blind-bytes, or the part {name.replace('blind', 'hybrid')} before it"
        if name in RANKED and self.a.device == "cuda" and len(launch.gpus()) < 2:
            return "two ranks need two GPUs"
        if ("hybrid" in name or name == "digest") and not self._needs(name):
            return "under which budget: --budget, or the part of checkpointing before it on a GPU"
        if name in ("inputs", *MEMORY) and not self._needs(name):
            return "under which budget: --budget, or a part before it whose memory it is to have"
        if name == "budget" and not self._needs(name):
            return "under which budget: --budget, or a GPU on which the fractions ran"
        return None

    def _run(self, name, *more):
        a = self.a
        told = ["--layers", a.layers, "--hidden", a.hidden, "--tokens", a.tokens, "--length", a.length, "--steps", a.steps]
        told += [] if a.host_memory is None else ["--host-memory", a.host_memory]
        told += ["--case", a.case, "--device", a.device, "--time-limit", max(self.clock.left(), 1), *more]
        names = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if name.startswith("exact") else {}
        ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if name in RANKED else []
        if a.device == "cuda":
            host.touch(*TOUCHED_AGAIN)
        rows, error = launch.call([sys.executable, *ranks, __file__, "--one", name, *map(str, told)], None, self.clock.left(), names)
        for row in rows:
            said = f"SKIPPED: {row['skipped']}" if "skipped" in row else "  ".join(
                f"{key} {value:.4g}" for key, value in row.items() if isinstance(value, (int, float)))
            self.log.add(row, f"{name}: {said}")
        if error:
            self.failed += 1
            self.log.add({"run": name, "error": error}, f"{name}: FAILED: {error}")


def main():
    a = arguments()
    if a.one:
        try:
            return CHILDREN.get(a.one, steps.one)(a)
        except baselines.Skipped as error:
            return steps.said(a, error)
    if a.device == "cuda":
        launch.needs_gpus("offload.py")
    runs = Runs(a)
    if a.device == "cuda":
        runs.log.say(f"host memory touched: {host.touch(*TOUCHED) / host.GIB:.0f} GiB")
    for name in a.only:
        runs.part(name)
    found = [{"what": what, "value": value, "bar": bar, "most": most} for what, value, bar, most in bars.bars(runs.rows())]
    missed = runs.failed + len(launch.told(runs.log, "offload", found) or [])
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()

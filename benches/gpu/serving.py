"""vLLM under torch's own allocator and under glake, in turns: tokens a second, the same tokens, sleep and wake.

    python benches/gpu/serving.py [--rounds 2] [--sleep] [--eager] [--out DIR]

It needs vLLM (measured with 0.23). The model has the shape of Llama 8B and random weights: nothing is downloaded. Each engine is a process
of its own; 128 prompts of 50 to 1,500 tokens, 128 tokens each, three times. With --sleep the engine sleeps and wakes twice (its own
allocator in a torch.cuda.MemPool) and answers again each time. Writes DIR/serving.jsonl; exit code 1 where a bar is missed: the same
tokens everywhere, and at least .99 of native's speed. What a whole engine takes to leave under glake is sleep.py's.
"""
import argparse, hashlib, importlib.util, json, pathlib, random, statistics, sys, tempfile, time

import launch

BAR = 0.99
PROMPTS, TOKENS = 128, 128
# The engine in the process that asks, and no word but its errors.
QUIET = dict(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_USE_FLASHINFER_SAMPLER="0", VLLM_LOGGING_LEVEL="WARNING", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
MODEL = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
             num_attention_heads=32, num_key_value_heads=8, vocab_size=32000, max_position_embeddings=8192, rms_norm_eps=1e-5,
             hidden_act="silu", torch_dtype="bfloat16", bos_token_id=1, eos_token_id=2, tie_word_embeddings=False, rope_theta=10000.0)


def start(**options):
    """A vLLM engine in this process, with random weights."""
    import vllm.model_executor.models.registry as registry
    from vllm import LLM

    registry._run_in_subprocess = lambda fn: fn()  # models are looked at in this process: a second one would need as long again
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "config.json").write_text(json.dumps(MODEL))
        return LLM(model=folder, load_format="dummy", skip_tokenizer_init=True, gpu_memory_utilization=0.5, max_model_len=4096, seed=0,
                   disable_log_stats=True, **options)


class Engine:
    """An engine in this process, and what it answered."""

    def __init__(self, alloc, sleep, eager):
        if alloc == "glake":
            import glake

            glake.enable()
        from vllm import SamplingParams

        begin = time.time()
        self.llm = start(enforce_eager=eager, enable_sleep_mode=sleep, enable_prefix_caching=False)
        self.figures = dict(alloc=alloc, sleep=sleep, start_s=round(time.time() - begin, 1), speeds=[], digests=[], sleeps=[])
        draw = random.Random(0)
        self.prompts = [dict(prompt_token_ids=[draw.randrange(3, 32000) for _ in range(draw.randrange(50, 1500))]) for _ in range(PROMPTS)]
        self.sampling = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, detokenize=False)

    def answer(self):
        begin = time.time()
        outputs = self.llm.generate(self.prompts, self.sampling, use_tqdm=False)
        self.figures["speeds"].append(round(PROMPTS * TOKENS / (time.time() - begin)))
        self.figures["digests"].append(hashlib.sha256(str([one.outputs[0].token_ids for one in outputs]).encode()).hexdigest()[:10])

    def cycle(self, leave, come):
        """Out and back, timed with the GPU's work, then an answer."""
        import torch

        torch.cuda.synchronize()
        free, begin = torch.cuda.mem_get_info()[0], time.time()
        said = leave()
        torch.cuda.synchronize()
        out, freed = time.time() - begin, torch.cuda.mem_get_info()[0] - free
        begin = time.time()
        come()
        torch.cuda.synchronize()
        self.figures["sleeps"].append(dict(sleep_s=round(out, 3), freed_gib=round(freed / 2**30, 1), wake_s=round(time.time() - begin, 3)))
        self.answer()
        return said


def engine(alloc, sleep, eager):
    """Runs one engine and prints its figures as a line of JSON."""
    import torch

    one = Engine(alloc, sleep, eager)
    for _ in range(3):
        one.answer()
    for _ in range(2 if sleep else 0):
        one.cycle(lambda: one.llm.sleep(level=1), one.llm.wake_up)
    one.figures["free_gib"] = round(torch.cuda.mem_get_info()[0] / 2**30, 1)
    print(json.dumps(one.figures), flush=True)


def needs_vllm(script):
    if importlib.util.find_spec("vllm") is None:
        sys.exit(f"{script}: vLLM is not installed for {sys.executable}: pip install vllm==0.23.0")


def run(script, arguments, limit):
    """The figures of an engine in a process of its own, or why there are none."""
    rows, error = launch.call([sys.executable, str(script), *arguments], None, limit, QUIET)
    return rows[-1] if rows and not error else dict(error=error)


def summary(rows):
    """(lines of text, bars missed)."""
    good = [row for row in rows if "error" not in row]
    lines = [f"{row['alloc']:8} FAILED {row['error']}" for row in rows if "error" in row]
    missed = len(lines)
    for row in good:
        slept = "".join(f"  slept {one['sleep_s']} s, {one['freed_gib']} GiB freed, awake {one['wake_s']} s" for one in row["sleeps"])
        lines.append(f"{row['alloc']:8} up after {row['start_s']} s, tokens/s {row['speeds']}, digests {sorted(set(row['digests']))}{slept}")
    digests = {digest for row in good for digest in row["digests"]}
    # The first answer of an engine pays for what is made at first use.
    speeds = {alloc: [speed for row in good if row["alloc"] == alloc for speed in row["speeds"][1:]] for alloc in ("native", "glake")}
    if all(speeds.values()):
        ratio = statistics.median(speeds["glake"]) / statistics.median(speeds["native"])
        missed += ratio < BAR
        lines.append(f"speed, glake to native: {ratio:.3f} (bar {BAR}) {'ok' if ratio >= BAR else 'MISSED'}")
    missed += len(digests) != 1
    lines.append(f"tokens: {'the same everywhere' if len(digests) == 1 else f'MISSED: {len(digests)} digests'}")
    return lines, missed


def main():
    p = launch.Parser(__doc__)
    p.add_argument("--rounds", type=int, default=2, help="engines under each allocator")
    p.add_argument("--sleep", action="store_true", help="with vLLM's sleep mode")
    p.add_argument("--eager", action="store_true", help="without CUDA graphs")
    p.add_argument("--engine-limit", type=float, default=220, help="seconds an engine")
    p.add_argument("--engine", choices=["native", "glake"], help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.engine:
        return engine(a.engine, a.sleep, a.eager)
    launch.needs_gpus("serving.py")
    needs_vllm("serving.py")
    options = ["--sleep"] * a.sleep + ["--eager"] * a.eager
    log = launch.Log(a.out, "serving.jsonl", launch.Clock(float("inf")))
    for round in range(a.rounds):
        for alloc in ("native", "glake") if round % 2 == 0 else ("glake", "native"):
            row = {"alloc": alloc, **run(__file__, ["--engine", alloc, *options], a.engine_limit)}
            log.add(row, summary([row])[0][0])
    rows = log.rows
    lines, missed = summary(rows)
    print("\n".join(lines[len(rows):]))
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()

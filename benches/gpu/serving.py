"""vLLM under torch's own allocator and under glake, in turns: tokens a second, the same tokens, sleep and wake.

    python benches/gpu/serving.py [--rounds 2] [--sleep] [--eager] --out DIR

It needs vLLM (measured with 0.23). The model has the shape of Llama 8B and random weights: nothing is downloaded. Each engine is a process
of its own; 128 prompts of 50 to 1,500 tokens, 128 tokens each, three times. With --sleep the engine sleeps and wakes twice (its own
allocator in a torch.cuda.MemPool) and answers again each time. Writes DIR/serving.jsonl; exit code 1 where a bar is missed: the same
tokens everywhere, and at least .99 of native's speed.
"""
import argparse, hashlib, importlib.util, json, os, pathlib, random, statistics, subprocess, sys, tempfile, time

BAR = 0.99
PROMPTS, TOKENS = 128, 128
MODEL = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
             num_attention_heads=32, num_key_value_heads=8, vocab_size=32000, max_position_embeddings=8192, rms_norm_eps=1e-5,
             hidden_act="silu", torch_dtype="bfloat16", bos_token_id=1, eos_token_id=2, tie_word_embeddings=False, rope_theta=10000.0)


def engine(alloc, sleep, eager):
    """One engine; prints its figures as a line of JSON."""
    if alloc == "glake":
        import glake

        glake.enable()
    import torch
    import vllm.model_executor.models.registry as registry
    from vllm import LLM, SamplingParams

    registry._run_in_subprocess = lambda fn: fn()  # models are looked at in this process: a second one would need as long again
    begin = time.time()
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "config.json").write_text(json.dumps(MODEL))
        llm = LLM(model=folder, load_format="dummy", skip_tokenizer_init=True, enforce_eager=eager, gpu_memory_utilization=0.5,
                  max_model_len=4096, seed=0, enable_sleep_mode=sleep, disable_log_stats=True, enable_prefix_caching=False)
    figures = dict(alloc=alloc, sleep=sleep, start_s=round(time.time() - begin, 1), speeds=[], digests=[], sleeps=[])
    draw = random.Random(0)
    prompts = [dict(prompt_token_ids=[draw.randrange(3, 32000) for _ in range(draw.randrange(50, 1500))]) for _ in range(PROMPTS)]
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, detokenize=False)

    def answer():
        begin = time.time()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        figures["speeds"].append(round(PROMPTS * TOKENS / (time.time() - begin)))
        figures["digests"].append(hashlib.sha256(str([one.outputs[0].token_ids for one in outputs]).encode()).hexdigest()[:10])

    for _ in range(3):
        answer()
    for _ in range(2 if sleep else 0):
        free, begin = torch.cuda.mem_get_info()[0], time.time()
        llm.sleep(level=1)
        slept, freed = time.time() - begin, torch.cuda.mem_get_info()[0] - free
        begin = time.time()
        llm.wake_up()
        figures["sleeps"].append(dict(sleep_s=round(slept, 3), freed_gib=round(freed / 2**30, 1), wake_s=round(time.time() - begin, 3)))
        answer()
    figures["free_gib"] = round(torch.cuda.mem_get_info()[0] / 2**30, 1)
    print(json.dumps(figures), flush=True)


def run(alloc, arguments):
    """The figures of an engine in a process of its own, or why there are none."""
    quiet = dict(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_USE_FLASHINFER_SAMPLER="0", VLLM_LOGGING_LEVEL="WARNING", HF_HUB_OFFLINE="1",
                 VLLM_NO_USAGE_STATS="1")
    done = subprocess.run([sys.executable, __file__, "--engine", alloc, *arguments], env={**os.environ, **quiet}, capture_output=True, text=True)
    try:
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return dict(alloc=alloc, error=f"exit code {done.returncode}: {done.stderr[-1500:]}")


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
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=2, help="engines under each allocator")
    p.add_argument("--sleep", action="store_true", help="with vLLM's sleep mode")
    p.add_argument("--eager", action="store_true", help="without CUDA graphs")
    p.add_argument("--out", help="a folder for serving.jsonl")
    p.add_argument("--engine", choices=["native", "glake"], help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.engine:
        return engine(a.engine, a.sleep, a.eager)
    if importlib.util.find_spec("vllm") is None:
        sys.exit(f"serving: vLLM is not installed for {sys.executable}: pip install vllm==0.23.0")
    options, rows = ["--sleep"] * a.sleep + ["--eager"] * a.eager, []
    for round in range(a.rounds):
        for alloc in ("native", "glake") if round % 2 == 0 else ("glake", "native"):
            rows.append(run(alloc, options))
            print(summary(rows[-1:])[0][0], flush=True)
    if a.out:
        pathlib.Path(a.out).mkdir(parents=True, exist_ok=True)
        pathlib.Path(a.out, "serving.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines, missed = summary(rows)
    print("\n".join(lines[len(rows):]))
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()

"""A vLLM engine that is parked between two steps and brought back, again and again, while it answers: the same tokens, the same prefix hits.

    python benches/gpu/engine.py [--parks 20] [--eager] [--out DIR]

It needs vLLM (measured with 0.23); the model has the shape of Llama 8B and random weights, nothing is downloaded. The engine runs over GLake's
plugin, in this process: its weights are sealed and their host copies retained; of its KV cache only those blocks count that a later request
can still hit, or that one uses. Prompts in groups share a prefix and arrive
over time. They are answered twice undisturbed, then with parks: another thread shrinks the engine while it steps, its memory leaves, and
comes back to the same addresses: first weights and cache, which is what vLLM's own sleep takes, then all there is, with captured graphs and
buffers. Tokens and prefix hits of every request are compared. At every other park bytes are verified, and what does not count is filled with
0xAB when it is back: who reads it answers otherwise. Times are those of the other parks. Bytes copied are those of all
parks; the bar is 1.1 x the weights, once, and the live blocks of each park; all there is has no bar, because what else an engine holds is
copied at each park.
Writes DIR/engine.jsonl. Ends with 1 if a bar was missed.
"""
import argparse, contextlib, os, random, statistics, threading, time

import launch, serving, shrink
from shrink import GIB, report

WAVES, WAVE, EVERY = 24, 4, 8  # requests arrive in waves of so many, at each so manieth step
GROUPS, PREFIX, TAIL, TOKENS = 12, 512, 96, 64


class Parked:
    """The engine, its block pool, and what its parks took."""

    def __init__(self, eager):
        os.environ["GLAKE_VLLM"] = "1"
        self.glake = shrink.glake_with()
        # As the installed wheel's entry point does.
        import glake.vllm

        glake.vllm.register()
        from vllm import SamplingParams

        self.engine = serving.start(enforce_eager=eager, enable_prefix_caching=True).llm_engine
        core = self.engine.engine_core.engine_core
        runner = core.model_executor.driver_worker.worker.model_runner
        self.over_glake = core.model_executor.driver_worker.worker.glake
        self.caches = runner.kv_caches
        self.page = self.caches[0].untyped_storage().nbytes() // core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks
        self.steps, self.asked = 0, threading.Event()
        self.sampling = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, detokenize=False)

    def live_bytes(self):
        return len(self.caches) * self.page * sum(end - first for first, end in self.over_glake.blocks())

    def answer(self, parks=0):
        """Tokens and prefix hits of each request, in the order of arrival; with so many parks, spread over the steps."""
        draw = random.Random(0)
        prefixes = [[draw.randrange(3, 32000) for _ in range(PREFIX)] for _ in range(GROUPS)]
        prompts = [prefixes[number % GROUPS] + [draw.randrange(3, 32000) for _ in range(draw.randrange(TAIL))] for number in range(WAVES * WAVE)]
        if not self.engine.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be reset")
        found, added, first, last = {}, 0, self.steps, WAVES * EVERY + TOKENS // 2
        while added < len(prompts) or self.engine.has_unfinished_requests():
            if (self.steps - first) % EVERY == 0 and added < len(prompts):
                for number in range(added, added + WAVE):
                    self.engine.add_request(str(number), dict(prompt_token_ids=prompts[number]), self.sampling)
                added += WAVE
            if parks and (self.steps - first) * parks // last > (self.steps - first - 1) * parks // last:
                self.asked.set()
            for output in self.engine.step():
                if output.finished:
                    found[int(output.request_id)] = (output.outputs[0].token_ids, output.num_cached_tokens)
            self.steps += 1
        return [found[number] for number in range(len(prompts))]

    def parked(self, parks, tags):
        """Answers, over and over, until another thread has taken the memory away so often; all answers, and what there is to tell of each
        park."""
        over, took, failed, answers = threading.Event(), [], [], []

        def take():
            try:
                while not over.is_set():
                    if self.asked.wait(0.01):
                        self.asked.clear()
                        # The first too: the copies of the weights are made then, and their digests with them.
                        verified = len(took) % 2 == 0
                        out, gone = shrink.seconds(lambda: self.glake.shrink(tags, timeout=60, verify=verified))
                        was, counted = self.glake.gate()["parked"], self.live_bytes()
                        back, _ = shrink.seconds(lambda: self.glake.refill(verify=verified))
                        if was:
                            took.append(dict(out=out, back=back, counted=counted, gone=gone, verified=verified))
                        # What was parked runs for its quantum first: who asks earlier waits for that.
                        time.sleep(0.35)
            except Exception as error:
                failed.append(error)

        import torch

        taker = threading.Thread(target=lambda: (torch.cuda.set_device(0), take()))
        taker.start()
        try:
            while len(took) < parks and not failed:
                answers.append(self.answer(parks))
        finally:
            over.set()
            taker.join()
        if failed:
            raise failed[0]
        return answers, took


def by_region(report, key):
    """GiB of each region in a shrink's report; all captured graphs are one."""
    found = {}
    for region in report["regions"]:
        tag = "graphs" if region["tag"].startswith("graph ") else region["tag"]
        found[tag] = found.get(tag, 0) + region[key] / GIB
    return found


def busy(a):
    one = Parked(a.eager)
    import vllm
    weights = next(region["live"] for region in one.glake.regions() if region["tag"] == "weights")
    one.answer()
    alone = one.answer()
    deterministic = alone == one.answer()
    out, back = shrink.links(repeat=3)
    for what, tags in (("weights and cache", ["weights", "kv_cache"]), ("all", None)):
        answers, took = one.parked(a.parks, tags)
        pairs = [(now, then) for answer in answers for now, then in zip(answer, alone)]
        report(f"{what}: requests whose tokens differ", sum(now[0] != then[0] for now, then in pairs), 0, most=True, requests=len(pairs),
               deterministic=deterministic)
        report(f"{what}: requests whose prefix hits differ", sum(now[1] != then[1] for now, then in pairs), 0, most=True,
               tokens_hit=sum(now[1] for now, _ in pairs))
        verified = [park for park in took if park["verified"]]
        report(f"{what}: parks", len(took), a.parks, verified=len(verified),
               poisoned_gib=sum(park["gone"]["undefined"] for park in verified) / GIB, vllm=vllm.__version__)
        copied, counted = sum(park["gone"]["copied"] for park in took), sum(park["counted"] for park in took)
        # Weights are copied to the host once in a process: by the first park of the first kind.
        bound, named, bar = (1.1 * weights + counted, "1.1 x weights once and live blocks", 1) if tags else (counted, "live blocks", None)
        report(f"{what}: bytes copied in all, of {named}", copied / bound, bar, most=True, copied_gib=copied / GIB, weights_gib=weights / GIB,
               live_gib=counted / GIB)
        outs, backs = ([park[way] for park in took if not park["verified"]] for way in ("out", "back"))
        slow_outs, slow_backs = ([park[way] for park in verified[1:]] for way in ("out", "back"))
        last = took[-1]["gone"]
        report(f"{what}: out, s: the rest of a step, the copies, and giving back", statistics.median(outs), first=took[0]["out"], slowest=max(outs),
               verified=statistics.median(slow_outs), link=out, freed_gib=last["freed"] / GIB,
               resident_gib=max(park["gone"]["resident"] for park in took) / GIB)
        report(f"{what}: back, s", statistics.median(backs), slowest=max(backs), verified=statistics.median(slow_backs), link=back)
        for key in ("copied", "freed"):
            report(f"{what}: GiB {key} by the last park, by region", by_region(last, key))


SCENARIOS = {"busy": busy}


def main():
    p = launch.Parser(__doc__)
    p.add_argument("--parks", type=int, default=20)
    p.add_argument("--eager", action="store_true", help="without CUDA graphs")
    p.add_argument("--time-limit", type=float, default=400)
    p.add_argument("--child", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.parks < 3:
        p.error("--parks: at least 3: the first, one that is not verified, and one that is")
    if a.child:
        return SCENARIOS[a.child](a)
    launch.needs_gpus("engine.py")
    serving.needs_vllm("engine.py")
    os.environ.update(serving.QUIET)
    launch.scenarios(__file__, list(SCENARIOS), ["--parks", a.parks, *["--eager"] * a.eager], a.out, a.time_limit)


if __name__ == "__main__":
    main()

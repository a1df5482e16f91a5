"""The driver's checkpoint of a worker that was shrunk: by hand, refused, while the GPU is full, and by the agent.

    python tests/gpu/checkpoint.py [--device cuda]

GLAKE names the command, GLAKE_LIBRARY the library. --device sim:h200x4@/FOLDER needs neither GPU nor torch. Prints a
row a check, and ends with 1 if one failed."""

import argparse, json, os, pathlib, shutil, subprocess, sys, tempfile, time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "benches" / "gpu"))
import launch
from sharing.agents import Agent, command
from sharing.client import Asked
from sharing.fleet import Fleet
from sharing.meter import meter
from sharing.setup import GIB, MIB, Setup

# Takes all of the GPU but so many bytes, and keeps it until its standard input ends.
FILL = """
import sys, torch
torch.empty(1, device="cuda")
keep, left = [], int(sys.argv[1])
while (room := torch.cuda.mem_get_info()[0] - left) > 2 << 20:
    keep.append(torch.empty(min(room, 8 << 30), dtype=torch.uint8, device="cuda"))
print("full", flush=True)
sys.stdin.read()
"""


class Checks:
    def __init__(self, a, folder):
        self.setup = Setup(1, 2, 1, 16, a.device, 64 if a.device != "cuda" else 1)
        self.meter, self.failed = meter(a.device), 0
        if self.setup.simulated:
            pathlib.Path(a.device.split("@", 1)[1]).mkdir(parents=True, exist_ok=True)
        self.agent = Agent(self.setup, folder)
        self.agent.patience = 20
        self.fleet = Fleet("glake", self.setup, folder, self.agent)

    def row(self, what, passed, said=""):
        self.failed += not passed
        print(f"{'ok  ' if passed else 'FAIL'} {what}: {said}", flush=True)

    def checkpoint(self, *arguments):
        """The exit code, what was printed and how long it took."""
        env, more = launch.environment(), ["--socket", str(self.agent.socket)]
        if self.setup.simulated:
            # Only contexts are as large as a GPU's.
            env["GLAKE_DEVICE"], more = self.setup.device, [*more, "--most", "656MiB"]
        begin = time.monotonic()
        done = subprocess.run(
            [command(), "checkpoint", *map(str, arguments), *more, "--json"], env=env, capture_output=True, text=True, timeout=60
        )
        took = f" ({time.monotonic() - begin:.2f} s)"
        try:
            return done.returncode, json.loads(done.stdout), took
        except ValueError:
            return done.returncode, (done.stdout + done.stderr).strip(), took

    def asked(self, worker, patience=60):
        asked = Asked(worker.name, 64, 8, time.monotonic())
        worker.port.send(asked)
        asked.over.wait(patience)
        return asked

    def answers(self, what, worker):
        """Whether a request is answered, and whether weights and cache are what they were."""
        asked = self.asked(worker)
        found = self.fleet.digests()
        right = asked.ttft is not None and not asked.failed and not found["wrong_weights"] and not found["wrong_cache"]
        self.row(what, right, f"first token after {asked.ttft} s, {found}, failed: {asked.failed}")

    def by_hand(self, worker):
        pid, used = worker.process.pid, self.meter.used
        code, said, took = self.checkpoint(os.getpid())
        self.row("a process without CUDA is refused", code == 4, f"exit {code}: {said}{took}")
        code, said, took = self.checkpoint(2**22 + 1)
        self.row("a process that is not there is refused", code == 4, f"exit {code}: {said}{took}")
        self.agent.do("refill", worker.name)
        code, said, took = self.checkpoint(pid)
        self.row("one that has its memory is refused", code == 4, f"exit {code}: {said}{took}")
        self.agent.do("shrink", worker.name)
        before = used()
        code, said, took = self.checkpoint(pid)
        left = before - used()
        self.row("out", code == 0 and left > 100 * MIB, f"exit {code}: {said}, meter {left / MIB:.0f} MiB less{took}")
        code, said, took = self.checkpoint(pid, "--restore")
        self.row("back", code == 0, f"exit {code}: {said}, meter {(used() - before) / MIB:.0f} MiB more than before{took}")
        self.agent.do("refill", worker.name)
        self.answers("the same bytes after it", worker)
        for again in range(3):
            self.agent.do("shrink", worker.name)
            out, back = self.checkpoint(pid), self.checkpoint(pid, "--restore")
            self.row(f"out and back, {again + 2}", out[0] == back[0] == 0, f"{out} {back}")
        self.answers("the same bytes after four", worker)

    def while_full(self, worker):
        pid = worker.process.pid
        self.agent.do("shrink", worker.name)
        code, said, took = self.checkpoint(pid)
        filler = subprocess.Popen(
            [sys.executable, "-c", FILL, str(128 * MIB)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        print(filler.stdout.readline().strip(), f"{self.meter.used() / GIB:.2f} GiB used")
        full, again = self.checkpoint(pid, "--restore"), self.checkpoint(pid, "--restore")
        filler.communicate()
        back = self.checkpoint(pid, "--restore")
        # The driver is not asked: it would not restore the process another time.
        refused = [code == 3 and "no room for what it had" in str(said) for code, said, _ in (full, again)]
        self.row("a restore without room asks the driver for nothing", code == 0 and all(refused), f"{said}{took}; {full}; {again}")
        self.row("and is done with room", back[0] == 0, back)
        self.answers("the same bytes after it", worker)

    def by_the_agent(self, worker):
        self.agent.end()
        file = self.setup.node().replace("[node]\n", "[node]\ncheckpoint_after_s = 1\n")
        self.setup.node = lambda **_: file
        self.agent.start()
        self.agent.wait_for([worker.name])
        self.agent.do("shrink", worker.name)
        before, end = self.meter.used(), time.monotonic() + 20
        while time.monotonic() < end and (state := self.agent.ps()[worker.name]["state"]) != "checkpointed":
            time.sleep(0.1)
        left = before - self.meter.used()
        self.row("an idle worker is checkpointed", state == "checkpointed", f"{state}, meter {left / MIB:.0f} MiB less")
        self.answers("a request brings it back", worker)

    def all(self):
        self.agent.start()
        self.fleet.start(print)
        worker = next(iter(self.fleet.workers.values()))
        for part in (self.by_hand, *([] if self.setup.simulated else [self.while_full]), self.by_the_agent):
            try:
                part(worker)
            except Exception as error:
                self.row(part.__name__, False, f"{type(error).__name__}: {error}; {self.agent.ps()}")

    def end(self):
        self.fleet.end()
        self.agent.end()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--device", default="cuda", help="cuda, or sim:TOPOLOGY@/FOLDER")
    a = p.parse_args()
    if a.device == "cuda":
        launch.needs_gpus("checkpoint.py")
    folder = pathlib.Path(tempfile.mkdtemp(prefix="glake-checkpoint-"))
    checks = Checks(a, folder)
    try:
        checks.all()
    except Exception as error:
        checks.row("start", False, f"{type(error).__name__}: {error}")
    finally:
        checks.end()
        print(*(folder / "agent.log").read_text().splitlines()[-12:], sep="\n")
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(checks.failed > 0)


if __name__ == "__main__":
    main()

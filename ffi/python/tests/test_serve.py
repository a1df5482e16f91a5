"""`glake serve`, and workers whose memory does not fit together: each has its bytes whenever it uses them."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import glake

LONG = 120

WORKER = """
import ctypes, hashlib, os, sys, time
import glake
from glake import _library

api = _library.api()
MIB = 1 << 20
name, socket = sys.argv[1:]
data = [hashlib.shake_128(f"{name} {block}".encode()).digest(4096) * (16 * MIB // 4096) for block in range(16)]

def fill(address, bytes):
    class Array:
        __cuda_array_interface__ = {"data": (address, False), "shape": (len(bytes),), "typestr": "|u1", "version": 3}
    glake.copy_(Array, bytes, wait=True)

with glake.region("weights", policy="sealed", host_copy="retain"):
    addresses = [api.alloc(0, 16 * MIB) for _ in data]
for address, bytes in zip(addresses, data):
    fill(address, bytes)
glake.seal("weights")
glake.join(name, socket)
print("joined", flush=True)
for line in sys.stdin:
    begin = time.monotonic()
    with glake.active():
        waited = time.monotonic() - begin
        # A use of some length, which stops between its steps where others need the memory.
        for step in range(int(line)):
            for address, bytes in zip(addresses, data):
                assert ctypes.string_at(address, len(bytes)) == bytes, "other bytes"
            glake.safepoint()
    print(f"used {waited:.3f}", flush=True)
"""


GROWING = """
import ctypes, os, sys
import glake
from glake import _library

api = _library.api()
MIB = 1 << 20
glake.join("growing")
for line in sys.stdin:
    if int(line):
        with glake.active():
            for block in [api.alloc(0, 16 * MIB) for _ in range(int(line))]:
                ctypes.memset(block, 7, 16 * MIB)
    copies = [held["bytes"] for held in glake.memory_usage() if "are evicted" in held["holder"]]
    print(sum(copies), flush=True)
"""

LOST = """
import glake
from glake import _library

_library.api().alloc(0, 1 << 20)
for _ in range(2):
    try:
        glake.join()
    except glake.UnavailableError as error:
        print("refused:", error)
    else:
        print("joined")
"""


def command():
    """The command that belongs to the library under test."""
    library = os.environ.get("GLAKE_LIBRARY")
    beside = pathlib.Path(library).parent / "glake" if library else pathlib.Path(glake.__file__).parent / "glake"
    return str(beside) if beside.exists() else shutil.which("glake")


@unittest.skipIf(command() is None, "there is no command glake")
class Serving(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.socket = self.folder / "glake" / "agent.sock"
        (self.folder / "node.toml").write_text('[node]\nbudget = "2560MiB"\nreserve = "16MiB"\n')
        (self.folder / "glake.toml").write_text('[tiers]\nextent = "16MiB"\n[lease]\ngrowth = 0\n')
        # Two of three fit: a context takes 640 MiB.
        self.environment = {**os.environ, "GLAKE_DEVICE": f"sim:h200x4@{self.folder}/gpus"}
        self.workers = []
        self.start()

    def start(self):
        serve = [command(), "serve", str(self.folder / "node.toml"), "--socket", str(self.socket)]
        self.agent = subprocess.Popen(serve, env=self.environment, stderr=subprocess.PIPE, text=True)
        self.addCleanup(self.end, self.agent)
        self.assertIn("serving", self.agent.stderr.readline())

    def end(self, process):
        process.kill()
        process.communicate()

    def worker(self, name):
        environment = {**self.environment, "GLAKE_CONFIG": str(self.folder / "glake.toml")}
        worker = subprocess.Popen(
            [sys.executable, "-c", WORKER, name, str(self.socket)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.addCleanup(self.end, worker)
        self.assertEqual(worker.stdout.readline(), "joined\n")
        return worker

    def tell(self, worker, steps=1):
        worker.stdin.write(f"{steps}\n")
        worker.stdin.flush()

    def used(self, worker):
        self.assertIn("used", worker.stdout.readline())

    def ask(self, *words):
        asked = [command(), *words, "--socket", str(self.socket)]
        return subprocess.run(asked, env=self.environment, capture_output=True, text=True, timeout=LONG, check=False)

    def ps(self):
        return [json.loads(line) for line in self.ask("ps", "--json").stdout.splitlines()]

    def test_each_has_its_bytes_whoever_is_killed(self):
        workers = {name: self.worker(name) for name in "abc"}
        # They have joined with more than there is for them. Of whom it is known that it says when it uses its memory, one gives way.
        for worker in workers.values():
            self.tell(worker)
            self.used(worker)
        end = time.monotonic() + LONG
        rows = self.ps()
        while not any(row["evicted"] for row in rows):
            self.assertLess(time.monotonic(), end, rows)
            rows = self.ps()
        self.assertEqual([row["worker"] for row in rows], ["a", "b", "c"])
        for name in "abcacb":
            self.tell(workers[name])
            self.used(workers[name])
        explained = [json.loads(line) for line in self.ask("explain", "--json").stdout.splitlines()]
        self.assertEqual(explained[-1]["outcome"], "refilled", explained)
        self.assertTrue(explained[-1]["taken"] and explained[-1]["real_s"] > 0, explained)
        # The agent dies; what each has stands, and the next one goes on.
        self.agent.send_signal(signal.SIGKILL)
        self.agent.wait()
        for name in "ab":
            self.tell(workers[name])
        self.start()
        for name in "ab":
            self.used(workers[name])
        # All at once, each for several steps: they are parked in turns.
        for name in "abc":
            self.tell(workers[name], 5)
        workers["b"].kill()
        for name in "ac":
            self.used(workers[name])
        for name in "caca":
            self.tell(workers[name])
            self.used(workers[name])
        self.assertEqual([row["worker"] for row in self.ps()], ["a", "c"])

    def python(self, program, **environment):
        environment = {**self.environment, "GLAKE_CONFIG": str(self.folder / "glake.toml"), **environment}
        worker = subprocess.Popen(
            [sys.executable, "-c", program], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.addCleanup(self.end, worker)
        return worker

    def test_growth_is_seen_and_its_copies_fit_the_hosts_budget(self):
        (self.folder / "node.toml").write_text('[node]\nbudget = "2560MiB"\nreserve = "16MiB"\nhost_budget = "300MiB"\n')
        (self.folder / "glake.toml").write_text(f'[tiers]\nextent = "16MiB"\nfiles = "{self.folder}/files"\n[lease]\ngrowth = 0\n')
        self.agent.kill()
        self.agent.wait()
        self.start()
        worker = self.python(GROWING, GLAKE_AGENT=str(self.socket))
        self.tell(worker, 32)
        worker.stdout.readline()
        (row,) = self.ps()
        self.assertEqual((row["resident"], row["state"]), (512 << 20, "idle"), row)
        self.assertIn('{worker="growing",place="resident"} 536870912', self.ask("ps", "--metrics").stdout)
        self.assertEqual(self.ask("shrink", "growing").returncode, 0)
        (row,) = self.ps()
        self.assertEqual((row["resident"], row["evicted"]), (0, 512 << 20), row)
        self.tell(worker, 0)
        hosted = int(worker.stdout.readline())
        self.assertLessEqual(hosted, 300 << 20)

    def test_a_join_of_no_agent_raises(self):
        lost = self.python(LOST, GLAKE_AGENT=str(self.folder / "glake" / "none.sock"))
        said, _ = lost.communicate()
        self.assertEqual(said.count("refused: "), 2, said)
        self.assertIn("none.sock", said)

    def test_what_serve_prints_is_all_that_a_worker_needs(self):
        lines = [self.agent.stderr.readline() for _ in range(2)]
        names = [line.split("=")[0] for line in lines]
        self.assertEqual(names, ["export GLAKE_AGENT", "export GLAKE_DEVICE"], lines)
        shell = {name: value for name, value in os.environ.items() if not name.startswith("GLAKE_") or name == "GLAKE_LIBRARY"}
        program = "".join(lines) + f'exec "{sys.executable}" -c "import glake; glake.join(\'told\'); input()"'
        worker = subprocess.Popen(["sh", "-c", program], env=shell, stdin=subprocess.PIPE, text=True)
        self.addCleanup(self.end, worker)
        end = time.monotonic() + LONG
        while [row["worker"] for row in self.ps()] != ["told"]:
            self.assertLess(time.monotonic(), end)
            self.assertIsNone(worker.poll())
            time.sleep(0.05)

    def test_operators_move_a_worker(self):
        self.worker("chat")
        done = self.ask("shrink", "chat")
        self.assertEqual((done.stdout, done.returncode), ("chat: shrunk\n", 0), done)
        (row,) = self.ps()
        self.assertEqual((row["state"], row["resident"], row["leased"]), ("asleep", 0, 0), row)
        done = self.ask("refill", "chat")
        self.assertEqual((done.stdout, done.returncode), ("chat: refilled\n", 0), done)
        (row,) = self.ps()
        self.assertGreaterEqual(row["resident"], 256 << 20)
        done = self.ask("shrink", "chap")
        self.assertEqual((done.stderr, done.returncode), ('glake: no worker is called "chap": there are chat\n', 1))
        self.agent.terminate()
        self.assertEqual(self.agent.wait(), 0)
        self.assertIn("no agent serves", self.ask("ps").stderr)


if __name__ == "__main__":
    unittest.main()

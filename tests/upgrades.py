#!/usr/bin/env python3
"""Agents and workers of two releases together, on simulated GPUs that processes share.

    python3 tests/upgrades.py OLD NEW       # folders, each with glake and libgmlake.so

Workers of both releases join an agent of each, grow, use their memory, take it from each other, and are shrunk and refilled by an operator of
each. Then one agent takes over from the other, back and forth, ended or killed, while uses go on. Always: no process ends, every use finds its
bytes, leases and contexts fit into the budget, and no connection is lost for what was said over it. A message of neither is refused by its
name.
"""

import ctypes
import json
import os
import pathlib
import queue
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

MIB = 1 << 20
LONG = 90
BLOCK, BLOCKS = 16 * MIB, 12
CONTEXT = 640 * MIB
OUT_OF_MEMORY = 1
# Three contexts, and blocks of two of three workers.
BUDGET = 3 * CONTEXT + 2 * BLOCKS * BLOCK + 64 * MIB
RESERVE = 16 * MIB


def worker(library, name, path):
    """A worker: each line of its input is a number of steps of a use, or a word; it answers each with a line."""
    gm = ctypes.CDLL(library)
    gm.glake_last_error.restype = ctypes.c_char_p
    pattern = name.encode().ljust(8, b".") * (BLOCK // 8)

    def check(status):
        if status != 0:
            raise RuntimeError(gm.glake_last_error().decode())

    blocks = []
    check(gm.glake_region_define(b"data", 0, 0))
    check(gm.glake_join(name.encode(), path.encode()))
    print("joined", flush=True)
    for line in sys.stdin:
        try:
            word, *number = line.split()
            use = ctypes.c_uint64()
            begun = time.monotonic()
            check(gm.glake_use_begin(None, ctypes.c_size_t(0), 0, ctypes.c_int64(LONG * 1000), ctypes.byref(use)))
            waited = time.monotonic() - begun
            for _ in range(int(number[0]) if number else 1):
                if word == "grow":
                    check(gm.glake_region_push(b"data"))
                    block = ctypes.c_void_p()
                    # Growth that is denied for now is asked for again.
                    while gm.glake_alloc(0, ctypes.c_size_t(BLOCK), None, ctypes.byref(block)) == OUT_OF_MEMORY and time.monotonic() < begun + LONG:
                        gm.glake_safepoint(use)
                        time.sleep(0.1)
                    if not block.value:
                        raise RuntimeError(gm.glake_last_error().decode())
                    check(gm.glake_region_pop())
                    ctypes.memmove(block.value, pattern, BLOCK)
                    blocks.append(block)
                for block in blocks:
                    if ctypes.string_at(block.value, BLOCK) != pattern:
                        raise RuntimeError("other bytes")
                gm.glake_safepoint(use)
            if word == "free":
                while blocks:
                    check(gm.glake_free(blocks.pop()))
            check(gm.glake_use_end(use))
            print(f"done {word} after {waited:.3f} s", flush=True)
        except RuntimeError as error:
            print(f"error {error}", flush=True)


class Worker:
    def __init__(self, node, release, name):
        self.name, self.release, self.lines = name, release, queue.Queue()
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", str(release / "libgmlake.so"), name, str(node.socket)],
            env={**node.environment, "GLAKE_CONFIG": str(node.folder / "glake.toml"), "GLAKE_LOG": "glake::agent=info"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=open(node.folder / f"{name}.log", "w"),
            text=True,
        )
        threading.Thread(target=lambda: [self.lines.put(line) for line in self.process.stdout], daemon=True).start()

    def tell(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self, what="done"):
        try:
            line = self.lines.get(timeout=LONG)
        except queue.Empty:
            raise AssertionError(f"{self.name} says nothing; its status is {self.process.poll()}") from None
        assert line.startswith(what), f"{self.name}: {line}"

    def does(self, line):
        self.tell(line)
        self.hear()


class Node:
    """A server: its agent of the moment, its workers, and a thread that looks at their leases."""

    def __init__(self, folder):
        self.folder, self.workers, self.agents, self.broken, self.looks = folder, [], 0, [], 0
        (folder / "agent").mkdir(mode=0o700)
        self.socket = folder / "agent" / "agent.sock"
        self.environment = {**os.environ, "GLAKE_DEVICE": f"sim:h200x4@{folder}/gpus"}
        self.environment.pop("GLAKE_AGENT", None)
        (folder / "node.toml").write_text(f"[node]\nbudget = {BUDGET}\nreserve = {RESERVE}\nhost_budget = \"4GiB\"\n")
        (folder / "glake.toml").write_text(f'[tiers]\nextent = "16MiB"\nfiles = "{folder}/files"\n[lease]\ngrowth = 0\ngrow_timeout_ms = 60000\n')
        self.agent = None

    def serve(self, release, killed=False):
        if self.agent:
            self.agent.send_signal(signal.SIGKILL if killed else signal.SIGTERM)
            assert self.agent.wait(LONG) in (0, -signal.SIGKILL), "the agent failed"
        self.agents += 1
        self.log = self.folder / f"agent{self.agents}.log"
        command = [release / "glake", "serve", self.folder / "node.toml", "--socket", self.socket]
        environment = {**self.environment, "GLAKE_LOG": "glake::agent=info"}
        self.agent = subprocess.Popen(command, env=environment, stderr=open(self.log, "w"))
        self.until(lambda: "serving" in self.log.read_text(), "an agent")

    def until(self, is_so, what):
        end = time.monotonic() + LONG
        while not is_so():
            assert time.monotonic() < end, f"{what} never came"
            time.sleep(0.05)

    def ask(self, release, *words):
        command = [release / "glake", *words, "--socket", self.socket]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=LONG, check=False)

    def rows(self, release):
        done = self.ask(release, "ps", "--json")
        return [json.loads(line) for line in done.stdout.splitlines()] if done.returncode == 0 else []

    def join(self, releases):
        self.workers = [Worker(self, release, f"w{number}") for number, release in enumerate(releases)]
        for one in self.workers:
            one.hear("joined")

    def look(self, release):
        """Whether all leases fit, with each worker's context."""
        rows = self.rows(release)
        leased = sum(row["leased"] for row in rows)
        self.looks += bool(rows)
        if leased + len(rows) * CONTEXT > BUDGET - RESERVE:
            self.broken.append(f"{leased // MIB} MiB are leased to {len(rows)} workers of a budget of {BUDGET // MIB} MiB: {rows}")

    def watch(self, release, over):
        while not over.is_set():
            self.look(release)
            over.wait(0.1)

    def check(self):
        assert not self.broken, self.broken[0]
        for one in self.workers:
            assert one.process.poll() is None, f"{one.name} has ended: {(self.folder / f'{one.name}.log').read_text()}"
        assert self.agent.poll() is None, f"the agent has ended: {self.log.read_text()}"
        for log in self.folder.glob("*.log"):
            for line in log.read_text().splitlines():
                # What is said over a connection is understood at its other end.
                assert "no message" not in line and "heard anew" not in line and "panicked" not in line, f"{log.name}: {line}"

    def say(self, *frames):
        """What an end of a later release would say first; the answer."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(LONG)
            connection.connect(str(self.socket))
            for frame in frames:
                body = json.dumps(frame).encode()
                connection.sendall(struct.pack("<I", len(body)) + body)
            answer = connection.recv(65536)
            return json.loads(answer[4 : 4 + struct.unpack("<I", answer[:4])[0]])

    def end(self):
        for process in [one.process for one in self.workers] + [self.agent]:
            if process:
                process.kill()
                process.wait()


def live(node, operators):
    """Everything that workers and an agent say to each other."""
    first, second, third = node.workers
    first.does(f"grow {BLOCKS}")
    second.does(f"grow {BLOCKS}")
    # Nothing is left for it: others give way as it grows.
    third.does(f"grow {BLOCKS}")
    for one in (first, second, third, first):
        one.does("use 1")
    # All at once, for several steps: they are parked in turns.
    for one in node.workers:
        one.tell("use 6")
    for one in node.workers:
        one.hear()
    for operator in operators:
        done = node.ask(operator, "shrink", second.name)
        assert done.returncode == 0, done.stderr
        row = next(row for row in node.rows(operator) if row["worker"] == second.name)
        assert row["leased"] == row["resident"] == 0 and row["evicted"] == BLOCKS * BLOCK, row
        done = node.ask(operator, "refill", second.name)
        assert done.returncode == 0, done.stderr
        second.does("use 1")
        for words in ["explain", "--json"], ["ps", "--metrics"], ["ps"]:
            done = node.ask(operator, *words)
            assert done.returncode == 0 and done.stdout, (words, done.stderr)
    for one in node.workers:
        one.does("free")
    node.check()


def unknown(node):
    """What is of neither release is refused by its name, and what may be passed over is."""
    later = node.say({"v": 2, "seq": 0, "ack": 0, "op": "hello"})
    assert later["op"] == "refused" and "version 2" in later["why"], later
    asked = node.say({"v": 1, "seq": 0, "ack": 0, "op": "dance"})
    assert asked["op"] == "refused" and asked["why"], asked
    rows = node.say({"v": 1, "seq": 0, "ack": 0, "op": "ps", "colour": "red"})
    assert rows["op"] in ("row", "end"), rows
    return asked["why"]


def case(what, releases, run):
    with tempfile.TemporaryDirectory(prefix="upgrades.") as folder:
        node = Node(pathlib.Path(folder))
        over, begun = threading.Event(), time.monotonic()
        watcher = threading.Thread(target=node.watch, args=(releases["new"], over))
        try:
            watcher.start()
            told = run(node)
            node.check()
            print(f"{what}: {node.looks} looks at leases, {time.monotonic() - begun:.1f} s{told or ''}", flush=True)
        except BaseException:
            for log in sorted(node.folder.glob("*.log")):
                print(f"--- {log.name}\n{log.read_text()[-2000:]}", file=sys.stderr)
            raise
        finally:
            over.set()
            watcher.join()
            node.end()


def main(old, new):
    releases = {"old": pathlib.Path(old).resolve(), "new": pathlib.Path(new).resolve()}

    def together(agent, workers):
        def run(node):
            node.serve(releases[agent])
            node.join([releases[release] for release in workers])
            live(node, releases.values())
            return f"; refused: {unknown(node)}"

        case(f"an agent of {agent}, workers of {', '.join(workers)}", releases, run)

    def takes_over(first, killed):
        second = "new" if first == "old" else "old"

        def run(node):
            node.serve(releases[first])
            node.join([releases[release] for release in ("old", "new", second)])
            live(node, [])
            for agent in (second, first, second):
                for one in node.workers[:2]:
                    one.tell("use 8")
                node.serve(releases[agent], killed)
                for one in node.workers[:2]:
                    one.hear()
                node.until(lambda: len(node.rows(releases["new"])) == 3, "a worker that joins again")
                for one in node.workers:
                    one.does("use 2")
            live(node, releases.values())

        how = "is killed" if killed else "ends"
        case(f"an agent of {first} {how}, one of {second} takes over, and back", releases, run)

    together("old", ["new", "new", "old"])
    together("new", ["old", "old", "new"])
    takes_over("old", killed=False)
    takes_over("new", killed=True)
    print("OK")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:])
    elif len(sys.argv) == 3:
        main(*sys.argv[1:])
    else:
        sys.exit(__doc__)

"""The node agent: a process joins it, by itself with GLAKE_AGENT too, is granted memory, gives it back, and leaves."""

import os
import tempfile
import textwrap
import unittest

import child

BEGIN = """
import ctypes, os, sys, threading, time
sys.path.insert(0, {tests!r})
import glake
from agent import Agent
from glake import _library

api = _library.api()
MIB = 1 << 20
sent = bytes(range(256)) * (16 * MIB // 256)

def raises(kind, call, *arguments, **named):
    try:
        call(*arguments, **named)
    except kind as error:
        return str(error)
    raise AssertionError(f"{{call}} raised nothing")

def beside(call):
    failed = []
    def run():
        try:
            call()
        except BaseException as error:
            failed.append(error)
    thread = threading.Thread(target=run)
    thread.start()
    def joined():
        thread.join(60)
        assert not thread.is_alive() and not failed, failed
    return joined

def block():
    with glake.region("weights"):
        address = api.alloc(0, 16 * MIB)
    class Array:
        __cuda_array_interface__ = {{"data": (address, False), "shape": (16 * MIB,), "typestr": "|u1", "version": 3}}
    glake.copy_(Array, sent, wait=True)
    return address
"""

CONFIG = '[tiers]\nextent = "16MiB"\n[lease]\ngrowth = 0\n'


class Joining(unittest.TestCase):
    def shared(self):
        """Simulated GPUs that other processes could share: with GPUs of a single process, no process joins by itself."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        return f"sim:h200x4@{folder.name}/gpus"

    def check(self, body, **environment):
        begin = BEGIN.format(tests=str(child.TESTS))
        path = os.path.join(os.environ.get("TMPDIR", "/tmp"), f"glake-agent-{os.getpid()}.toml")
        with open(path, "w") as file:
            file.write(CONFIG)
        self.addCleanup(lambda: os.path.exists(path) and os.unlink(path))
        return child.check(self, begin + textwrap.dedent(body), GLAKE_CONFIG=path, **environment)

    def test_a_worker_joins_gives_back_and_wants(self):
        self.check(
            """
            address = block()
            agent = Agent()
            joined = beside(lambda: glake.join("chat", agent.path))
            hello = agent.welcome()
            joined()
            (held,) = hello["holdings"]
            assert hello["name"] == "chat" and hello["peer"]["pid"] == os.getpid(), hello
            assert held["gpu"] == "0" and held["lease"] == held["resident"] >= 16 * MIB, held
            glake.join("chat", agent.path)
            assert "already" in raises(glake.InvalidError, glake.join, "other", agent.path)
            assert "agent's" in raises(glake.InvalidError, glake.lease.set, 0, 0)
            agent.say("shrink", gpu="0", bytes=held["lease"], tier="host", within_ms=60000)
            (held,) = agent.hear("shrunk")["holdings"]
            assert held["lease"] == 0 and held["evicted"] >= 16 * MIB, held

            def use():
                with glake.active():
                    assert ctypes.string_at(address, len(sent)) == sent

            used = beside(use)
            agent.hear("want")
            agent.say("grant", gpu="0", bytes=held["evicted"] + held["room"])
            agent.say("admit")
            agent.hear("refilled")
            used()
            glake.leave()
            agent.hear("bye")
            glake.leave()
            glake.lease.set(0, None)
            """
        )

    def test_with_the_variable_the_first_pool_joins(self):
        self.check(
            """
            agent = Agent()
            os.environ["GLAKE_AGENT"] = agent.path
            made = beside(block)
            hello = agent.welcome(wait=True)
            assert hello["starting"] and hello["name"].endswith(f"-{os.getpid()}"), hello
            # A thread that waits lets this one run.
            agent.say("grant", gpu="0", bytes=64 * MIB)
            agent.say("admit")
            made()
            glake.join()
            agent.hear("refilled")
            glake.leave()
            """,
            GLAKE_DEVICE=self.shared(),
        )

    def test_with_the_setting_too(self):
        self.check(
            """
            agent = Agent()
            with open(os.environ["GLAKE_CONFIG"], "a") as file:
                file.write(f'[agent]\\nsocket = "{agent.path}"\\n')
            made = beside(block)
            agent.welcome(wait=True)
            # A thread that waits lets this one run.
            agent.say("grant", gpu="0", bytes=64 * MIB)
            agent.say("admit")
            made()
            glake.leave()
            """,
            GLAKE_DEVICE=self.shared(),
        )

    def test_ranks_are_one_gang(self):
        self.check(
            """
            agent = Agent()
            joined = beside(lambda: glake.join("train", agent.path))
            hello = agent.welcome()
            joined()
            assert (hello["name"], hello["gang"], hello["ranks"]) == ("train/1", "run-7", 2), hello
            glake.leave()
            """,
            RANK="1",
            WORLD_SIZE="2",
            TORCHELASTIC_RUN_ID="run-7",
        )

    def test_without_an_agent_it_says_what_to_do(self):
        self.check(
            """
            text = raises(glake.UnavailableError, glake.join, agent="/nowhere/agent.sock")
            assert "/nowhere" in text, text
            assert "from the root" in raises(glake.InvalidError, glake.join, agent="agent.sock")
            assert "1 to 64" in raises(glake.InvalidError, glake.join, "a b", "/nowhere/agent.sock")
            agent = Agent()
            refused = beside(lambda: raises(glake.UnavailableError, glake.join, None, agent.path))
            agent.accept()
            agent.send({"v": 1, "seq": 0, "ack": 0, "op": "refused", "why": "no: do this"})
            refused()
            os.chmod(os.path.dirname(agent.path), 0o777)
            assert "written by others" in raises(glake.UnavailableError, glake.join, agent=agent.path)
            block()
            """
        )

    def test_a_variable_without_an_agent_is_one_warning(self):
        done = child.run(
            BEGIN.format(tests=str(child.TESTS)) + "block()\nblock()\nprint('fine')\n",
            GLAKE_AGENT="/nowhere/glake/agent.sock",
            GLAKE_DEVICE=self.shared(),
        )
        self.assertEqual((done.returncode, done.stdout), (0, "fine\n"), done.stderr)
        self.assertEqual(done.stderr.count("no agent"), 1, done.stderr)

    def test_a_forked_child_has_nothing_of_it(self):
        self.check(
            """
            block()
            agent = Agent()
            joined = beside(lambda: glake.join("chat", agent.path))
            agent.welcome()
            joined()
            def sockets():
                found = []
                for name in os.listdir("/proc/self/fd"):
                    try:
                        found.append(os.readlink(f"/proc/self/fd/{name}"))
                    except OSError:
                        pass
                return sorted(name for name in found if name.startswith("socket:"))
            before = len(sockets())
            child = os.fork()
            if child == 0:
                text = raises(glake.UnavailableError, glake.join, "child", agent.path)
                glake.leave()
                os._exit(0 if "forked" in text and len(sockets()) == before - 1 else 1)
            assert os.waitpid(child, 0)[1] == 0
            agent.say("shrink", gpu="0", bytes=MIB, tier="host", within_ms=60000)
            agent.hear("shrunk")
            glake.leave()
            """
        )

    def test_few_descriptors_are_an_error_and_no_end(self):
        self.check(
            """
            import resource
            block()
            agent = Agent()
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            opened = max(int(name) for name in os.listdir("/proc/self/fd"))
            for limit in range(opened, opened + 3):
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
                text = raises(glake.UnavailableError, glake.join, "chat", agent.path)
                assert "descriptor" in text or "socket" in text or "Too many" in text or "page" in text, text
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            joined = beside(lambda: glake.join("chat", agent.path))
            try:
                agent.welcome()
            except EOFError:
                # Of an attempt that had its connection, and no descriptor more.
                agent.welcome()
            joined()
            glake.leave()
            """
        )

    @unittest.skipUnless(os.geteuid() == 0, "only root can serve as another user")
    def test_a_server_of_another_user_is_not_trusted(self):
        self.check(
            """
            import socket, subprocess, tempfile
            folder = tempfile.mkdtemp()
            path = folder + "/agent.sock"
            bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            bound.bind(path)
            serve = "import socket, os; os.setuid(65534); socket.socket(fileno=0).listen(4); print('up', flush=True); import time; time.sleep(60)"
            server = subprocess.Popen([sys.executable, "-c", serve], stdin=bound, stdout=subprocess.PIPE, text=True)
            assert server.stdout.readline() == "up\\n"
            text = raises(glake.UnavailableError, glake.join, "chat", path)
            assert "65534" in text, text
            server.kill()
            server.wait()
            """
        )


if __name__ == "__main__":
    unittest.main()

"""A process ends with live tensors, busy streams, running threads: its own exit code, and not a word."""
import unittest

import fixture

ISOLATED = True

BEGIN = """
    import sys, threading, torch, fixture
    fixture.enable()
    kept = [fixture.stamp(fixture.new(size), 1) for size in (4096, 30 << 20)]
"""


class Exits(unittest.TestCase):
    def check(self, rest, code=0):
        done = fixture.code(BEGIN + rest)
        self.assertEqual((done.code, done.out, done.err), (code, "", ""), done.text())

    def test_live_tensors(self):
        self.check("")

    def test_busy_streams(self):
        self.check("""
    streams = [torch.cuda.Stream() for _ in range(4)]
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(400_000_000)
            held = torch.ones(5 << 20, device="cuda")
            held.record_stream(torch.cuda.default_stream())
    del held
""")

    def test_a_graph_and_pending_frees(self):
        self.check("""
    still, graph = torch.ones(1000, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = still + 1
    graph.replay()
""")

    def test_threads_that_allocate_for_ever(self):
        # Such threads die inside torch's C++, which may end the process by a signal: with any allocator.
        program = BEGIN + """
    def work():
        while True:
            torch.empty(3 << 20, device="cuda")
    for _ in range(3):
        threading.Thread(target=work, daemon=True).start()
    import time
    time.sleep(0.5)
"""
        done, native = fixture.code(program), fixture.code(program, GLAKE_TEST_BACKEND="native")
        self.assertIn(done.code, (0, native.code), done.text())
        self.assertNotIn("glake", done.err, done.text())

    def test_an_exit_code_is_kept(self):
        self.check("    sys.exit(5)\n", code=5)

    def test_an_exception_is_only_itself(self):
        done = fixture.code(BEGIN + "    raise KeyError('mine')\n")
        self.assertEqual(done.code, 1)
        self.assertTrue(done.err.strip().endswith("KeyError: 'mine'"), done.text())

    def test_tensors_in_a_module_that_goes_last(self):
        self.check("""
    sys.modules["torch"].held_to_the_end = kept
    import builtins, atexit
    builtins.held_to_the_end = torch.ones(3 << 20, device="cuda")
    atexit.register(lambda: torch.ones(10, device="cuda"))
""")

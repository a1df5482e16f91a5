"""The examples run."""
import sys, unittest

import fixture

ISOLATED = True
EXAMPLES = fixture.REPOSITORY / "examples"


class Examples(unittest.TestCase):
    def check(self, name):
        done = fixture.finish([fixture.start([sys.executable, EXAMPLES / name])], 90)[0]
        self.assertEqual(done.code, 0, done.text())
        self.assertNotIn("Traceback", done.err, done.text())

    @fixture.limit(100)
    @fixture.only("pluggable", "one run is enough: the tutorial's class is the plain ABI")
    def test_the_tutorial(self):
        self.check("tutorial.py")

    @fixture.limit(100)
    @fixture.only("compiled", "one run is enough: the example calls enable() as users do")
    def test_deepspeeds_four_places(self):
        self.check("deepspeed_style.py")

    @fixture.limit(100)
    @fixture.only("compiled", "one run is enough: the example calls enable() as users do")
    def test_the_server_that_sleeps(self):
        self.check("server.py")

    @fixture.limit(100)
    @fixture.only("compiled", "one run is enough: the example calls enable() as users do")
    def test_training(self):
        self.check("training.py")

    @fixture.limit(100)
    @fixture.only("compiled", "one run is enough: the example calls enable() as users do")
    def test_serving(self):
        self.check("serving.py")

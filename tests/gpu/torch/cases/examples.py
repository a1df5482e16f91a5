"""The examples of the package train."""
import sys, unittest

import bed

ISOLATED = True
EXAMPLES = bed.REPOSITORY / "ffi" / "python" / "examples"


class Examples(unittest.TestCase):
    def check(self, name):
        done = bed.finish([bed.start([sys.executable, EXAMPLES / name])], 90)[0]
        self.assertEqual(done.code, 0, done.text())
        self.assertNotIn("Traceback", done.err, done.text())

    @bed.limit(100)
    @bed.only("pluggable", "one run is enough: the tutorial's class is the plain ABI")
    def test_the_tutorial(self):
        self.check("tutorial.py")

    @bed.limit(100)
    @bed.only("compiled", "one run is enough: the example calls enable() as users do")
    def test_deepspeeds_four_places(self):
        self.check("deepspeed_style.py")

    @bed.limit(100)
    @bed.only("compiled", "one run is enough: the example calls enable() as users do")
    def test_the_server_that_sleeps(self):
        self.check("server.py")

"""cudnn.benchmark: it asks the allocator how much it could give (cacheInfo)."""
import unittest

import fixture

ISOLATED = True

PROGRAM = """
    import torch, fixture
    fixture.enable()
    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = False
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 5, padding=2), torch.nn.ReLU(), torch.nn.Conv2d(32, 16, 3)).cuda()
    inputs = [torch.randn(n, 3, side, side, device="cuda") for n, side in ((4, 64), (8, 96), (2, 200))]
    with torch.no_grad():
        plain = [net(x) for x in inputs]
        torch.backends.cudnn.benchmark = True
        for x, expected in zip(inputs, plain):
            for _ in range(3):
                torch.testing.assert_close(net(x), expected, rtol=1e-3, atol=1e-3)
    net(inputs[0]).sum().backward()
    print("benchmark", torch.backends.cudnn.benchmark)
"""


class Convolutions(unittest.TestCase):
    def test_benchmark(self):
        done = fixture.code(PROGRAM, timeout=90)
        self.assertEqual(done.code, 0, done.text())
        if fixture.BACKEND == "compiled":
            self.assertIn("benchmark True", done.out)
            self.assertNotIn("glake", done.err, done.text())
        else:
            self.assertIn("benchmark", done.err, done.text())  # a warning says that it stays off

    test_benchmark.limit = 120

"""A small transformer, trained: the same losses as torch's own allocator gives."""
import unittest

import fixture

ISOLATED = True

PROGRAM = """
    import json, os, random, sys
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    import torch, torch.utils.checkpoint
    if sys.argv[1] == "glake":
        import fixture
        fixture.enable()
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0); random.seed(0)
    layer = lambda: torch.nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    layers = torch.nn.ModuleList([layer() for _ in range(4)]).cuda()
    opt = torch.optim.AdamW(layers.parameters(), lr=1e-3)
    losses = []
    for step in range(12):
        x = torch.randn(8, random.randrange(16, 400), 256, device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            for one in layers:
                x = torch.utils.checkpoint.checkpoint(one, x, use_reentrant=False)
            loss = x.float().square().mean() + x.float().abs().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(layers.parameters(), 1.0)
        opt.step(); opt.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
        if step % 5 == 4:
            torch.cuda.empty_cache()
    print(json.dumps([losses, torch.cuda.max_memory_allocated()]))
"""


class Training(unittest.TestCase):
    def test_losses_are_natives(self):
        native, glake = (fixture.code(PROGRAM, which) for which in ("native", "glake"))
        for done in (native, glake):
            self.assertEqual(done.code, 0, done.text())
        (theirs, their_peak), (mine, my_peak) = native.json(), glake.json()
        self.assertEqual(mine, theirs)
        self.assertLess(abs(my_peak / their_peak - 1), 0.02)

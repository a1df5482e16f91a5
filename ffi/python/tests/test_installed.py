"""Leaf replay: what stands in place of torch's functions while leaves are replayed, when it is put back, and what
a forked child has of it.

Needs torch. Every test is skipped without what it needs."""

import contextlib
import copy
import gc
import os
import pickle
import signal
import threading
import unittest

os.environ["GLAKE_DEVICE"] = "sim"

from replays import OfReplay  # noqa: E402
from test_activations import torch  # noqa: E402

if torch:
    from glake.offload._activations import Activations
    from glake.offload._budget import Offloaded
    from glake.offload._replay import Replay
    from replays import Block, Layered
    from torch import nn
    from torch.nn import functional


class Installed(OfReplay):
    def functions(self):
        module = torch.utils.checkpoint
        return functional.linear, functional.scaled_dot_product_attention, torch.addmm, module._checkpoint_without_reentrant_generator

    def test_functions_are_put_back(self):
        before = self.functions()
        models = [Layered([Block()], True) for _ in range(2)]
        handles = [self.replays(model) for model in models]
        self.assertEqual(self.functions(), before, "nothing is replaced before a forward")
        for model in models:
            model(self.inputs()).sum().backward()
        self.assertNotEqual(self.functions(), before)
        handles[0].remove()
        models[1](self.inputs()).sum().backward()
        self.assertNotEqual(self.functions(), before)
        handles[1].remove()
        handles[1].remove()
        self.assertEqual(self.functions(), before)

    def test_others_that_replace_them_too(self):
        model, before, calls = Layered([Block()], True), functional.linear, []
        handle = self.replays(model)
        model(self.inputs()).sum().backward()
        under = functional.linear

        def theirs(*args):
            calls.append(1)
            return under(*args)

        functional.linear = theirs
        try:
            for _ in range(2):
                model(self.inputs()).sum().backward()
            handle.remove()
            self.assertIs(functional.linear, theirs)
            model(self.inputs()).sum().backward()
        finally:
            functional.linear = before
        self.assertGreater(len(calls), 0)

    def test_a_graph_outlives_them(self):
        torch.manual_seed(0)
        model, batch = Layered([Block(after=0.2) for _ in range(2)], True), self.inputs()
        found = []
        for handle_of in (None, self.replays):
            handle = handle_of(model) if handle_of else None
            for _ in range(3):
                torch.manual_seed(3)
                loss = model(batch).square().sum()
                if handle and _ == 2:
                    handle.remove()
                gradients = torch.autograd.grad(loss, list(model.parameters()))
            found.append(gradients)
        self.assertTrue(all(torch.equal(a, b) for a, b in zip(*found)))

    def test_a_replay_that_is_forgotten(self):
        before, model = self.functions(), Layered([Block()], True)
        handle = self.replays()
        with handle:
            loss = model(self.inputs()).sum()
        loss.backward()
        del handle, loss
        gc.collect()
        self.assertEqual(self.functions(), before)

    def test_by_itself(self):
        from glake.offload._packer import Packer

        torch.manual_seed(0)
        model, batch = Layered([Block() for _ in range(2)], True), self.inputs()
        plain = torch.autograd.grad(model(batch).sum(), list(model.parameters()))
        replay = Replay(Packer(0, self.memory), least_inner=0)
        for _ in range(3):
            replay.begin(model)
            loss = model(batch).sum()
            replay.end()
            found = torch.autograd.grad(loss, list(model.parameters()))
            self.assertTrue(all(torch.equal(a, b) for a, b in zip(plain, found)))
        replay.remove()
        self.assertGreater(self.replayed(), 0)

    def test_a_forked_child_computes_as_without(self):
        model = Layered([Block()], True)
        handle = Activations(model, 0, None, True)
        planned, kept = nn.Linear(16, 16), nn.Linear(16, 16)
        others = [Offloaded(planned, "1GiB", "hybrid", 0), Activations(kept, 0)]
        for made in (model, planned, kept):
            made(self.inputs())
        held, done = threading.Event(), threading.Event()

        def hold():
            with handle._packer._lock, handle._replay._lock:
                held.set()
                done.wait()

        holder = threading.Thread(target=hold)
        holder.start()
        held.wait()
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            # Those of the parent are not here.
            torch.set_num_threads(1)
            with contextlib.suppress(BaseException):
                model(self.inputs())
                # So do copies, which have hooks of their own.
                for made in (model, planned):
                    copy.deepcopy(made)(self.inputs())
                pickle.loads(pickle.dumps(kept))(self.inputs())
                os._exit(0)
            os._exit(1)
        done.set()
        holder.join()
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        for each in (handle, *others):
            each.remove()


if __name__ == "__main__":
    unittest.main()

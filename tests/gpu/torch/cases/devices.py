"""Several GPUs in one process: the device that was asked for, peers, bytes across."""
import unittest

import torch

import fixture
from fixture import MIB

GPUS = 2
# Without peer access in the plain ABI, copies between devices are refused: peers.py has that.
CONFIG = {"pool": {"peer_access": True}} if fixture.BACKEND == "pluggable" else None


class Devices(unittest.TestCase):
    def test_a_stream_of_another_gpu_is_recorded(self):
        other = torch.cuda.Stream(device="cuda:0")
        for stream in (other, torch.cuda.default_stream(0)):
            tensor = fixture.stamp(fixture.new(64 * MIB, "cuda:1"), 6)
            torch.cuda.synchronize(1)
            with torch.cuda.stream(stream):
                torch.cuda._sleep(200_000_000)  # about 0.1 s
                there = tensor.to("cuda:0", non_blocking=True)
                tensor.record_stream(stream)
            address = tensor.data_ptr()
            del tensor
            # Its own stream may not have it while the copy waits.
            with torch.cuda.device(1):
                others = [fixture.new(64 * MIB, "cuda:1").fill_(255) for _ in range(4)]
            self.assertTrue(stream.query() or address not in [each.data_ptr() for each in others])
            stream.synchronize()
            self.assertEqual(fixture.wrong(there, 6), 0)

    def test_a_device_that_is_not_the_current_one(self):
        torch.cuda.set_device(0)
        before = torch.cuda.memory_allocated(0)
        tensors = []
        for size in (4096, 3 * MIB, 80 * MIB):
            tensor = fixture.new(size, "cuda:1")
            self.assertEqual(torch.cuda.current_device(), 0)
            tensor.fill_(7)
            self.assertEqual(int(tensor.sum(dtype=torch.int64)), 7 * size)
            tensors.append(tensor)
        self.assertEqual(torch.cuda.memory_allocated(0), before)
        with torch.cuda.device(1):
            del tensor, tensors
            self.assertEqual(torch.cuda.current_device(), 1)

    def test_bytes_between_devices(self):
        for one, other in ((0, 1), (1, 0)):
            for size in (512, 4096, 3 * MIB, 200 * MIB):
                with torch.cuda.device(one):
                    tensor = fixture.stamp(fixture.new(size, f"cuda:{one}"), size)
                there = tensor.to(f"cuda:{other}")
                with torch.cuda.device(other):
                    self.assertEqual(fixture.wrong(there, size), 0, (one, other, size))
                self.assertTrue(torch.equal(there.cpu(), tensor.cpu()))
                back = torch.empty_like(tensor)
                back.copy_(there, non_blocking=True)
                with torch.cuda.device(one):
                    self.assertEqual(fixture.wrong(back, size), 0)

    def test_stitched_bytes_between_devices(self):
        for one, other in ((0, 1), (1, 0)):
            with torch.cuda.device(one):
                whole, _ = fixture.stitched(512 * MIB, f"cuda:{one}")
            there = whole.to(f"cuda:{other}")
            with torch.cuda.device(other):
                self.assertEqual(fixture.wrong(there, 0), 0)
                target, _ = fixture.stitched(512 * MIB, f"cuda:{other}")
            with torch.cuda.device(one):
                fixture.stamp(whole, 5)
            target.copy_(whole)
            with torch.cuda.device(other):
                self.assertEqual(fixture.wrong(target, 5), 0)

    def test_memory_made_after_the_first_copy(self):
        fixture.new(4096, "cuda:0").to("cuda:1")
        torch.cuda.empty_cache()
        for seed in range(5):
            tensor = fixture.stamp(fixture.new(300 * MIB, "cuda:0"), seed)
            there = tensor.to("cuda:1")
            with torch.cuda.device(1):
                self.assertEqual(fixture.wrong(there, seed), 0)
            del tensor, there
            torch.cuda.empty_cache()

    def test_streams_of_both_devices(self):
        streams = [torch.cuda.Stream(device) for device in (0, 1)]
        for number in range(30):
            with torch.cuda.device(0), torch.cuda.stream(streams[0]):
                block = torch.full((5 * MIB,), number, dtype=torch.int32, device="cuda:0")
            streams[1].wait_stream(streams[0])
            with torch.cuda.device(1), torch.cuda.stream(streams[1]):
                torch.cuda._sleep(2_000_000)
                there = block.to("cuda:1", non_blocking=True)
            streams[0].wait_stream(streams[1])
            del block
            with torch.cuda.device(0), torch.cuda.stream(streams[0]):
                torch.full((5 * MIB,), -1, dtype=torch.int32, device="cuda:0")
            torch.cuda.synchronize(0)
            torch.cuda.synchronize(1)
            self.assertEqual(int((there != number).sum()), 0)

    def test_data_parallel(self):
        torch.manual_seed(0)
        net = torch.nn.Linear(256, 256).cuda(0)
        x = torch.randn(64, 256, device="cuda:0")
        spread = torch.nn.DataParallel(net, [0, 1])
        spread(x).sum().backward()
        got = net.weight.grad.clone()
        net.zero_grad()
        net(x).sum().backward()
        torch.testing.assert_close(got, net.weight.grad)

    def test_fraction_and_trim_are_a_devices_own(self):
        import glake

        torch.cuda.set_per_process_memory_fraction(0.5, 1)
        self.assertAlmostEqual(torch.cuda.get_per_process_memory_fraction(1), 0.5)
        self.assertAlmostEqual(torch.cuda.get_per_process_memory_fraction(0), 1.0)
        torch.cuda.set_per_process_memory_fraction(1.0, 1)
        kept = [fixture.new(300 * MIB, f"cuda:{device}") for device in (0, 1)]
        del kept
        glake.trim()
        for device in (0, 1):
            self.assertLessEqual(torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), 128 * MIB)

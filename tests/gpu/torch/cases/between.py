"""glake.copy_ and copy_list between two GPUs, where nothing has opened the memory of one to the other."""
import unittest

import fixture

ISOLATED = True

PROGRAM = """
    import ctypes, random, torch, fixture, glake
    from fixture import MIB
    fixture.enable()
    # Memory of the other GPU: ours, and cudaMalloc's.
    cuda, plain = ctypes.CDLL("libcudart.so.13" if torch.version.cuda.startswith("13") else "libcudart.so.12"), ctypes.c_void_p()
    class Plain:
        def __init__(self, size):
            at = ctypes.c_void_p()
            with torch.cuda.device(1):
                assert cuda.cudaMalloc(ctypes.byref(at), ctypes.c_size_t(size)) == 0
            self.__cuda_array_interface__ = dict(data=(at.value, False), shape=(size,), typestr="|u1", version=3)
    bad = []
    for size in (4096, 5 * MIB, 256 * MIB):
        here = fixture.new(size, "cuda:0")
        for there, what in ((fixture.new(size, "cuda:1"), "ours"), (torch.as_tensor(Plain(size), device="cuda:1"), "cudaMalloc")):
            for stream in (torch.cuda.Stream(0), torch.cuda.Stream(1)):
                for to, from_ in ((here, there), (there, here)):
                    fixture.stamp(from_, 5)
                    fixture.stamp(to, 6)
                    torch.cuda.synchronize(0), torch.cuda.synchronize(1)
                    glake.copy_(to, from_, stream=stream, wait=True)
                    if fixture.wrong(to, 5):
                        bad.append((size, what, stream.device_index, "one"))
                    parts = list(zip(to.split(1024), from_.split(1024)))[:3000]
                    random.shuffle(parts)
                    fixture.stamp(from_, 7)
                    torch.cuda.synchronize(0), torch.cuda.synchronize(1)
                    glake.copy_list(parts, stream=stream, wait=True)
                    if not all(torch.equal(a.cpu(), b.cpu()) for a, b in parts[:200]):
                        bad.append((size, what, stream.device_index, "list"))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    to, from_ = fixture.new(256 * MIB, "cuda:0"), fixture.new(256 * MIB, "cuda:1")
    with torch.cuda.device(0):
        begin.record()
        for _ in range(20):
            glake.copy_(to, from_)
        end.record()
        end.synchronize()
    print(f"{20 * 256 * MIB / begin.elapsed_time(end) / 1e6:.0f} GB/s between the GPUs", bad)
    code = cuda.cudaDeviceEnablePeerAccess(1, 0)
    print("peer access was untouched" if code == 0 else f"cudaDeviceEnablePeerAccess: {code}")
    assert not bad and code == 0
"""


class Between(unittest.TestCase):
    @fixture.gpus(2)
    @fixture.limit(120)
    def test_copies_need_no_opening(self):
        done = fixture.code(PROGRAM, timeout=110)
        self.assertEqual(done.code, 0, done.text())
        print(done.out)

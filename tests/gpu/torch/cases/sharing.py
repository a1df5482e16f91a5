"""CUDA tensors in another process, through torch.multiprocessing."""
import json, unittest

import torch

import fixture
from fixture import GIB

ISOLATED = True


class Sharing(unittest.TestCase):
    @fixture.only("compiled", "a pluggable allocator has no shareIpcHandle")
    @fixture.limit(60)
    def test_tensors_arrive_and_come_back(self):
        done = fixture.program("share.py", timeout=50)
        self.assertEqual(done.code, 0, done.text())

    @fixture.only("compiled", "a pluggable allocator has no shareIpcHandle")
    @fixture.limit(150)
    def test_a_tensor_of_thousands_of_extents_arrives_under_the_usual_limit_of_files(self):
        if torch.cuda.mem_get_info()[0] < 76 * GIB:
            self.skipTest("less than 76 GiB are free")
        done = fixture.program("share_large.py", timeout=140)
        self.assertEqual(done.code, 0, done.text())

    @fixture.limit(60)
    def test_memory_can_be_registered_for_rdma_as_torch_s_can(self):
        """The attribute of a pointer, of a small tensor, a large one and one in a region; and of plain torch's expandable segments."""
        asked = """
            import ctypes, torch, fixture
            fixture.enable()
            driver = ctypes.CDLL("libcuda.so.1")
            tensors = [fixture.new(size) for size in (2048, 150 * fixture.MIB)]
            if fixture.BACKEND != "native":
                import glake
                with glake.region("cache"):
                    tensors.append(fixture.new(64 * fixture.MIB))
            def capable(at):
                found = ctypes.c_uint(99)  # CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE
                assert driver.cuPointerGetAttribute(ctypes.byref(found), 15, ctypes.c_uint64(at)) == 0
                return found.value
            print([capable(tensor.data_ptr() + at) for tensor in tensors for at in (0, tensor.numel() - 1)])
        """
        ours = fixture.code(asked)
        plain = fixture.code(asked, GLAKE_TEST_BACKEND="native", PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
        for done in (ours, plain):
            self.assertEqual(done.code, 0, done.text())
        self.assertEqual(set(json.loads(ours.out)), set(json.loads(plain.out)))

    @fixture.only("pluggable", "the other backend shares")
    def test_the_plain_abi_says_so(self):
        done = fixture.code("""
            import torch, fixture
            from torch.multiprocessing.reductions import reduce_tensor
            fixture.enable()
            tensor = fixture.stamp(fixture.new(1 << 20), 1)
            try:
                reduce_tensor(tensor)
                print("no error")
            except RuntimeError as error:
                print("refused:", error)
            print("alive", fixture.wrong(tensor, 1))
        """)
        self.assertEqual(done.code, 0, done.text())
        self.assertIn("refused: ", done.out, done.text())
        self.assertIn("alive 0", done.out, done.text())

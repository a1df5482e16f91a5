"""The interface of torch_memory_saver over regions, on simulated memory. tests/gpu has the script against the other package."""

import pathlib
import sys
import unittest

import child

SAVER = pathlib.Path(__file__).resolve().parents[1] / "saver"

COMMON = f"""
import ctypes, os, sys, tempfile
sys.path.insert(0, {str(SAVER)!r})
import glake
from glake import _library
backend = [None]
def enable(config=None):
    from glake._configuration import configuration
    _library.api().configure(*configuration(config))
    backend[0] = "of the test"
glake.enable, glake.backend = enable, lambda: backend[0]
from torch_memory_saver import TorchMemorySaver, configure_subprocess, torch_memory_saver as saver
MIB = 1 << 20

class Block:
    def __init__(self, seed, size=4 * MIB):
        self.address, self.size, self.content = glake.allocate(size), size, bytes([seed, seed + 1]) * (size // 2)
        self.__cuda_array_interface__ = {{"data": (self.address, False), "shape": (size,), "typestr": "|u1", "version": 3}}
        glake.copy_(self, self.content, wait=True)
    def has(self):
        found = bytearray(self.size)
        glake.copy_(found, self, wait=True)
        return found == self.content

def refused(kind, word, call):
    try:
        call()
    except kind as error:
        assert word in str(error), error
    else:
        raise AssertionError("not refused")
def enter(**more):
    with saver.region(**more):
        pass
def reserved():
    return glake.memory_stats(0)["reserved_bytes.all.current"]
def evicted():
    return {{region["tag"] for region in glake.regions() if region["evicted"]}}
"""


class Saver(unittest.TestCase):
    def check(self, code, **options):
        return child.check(self, COMMON + code, **options)

    def test_tags_pause_and_resume_by_themselves(self):
        self.check(
            """
enter()
other = Block(9)
with saver.region(tag="weights", enable_cpu_backup=True):
    kept = Block(1)
    with saver.region(tag="cache"):
        lost = Block(3)
    with saver.disable():
        stays = Block(5)
with saver.region("weights", True, cpu_backup_backend="mmap"):
    more = Block(7)
before = reserved()
saver.pause("weights")
assert evicted() == {"saver weights kept"} and reserved() <= before - 8 * MIB
assert lost.has() and stays.has() and other.has()
found = bytearray(4 * MIB)
glake.copy_evicted(found, kept)
assert found == kept.content
refused(glake.InvalidError, "in host memory", lambda: glake.copy_evicted(found, lost))
saver.pause("weights")
saver.pause()
assert evicted() == {"saver weights kept", "saver cache discarded"}
saver.resume("weights")
assert kept.has() and more.has() and evicted() == {"saver cache discarded"}
saver.resume()
assert evicted() == set() and stays.has() and other.has()
for block in (kept, lost, more):
    glake.free(block.address)
for _ in range(2):
    saver.pause()
    saver.resume()
saver.pause("unknown")
saver.resume("unknown")
"""
        )

    def test_a_backup_on_disk(self):
        self.check(
            """
folder = tempfile.mkdtemp(dir="/var/tmp")
refused(ValueError, "needs a folder", lambda: enter(enable_disk_backup=True))
saver.set_disk_backup_dir(os.path.join(folder, "new"))
with saver.region("weights", enable_disk_backup=True):
    block = Block(1)
saver.pause("weights")
place = [region["place"] for region in glake.regions() if region["tag"] == "saver weights disk"]
assert place == ["file"], place
saver.resume()
assert block.has()
saver.set_disk_backup_dir(os.path.join(folder, "new"))
refused(glake.StateError, "before the first region", lambda: saver.set_disk_backup_dir(folder))
import shutil
shutil.rmtree(folder)
"""
        )

    def test_what_is_refused(self):
        self.check(
            """
refused(ValueError, "exclude each other", lambda: enter(enable_cpu_backup=True, enable_disk_backup=True))
refused(ValueError, "requires enable_cpu_backup", lambda: enter(cpu_backup_backend="pinned"))
refused(ValueError, "'pinned' and 'mmap'", lambda: enter(enable_cpu_backup=True, cpu_backup_backend="ssd"))
refused(ValueError, "'preload' and 'torch'", lambda: setattr(saver, "hook_mode", "other"))
saver.hook_mode = "torch"
assert saver.hook_mode == "torch" and saver.enabled and saver.retain_cpu_backup is False
saver.retain_cpu_backup = True
assert saver.retain_cpu_backup is True and isinstance(saver, TorchMemorySaver)
"""
        )

    def test_subprocesses_are_switched_on(self):
        self.check(
            """
import subprocess
code = "import glake_switch; print(glake_switch.allocator())"
os.environ.pop("GLAKE_ALLOCATOR", None)
before = dict(os.environ)
with configure_subprocess():
    with configure_subprocess():
        pass
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
assert out == "(True, 'GLAKE_ALLOCATOR=1')\\n", out
assert dict(os.environ) == before
"""
        )


if __name__ == "__main__":
    sys.exit(unittest.main())

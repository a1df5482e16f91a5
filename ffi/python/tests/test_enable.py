"""``glake.enable()`` against a torch that is none: what it refuses, what it warns of, what is a no-op."""

import unittest

import child

AROUND = """
import glake, logging, os, sys, warnings
def refused(kind, *words, **arguments):
    try:
        glake.enable(**arguments)
    except kind as error:
        for word in words:
            assert word in str(error), (word, str(error))
    else:
        raise AssertionError("not refused")
"""


class Enable(unittest.TestCase):
    def enable(self, code, **options):
        options = {"device": None, "torch": child.FAKE_TORCH, **options}
        return child.check(self, AROUND + code, **options)

    def test_the_plain_abi(self):
        out = self.enable(
            """
logging.basicConfig(level=logging.INFO)
glake.enable({"pool": {"borrow": "wait"}}, backend="pluggable")
import torch
assert glake.backend() == "pluggable"
assert len(torch._C.changed) == 1
assert set(torch._C.changed[0].functions) == {"alloc", "free", "set_init_fn", "set_reset_fn", "set_memory_fraction_fn",
    "set_base_alloc_fn", "set_record_stream_fn", "set_begin_allocate_to_pool", "set_end_allocate_to_pool_fn", "set_release_pool"}
assert all(torch._C.changed[0].functions.values())
# The same again is nothing; another is refused.
glake.enable({"pool": {"borrow": "wait"}}, backend="pluggable")
refused(glake.StateError, "one configuration", config="serverless", backend="pluggable")
assert len(torch._C.changed) == 1
"""
        )
        self.assertEqual(out, "")

    def test_forked_children(self):
        self.enable(
            """
from glake import _library
def in_child(check):
    pid = os.fork()
    if pid == 0:
        try:
            check()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
glake.enable(backend="pluggable")
# The parent has not started anything: its children may.
in_child(lambda: glake.enable(backend="pluggable"))
os.environ["GLAKE_DEVICE"] = "sim"
_library.api().start()
in_child(lambda: refused(glake.StateError, "forked", backend="pluggable"))
glake.enable(backend="pluggable")
"""
        )

    def test_the_log_says_which_backend_and_why(self):
        self.enable(
            """
records = []
handler = logging.Handler()
handler.emit = lambda record: records.append(record.getMessage())
logging.getLogger("glake").addHandler(handler)
logging.getLogger("glake").setLevel(logging.INFO)
glake.enable()
assert len(records) == 1 and "pluggable" in records[0] and "not possible" in records[0], records
""",
            CXX="no-such-compiler",
        )

    def test_compiled_only(self):
        self.enable('refused(glake.Error, "compiled backend", backend="compiled")', CXX="no-such-compiler")

    def test_a_backend_that_is_none(self):
        self.enable('refused(ValueError, "pluggable", backend="native")')

    def test_no_torch(self):
        self.enable('sys.modules["torch"] = None\nrefused(glake.TorchError, "torch 2.0")')

    def test_torch_that_is_too_old(self):
        self.enable('import torch\ntorch.__version__ = "1.13.1+cu117"\nrefused(glake.TorchError, "1.13.1", "2.0")')

    def test_torch_without_cuda(self):
        self.enable("import torch\ntorch.version.cuda = None\nrefused(glake.TorchError, 'without CUDA')")

    def test_too_late(self):
        for backend in ("pluggable", None):
            self.enable(f"import torch\ntorch._C.initialized.append(1)\nrefused(glake.StateError, 'initialised', backend={backend!r})")

    def test_an_allocator_that_is_in_use(self):
        self.enable(
            "import torch\ntorch.cuda.is_initialized = lambda: False\ntorch._C.initialized.append(1)\n"
            "refused(glake.StateError, 'in use', backend='pluggable')\nassert glake.backend() is None"
        )

    def test_a_simulated_device(self):
        self.enable('refused(glake.TorchError, "simulated", "needs an NVIDIA GPU", "`glake demo` shows")', device="sim:h20x8")
        self.enable('refused(glake.TorchError, "simulated", config={"device": {"choice": "sim"}})')

    def test_a_configuration_that_does_not_parse(self):
        self.enable('refused(glake.ConfigError, "borrow", "maybe", "completed", config={"pool": {"borrow": "maybe"}}); assert glake.backend() is None')
        self.enable('refused(glake.ConfigError, "trainig", config="trainig")')
        self.enable('refused(glake.ConfigError, "reuseLimit", "many")', reuseLimit="many")

    def test_after_a_refusal_it_can_be_asked_again(self):
        self.enable(
            """
refused(glake.ConfigError, config={"pool": {"borrow": "maybe"}}, backend="pluggable")
glake.enable({"pool": {"borrow": "off"}}, backend="pluggable")
assert glake.backend() == "pluggable"
"""
        )

    def test_no_gpu(self):
        self.enable("import torch\ntorch.cuda.devices[0] = 0\nrefused((glake.UnavailableError, glake.TorchError), 'CUDA')")
        # The simulator is no way out for torch, and the errors of both do not lead from one to the other.
        for device, sends in (None, "GLAKE_DEVICE=sim"), ("sim", "unset GLAKE_DEVICE"):
            self.enable(
                f"""
import torch
torch.cuda.devices[0] = 0
try:
    glake.enable()
except glake.Error as error:
    assert {sends!r} not in str(error), error
else:
    raise AssertionError("enabled")
""",
                device=device,
            )

    def test_settings_of_torchs_own_allocator(self):
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            self.enable(
                f"""
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    glake.enable(backend="pluggable")
texts = [str(warning.message) for warning in seen]
assert len(texts) == 1, texts
assert "{name}" in texts[0] and "expandable_segments:True, roundup_power2_divisions:[256:1,>:2]" in texts[0], texts
assert "pinned" not in texts[0]
assert seen[0].filename == "<string>", seen[0].filename
""",
                **{name: "expandable_segments:True,roundup_power2_divisions:[256:1,>:2],pinned_num_register_threads:2"},
            )

    def test_caching_cannot_be_switched_off(self):
        for value in ("1", "0"):
            self.enable(
                """
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    glake.enable(backend="pluggable")
texts = [str(warning.message) for warning in seen]
assert len(texts) == 1 and "PYTORCH_NO_CUDA_MEMORY_CACHING" in texts[0] and "has no effect" in texts[0], texts
assert seen[0].filename == "<string>", seen[0].filename
""",
                PYTORCH_NO_CUDA_MEMORY_CACHING=value,
            )

    def test_settings_at_run_time(self):
        self.enable(
            """
import types
from glake import _layer
given = []
torch = types.SimpleNamespace(_C=types.SimpleNamespace(_accelerator_setAllocatorSettings=given.append))
for pinned_only, kept in ((True, "pinned_use_background_threads:True"), (False, None)):
    (setter,) = _layer.settings(torch, pinned_only=pinned_only).values()
    for text, ignored in (("pinned_use_background_threads:True,max_split_size_mb:20", "max_split_size_mb:20"), ("pinned_num_register_threads:2", None)):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            setter(text)
        assert [str(warning.message).split(" have no")[0] for warning in seen] == [f"torch's allocator settings {ignored}"] * bool(ignored), seen
        assert given.pop() == (text if ignored is None else kept or text)
"""
        )

    def test_the_package_tells_what_it_would_do(self):
        out = self.enable(
            """
from glake.__main__ import main
main()
""",
            CXX="no-such-compiler",
        )
        for word in ("glake ", "library ", "libgmlake.so", "2.11.0+fake", "pluggable", "headers"):
            self.assertIn(word, out)


if __name__ == "__main__":
    unittest.main()

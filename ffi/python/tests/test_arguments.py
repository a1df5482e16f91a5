"""Wrong arguments of every public function: a TypeError or a ValueError whose text names the argument and what is allowed."""

import inspect
import math
import os
import re
import unittest

os.environ["GLAKE_DEVICE"] = "sim"

import glake  # noqa: E402

from regions import made  # noqa: E402

try:
    import torch
except ImportError:
    torch = None

TAG, ARRAYS = made(size=1 << 20)
HOST = bytearray(1 << 20)
ARRAY = ARRAYS[0]
HUGE = 1 << 2000
# Values that are wrong for each kind of parameter.
WRONG = {
    "tag": [None, 7, b"x", ["x"], object(), "a\0b", "\ud800"],
    "tags": [7, 1.5, b"x", [None], [7], [["x"]], ["a\0b"], "\ud800", object()],
    "word": [None, 7, "nonsense", ["keep"], {}, b"x", "a\0b", "\ud800"],
    "tier": [7, "nonsense", ["host"], b"host", "a\0b", "\ud800"],
    "flag": [2, -1, "yes", 1.5, [True], {}, object(), HUGE],
    "seconds": ["1", -1, math.nan, math.inf, 1e300, HUGE, [1], object()],
    "bytes": [-1, 1.5, True, HUGE, 1 << 64, [1], object(), b"1"],
    "device": [1.5, -1, True, HUGE, 1 << 31, 99, "cpu", "cuda:x", "cuda:-1", [0], object()],
    "stream": [-1, 1.5, True, HUGE, "x", [0], object()],
    "array": [None, 7, 1.5, "x", [1], object()],
    "gpu array": [None, 7, "x", object(), bytearray(8)],
    "arrays": [None, 7, [None], [7], b"x"],
    "pairs": [None, 7, [None], [7], ["x"], [(ARRAY,)], [(ARRAY, None)], "xy"],
    "ranges": [7, 1.5, "x", [7], [(0, 1.5)], [(0, "8")], [(0,)], [(-1, 8)], [(0, HUGE)], [(8, 0)]],
    "function": [7, "x", [len], object()],
    "module": [None, 7, "x", object(), int],
    "modules": [7, "x", object(), int],
    "least": [None, -1, "x", True, math.nan, [1], object()],
    "size": [-1, 0, "x", "1 parsec", True, math.nan, math.inf, HUGE, [1], object()],
    "file": [7, True, [1], object(), b"x"],
    "path": [7, 1.5, ["/x"], object(), "a\0b", "\ud800"],
    "worker": [7, b"x", "", "a b", "a\0b", "\ud800"],
    "config": [7, 1.5, ["x"], object(), "/nowhere/glake.toml", {7: {}}, {"pool": object()}],
    "whole number": [-1, 1.5, True, HUGE, "x", None],
}
# Texts of the interpreter, of the bindings, and of the library's parser, none of which names the argument.
FOREIGN = re.compile(
    "is not an instance of|JSON|line [0-9]+ column|invalid type|codec|unhashable|object is not|has no attribute|not supported between"
    "|to unpack|cannot unpack|too large to convert|too big to convert|can't convert|ambiguous|null byte"
)


async def app(_scope, _receive, _send):
    pass


def gate(**options):
    glake.asgi.Gate(app, **options)


def within(**options):
    glake.hooks(**options)
    glake.hooks()


# Kind and call of each parameter of each function. The text may call an array by another name.
CALLS = {
    ("active", "tags"): ("tag", lambda value: glake.active(value)),
    ("active", "when_closed"): ("word", lambda value: glake.active(when_closed=value)),
    ("active", "timeout"): ("seconds", lambda value: glake.active(timeout=value)),
    ("allocate", "size"): ("bytes", glake.allocate),
    ("allocate", "device"): ("device", lambda value: glake.allocate(16, device=value)),
    ("allocate", "stream"): ("stream", lambda value: glake.allocate(16, stream=value)),
    ("asgi.Gate", "app"): ("function", glake.asgi.Gate),
    ("asgi.Gate", "tags"): ("tags", lambda value: gate(tags=value)),
    ("asgi.Gate", "when_closed"): ("word", lambda value: gate(when_closed=value)),
    ("asgi.Gate", "timeout"): ("seconds", lambda value: gate(timeout=value)),
    ("asgi.Gate", "retry_after"): ("whole number", lambda value: gate(retry_after=value)),
    ("asgi.Gate", "exempt"): ("tags", lambda value: gate(exempt=value)),
    ("asgi.Gate", "grain"): ("word", lambda value: gate(grain=value)),
    ("asgi.Gate", "buffer"): ("bytes", lambda value: gate(buffer=value)),
    ("asgi.Gate", "stall_timeout"): ("seconds", lambda value: gate(stall_timeout=value)),
    ("commit", "tensor"): ("gpu array", glake.commit),
    ("copy_", "dst"): ("array", lambda value: glake.copy_(value, HOST)),
    ("copy_", "src"): ("array", lambda value: glake.copy_(ARRAY, value)),
    ("copy_", "stream"): ("stream", lambda value: glake.copy_(ARRAY, HOST, stream=value)),
    ("copy_", "priority"): ("word", lambda value: glake.copy_(ARRAY, HOST, priority=value)),
    ("copy_", "wait"): ("flag", lambda value: glake.copy_(ARRAY, HOST, wait=value)),
    ("copy_", "verify"): ("flag", lambda value: glake.copy_(ARRAY, HOST, wait=True, verify=value)),
    ("copy_evicted", "dst"): ("array", lambda value: glake.copy_evicted(value, ARRAY)),
    ("copy_evicted", "src"): ("array", lambda value: glake.copy_evicted(HOST, value)),
    ("copy_list", "pairs"): ("pairs", glake.copy_list),
    ("copy_list", "stream"): ("stream", lambda value: glake.copy_list([(ARRAY, HOST)], stream=value)),
    ("copy_list", "priority"): ("word", lambda value: glake.copy_list([(ARRAY, HOST)], priority=value)),
    ("copy_list", "wait"): ("flag", lambda value: glake.copy_list([(ARRAY, HOST)], wait=value)),
    ("copy_list", "verify"): ("flag", lambda value: glake.copy_list([(ARRAY, HOST)], wait=True, verify=value)),
    ("copy_to_all", "dsts"): ("arrays", lambda value: glake.copy_to_all(value, HOST)),
    ("copy_to_all", "src"): ("array", lambda value: glake.copy_to_all([ARRAY], value)),
    ("copy_to_all", "stream"): ("stream", lambda value: glake.copy_to_all([ARRAY], HOST, stream=value)),
    ("copy_to_all", "priority"): ("word", lambda value: glake.copy_to_all([ARRAY], HOST, priority=value)),
    ("copy_to_all", "wait"): ("flag", lambda value: glake.copy_to_all([ARRAY], HOST, wait=value)),
    ("copy_to_all", "verify"): ("flag", lambda value: glake.copy_to_all([ARRAY], HOST, wait=True, verify=value)),
    ("decommit", "tensor"): ("gpu array", glake.decommit),
    ("enable", "config"): ("config", glake.enable),
    ("enable", "backend"): ("word", lambda value: glake.enable(backend=value or "none")),
    ("fix", "memory"): ("gpu array", glake.fix),
    ("follow", "module"): ("module", glake.follow),
    ("follow", "safepoints"): ("flag", lambda value: glake.follow(torch.nn.Linear(2, 2), safepoints=value)),
    ("free", "address"): ("whole number", glake.free),
    ("hooks", "before"): ("function", lambda value: within(before=value)),
    ("hooks", "after"): ("function", lambda value: within(after=value)),
    ("hooks", "timeout"): ("seconds", lambda value: within(timeout=value)),
    ("join", "name"): ("worker", lambda value: glake.join(value, "/nowhere/agent.sock")),
    ("join", "agent"): ("path", lambda value: glake.join("worker", value)),
    ("lease.grant", "device"): ("device", lambda value: glake.lease.grant(value, 0)),
    ("lease.grant", "bytes"): ("bytes", lambda value: glake.lease.grant(0, value)),
    ("lease.set", "device"): ("device", lambda value: glake.lease.set(value, 0)),
    ("lease.set", "bytes"): ("bytes", lambda value: glake.lease.set(0, value)),
    ("lease.take", "device"): ("device", lambda value: glake.lease.take(value, 0)),
    ("lease.take", "bytes"): ("bytes", lambda value: glake.lease.take(0, value)),
    ("lease.watch", "callback"): ("function", glake.lease.watch),
    ("live", "tensor"): ("gpu array", lambda value: glake.live(value, None)),
    ("live", "ranges"): ("ranges", lambda value: glake.live(ARRAY, value)),
    ("memory_stats", "device"): ("device", glake.memory_stats),
    ("memory_summary", "device"): ("device", glake.memory_summary),
    ("multi_path", "on"): ("flag", glake.multi_path),
    ("offload.activations", "module"): ("modules", glake.offload.activations),
    ("offload.activations", "least"): ("least", lambda value: glake.offload.activations(torch.nn.Linear(2, 2), least=value)),
    ("offload.activations", "replay"): ("flag", lambda value: glake.offload.activations(torch.nn.Linear(2, 2), replay=value)),
    ("offload.offload", "module"): ("module", glake.offload.offload),
    ("offload.offload", "budget"): ("size", lambda value: glake.offload(torch.nn.Linear(2, 2), budget=value)),
    ("offload.offload", "preset"): ("word", lambda value: glake.offload(torch.nn.Linear(2, 2), preset=value)),
    ("offload.offload", "least"): ("least", lambda value: glake.offload(torch.nn.Linear(2, 2), least=value)),
    ("offload.offload", "host_memory"): ("size", lambda value: glake.offload(torch.nn.Linear(2, 2), host_memory=value)),
    ("offload.offload", "weights"): ("flag", lambda value: glake.offload(torch.nn.Linear(2, 2), weights=value)),
    ("offload.offload", "load"): ("function", lambda value: glake.offload(torch.nn.Linear(2, 2), load=value)),
    ("offload.report", "plot"): ("file", lambda value: glake.offload.report(plot=value)),
    ("order", "tags"): ("tags", glake.order),
    ("prepare", "tag"): ("tag", glake.prepare),
    ("refill", "tags"): ("tags", glake.refill),
    ("refill", "bytes"): ("bytes", lambda value: glake.refill(bytes=value)),
    ("refill", "wait"): ("flag", lambda value: glake.refill(wait=value)),
    ("refill", "verify"): ("flag", lambda value: glake.refill(verify=value)),
    ("refill", "timeout"): ("seconds", lambda value: glake.refill(timeout=value)),
    ("region", "tag"): ("tag", glake.region),
    ("region", "policy"): ("word", lambda value: glake.region("another", policy=value)),
    ("region", "host_copy"): ("word", lambda value: glake.region("another", host_copy=value)),
    ("region", "clean"): ("flag", lambda value: glake.region("another", clean=value)),
    ("region_of", "array"): ("array", glake.region_of),
    ("seal", "tag"): ("tag", glake.seal),
    ("seal", "strict"): ("flag", lambda value: glake.seal(TAG, strict=value)),
    ("shrink", "tags"): ("tags", glake.shrink),
    ("shrink", "tier"): ("tier", lambda value: glake.shrink(tier=value)),
    ("shrink", "bytes"): ("bytes", lambda value: glake.shrink(bytes=value)),
    ("shrink", "verify"): ("flag", lambda value: glake.shrink(verify=value)),
    ("shrink", "timeout"): ("seconds", lambda value: glake.shrink(timeout=value)),
    ("trim", "keep"): ("bytes", glake.trim),
    ("trim", "device"): ("device", lambda value: glake.trim(device=value)),
    ("unfix", "memory"): ("gpu array", glake.unfix),
    ("unseal", "tag"): ("tag", glake.unseal),
    ("wait", "tag"): ("tag", glake.wait),
    ("wait", "stream"): ("stream", lambda value: glake.wait(TAG, stream=value)),
}
NEEDS_TORCH = {("follow", "safepoints"), *(key for key in CALLS if key[0] in ("offload.activations", "offload.offload"))}
# Words for a parameter in the texts of its part or of the library.
ALSO_CALLED = {
    ("enable", "config"): "configuration|pool",
    ("join", "name"): "worker",
    ("live", "ranges"): "range|bytes",
    ("order", "tags"): "region",
}


def public():
    """Yields the functions and classes of users by name. Types, results of calls and exceptions are made by the package."""
    made_here = {glake.Copy, glake.Region, glake.Following}
    for module, names in ((glake, glake.__all__), (glake.lease, glake.lease.__all__), (glake.asgi, ["Gate"]), (glake.offload, ["activations", "offload", "report"])):
        prefix = "" if module is glake else module.__name__.removeprefix("glake.") + "."
        for name in names:
            thing = getattr(module, name)
            is_error = isinstance(thing, type) and issubclass(thing, Exception)
            if inspect.isroutine(thing) or (isinstance(thing, type) and not is_error and thing not in made_here):
                yield prefix + name, thing


class Arguments(unittest.TestCase):
    def test_every_parameter_is_tried(self):
        there = set()
        for name, thing in public():
            parameters = [parameter for parameter in inspect.signature(thing).parameters if parameter not in ("args", "kwargs")]
            there.update((name, parameter) for parameter in parameters)
        self.assertEqual(set(CALLS), there)

    def test_each_wrong_value_is_refused_in_words(self):
        for (function, parameter), call in CALLS.items():
            if (function, parameter) in NEEDS_TORCH and not torch:
                continue
            kind, ask = call
            for value in WRONG[kind]:
                with self.subTest(f"{function}({parameter}={value!r:.60})"):
                    with self.assertRaises((TypeError, ValueError)) as raised:
                        ask(value)
                    text = str(raised.exception)
                    self.assertIsNone(FOREIGN.search(text), text)
                    called = ALSO_CALLED.get((function, parameter), parameter)
                    self.assertRegex(text, rf"\b({called}|{parameter}|{parameter.rstrip('s')})\b")

    def test_a_text_is_one_name_and_not_its_letters(self):
        glake.order(TAG)
        gated = glake.asgi.Gate(app, tags=TAG, exempt="/alive")
        self.assertEqual((gated._tags, gated._exempt), ((TAG,), frozenset(["/alive"])))

    def test_numbers_of_other_libraries(self):
        class Count(int):
            pass

        glake.shrink(TAG, bytes=Count(1), timeout=Count(10))
        glake.refill(TAG, wait=1, bytes="1MiB")
        glake.refill()
        glake.trim(keep=Count(1), device="cuda:0")

    def test_decorators_of_no_function(self):
        for block in (glake.active(), glake.region("another")):
            with self.assertRaisesRegex(TypeError, "decorates functions"):
                block(7)

    def test_memory_of_the_host_is_called_so(self):
        calls = [glake.fix, glake.unfix, glake.decommit, glake.commit, lambda array: glake.live(array, None)]
        arrays = [bytearray(8)] + ([torch.zeros(8)] if torch else [])
        for call in calls:
            for array in arrays:
                with self.assertRaisesRegex(glake.InvalidError, "lies in host memory"):
                    call(array)


if __name__ == "__main__":
    unittest.main()

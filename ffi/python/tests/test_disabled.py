"""``GLAKE_DISABLE=1``: every public function does nothing, with torch's meaning, and the library is never opened."""

import importlib.util
import unittest

import child

# Modules and tensors are tried where there is a torch.
TORCH = None if importlib.util.find_spec("torch") else child.FAKE_TORCH

CALLS = """
import asyncio, glake, sys
array, other = bytearray(b"12345678"), bytearray(8)

def program():
    glake.enable()
    glake.enable({"pool": {"borrow": "wait"}}, backend="pluggable")
    assert glake.backend() is None
    with glake.active("weights"), glake.region("weights", policy="sealed", host_copy="prepare", clean=True):
        assert glake.safepoint() is False
    @glake.region("weights")
    @glake.active("weights", when_closed="refuse", timeout=1)
    def inside():
        return 7
    assert inside() == 7
    asyncio.run(tasks())

async def tasks():
    async with glake.active(when_closed="hold"):
        assert await glake.safepoint_async() is False
    replies = []
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"here"})
    async def send(message):
        replies.append(message["type"])
    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}
    await glake.asgi.Gate(app)({"type": "http", "path": "/", "method": "GET", "headers": []}, receive, send)
    assert replies == ["http.response.start", "http.response.body"], replies

def copies():
    assert glake.copy_(other, array, wait=True) is None and other == array
    other[:] = bytes(8)
    glake.copy_list([(memoryview(other)[:4], memoryview(array)[4:])]).wait()
    assert other == b"5678" + bytes(4)
    copy = glake.copy_to_all([other], array, priority="critical")
    assert copy.done() and other == array
    for wrong in (lambda: glake.copy_evicted(other, array), lambda: glake.copy_(other, b"1"), lambda: glake.copy_(array, array, priority="high")):
        try:
            wrong()
        except (ValueError, glake.InvalidError):
            continue
        raise AssertionError("not refused")

def refusals():
    wrong = [lambda tag=tag: glake.region(tag) for tag in ("", "default", "graph 1")]
    wrong += [lambda tier=tier: glake.shrink(tier=tier) for tier in ("moon", "peer:x", "peer:")]
    wrong += [lambda: glake.fix((-1, 5)), lambda: glake.enable(backend="other"), lambda: glake.offload(None), lambda: glake.join("a/b")]
    for call in wrong:
        try:
            call()
        except glake.InvalidError:
            continue
        raise AssertionError("not refused")
    for tier in ("host", "file", "peer", "peer:1"):
        glake.shrink(tier=tier)

def statistics():
    import torch
    torch.cuda.memory_stats = lambda device: {"of": "torch"}
    torch.cuda.memory_summary = lambda device: "of torch"
    torch.cuda.memory._snapshot = lambda: {"segments": []}
    emptied = []
    torch.cuda.empty_cache = lambda: emptied.append(1)
    assert glake.memory_stats() == {"of": "torch"} and glake.memory_summary(0) == "of torch"
    assert glake.snapshot() == {"segments": []}
    assert glake.trim() == 0 and emptied == [1]
    torch.cuda.MemPool = type("MemPool", (), {})
    assert isinstance(glake.mem_pool(), torch.cuda.MemPool)

def blocks():
    import torch
    live = {}
    torch.cuda.caching_allocator_alloc = lambda size, device, stream: live.setdefault(4096, (size, device, stream)) and 4096
    torch.cuda.caching_allocator_delete = live.pop
    assert glake.allocate(100, device="cuda:0", stream=7) == 4096 and live == {4096: (100, 0, 7)}
    glake.free(4096)
    assert live == {} and glake.allocate(0) == 0 and glake.free(0) is None

def leases():
    glake.lease.watch(lambda *event: None)
    glake.lease.set(0, 1 << 30)
    glake.lease.grant(0, 5)
    assert glake.lease.take(0, 5) == 0
    glake.lease.watch(None)

def modules():
    if importlib.util.find_spec("torch.nn") is None:
        return
    import torch
    model = torch.nn.Linear(4, 4)
    following, offloaded = glake.follow(model, safepoints=True), glake.offload(model, budget="1GiB")
    with glake.offload.activations():
        model(torch.ones(2, 4)).sum().backward()
    assert model.weight.grad is not None
    assert glake.offload.report()["entries"] == 0 and "passes" in offloaded.report()["sites"][0]
    offloaded.remove(), following.remove()

import importlib.util
calls = {
    "active enable backend region safepoint safepoint_async asgi Region": program,
    "copy_ copy_evicted copy_list copy_to_all Copy": copies,
    "memory_stats memory_summary snapshot trim mem_pool": statistics,
    "lease": leases,
    "allocate free": blocks,
    "follow Following offload": modules,
    "plain": lambda: glake.plain().__enter__().__exit__(None, None, None),
    "reports": lambda: glake.reports.ShrinkReport,
    "commit decommit": lambda: [glake.commit(array), glake.decommit(array)] == [0, 0] or 1 / 0,
    "copy_stats": lambda: glake.copy_stats()["paths"],
    "fix unfix": lambda: [glake.fix(array), glake.unfix(array)],
    "gate": lambda: glake.gate()["open"] or 1 / 0,
    "generation": lambda: glake.generation.SafePoint()(None, None),
    "hooks": lambda: glake.hooks(before=print, after=print),
    "join leave": lambda: [glake.join("name", "/no/agent.sock"), glake.leave()],
    "library_path": glake.library_path,
    "live": lambda: [glake.live(array, [(0, 4)]), glake.live(array, lambda: []), glake.live(array, None)],
    "memory_usage regions region_of": lambda: [glake.memory_usage(), glake.regions(), glake.region_of(array)],
    "multi_path": lambda: [glake.multi_path(), glake.multi_path(False)],
    "order prepare": lambda: [glake.order(["weights"]), glake.prepare("weights")],
    "seal unseal wait": lambda: [glake.seal("weights"), glake.unseal("weights"), glake.wait("weights", 0)],
    "shrink refill": lambda: [glake.shrink("weights", tier="host", timeout=1)["freed"], glake.refill(wait=False)["copied"]],
}
named = {name for names in calls for name in names.split()}
errors = {name for name in glake.__all__ if isinstance(getattr(glake, name), type) and issubclass(getattr(glake, name), Exception)}
assert named == set(glake.__all__) - errors, named ^ (set(glake.__all__) - errors)
for name, call in calls.items():
    call()
refusals()
assert "glake._glake" not in sys.modules, "the library was opened"
"""

KEYS = """
import json, glake
from glake import _disabled, _library
assert not isinstance(_library.api(), _disabled.Library)
def keys(text):
    return sorted(json.loads(text))
here, there = _disabled.Library(), _library.api()
there.start()
for name in ("shrink", "refill"):
    assert keys(getattr(here, name)("{}")) == keys(getattr(there, name)("{}")), name
for name in ("gate_json", "copy_stats_json", "offload_stats_json", "regions_json", "memory_usage_json"):
    assert keys(getattr(here, name)()) == keys(getattr(there, name)()), name
assert keys(here.Site().told_json()) == keys(there.Site().told_json())
"""


LATCHED = """
import os, sys
# With GLAKE_DISABLE glake.allocate() is torch's.
sys.modules["torch"] = None
import glake, glake_switch
glake.regions()
before = glake_switch.is_disabled()
os.environ["GLAKE_DISABLE"] = "{later}"
assert glake_switch.is_disabled() is before is {disabled}
try:
    address = glake.allocate(4096)
except glake.TorchError:
    assert {disabled}
else:
    assert address and not {disabled}
    glake.free(address)
assert ("GLAKE_DISABLE" in glake_switch.allocator()[1]) is {disabled}
glake.copy_(bytearray(8), bytearray(8), wait=True)
"""


class Disabled(unittest.TestCase):
    def test_the_variable_is_read_once(self):
        child.check(self, LATCHED.format(later="0", disabled=True), GLAKE_DISABLE="1")
        child.check(self, LATCHED.format(later="1", disabled=False), GLAKE_DISABLE="")

    def test_every_public_function_does_nothing(self):
        child.check(self, CALLS, torch=TORCH, GLAKE_DISABLE="1", GLAKE_AGENT="/no/agent.sock")

    def test_reports_have_the_keys_of_the_library(self):
        child.check(self, KEYS, GLAKE_DISABLE="0")


if __name__ == "__main__":
    unittest.main()

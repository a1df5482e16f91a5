"""The plugin for vLLM: the names that it needs, its arguments, and an engine's life over simulated memory with a vLLM that does nothing."""

import importlib.util
import pathlib
import random
import sys
import tempfile
import types
import unittest

import child

HERE = pathlib.Path(__file__).resolve().parent / "of_vllm"


def _load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


names = _load("vllm_wheel_names", HERE / "names.py")
table = names.table()
live = _load("vllm_live", HERE.parents[1] / "glake" / "vllm" / "_live.py")

COMMON = f"""
import os, sys, threading, time, types
sys.path.insert(0, {str(HERE)!r})
os.environ.setdefault("GLAKE_VLLM", "1")
import fake
fake.install()
import logging
said = []
class Handler(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
logging.getLogger("vllm.glake").addHandler(Handler())
import glake, glake.vllm
from glake.vllm import _names
"""

ENGINE = (
    COMMON
    + """
MIB = 1 << 20
_names.missing = lambda package: []
# torch cannot compute on simulated memory: what enable() would do is done by the first allocation.
glake.enable = lambda: None
from glake.vllm import _connector, _engine, _sleep, _worker
glake.vllm.register()
config = fake.EngineArgs().create_engine_config()
assert config.parallel_config.worker_cls == "glake.vllm._worker.Worker"
worker = _worker.Worker(vllm_config=config, local_rank=0, rank=0)
with worker._maybe_get_memory_pool_context("weights"):
    weights = glake.allocate(8 * MIB)
with worker._maybe_get_memory_pool_context(tag="kv_cache"):
    cache = glake.allocate(16 * MIB)
def resident():
    return sum(one["resident"] for one in glake.regions())
def touch():
    assert not any(one["evicted"] for one in glake.regions()), glake.regions()
fake.Worker.touch = staticmethod(touch)
block = lambda number, uses=0, hash=None, null=False: types.SimpleNamespace(block_id=number, ref_cnt=uses, block_hash=hash, is_null=null)
pool = types.SimpleNamespace(blocks=[block(0, null=True), block(1), block(2, uses=1), block(3, hash=7), block(4), block(5, uses=2)])
def connector(role):
    return _connector.Connector(config, role, types.SimpleNamespace(num_blocks=6))
scheduler = connector("scheduler")
def step(*, start=(), stop=()):
    for request in start:
        scheduler.update_state_after_alloc(types.SimpleNamespace(request_id=request), None, 0)
    for request in stop:
        assert scheduler.request_finished(types.SimpleNamespace(request_id=request), []) == (False, None)
    output = fake.output(len(scheduler._running))
    output.kv_connector_metadata = scheduler.build_connector_meta(output)
    return worker.execute_model(output)
def uses():
    return glake.gate()["uses"]
def at_once(call):
    done = threading.Thread(target=call)
    done.start()
    return done
"""
)


class Names(unittest.TestCase):
    def test_every_version_that_is_said_to_work_has_them(self):
        for version in table.VERSIONS:
            with self.subTest(version), tempfile.TemporaryDirectory() as folder:
                package = names.unpack(version, folder)
                self.assertEqual(table.missing(package), [])
                self.assertEqual(table.has_sleep_backend(package), version != "0.23.0")

    def test_what_is_missing_is_named(self):
        with tempfile.TemporaryDirectory() as folder:
            package = names.unpack("0.33.0", folder)
            file = package / "v1/worker/gpu_worker.py"
            file.write_text(file.read_text().replace("def execute_model(self, scheduler_output)", "def execute_model(self, plan)"))
            (package / "v1/core/block_pool.py").unlink()
            said = table.missing(package)
        self.assertEqual(len(said), 2, said)
        self.assertIn("vllm.v1.worker.gpu_worker.Worker.execute_model: no scheduler_output", said)
        self.assertIn("vllm.v1.core.block_pool.BlockPool: the module's source is missing", said)


class Live(unittest.TestCase):
    def test_a_blocks_bytes_are_found_in_any_layout(self):
        draw = random.Random(5)
        for _ in range(300):
            blocks, kernels = draw.randrange(7, 20), draw.choice([1, 1, 2])
            dimensions = [blocks * kernels, *(draw.choice([1, 2, 3]) for _ in range(draw.randrange(1, 4)))]
            order = list(range(len(dimensions)))
            draw.shuffle(order)
            # Memory in this order, seen as a tensor in the order of dimensions.
            strides, stride = [0] * len(dimensions), draw.choice([1, 1, 2])
            for index in reversed(order):
                strides[index], stride = stride, stride * dimensions[index]
            offset, item = draw.randrange(3), draw.choice([1, 2, 4])
            parts = live.parts(offset, dimensions, strides, item, blocks)
            chosen = sorted(draw.sample(range(blocks), draw.randrange(1, blocks)))
            found = live.ranges(parts, live.runs(chosen))
            elements = {offset}
            for index, size in enumerate(dimensions):
                entries = [e for b in chosen for e in range(b * kernels, (b + 1) * kernels)] if index == 0 else range(size)
                elements = {start + entry * strides[index] for start in elements for entry in entries}
            told = {byte for first, end in found for byte in range(first, end)}
            self.assertLessEqual({byte for element in elements for byte in range(element * item, (element + 1) * item)}, told)
            told_of_joined = live.ranges(live.joined(parts), live.runs(chosen))
            self.assertLessEqual(set(found), {pair for pair in found if any(a <= pair[0] and pair[1] <= b for a, b in told_of_joined)})
            if order[0] == 0 and stride == dimensions[0] * strides[0] and 1 in strides:
                self.assertEqual(len(told), len(chosen) * strides[0] * kernels * item, "blocks that lie apart tell nothing else")
            self.assertEqual(found, sorted(found))

    def test_an_unknown_layout_has_no_parts(self):
        self.assertIsNone(live.parts(0, [3, 4], [4, 1], 2, 100))

    def test_parts_that_touch_are_joined(self):
        layers = [live.Part(offset * 1024, 4096, 1024) for offset in range(4)]
        self.assertEqual(live.joined(reversed(layers)), [live.Part(0, 4096, 4096)])
        self.assertEqual(live.joined([live.Part(0, 4096, 3900)]), [live.Part(0, 4096, 4096)], "a gap that is copied anyway")
        self.assertEqual(live.joined([live.Part(0, 100, 100), live.Part(700, 100, 100)]), [live.Part(0, 100, 100), live.Part(700, 100, 100)])

    def test_runs(self):
        self.assertEqual(live.runs([0, 1, 2, 5, 7, 8]), [(0, 3), (5, 6), (7, 9)])
        self.assertEqual(live.runs([]), [])


class Arguments(unittest.TestCase):
    def check(self, code, **options):
        child.check(self, COMMON + code, **options)

    def test_without_the_variable_nothing_changes(self):
        for environment in ({"GLAKE_VLLM": "0"}, {"GLAKE_VLLM": ""}, {"GLAKE_DISABLE": "1"}):
            self.check(
                """
original = fake.EngineArgs.create_engine_config
glake.vllm.register()
assert fake.EngineArgs.create_engine_config is original and not said
""",
                **environment,
            )

    def test_a_vllm_that_lacks_names_is_left_alone_with_one_line(self):
        self.check("""
original = fake.EngineArgs.create_engine_config
glake.vllm.register()
assert fake.EngineArgs.create_engine_config is original
assert len(said) == 1 and said[0].startswith("GLake leaves vLLM 0.23.0 alone, which lacks vllm.engine.arg_utils") and "more" in said[0], said
""")

    def test_without_vllm_there_is_one_line(self):
        self.check("""
for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
    del sys.modules[name]
sys.modules["vllm"] = None
glake.vllm.register()
assert len(said) == 1 and said[0].startswith("GLake leaves vLLM alone: "), said
""")

    def test_an_engine_gets_what_its_user_left_open(self):
        self.check("""
_names.missing = lambda package: []
glake.vllm.register()
once = fake.EngineArgs.create_engine_config
glake.vllm.register()
assert fake.EngineArgs.create_engine_config is once
arguments = fake.EngineArgs()
config = arguments.create_engine_config("usage", headless=True)
assert config.parallel_config.worker_cls == "glake.vllm._worker.Worker"
assert config.model_config.sleep_mode_backend == "glake"
connector = config.kv_transfer_config
assert (connector.kv_connector, connector.kv_connector_module_path) == ("Connector", "glake.vllm._connector")
assert connector.kv_connector_extra_config == {"utilization": 0.92} and config.cache_config.gpu_memory_utilization < 1e-3
assert arguments == fake.EngineArgs(), "the user's arguments stay as they are"
given = fake.EngineArgs(gpu_memory_utilization=0.5).create_engine_config()
assert given.cache_config.gpu_memory_utilization == 0.5 and not given.kv_transfer_config.kv_connector_extra_config
given = fake.EngineArgs(kv_cache_memory_bytes=1 << 30).create_engine_config()
assert given.cache_config.kv_cache_memory_bytes == 1 << 30 and given.cache_config.gpu_memory_utilization < 1e-3
assert not given.kv_transfer_config.kv_connector_extra_config
assert not said, said
assert "GLAKE_WORKER" not in os.environ
fake.EngineArgs(tensor_parallel_size=2).create_engine_config()
assert os.environ["GLAKE_WORKER"] == f"vllm-{os.getpid()}"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
assert fake.EngineArgs(tensor_parallel_size=2).create_engine_config().parallel_config.worker_cls == "auto"
""")

    def test_an_engine_that_is_not_supported_starts_as_without(self):
        self.check("""
_names.missing = lambda package: []
glake.vllm.register()
for word, given in {
    "--worker-cls mine is set": dict(worker_cls="mine"),
    "another KV connector": dict(kv_transfer_config=fake.KVTransferConfig(kv_connector="LMCache")),
    "--kv-offloading-size": dict(kv_offloading_size=1.0),
    "--data-parallel-size is above 1": dict(data_parallel_size=2),
    "--pipeline-parallel-size is above 1": dict(pipeline_parallel_size=2),
    "--distributed-executor-backend is ray": dict(distributed_executor_backend="ray"),
    "--enable-return-routed-experts": dict(enable_return_routed_experts=True),
    "--nnodes is above 1": dict(nnodes=2),
    "--ec-transfer-config": dict(ec_transfer_config=object()),
    "--enable-eplb": dict(enable_eplb=True),
    "Step5ForCausalLM excludes": dict(architectures=("Step5ForCausalLM",)),
    "encoder-decoder": dict(is_encoder_decoder=True),
    "run for pooling": dict(runner_type="pooling"),
    "ValueError: excluded with a connector": dict(excludes=True),
}.items():
    said.clear()
    config = fake.EngineArgs(**given).create_engine_config()
    assert config.parallel_config.worker_cls == given.get("worker_cls", "auto"), given
    assert config.kv_transfer_config is given.get("kv_transfer_config") and config.cache_config.gpu_memory_utilization == 0.92
    assert len(said) == 1 and said[0].startswith("GLake leaves this engine alone: ") and word in said[0], (given, said)
said.clear()
try:
    fake.EngineArgs(model=None).create_engine_config()
except ValueError as error:
    assert str(error) == "no model" and not said
else:
    raise AssertionError("the user's error")
""")

    def test_elsewhere_than_on_cuda_it_starts_as_without(self):
        self.check("""
fake.install(cuda=False)
_names.missing = lambda package: []
glake.vllm.register()
assert fake.EngineArgs().create_engine_config().parallel_config.worker_cls == "auto"
assert said == ["GLake leaves this engine alone: it needs CUDA"], said
""")


class Life(unittest.TestCase):
    """An engine from its start to its end."""

    def check(self, code, **options):
        child.check(self, ENGINE + code, **options)

    def test_there_is_one_use_from_the_first_running_request_to_the_last(self):
        self.check("""
step(start="a")
assert uses() == 0, "while it starts there is none: an agent takes nothing before the first"
step(stop="a")
assert worker.compile_or_warm_up_model() == "times" and uses() == 0
assert step(start="a") == 3 and uses() == 1
step(start="b")
step(stop="a")
assert uses() == 1
step(stop="b")
assert uses() == 0
fake.Worker.touch = staticmethod(lambda: None)
glake.shrink()
step()
assert uses() == 0 and resident() == 0, "an empty step after another brings nothing back"
assert worker.is_static() == "static"
worker.shutdown()
assert worker.steps == -1 and _engine.here() is None
""")

    def test_a_program_that_calls_the_steps_itself_ends_the_use_with_the_last_request(self):
        self.check(
            """
worker.compile_or_warm_up_model()
step(start="ab")
scheduler.request_finished(types.SimpleNamespace(request_id="a"), [])
assert uses() == 1
scheduler.request_finished(types.SimpleNamespace(request_id="b"), [])
assert uses() == 0
glake.shrink()
assert worker.sample_tokens(None) == "sampled", "of the step before, when its sampling was put off"
step(start="c")
assert uses() == 1
""",
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
        )

    def test_a_busy_engine_is_parked_between_two_steps(self):
        self.check("""
worker.compile_or_warm_up_model()
step(start="a")
before, over = resident(), []
def take():
    while not over:
        freed = glake.shrink(timeout=30)["freed"]
        if freed:
            over.append((freed, glake.gate()["parked"], worker.steps))
    glake.refill()
taking = at_once(take)
while not over and taking.is_alive():
    step()
taking.join()
step(stop="a")
[(freed, parked, _)] = over
assert freed == before and parked == 1, over
assert resident() == before and uses() == 0
""")

    def test_a_call_of_an_evicted_engine_brings_its_memory_back(self):
        self.check("""
worker.compile_or_warm_up_model()
glake.shrink()
assert worker.check_health() == "well" and resident() == 0, "what needs no memory brings none back"
assert worker.add_lora("adapter") == "adapter"
assert resident() > 0 and uses() == 0
glake.shrink()
step(start="a")
step(stop="a")
""")

    def test_sleep_and_wake_go_through_regions(self):
        self.check("""
worker.compile_or_warm_up_model()
all = resident()
step(start="a")
# Requests that are kept: the use ends with the sleep, and begins again.
worker.sleep(1)
assert resident() == 0 and uses() == 0
worker.wake_up(["weights"])
assert resident() == 8 * MIB, glake.regions()
worker.wake_up(["kv_cache"])
assert resident() == all and worker.model_runner.calls[-1] == "post_kv_cache_wake_up"
step()
assert uses() == 1
step(stop="a")
worker.sleep(2)
worker.wake_up()
assert resident() == all
# A trainer that has the room of the cache: calls use what is awake.
worker.sleep(1)
worker.wake_up(["weights"])
fake.Worker.touch = staticmethod(lambda: None)
worker.add_lora("adapter")
assert resident() == 8 * MIB
fake.Worker.touch = staticmethod(touch)
worker.wake_up(["kv_cache"])
worker.sleep()
worker.sleep()
worker.wake_up(["weights", "nothing"])
worker.wake_up(None)
assert resident() == all
sealed = {one["tag"]: one["sealed"] for one in glake.regions()}
assert sealed["weights"] and not sealed["kv_cache"]
""")

    def test_level_2_gives_the_weights_up_and_nothing_else(self):
        self.check("""
_sleep.whole = lambda parameter: parameter
class Parameter:
    is_cuda = True
    def __init__(self, address, size):
        self.address, self.size = address, size
        self.__cuda_array_interface__ = dict(data=(address, False), shape=(size,), typestr="|u1", version=3)
    def numel(self):
        return self.size
    def untyped_storage(self):
        return types.SimpleNamespace(data_ptr=lambda: self.address)
with worker._maybe_get_memory_pool_context("weights"):
    kept, other = glake.allocate(2 * MIB), glake.allocate(4 * MIB)
# One that is empty, and one whose bytes are the host's.
worker.model.parameters = [("first", Parameter(weights, 8 * MIB)), ("second", Parameter(other, 4 * MIB)), ("kept", Parameter(kept, 2 * MIB)),
                           ("empty", Parameter(0, 0)), ("host", Parameter(4096, 64))]
config.model_config.sleep_preserve_parameter_names = ["k*pt"]
worker.compile_or_warm_up_model()
copied = []
shrink = glake.shrink
glake.shrink = lambda *a, **k: copied.append(shrink(*a, **k)) or copied[-1]
worker.sleep(2)
assert copied[-1]["copied"] == (16 + 2) * MIB, copied
worker.wake_up()
worker.sleep(1)
assert copied[-1]["copied"] == (16 + 14) * MIB, copied
worker.wake_up()
# A sleep that fails leaves the weights as they were.
glake.shrink = lambda: 1 / 0
try:
    worker.sleep(2)
except ZeroDivisionError:
    pass
glake.shrink = shrink
assert glake.shrink()["undefined"] == 0
""")

    def test_an_engine_that_is_dropped_makes_room_for_the_next(self):
        self.check("""
import gc
gc.disable()
worker.compile_or_warm_up_model()
del worker
assert _engine.here() is None
""")

    def test_without_room_a_step_waits_and_a_wake_is_an_error(self):
        self.check(
            """
worker.compile_or_warm_up_model()
worker.sleep()
_, whole = glake._library.api().memory_info(0) if hasattr(glake._library.api(), "memory_info") else (0, 0)
glake.lease.set(0, 0)
try:
    worker.wake_up()
except glake.Error as error:
    assert isinstance(error, (glake.OutOfMemoryError, glake.TimedOutError)), error
else:
    raise AssertionError("there is no room")
assert resident() == 0 and uses() == 0
from glake.vllm import _uses
_uses._RETRY_SECONDS = 0.01
stepping = at_once(lambda: step(start="a"))
while not said:
    time.sleep(0.01)
assert said[0].startswith("The engine waits for its GPU memory: "), said
glake.lease.set(0, None)
stepping.join()
assert resident() > 0 and worker.steps == 1
""",
            GLAKE_CONFIG=self.config("[lease]\nrefill_timeout_ms = 50\n"),
        )

    def config(self, text):
        file = tempfile.NamedTemporaryFile("w", suffix=".toml")
        self.addCleanup(file.close)
        file.write(text)
        file.flush()
        return file.name

    def test_one_engine_of_a_process_is_served(self):
        self.check("""
other = _worker.Worker(vllm_config=config)
assert other.glake is None and said == ["GLake leaves this worker alone: it serves another engine in this process"], said
worker.compile_or_warm_up_model()
worker.shutdown()
after = _worker.Worker(vllm_config=config)
with after._maybe_get_memory_pool_context("weights"):
    # The region of the engine before it was sealed.
    glake.allocate(MIB)
assert after.glake is not None
""")

    def test_where_the_allocator_cannot_be_had_the_worker_is_vllms(self):
        self.check("""
worker.shutdown()
def refused():
    raise glake.StateError("CUDA is in use")
glake.enable, glake.backend = refused, lambda: "compiled"
assert _worker.Worker(vllm_config=config).glake is not None, "the program has enabled it"
glake.backend = lambda: None
plain = _worker.Worker(vllm_config=config)
assert plain.glake is None and said == ["GLake leaves this worker alone: CUDA is in use"], said
assert (config.cache_config.gpu_memory_utilization, config.model_config.sleep_mode_backend) == (0.92, "cumem"), "as its user had it"
output = fake.output(1)
output.kv_connector_metadata = scheduler.build_connector_meta(output)
assert plain.execute_model(output) == 1 and plain.compile_or_warm_up_model() == "times"
""")

    def test_blocks_count_that_are_used_or_can_be_hit(self):
        self.check("""
scheduler.bind_gpu_block_pool(pool)
engine = _engine.here()
assert engine.blocks() == [(0, 1), (2, 4), (5, 6)]
pool.cached_block_hashes_by_block = {1: "part"}
assert engine.blocks() == [(0, 1), (2, 4), (5, 6)], "between two steps they are looked for once"
step(start="a")
assert engine.blocks() == [(0, 4), (5, 6)]
""")

    def test_workers_of_other_processes_are_told(self):
        self.check("""
engine = _engine.here()
engine.end()
alone = connector("scheduler")
alone.bind_gpu_block_pool(pool)
alone.update_state_after_alloc(types.SimpleNamespace(request_id="a"), None, 0)
told = alone.build_connector_meta(fake.output(3, new=[([4, 5], [2])], cached=[None, ([1], [])]))
assert (told.is_empty, told.taken, told.counted) == (False, [4, 5, 2, 1], None), told
copied = alone.build_connector_meta(fake.output(1, copies=[(1, 3)]))
assert copied.taken == [1, 3], copied
assert engine.blocks() == [(0, 1)], engine.blocks()
engine.told(told.taken, told.counted)
assert engine.blocks() == [(0, 3), (4, 6)]
alone.request_finished_all_groups(types.SimpleNamespace(request_id="a"), ())
last = alone.build_connector_meta(fake.output(0))
assert (last.is_empty, last.counted) == (True, [(0, 1), (2, 4), (5, 6)])
engine.told(last.taken, last.counted)
assert engine.blocks() == [(0, 1), (2, 4), (5, 6)]
""")

    def test_the_bytes_of_a_caches_blocks_are_declared_by_storage(self):
        self.check("""
class Storage:
    def __init__(self, address, size):
        self.address, self.size = address, size
    def data_ptr(self):
        return self.address
    def nbytes(self):
        return self.size
class Tensor:
    def __init__(self, storage, shape, stride, offset=0):
        self.storage, self.shape, self.strides, self.offset = storage, shape, stride, offset
        self.__cuda_array_interface__ = dict(data=(storage.address, False), shape=(storage.size,), typestr="|u1", version=3)
    untyped_storage = lambda self: self.storage
    storage_offset = lambda self: self.offset
    stride = lambda self: self.strides
    element_size = lambda self: 2
_engine.whole = lambda tensor: tensor
# Two layers that share one storage; keys and values of the second lie apart.
storage = Storage(cache, 12 << 20)
page = (12 << 20) // 2 // 12
layers = dict(first=Tensor(storage, (6, page), (page, 1)), second=Tensor(storage, (2, 6, page // 2), (3 * page, page // 2, 1), 6 * page))
told = []
live = glake.live
glake.live = lambda tensor, ranges: (told.append(ranges), live(tensor, ranges))
scheduler.bind_gpu_block_pool(pool)
connector("worker").register_kv_caches(layers)
assert len(told) == 1
step, half = 2 * page, page
second = 6 * step
want = [(number * step, end * step) for number, end in [(0, 1), (2, 4)]]
want += [(5 * step, second + half), *[(second + n * half, second + e * half) for n, e in [(2, 4)]]]
want += [(second + 5 * half, second + 7 * half), (second + 8 * half, second + 10 * half), (second + 11 * half, second + 12 * half)]
assert told[0]() == want, (told[0](), want)
worker.compile_or_warm_up_model()
report = glake.shrink()
counted = sum(end - first for first, end in want) + (4 << 20) + (8 << 20)
assert report["copied"] == counted, (report, counted)
glake.refill()
# Memory that is not GLake's is left alone.
host = bytearray(64)
connector("worker").register_kv_caches(dict(first=Tensor(Storage(1 << 20, 96), (6, 8), (8, 1))))
""")


if __name__ == "__main__":
    unittest.main()

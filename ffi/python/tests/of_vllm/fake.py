"""As much of vLLM as the plugin touches, for tests in a process of their own: ``install()`` puts it into ``sys.modules``."""

import dataclasses
import sys
import types


@dataclasses.dataclass
class KVTransferConfig:
    kv_connector: str = None
    kv_connector_module_path: str = None
    kv_role: str = None
    kv_connector_extra_config: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class EngineArgs:
    model: str = "m"
    worker_cls: str = "auto"
    kv_transfer_config: object = None
    kv_offloading_size: float = None
    gpu_memory_utilization: float = 0.92
    kv_cache_memory_bytes: int = None
    data_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    tensor_parallel_size: int = 1
    distributed_executor_backend: str = None
    enable_return_routed_experts: bool = False
    ec_transfer_config: object = None
    enable_eplb: bool = False
    nnodes: int = 1
    # What the model is.
    is_encoder_decoder: bool = False
    runner_type: str = "generate"
    architectures: tuple = ("LlamaForCausalLM",)
    # A connector is refused, for a reason that vLLM alone knows.
    excludes: bool = False

    def create_engine_config(self, usage_context=None, headless=False):
        if self.model is None:
            raise ValueError("no model")
        if self.excludes and self.kv_transfer_config is not None:
            raise ValueError("excluded with a connector")
        model = types.SimpleNamespace(
            is_encoder_decoder=self.is_encoder_decoder, runner_type=self.runner_type, architectures=self.architectures, sleep_mode_backend="cumem"
        )
        cache = types.SimpleNamespace(kv_cache_memory_bytes=self.kv_cache_memory_bytes, gpu_memory_utilization=self.gpu_memory_utilization)
        parallel = types.SimpleNamespace(worker_cls=self.worker_cls, world_size=self.tensor_parallel_size)
        return Config("instance", model, cache, parallel, self.kv_transfer_config)


@dataclasses.dataclass
class Config:
    instance_id: str
    model_config: object
    cache_config: object
    parallel_config: object
    kv_transfer_config: object


class Runner:
    def __init__(self):
        self.calls = []

    def post_kv_cache_wake_up(self):
        self.calls.append("post_kv_cache_wake_up")

    def capture_model(self):
        self.calls.append("capture_model")
        return 0


class Model:
    def __init__(self, parameters=()):
        self.parameters = parameters

    def named_parameters(self):
        return self.parameters


class Worker:
    """vLLM's worker. ``touch`` is called by whatever works on the GPU."""

    touch = staticmethod(lambda: None)

    def __init__(self, vllm_config, local_rank=0, rank=0, distributed_init_method="", is_driver_worker=False):
        self.vllm_config, self.rank, self.model_runner, self.steps, self.model = vllm_config, rank, Runner(), 0, Model()

    def _maybe_get_memory_pool_context(self, tag):
        raise AssertionError("vLLM's own pools are not used")

    def determine_available_memory(self):
        return self.vllm_config.cache_config.kv_cache_memory_bytes

    def compile_or_warm_up_model(self):
        self.touch()
        self.model_runner.capture_model()
        return "times"

    def execute_model(self, scheduler_output):
        self.touch()
        self.steps += 1
        return self.steps

    def sample_tokens(self, grammar_output):
        self.touch()
        return "sampled"

    def get_model(self):
        return self.model

    def add_lora(self, lora_request):
        self.touch()
        return lora_request

    @staticmethod
    def is_static():
        return "static"

    def check_health(self):
        return "well"

    def sleep(self, level=1):
        raise AssertionError("vLLM's own sleep")

    def wake_up(self, tags=None):
        raise AssertionError("vLLM's own wake")

    def shutdown(self):
        self.steps = -1


class Connector:
    def __init__(self, vllm_config, role, kv_cache_config):
        self.role = role


def install(cuda=True):
    """Puts the modules where imports find them."""

    def module(name, **content):
        found = sys.modules.setdefault(name, types.ModuleType(name))
        found.__path__ = []
        vars(found).update(content)
        return found

    base = "vllm.distributed.kv_transfer.kv_connector.v1.base"
    parts = base.split(".")
    for length in range(1, len(parts)):
        module(".".join(parts[:length]))
    module("vllm", __version__="0.23.0", __file__="/nowhere/vllm/__init__.py")
    module(base, KVConnectorBase_V1=Connector, KVConnectorMetadata=object, SupportsHMA=type("SupportsHMA", (), {}))
    module("vllm.config", KVTransferConfig=KVTransferConfig)
    module("vllm.engine")
    module("vllm.engine.arg_utils", EngineArgs=EngineArgs)
    module("vllm.platforms", current_platform=types.SimpleNamespace(is_cuda=lambda: cuda))
    module("vllm.v1")
    module("vllm.v1.worker").gpu_worker = module("vllm.v1.worker.gpu_worker", Worker=Worker)


def output(tokens, new=(), cached=(), copies=None):
    """A scheduler's output, without a connector's metadata."""
    return types.SimpleNamespace(
        total_num_scheduled_tokens=tokens,
        scheduled_new_reqs=[types.SimpleNamespace(block_ids=ids) for ids in new],
        scheduled_cached_reqs=types.SimpleNamespace(new_block_ids=list(cached)),
        kv_cache_block_copies=copies,
        kv_connector_metadata=None,
    )

"""Baselines: each prepares a model and returns a maker of context managers, one for each step.

A baseline that this machine cannot run raises Skipped with the reason."""

import contextlib, importlib.util, inspect, logging, pathlib, sys, types, unittest.mock


class Skipped(Exception):
    pass


def recomputes(model, offload=False):
    enable = model.get_base_model().gradient_checkpointing_enable
    if offload and "offload" not in inspect.signature(enable).parameters:
        raise Skipped("this version of transformers has no offload=True")
    enable({"use_reentrant": False}, **({"offload": True} if offload else {}))
    model.enable_input_require_grads()


def keep(torch, model, a):
    return contextlib.nullcontext


def checkpoint(torch, model, a):
    recomputes(model)
    return contextlib.nullcontext


def save_on_cpu(torch, model, a):
    return lambda: torch.autograd.graph.save_on_cpu(pin_memory=a.device == "cuda")


def hf_offload(torch, model, a):
    """transformers' own option: save_on_cpu around each recomputed layer."""
    if a.device != "cuda":
        raise Skipped("transformers copies to pinned memory there, which needs a GPU")
    recomputes(model, offload=True)
    return contextlib.nullcontext


def trl(torch, model, a):
    """TRL's hooks as its trainers make them, the head left out; entered around forward and backward, as there."""
    if a.device != "cuda":
        raise Skipped("TRL asks torch for an accelerator")
    try:
        from trl.models.activation_offloading import get_act_offloading_ctx_manager
    except (ImportError, RuntimeError) as error:
        raise Skipped(f"TRL is not there: {error}") from error
    around = get_act_offloading_ctx_manager(model)
    return lambda: around


def trl_inputs(torch, model, a):
    recomputes(model)
    return trl(torch, model, a)


def torchtunes_file():
    """The one file of torchtune's hooks. What it asks of the rest, and of torchao, stands in for it: it is not used here, and needs more than
    most machines have."""
    spec = importlib.util.find_spec("torchtune")
    if spec is None:
        raise Skipped("torchtune is not there")
    path = pathlib.Path(spec.submodule_search_locations[0]) / "training/_activation_offloading.py"
    stand_ins = {
        "torchao": {"__version__": "0.18.0"}, "torchao.dtypes": {}, "torchao.dtypes.nf4tensor": {"NF4Tensor": type("NF4Tensor", (), {})},
        "torchtune": {}, "torchtune.modules": {"TiedLinear": type("TiedLinear", (), {})}, "torchtune.utils": {"get_logger": logging.getLogger},
    }
    modules = {name: types.ModuleType(name) for name in stand_ins}
    for name, module in modules.items():
        vars(module).update(stand_ins[name])
    own = importlib.util.spec_from_file_location("torchtune_activation_offloading", path)
    file = importlib.util.module_from_spec(own)
    try:
        with unittest.mock.patch.dict(sys.modules, modules):
            own.loader.exec_module(file)
    except (ImportError, OSError) as error:
        raise Skipped(f"torchtune's hooks cannot be loaded: {error}") from error
    return file


def torchtune(torch, model, a):
    """torchtune's hooks, a manager each step as its recipes have one for all; the head is no part of its blocks here."""
    if a.device != "cuda":
        raise Skipped("torchtune's hooks use CUDA's streams")
    file = torchtunes_file()
    around, nothing = file.OffloadActivations(), file.NoOpManager()
    head = model.get_base_model().lm_head
    head.register_forward_pre_hook(lambda *_: nothing.__enter__())
    head.register_forward_hook(lambda *_: nothing.__exit__(), always_call=True)
    return lambda: around


THEIRS = {
    "keep": keep, "checkpoint": checkpoint, "save-on-cpu": save_on_cpu, "hf-offload": hf_offload, "trl": trl,
    "trl-inputs": trl_inputs, "torchtune": torchtune, "ddp-checkpoint": checkpoint,
}


class Copied:
    """Bytes that a program copies from the GPU to the host, as all of these do: by Tensor.copy_. For the process's life."""

    def __init__(self, torch):
        self.bytes, copy = 0, torch.Tensor.copy_

        def counts(into, source, *args, **kwargs):
            if source.is_cuda and not into.is_cuda:
                self.bytes += into.nbytes
            return copy(into, source, *args, **kwargs)

        torch.Tensor.copy_ = counts

    def taken(self):
        """Since it was asked last."""
        found, self.bytes = self.bytes, 0
        return found


class Blind:
    """Copies of so many bytes out beside the forward, and of so many in beside the backward, of memory that nothing else uses: what no offloading
    of as many can be faster than. A piece comes in once it is out, the first one first: nothing waits for all of them."""

    PIECE = 256 << 20

    def __init__(self, torch, a, out, back, glake=None):
        self.torch, self.glake, self.cuda = torch, glake, a.device == "cuda"
        self.pieces_out, self.pieces_back = self._pieces(out), self._pieces(back)
        self.there = torch.empty(min(self.PIECE, max(out, back, 1)), dtype=torch.uint8, device=a.device)
        self.here = torch.empty_like(self.there, device="cpu", pin_memory=self.cuda)
        self.streams = [torch.cuda.Stream() for _ in range(2)] if self.cuda else [None, None]
        self.gone = [torch.cuda.Event() for _ in self.pieces_out] if self.cuda else []

    def _pieces(self, size):
        return [min(left, self.PIECE) for left in range(size, 0, -self.PIECE)]

    @contextlib.contextmanager
    def _behind(self, stream):
        """On a stream, behind what was computed."""
        if not self.cuda:
            yield
            return
        stream.wait_stream(self.torch.cuda.current_stream())
        with self.torch.cuda.stream(stream):
            yield

    def _copy(self, into, source, size):
        if self.glake:
            self.glake.copy_(into[:size], source[:size])
        else:
            into[:size].copy_(source[:size], non_blocking=True)

    def out(self):
        with self._behind(self.streams[0]):
            for number, size in enumerate(self.pieces_out):
                self._copy(self.here, self.there, size)
                if self.cuda:
                    self.gone[number].record()

    def back(self):
        with self._behind(self.streams[1]):
            for number, size in enumerate(self.pieces_back):
                if self.gone:
                    self.gone[min(number, len(self.gone) - 1)].wait()
                self._copy(self.there, self.here, size)

    def end(self):
        if self.cuda:
            for stream in self.streams:
                self.torch.cuda.current_stream().wait_stream(stream)

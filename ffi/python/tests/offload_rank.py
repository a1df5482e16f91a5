"""Training of one of two ranks over gloo on the CPU, whose saved bytes are placed into a simulated GPU's memory.

    python offload_rank.py RANK RANKS STORE SCENE

It prints as JSON what went wrong, and what was offloaded.
"""

import json
import os
import sys

os.environ["GLAKE_DEVICE"] = "sim"

import glake
import torch
import torch.distributed as dist
from glake.offload import _saved
from glake.offload._activations import Activations
from test_activations import Laid

OWN, RANKS, STORE, SCENE = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
STEPS = 4


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        nn = torch.nn
        self.norm, self.up, self.down, self.drop = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32), nn.Dropout(0.1)

    def forward(self, x):
        # Products with a transposed view of a weight, and with one that autograd does not see is a weight's.
        h = torch.nn.functional.gelu(self.norm(x) @ self.up.weight.t() + self.up.bias)
        h = h * (1 + 0.01 * torch.tanh(self.up.weight.detach().sum(1)))
        h = h + 0.01 * (h @ self.down.weight.detach().t()) @ self.down.weight.detach()
        return x + self.drop(self.down(h))


class First(torch.nn.Linear):
    """Outermost part of the model."""

    def forward(self, x):
        x = super().forward(x)
        return x + 0.1 * torch.tanh(x) @ self.weight.detach().t()


class Branches(torch.nn.Module):
    """Two experts, of which each step uses one: the other's parameters have no gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.experts = torch.nn.Linear(32, 32), torch.nn.ModuleList([Block(), Block()])
        self.step = 0

    def forward(self, x):
        self.step += 1
        return self.experts[(self.step + OWN) % 2](torch.relu(self.first(x)))


class Looks:
    """Checks whether packed tensors lie in a parameter's current memory, by the addresses of bytes."""

    def __init__(self, model):
        self.model, self.found = model, 0

    def pack(self, packer):
        pack = packer.pack

        def looks(tensor):
            saved = pack(tensor)
            if type(saved) is _saved.Away:
                address = tensor.untyped_storage().data_ptr()
                self.found += any(address == place for place in self.gathered())
            return saved

        packer.pack = looks

    def gathered(self):
        for module in self.model.modules():
            for parameter in module.parameters(recurse=False):
                local = getattr(parameter, "_local_tensor", parameter)
                yield local.untyped_storage().data_ptr()


def sharded(model, mixed=False, reshard=True, second=False):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Shard

    policy = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)} if mixed else {}
    if second:
        policy["shard_placement_fn"] = lambda parameter: Shard(parameter.dim() - 1)
    for part in model:
        if isinstance(part, Block):
            fully_shard(part, reshard_after_forward=reshard, **policy)
    return fully_shard(model, **policy)


def recomputes(model, reentrant=False):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, apply_activation_checkpointing, checkpoint_wrapper

    kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    apply_activation_checkpointing(model, lambda part: checkpoint_wrapper(part, checkpoint_impl=kind), lambda part: isinstance(part, Block))
    return model


def plain():
    return torch.nn.Sequential(First(32, 32), *[Block() for _ in range(3)])


def ddp(make=plain, **settings):
    return lambda: torch.nn.parallel.DistributedDataParallel(make(), **settings)


def fsdp1():
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = plain()
    for place in range(1, len(model)):
        model[place] = FullyShardedDataParallel(model[place], device_id=torch.device("cpu"), use_orig_params=True)
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


SCENES = {
    "ddp": ddp(),
    "ddp_unused": ddp(Branches, find_unused_parameters=True),
    "ddp_static": ddp(static_graph=True),
    "ddp_recomputes": ddp(lambda: recomputes(plain())),
    "ddp_recomputes_reentrant": ddp(lambda: recomputes(plain(), True), static_graph=True),
    "fsdp2": lambda: sharded(plain()),
    "fsdp2_mixed": lambda: sharded(plain(), mixed=True),
    "fsdp2_whole": lambda: sharded(plain(), reshard=False),
    "fsdp2_second": lambda: sharded(plain(), second=True),
    "fsdp2_recomputes": lambda: sharded_and_recomputed(),
    "fsdp1": fsdp1,
}


def sharded_and_recomputed():
    from torch.distributed._composable import checkpoint
    from torch.distributed.fsdp import fully_shard

    model = plain()
    for part in model:
        if isinstance(part, Block):
            checkpoint(part)
            fully_shard(part)
    return fully_shard(model)


def run(offloads, early, accumulates):
    """Returns losses and gradients of each step, and how often a parameter's bytes were packed."""
    torch.manual_seed(3)
    memory, looks, handle = Laid(), None, None
    if offloads and early:
        # Given to us before it is sharded, as a trainer does it.
        held = {}
        wrap = torch.nn.Sequential.__init__

        def init(self, *parts):
            wrap(self, *parts)
            if len(parts) == 4:
                held["handle"] = Activations(self, 0, memory)

        torch.nn.Sequential.__init__ = init
        try:
            model = SCENES[SCENE]()
        finally:
            torch.nn.Sequential.__init__ = wrap
        handle = held["handle"]
    else:
        model = SCENES[SCENE]()
        if offloads:
            handle = Activations(model, 0, memory)
    if handle:
        looks = Looks(model)
        looks.pack(handle._packer)
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    torch.manual_seed(100 + OWN)
    for step in range(STEPS):
        is_last = not accumulates or step % 2 == 1
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(is_last)
        later = model.no_sync() if not is_last and hasattr(model, "no_sync") else None
        if later:
            later.__enter__()
        loss = model(torch.randn(4, 32)).float().square().mean()
        loss.backward()
        if later:
            later.__exit__(None, None, None)
        if is_last:
            grads = [p.grad for p in model.parameters()]
            local = [None if g is None else getattr(g, "_local_tensor", g).clone() for g in grads]
            found.append((loss.item(), local))
            optimizer.step()
            optimizer.zero_grad()
    if handle:
        handle.remove()
        memory.free()
    del model, optimizer, loss
    return found, looks.found if looks else 0


def differ(one, other):
    for step, ((loss, mine), (other_loss, others)) in enumerate(zip(one, other)):
        if loss != other_loss:
            return f"the losses of step {step}: {loss} and {other_loss}"
        for place, (a, b) in enumerate(zip(mine, others)):
            if not (a is b is None or torch.equal(a, b)):
                return f"gradient {place} of step {step}"
    return None if len(one) == len(other) and one else f"{len(one)} steps and {len(other)}"


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(STORE, RANKS), rank=OWN, world_size=RANKS)
    wrong, taken = [], []
    can_be_early = not SCENE.endswith(("unused", "static", "reentrant"))
    for accumulates in (False, True):
        # torch's own assertion fails there, without us too.
        if accumulates and SCENE in ("ddp_static", "ddp_recomputes_reentrant"):
            continue
        expected, _ = run(False, False, accumulates)
        if differ(expected, run(False, False, accumulates)[0]):
            wrong.append("two plain runs differ")
        for early in (False, True)[: 1 + can_be_early]:
            before = glake.offload.report()["bytes_out"]
            found, parameters = run(True, early, accumulates)
            taken.append(glake.offload.report()["bytes_out"] - before)
            unequal = differ(expected, found)
            if unequal:
                wrong.append(f"early {early}, accumulates {accumulates}: {unequal}")
            # What the first FSDP hands to a module is no parameter there: a part of it that is detached is a tensor like others.
            if parameters and SCENE != "fsdp1":
                wrong.append(f"early {early}, accumulates {accumulates}: {parameters} saves of parameters' memory were packed")
    import gc

    gc.collect()
    left = glake.offload.report()
    dist.destroy_process_group()
    print(json.dumps({"wrong": wrong, "taken": taken, "left": [left["entries"], left["host_bytes"], left["held_bytes"]]}))


main()

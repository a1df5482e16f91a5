"""Digests of all tensors that are offloaded at full size, before they leave and after they return."""

import json

from .baselines import recomputes
from .models import chunked_loss, layers_of, llama
from .steps import MIB, OURS, Step, started, warmed

PARTS = ("memory", "hybrid", "inputs")
# By then saves have been checked, what goes narrow does, and leaves are replayed.
STEPS = 6


class Digests:
    """Numbers of 64 bits of tensors' bytes, in their order, made on the GPU; nothing waits for them before the end."""

    # So many words at a time, each with a weight of its own; a weight is odd: no other word has the same product.
    WORDS = 4 << 20

    def __init__(self, torch, device):
        self.torch = torch
        chosen = torch.randint(-(1 << 62), 1 << 62, (self.WORDS,), generator=torch.Generator().manual_seed(22)) * 2 + 1
        self.weights = chosen.to(device)
        self.packed, self.unpacked, self.bytes = [], [], 0

    def of(self, tensor):
        torch = self.torch
        with torch.no_grad():
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
            if flat.data_ptr() % 8:
                flat = flat.clone()
            whole = flat.numel() // 8 * 8
            parts = list(flat[:whole].view(torch.int64).split(self.WORDS)) + [flat[whole:].to(torch.int64)]
            # Parts count differently too: they may not change places.
            sums = [(part * self.weights[: part.numel()]).sum() * (2 * number + 1) for number, part in enumerate(parts)]
            return torch.stack(sums).sum()

    def came_back(self, packed, tensor):
        self.packed.append(packed)
        self.unpacked.append(self.of(tensor))
        self.bytes += tensor.nbytes

    def taken(self):
        """Returns the number of tensors that returned since the last call, their bytes, and how many differ."""
        count, size, differ = len(self.packed), self.bytes, 0
        if count:
            differ = int((self.torch.stack(self.packed) != self.torch.stack(self.unpacked)).sum())
        self.packed, self.unpacked, self.bytes = [], [], 0
        return {"compared": count, "bytes": size, "differ": differ}


def watch(digests):
    """Has all that hooks pack digested, leaves of checkpoints too, and what was offloaded of it compared as it is unpacked. For the process's
    life."""
    from glake.offload import _packer

    class Away(_packer.Away):
        """A packed tensor with room for a digest."""

    pack, unpack = _packer.Packer._pack, _packer.Packer.unpack

    def packs(self, tensor, *more):
        saved = pack(self, tensor, *more)
        if isinstance(saved, Away) and saved.entry.packed is not None:
            saved.digest = digests.of(tensor)
        return saved

    def unpacks(self, saved):
        tensor = unpack(self, saved)
        if hasattr(saved, "digest"):
            digests.came_back(saved.digest, tensor)
        return tensor

    _packer.Away, _packer.Packer._pack, _packer.Packer.unpack = Away, packs, unpacks


def digest(a):
    """Some steps of each preset in one process; `--budget` is hybrid's, the others offload all they can."""
    glake = started(a)
    import torch

    model, vocabulary = llama(a, torch)
    length = min(a.tokens, a.length)
    ids = torch.randint(0, vocabulary, (a.tokens // length, length), device=a.device)
    step = Step(torch, model, lambda ids: chunked_loss(torch, model, ids))
    warmed(torch, a, model, step, ids)
    digests = Digests(torch, a.device)
    watch(digests)
    for name in PARTS:
        is_recomputed, preset = OURS[name]
        if is_recomputed:
            recomputes(model)
        before = glake.offload.report()
        handle = glake.offload(layers_of(model), budget=f"{a.budget // MIB}MiB" if name == "hybrid" else None, preset=preset)
        losses = [step(ids) for _ in range(min(a.steps, STEPS))]
        handle.remove()
        after = glake.offload.report()
        moved = {key: after[key] - before[key] for key in ("bytes_out", "narrowed", "merged", "replayed", "stayed", "changed")}
        row = {"run": a.one, "preset": name, "tokens": a.tokens, "layers": a.layers, "losses": losses, **digests.taken(), **moved}
        print(json.dumps(row), flush=True)

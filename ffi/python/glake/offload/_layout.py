"""Layout of a model: which of its parameters may stream, and which of them do."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from ._parts import parts

# Gradients and states of an optimizer, in the size of what is trained.
_STATES = 3


@dataclasses.dataclass
class Owner:
    """A module whose forward reads parameters, its own or those of its parts: they come together."""

    module: Any
    # The module that has it, its name there, the name in the model, and the parameter.
    parameters: list[tuple[Any, str, str, Any]] = dataclasses.field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(size_of(parameter) for *_, parameter in self.parameters)


@dataclasses.dataclass
class Block:
    """A repeated block: an element of a ``ModuleList``."""

    name: str
    owners: list[Owner]

    @property
    def nbytes(self) -> int:
        return sum(owner.nbytes for owner in self.owners)


@dataclasses.dataclass
class Layout:
    """What of a model may stream."""

    blocks: list[Block]
    # Modules around the blocks, the outermost first, and the blocks.
    above: list[Any]
    # Bytes of what stays on the GPU, with the gradients and states of what is trained.
    fixed: int
    # Kinds of parameters in blocks that stay although they are frozen.
    staying: dict[str, int]

    @property
    def nbytes(self) -> int:
        """Bytes of all that may stream."""
        return sum(block.nbytes for block in self.blocks)

    @property
    def largest(self) -> int:
        return max((block.nbytes for block in self.blocks), default=0)


def layout(model: Any, least: int) -> Layout:
    """Returns the layout of a model: frozen parameters of repeated blocks may stream. Parameters below ``least`` bytes stay, and so do
    parameters that several modules share, that are subclasses such as bitsandbytes's, and those of compiled parts.
    """
    import torch

    named: dict[int, str] = {}
    count: dict[int, int] = {}
    for part in parts(model):
        for parameter in part._parameters.values():
            if parameter is not None:
                count[id(parameter)] = count.get(id(parameter), 0) + 1
    for name, parameter in model.named_parameters():
        named[id(parameter)] = name
    blocks: list[Block] = []
    above: list[Any] = []
    may: set[int] = set()
    staying: dict[str, int] = {}
    for name, module, around in _repeated(model):
        above += [each for each in around if not any(each is other for other in above)]
        if _is_compiled(module):
            staying["compiled"] = staying.get("compiled", 0) + 1
            continue
        owners: dict[int, Owner] = {}
        for owner, holder in _owners(module):
            for own, parameter in holder._parameters.items():
                if parameter is None or parameter.requires_grad or id(parameter) in may:
                    continue
                reason = _stays(parameter, least, count[id(parameter)])
                if reason is None:
                    may.add(id(parameter))
                    known = owners.setdefault(id(owner), Owner(owner))
                    known.parameters.append((holder, own, named[id(parameter)], parameter))
                elif reason:
                    staying[reason] = staying.get(reason, 0) + 1
        if owners:
            blocks.append(Block(name, list(owners.values())))
            above.append(module)
    fixed = 0
    for parameter in model.parameters():
        if id(parameter) not in may and not isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            fixed += size_of(parameter) * (1 + _STATES * parameter.requires_grad)
    fixed += sum(size_of(buffer) for buffer in model.buffers())
    return Layout(blocks, above, fixed, staying)


def spread(count: int, of: int) -> set[int]:
    """Returns ``count`` numbers below ``of``, as far from one another as possible."""
    return {number for number in range(of) if (number + 1) * count // of > number * count // of}


def streamed_blocks(found: Layout, room: int) -> set[int]:
    """Returns the fewest blocks that have to stream so that the others, and what streams, take at most ``room`` bytes on the GPU: the block
    in use, and the two behind it.
    """
    if found.nbytes <= room:
        return set()
    for count in range(1, len(found.blocks) + 1):
        chosen = spread(count, len(found.blocks))
        if found.nbytes - sum(found.blocks[number].nbytes for number in chosen) + beside(found, chosen) <= room:
            return chosen
    return spread(len(found.blocks), len(found.blocks))


def beside(found: Layout, chosen: set[int]) -> int:
    """Returns the GPU memory of streaming blocks: the largest in use, and a window of two more."""
    sizes = sorted((found.blocks[number].nbytes for number in chosen), reverse=True)
    return 3 * sizes[0] if len(sizes) > 3 else sum(sizes)


def size_of(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def refusals(model: Any) -> list[str]:
    """Returns why the weights of a model cannot stream, by name."""
    found: list[str] = []
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kinds = tuple(kind for kind in (getattr(fsdp, "FSDPModule", None), getattr(fsdp, "FullyShardedDataParallel", None)) if kind)
    for part in parts(model):
        own = vars(part)
        if kinds and isinstance(part, kinds):
            found.append("FSDP: it shards parameters and moves them itself; use its CPUOffloadPolicy, or train without it")
        if type(part).__module__.startswith("deepspeed") or any(hasattr(parameter, "ds_id") for parameter in part._parameters.values()):
            found.append("DeepSpeed: it moves parameters itself; use its offload_param, or train without it")
        if "_hf_hook" in own:
            found.append("device_map: Accelerate's hooks move parameters themselves, and cannot be trained; load the model without device_map")
    if _is_compiled(model):
        found.append("torch.compile: the model is compiled as a whole, with its parameters' addresses; compile parts outside of its blocks")
    return list(dict.fromkeys(found))


def _repeated(model: Any) -> list[tuple[str, Any, list[Any]]]:
    """Returns the elements of the outermost lists of modules: their names, and the modules around them, the outermost first."""
    import torch

    found: list[tuple[str, Any, list[Any]]] = []
    seen: set[int] = set()

    def look(module: Any, name: str, around: list[Any]) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        around = [*around, module]
        for own, child in module._modules.items():
            if child is None:
                continue
            path = f"{name}.{own}" if name else own
            if isinstance(child, torch.nn.ModuleList) and len(child) > 1:
                for number, block in enumerate(child):
                    if id(block) not in seen:
                        seen.add(id(block))
                        found.append((f"{path}.{number}", block, around))
            else:
                look(child, path, around)

    look(model, "", [])
    return found


def _owners(block: Any) -> list[tuple[Any, Any]]:
    """Returns the modules of a block that have parameters, each behind the module whose forward reads them."""
    import torch

    # They read their parts' parameters without calling the parts.
    whole = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)
    lists = (torch.nn.ParameterList, torch.nn.ParameterDict)
    found: list[tuple[Any, Any]] = []

    def look(module: Any, reader: Any) -> None:
        if reader is None and isinstance(module, whole):
            reader = module
        found.append((module if reader is None else reader, module))
        for child in module._modules.values():
            if child is not None and not _is_compiled(child):
                look(child, module if reader is None and isinstance(child, lists) else reader)

    look(block, None)
    return [(owner, holder) for owner, holder in found if holder._parameters]


def _is_compiled(module: Any) -> bool:
    return vars(module).get("_compiled_call_impl") is not None or "_orig_mod" in module._modules


def _stays(parameter: Any, least: int, owners: int) -> str | None:
    """Returns why a frozen parameter stays: empty where that goes without saying. None: it may stream."""
    import torch

    if type(parameter) is not torch.nn.Parameter:
        return type(parameter).__name__
    if parameter.layout is not torch.strided or parameter.is_nested or parameter.is_quantized or parameter.is_inference():
        return str(parameter.layout)
    if owners > 1:
        return "tied"
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.size())):
        if size != 1:
            if stride != expected:
                return "strided"
            expected *= size
    return "" if size_of(parameter) < max(least, 1) else None

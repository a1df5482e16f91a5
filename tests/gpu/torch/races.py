"""Detectors of memory that changes hands too early: a write that is still to come lands in somebody else's block.

Each returns how many elements were found wrong; `late` is a kernel of some milliseconds that holds a stream back.
"""
import torch

import fixture


def late(cycles=3_000_000):
    torch.cuda._sleep(cycles)


def filled(size, value, stream=None):
    with torch.cuda.stream(stream):
        return torch.full((size // 4,), value, dtype=torch.int32, device="cuda")


def freed_while_writing(size, rounds, one, other):
    """A block is freed while its own stream still has to write it; another stream asks for the same size."""
    bad = 0
    for number in range(rounds):
        with torch.cuda.stream(one):
            block = torch.empty(size // 4, dtype=torch.int32, device="cuda")
            late()
            block.fill_(-number)
            del block
        taken = filled(size, number + 1, other)
        torch.cuda.synchronize()
        bad += int((taken != number + 1).sum())
        del taken
    return bad


def recorded_elsewhere(size, rounds, one, other):
    """A block of one stream is used on another, recorded there and freed; its own stream asks for the same size."""
    bad = 0
    for number in range(rounds):
        block = filled(size, 0, one)
        other.wait_stream(one)
        with torch.cuda.stream(other):
            late()
            block.fill_(-number)
            block.record_stream(other)
        del block
        taken = filled(size, number + 1, one)
        torch.cuda.synchronize()
        bad += int((taken != number + 1).sum())
        del taken
    return bad


def stitched_while_writing(rounds, one, other, block=32 * fixture.MIB, count=16):
    """Every other block of one stream is freed with its writes to come; another stream asks for all of it in one piece."""
    bad = 0
    for number in range(rounds):
        with torch.cuda.stream(one):
            blocks = [torch.empty(block // 4, dtype=torch.int32, device="cuda") for _ in range(count)]
            late()
            for tensor in blocks:
                tensor.fill_(-number)
            del tensor
            del blocks[::2]
        taken = filled(block * count // 2, number + 1, other)
        torch.cuda.synchronize()
        bad += int((taken != number + 1).sum()) + sum(int((tensor != -number).sum()) for tensor in blocks)
        del taken, blocks
    return bad


def read_while_reused(size, rounds, one, other):
    """A block is read late on its own stream and freed; what the reader got must be from before the next owner wrote."""
    bad = 0
    for number in range(rounds):
        with torch.cuda.stream(one):
            block = torch.full((size // 4,), number, dtype=torch.int32, device="cuda")
            seen = torch.empty_like(block)
            late()
            seen.copy_(block)
            del block
        taken = filled(size, -1, other)
        torch.cuda.synchronize()
        bad += int((seen != number).sum())
        del taken, seen
    return bad

"""Sends a CUDA tensor of 70 GiB to another process, where both may open 1,024 files. Bytes are compared both ways."""
import resource, sys, time

import torch
import torch.multiprocessing as mp

import fixture
from fixture import GIB

SIZE = 70 * GIB


def limited():
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
    fixture.enable()


def child(inbox, outbox):
    limited()
    begin = time.time()
    tensor = inbox.get()
    opened = time.time() - begin
    bad = fixture.wrong(tensor, 1)
    fixture.stamp(tensor, 2)
    torch.cuda.synchronize()
    del tensor
    outbox.put((bad, opened))
    torch.cuda.ipc_collect()


def main():
    limited()
    context = mp.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    other = context.Process(target=child, args=(inbox, outbox))
    other.start()
    tensor = fixture.stamp(fixture.new(SIZE), 1)
    torch.cuda.synchronize()
    inbox.put(tensor)
    bad, opened = outbox.get(timeout=100)
    back = fixture.wrong(tensor, 2)
    other.join(20)
    print(f"{bad} wrong there, {back} wrong here; open after {opened:.2f} s, which includes the start of CUDA", flush=True)
    if bad or back or other.exitcode != 0:
        sys.exit(f"failed: the child's exit code is {other.exitcode}")


if __name__ == "__main__":
    main()

"""Sends CUDA tensors to another process and back: small, large, stitched, a view with an offset. Bytes are compared both ways."""
import gc, sys

import torch
import torch.multiprocessing as mp

import fixture
from fixture import MIB


def child(inbox, outbox):
    fixture.enable()
    made = fixture.stamp(fixture.new(30 * MIB), 77)
    for name, tensor, seed in iter(inbox.get, None):
        bad = fixture.wrong(tensor, seed)
        if not bad:
            fixture.stamp(tensor, seed + 100)
        torch.cuda.synchronize()
        del tensor
        gc.collect()
        outbox.put((name, bad))
    outbox.put(("made", made))
    inbox.get()  # the parent has read it
    del made
    torch.cuda.synchronize()
    torch.cuda.ipc_collect()


def main():
    fixture.enable()
    context = mp.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    other = context.Process(target=child, args=(inbox, outbox))
    other.start()
    small, large = fixture.stamp(fixture.new(2048), 1), fixture.stamp(fixture.new(150 * MIB), 2)
    stitched, kept = fixture.stitched(256 * MIB)
    around = fixture.new(100 * MIB).zero_()
    view = around[33 * MIB + 4096 : 65 * MIB]
    fixture.stamp(view, 4)
    torch.cuda.synchronize()
    failed = []
    sent = [("small", small, 1), ("large", large, 2), ("stitched", stitched, 0), ("view", view, 4), ("large again", large, 102)]
    for name, tensor, seed in sent:
        try:
            inbox.put((name, tensor, seed))
            told, bad = outbox.get(timeout=20)
            back = fixture.wrong(tensor, seed + 100)
            print(f"{told}: {bad} wrong there, {back} wrong here", flush=True)
            if bad or back:
                failed.append(name)
        except Exception as error:
            print(f"{name}: {error!r}", flush=True)
            failed.append(name)
            break
    if int(around[: 33 * MIB + 4096].count_nonzero()) or int(around[65 * MIB :].count_nonzero()):
        failed.append("around the view")
    inbox.put(None)
    if not failed:
        name, made = outbox.get(timeout=20)
        if fixture.wrong(made, 77):
            failed.append("the child's tensor")
        del made
        gc.collect()
        torch.cuda.synchronize()
        inbox.put("read")
    other.join(10)
    if other.is_alive():
        other.kill()
    if other.exitcode != 0:
        failed.append(f"the child's exit code {other.exitcode}")
    del small, large, stitched, kept, around, view, sent, tensor
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
    left = torch.cuda.memory_reserved()
    print(f"{left / MIB:.0f} MiB are still reserved", flush=True)
    if left > 160 * MIB:
        failed.append("memory that was not given back")
    if failed:
        sys.exit("failed: " + ", ".join(failed))


if __name__ == "__main__":
    main()

"""Every kind of copy once or twice, bytes compared: lists, pageable memory, broadcasts, captured copies, priorities.

    compute-sanitizer --tool memcheck --error-exitcode 9 python tests/gpu/torch/shapes.py

Small, for it is slow under the sanitizer. Ends with 1 if bytes differ.
"""
import random, sys, time

MIB, BLOCK = 1 << 20, 16 << 10


def main():
    import torch
    if not torch.cuda.is_available():
        print("shapes: SKIPPED: no NVIDIA GPU on this machine")
        return
    import glake
    glake.enable({"transfer": {"graphs": True, "shared_gpus": True}})
    glake.multi_path(True)
    gpus = torch.cuda.device_count()
    for gpu in range(gpus):
        torch.zeros(1, device=f"cuda:{gpu}")
    time.sleep(5)  # contexts of the relays, kernels, slots
    wrong = []

    def host(size, pinned=True):
        tensor = torch.randint(0, 255, (size,), dtype=torch.uint8)
        return tensor.pin_memory() if pinned else tensor

    def empty(size, device="cuda"):
        return torch.zeros(size, dtype=torch.uint8, device=device)

    def same(what, found, expected):
        torch.cuda.synchronize()
        good = torch.equal(found.cpu(), expected.cpu())
        print(f"{'ok     ' if good else 'WRONG  '} {what}", flush=True)
        wrong.extend([] if good else [what])

    def captured(work):
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream):
            work()
        return graph

    for _ in range(2):
        source, target, back = host(8 * MIB), empty(8 * MIB), empty(8 * MIB, "cpu").pin_memory()
        places = [slice(start, start + BLOCK) for start in range(0, 8 * MIB, BLOCK)]
        random.shuffle(places)
        glake.copy_list([(target[place], source[place]) for place in places]).wait()
        same("a list of blocks, to the GPU", target, source)
        glake.copy_list([(back[place], target[place]) for place in places]).wait()
        same("a list of blocks, from the GPU", back, source)

        source, target, back = host(24 * MIB, pinned=False), empty(24 * MIB), empty(24 * MIB, "cpu")
        glake.copy_(target, source)
        same("pageable memory, to the GPU", target, source)
        glake.copy_(back, target)
        same("pageable memory, from the GPU", back, source)

        source, targets = host(32 * MIB), [empty(32 * MIB, f"cuda:{gpu}") for gpu in range(gpus)]
        for gpu in range(gpus):
            torch.cuda.synchronize(gpu)  # each is zeroed on its own GPU's stream, and the copy is on one stream
        glake.copy_to_all(targets, source).wait()
        for gpu, target in enumerate(targets):
            same(f"a broadcast, GPU {gpu}", target, source)

        target, back = empty(32 * MIB), empty(32 * MIB, "cpu").pin_memory()
        glake.copy_(target, source).wait()
        graph = captured(lambda: glake.copy_(target, source))
        for _ in range(3):
            source.random_()
            target.zero_()
            graph.replay()
            same("a captured copy", target, source)
        graph = captured(lambda: glake.copy_(back, target ^ 7))
        graph.replay()
        same("a captured copy behind a kernel", back, target ^ 7)

        behind, large = torch.cuda.Stream(), host(64 * MIB)
        below = empty(64 * MIB)
        torch.cuda.synchronize()
        slow = glake.copy_(below, large, stream=behind, priority="background")
        glake.copy_(target, source, priority="critical").wait()
        slow.wait()
        same("a critical copy", target, source)
        same("a background copy", below, large)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()

"""A pool of NCCL's own memory, registered with the communicator: all-reduces in it, beside tensors elsewhere."""
import os, subprocess, tempfile

import torch
import torch.distributed as dist

import fixture

fixture.enable()
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
backend = dist.group.WORLD._get_backend(device)
with tempfile.TemporaryDirectory() as folder:
    # torch's own (backend.mem_allocator) is refused where GPUs lack multicast.
    library = f"{folder}/nccl_memory.so"
    subprocess.run(["cc", "-shared", "-fPIC", str(fixture.PROGRAMS / "nccl_memory.c"), "-o", library], check=True)
    memory = torch.cuda.memory.CUDAPluggableAllocator(library, "nccl_alloc", "nccl_free")
pool = torch.cuda.MemPool(memory.allocator())
with torch.cuda.use_mem_pool(pool):
    inside = torch.empty(32 * fixture.MIB, dtype=torch.float32, device=device)
backend.register_mem_pool(pool)
outside = torch.empty(1000, device=device)
for step in range(50):
    inside.fill_(rank + step)
    outside.fill_(rank + step)
    dist.all_reduce(inside)
    dist.all_reduce(outside)
    expected = sum(other + step for other in range(ranks))
    assert bool((inside == expected).all()) and bool((outside == expected).all()), step
    fixture.new((3 + step) * fixture.MIB, device)
    torch.cuda.empty_cache()
backend.deregister_mem_pool(pool)
del inside
segments = pool.snapshot()
assert segments and not any(segment["allocated_size"] for segment in segments), segments
dist.destroy_process_group()
print("done")

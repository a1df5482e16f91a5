"""switch.py GLAKE [WORD ...]: programs that know nothing of GLake, alone and under `GLAKE run --allocator`: the same results, and who allocates.

GLAKE is the command; WORDs choose programs by their names. The package has to be in Python's path. Needs a GPU.
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import textwrap

# A process ends with what it computed and who allocated.
END = """
def end(value):
    # In one write: ranks share the output.
    os.write(1, f"result {float(value):.6f} allocator {torch.cuda.memory.get_allocator_backend()}\\n".encode())
"""
STEP = """
def step(device="cuda"):
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        loss = model(torch.ones(64, 256, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss
"""
OWN = """
#include <sys/types.h>
int cudaMalloc(void **, size_t); int cudaFree(void *);
void *mine(ssize_t size, int device, void *stream) { void *p = 0; cudaMalloc(&p, size); return p; }
void gone(void *p, ssize_t size, int device, void *stream) { cudaFree(p); }
"""

# Name: (program, what its processes allocate with under the switch).
PROGRAMS = {
    "a training step": ("end(step())", ["glake"]),
    "CUDA_VISIBLE_DEVICES after the import": ("os.environ['CUDA_VISIBLE_DEVICES'] = '0'\nend(step())", ["glake"]),
    "set_device": ("torch.cuda.set_device(0)\nend(step('cuda:0'))", ["glake"]),
    "set_default_device": ("torch.set_default_device('cuda')\nend(step())", ["glake"]),
    "an allocator of its own": (
        "torch.cuda.memory.change_current_allocator(torch.cuda.memory.CUDAPluggableAllocator(os.environ['OWN'], 'mine', 'gone'))\nend(step())",
        ["pluggable"],
    ),
    "glake.enable() itself": ("import importlib\nif os.environ.get('GLAKE_ALLOCATOR'): importlib.import_module('glake').enable()\nend(step())", ["glake"]),
    "children forked after the import": (
        """
for _ in range(2):
    if os.fork() == 0:
        end(step())
        os._exit(0)
    os.wait()
end(step())
""",
        ["glake"] * 3,
    ),
    "a child that is spawned": (
        """
import torch.multiprocessing as processes
def work(number):
    end(step())
if __name__ == "__main__":
    processes.spawn(work, nprocs=2, join=True)
    end(step())
""",
        ["glake"] * 3,
    ),
    "a loader with workers": (
        """
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, at): return torch.full((256,), float(at))
if __name__ == "__main__":
    total = sum(batch.cuda().sum() for batch in torch.utils.data.DataLoader(Rows(), 8, num_workers=2))
    end(total)
""",
        ["glake"],
    ),
    "two ranks of torchrun": (
        """
import torch.distributed as dist
dist.init_process_group("gloo")
value = step("cuda:0").detach().cpu()
dist.all_reduce(value)
end(value)
dist.destroy_process_group()
""",
        ["glake"] * 2,
    ),
    "no CUDA at all": ("print('result', float(torch.ones(3).sum()), 'allocator', 'none' if 'glake' not in sys.modules else 'glake')", ["none"]),
}


def run(command: list[str], environment: dict[str, str]) -> tuple[list[str], list[str], str]:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("result ")]
    said = "" if done.returncode == 0 else f"exit {done.returncode}: {done.stderr[-800:]}"
    warned = [line for line in done.stderr.splitlines() if "GLake is not torch's allocator" in line]
    return sorted(line[1] for line in lines), sorted(line[3] for line in lines), said or "\n".join(warned)


def main() -> int:
    glake, failed = sys.argv[1], 0
    with tempfile.TemporaryDirectory() as folder:
        source, own = pathlib.Path(folder, "own.c"), pathlib.Path(folder, "own.so")
        source.write_text(OWN)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", own, source], check=True)
        plain = {name: value for name, value in os.environ.items() if not name.startswith("GLAKE_A")} | {"OWN": str(own)}
        chosen = sys.argv[2:]
        for name, (program, expected) in PROGRAMS.items():
            if chosen and not any(word in name for word in chosen):
                continue
            file = pathlib.Path(folder, "program.py")
            file.write_text("import os, sys\nimport torch\n" + END + STEP + textwrap.dedent(program))
            python = [sys.executable, str(file)]
            if "torchrun" in name:
                python = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(file)]
            alone, _, said = run(python, plain)
            results, allocators, warned = run([glake, "run", "--allocator", "--", *python], plain)
            same = results == alone and allocators == sorted(expected) and not said and not warned
            failed += not same
            print(f"{'ok     ' if same else 'FAILED '}{name}: {', '.join(allocators)}")
            if not same:
                print(textwrap.indent(f"alone {alone} {said}\nunder {results} {warned}", "        "))
        for variable in ("GLAKE_DISABLE", "GLAKE_LIBRARY"):
            file = pathlib.Path(folder, "program.py")
            file.write_text("import os, sys\nimport torch\n" + END + STEP + "end(step())")
            value = {"GLAKE_DISABLE": "1", "GLAKE_LIBRARY": str(own)}[variable]
            results, allocators, warned = run([glake, "run", "--allocator", "--", "env", f"{variable}={value}", sys.executable, str(file)], plain)
            is_right = allocators == ["native"] and bool(warned) is (variable == "GLAKE_LIBRARY")
            failed += not is_right
            print(f"{'ok     ' if is_right else 'FAILED '}{variable}={pathlib.Path(value).name}: {', '.join(allocators)}; {warned[:300]}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())

"""Fine-tuning in a plain loop: a Llama of random weights, with the memory of a step under a budget; also with DDP or FSDP2.

    python finetune_plain.py                                     # tiny; needs torch and transformers
    python finetune_plain.py --size 1b --tokens 8192             # prints the memory of a step; needs a GPU
    python finetune_plain.py --size 1b --tokens 8192 --offload 20GiB
    torchrun --nproc-per-node 2 finetune_plain.py --ddp --size 1b --tokens 8192 --offload 30GiB      # needs two GPUs
    torchrun --nproc-per-node 2 finetune_plain.py --fsdp --size 8b --tokens 8192 --offload 40GiB
"""

import argparse
import os
import sys

try:
    import torch
    import torch.distributed as dist
    import transformers
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel
except ImportError as error:
    sys.exit(f"finetune_plain.py needs torch 2.8 or later and transformers: pip install torch transformers ({error})")

import glake

# Hidden size and layers.
SIZES = {"tiny": (256, 4), "1b": (2048, 16), "8b": (4096, 32)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--tokens", type=int, default=512, help="length of a sequence")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--offload", metavar="BUDGET", help='GPU memory that each process may use, as "20GiB"')
    ranks = parser.add_mutually_exclusive_group()
    ranks.add_argument("--ddp", action="store_true", help="a copy of the model on every GPU, under torchrun")
    ranks.add_argument("--fsdp", action="store_true", help="the model sharded over all GPUs with FSDP2, under torchrun")
    return parser.parse_args()


def llama(chosen: argparse.Namespace) -> transformers.LlamaForCausalLM:
    hidden, layers = SIZES[chosen.size]
    torch.manual_seed(0)
    widths = {"hidden_size": hidden, "intermediate_size": hidden * 7 // 2, "num_hidden_layers": layers}
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 256}
    shape = transformers.LlamaConfig(vocab_size=32000, max_position_embeddings=chosen.tokens, use_cache=False, **widths, **heads)
    return transformers.LlamaForCausalLM(shape)


def main() -> None:
    chosen = arguments()
    several = chosen.ddp or chosen.fsdp
    if several and "RANK" not in os.environ:
        sys.exit("finetune_plain.py --ddp and --fsdp run one process per GPU: torchrun --nproc-per-node 2 finetune_plain.py --ddp")
    if chosen.offload:
        try:
            glake.enable()  # before the first use of CUDA, in each process
        except glake.Error as error:
            sys.exit(f"finetune_plain.py --offload needs an NVIDIA GPU with its driver and a CUDA build of torch: {error}")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if several:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank = dist.get_rank() if several else 0

    model = llama(chosen).to(device)
    if chosen.fsdp:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for part in [*model.model.layers, model]:
            fully_shard(part, mp_policy=policy)
    else:
        model = model.to(torch.bfloat16)
    if chosen.ddp:
        # With this option the gradients share memory with the communication buckets.
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if chosen.offload:
        # The one line; forward and backward are as before. Parameters that FSDP2 gathers stay: it frees and gathers them again itself.
        glake.offload(model, budget=chosen.offload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    torch.manual_seed(1 + rank)
    for step in range(chosen.steps):
        ids = torch.randint(32000, (1, chosen.tokens), device=device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    if device.type == "cuda":
        print(f"rank {rank}: {torch.cuda.max_memory_allocated() / (1 << 30):.2f} GiB live at the peak", flush=True)
    if chosen.offload:
        print(f"rank {rank}: {glake.offload.report()}", flush=True)
    if several:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

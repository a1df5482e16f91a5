"""Fine-tuning with DDP, a copy of the model on every GPU: a Llama of random weights, with the memory of a step under a budget on each.

    torchrun --nproc-per-node 2 finetune_ddp.py                  # tiny; needs torch and transformers
    torchrun --nproc-per-node 2 finetune_ddp.py --size 1b --tokens 8192 --offload 30GiB      # needs two GPUs
"""

import argparse
import os
import sys

try:
    import torch
    import torch.distributed as dist
    import transformers
    from torch.nn.parallel import DistributedDataParallel
except ImportError as error:
    sys.exit(f"finetune_ddp.py needs torch 2.8 or later and transformers: pip install torch transformers ({error})")

import glake

# Hidden size and layers.
SIZES = {"tiny": (256, 4), "1b": (2048, 16)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--tokens", type=int, default=512, help="of a sequence")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--offload", metavar="BUDGET", help='what each process may take of its GPU, as "40GiB"')
    chosen = parser.parse_args()
    if "RANK" not in os.environ:
        sys.exit("finetune_ddp.py is one of several ranks: torchrun --nproc-per-node 2 finetune_ddp.py")
    if chosen.offload:
        try:
            glake.enable()  # before the first use of CUDA, on every rank
        except glake.Error as error:
            sys.exit(f"finetune_ddp.py --offload needs an NVIDIA GPU with its driver and a CUDA build of torch: {error}")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    hidden, layers = SIZES[chosen.size]
    torch.manual_seed(0)
    widths = {"hidden_size": hidden, "intermediate_size": hidden * 7 // 2, "num_hidden_layers": layers}
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 256}
    shape = transformers.LlamaConfig(vocab_size=32000, max_position_embeddings=chosen.tokens, use_cache=False, **widths, **heads)
    model = transformers.LlamaForCausalLM(shape).to(device, torch.bfloat16)
    # The gradients lie in the buckets that are sent: once, and not twice.
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if chosen.offload:
        glake.offload(model, budget=chosen.offload)  # a budget of each rank's own GPU
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    torch.manual_seed(1 + dist.get_rank())
    for step in range(chosen.steps):
        ids = torch.randint(shape.vocab_size, (1, chosen.tokens), device=device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    if chosen.offload:
        print(f"rank {dist.get_rank()}: {glake.offload.report()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

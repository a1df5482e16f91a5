"""Fine-tuning with FSDP2 on every GPU: a Llama of random weights, with the memory of a step under a budget on each.

    torchrun --nproc-per-node 2 finetune_fsdp.py                 # tiny; needs torch and transformers
    torchrun --nproc-per-node 2 finetune_fsdp.py --size 8b --tokens 8192 --offload 40GiB      # needs two GPUs
"""

import argparse
import os
import sys

try:
    import torch
    import torch.distributed as dist
    import transformers
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
except ImportError as error:
    sys.exit(f"finetune_fsdp.py needs torch 2.8 or later and transformers: pip install torch transformers ({error})")

import glake

# Hidden size and layers.
SIZES = {"tiny": (256, 4), "1b": (2048, 16), "8b": (4096, 32)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--tokens", type=int, default=512, help="of a sequence")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--offload", metavar="BUDGET", help='what each process may take of its GPU, as "40GiB"')
    chosen = parser.parse_args()
    if "RANK" not in os.environ:
        sys.exit("finetune_fsdp.py is one of several ranks: torchrun --nproc-per-node 2 finetune_fsdp.py")
    if chosen.offload:
        try:
            glake.enable()  # before the first use of CUDA, on every rank
        except glake.Error as error:
            sys.exit(f"finetune_fsdp.py --offload needs an NVIDIA GPU with its driver and a CUDA build of torch: {error}")
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
    model = transformers.LlamaForCausalLM(shape).to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    if chosen.offload:
        glake.offload(model, budget=chosen.offload)  # what FSDP2 gathers stays: it is freed and gathered again anyway
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

"""Fine-tuning in a plain loop: a Llama of random weights, with the memory of a step under a budget.

    python finetune_plain.py                                     # tiny; needs torch and transformers
    python finetune_plain.py --size 1b --tokens 8192             # what a step takes: needs a GPU
    python finetune_plain.py --size 1b --tokens 8192 --offload 20GiB
"""

import argparse
import sys

try:
    import torch
    import transformers
except ImportError as error:
    sys.exit(f"finetune_plain.py needs torch 2.8 or later and transformers: pip install torch transformers ({error})")

import glake

# Hidden size and layers.
SIZES = {"tiny": (256, 4), "1b": (2048, 16), "8b": (4096, 32)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--tokens", type=int, default=512, help="of a sequence")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--offload", metavar="BUDGET", help='what the process may take of the GPU, as "20GiB"')
    return parser.parse_args()


def main() -> None:
    chosen = arguments()
    if chosen.offload:
        try:
            glake.enable()  # before the first use of CUDA
        except glake.Error as error:
            sys.exit(f"finetune_plain.py --offload needs an NVIDIA GPU with its driver and a CUDA build of torch: {error}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hidden, layers = SIZES[chosen.size]
    torch.manual_seed(0)
    widths = {"hidden_size": hidden, "intermediate_size": hidden * 7 // 2, "num_hidden_layers": layers}
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 256}
    shape = transformers.LlamaConfig(vocab_size=32000, max_position_embeddings=chosen.tokens, use_cache=False, **widths, **heads)
    model = transformers.LlamaForCausalLM(shape).to(device, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if chosen.offload:
        glake.offload(model, budget=chosen.offload)  # the one line; forward and backward are as before
    for step in range(chosen.steps):
        ids = torch.randint(shape.vocab_size, (1, chosen.tokens), device=device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}", flush=True)
    if device == "cuda":
        print(f"{torch.cuda.max_memory_allocated() / (1 << 30):.2f} GiB live at the peak")
    if chosen.offload:
        print(glake.offload.report())


if __name__ == "__main__":
    main()

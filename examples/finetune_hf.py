"""Fine-tuning with Hugging Face's Trainer and peft's LoRA: a Llama of random weights, with the memory of a step under a budget.

    python finetune_hf.py                                        # tiny; needs torch, transformers, peft and accelerate
    python finetune_hf.py --size 8b --tokens 8192 --checkpointing     # needs a GPU
    python finetune_hf.py --size 8b --tokens 8192 --checkpointing --offload 40GiB
"""

import argparse
import sys
import tempfile

try:
    import accelerate  # noqa: F401 (what the Trainer needs)
    import peft
    import torch
    import transformers
except ImportError as error:
    sys.exit(f"finetune_hf.py needs torch 2.8 or later, transformers, peft and accelerate: pip install torch transformers peft accelerate ({error})")

import glake

# Hidden size and layers.
SIZES = {"tiny": (256, 4), "1b": (2048, 16), "8b": (4096, 32)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--tokens", type=int, default=512, help="of a sequence")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--checkpointing", action="store_true", help="layers may be recomputed")
    parser.add_argument("--offload", metavar="BUDGET", help='what the process may take of the GPU, as "40GiB"')
    return parser.parse_args()


def main() -> None:
    chosen = arguments()
    if chosen.offload:
        try:
            glake.enable()  # before the first use of CUDA
        except glake.Error as error:
            sys.exit(f"finetune_hf.py --offload needs an NVIDIA GPU with its driver and a CUDA build of torch: {error}")
    hidden, layers = SIZES[chosen.size]
    torch.manual_seed(0)
    widths = {"hidden_size": hidden, "intermediate_size": hidden * 7 // 2, "num_hidden_layers": layers}
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 256}
    shape = transformers.LlamaConfig(vocab_size=32000, max_position_embeddings=chosen.tokens, use_cache=False, **widths, **heads)
    model = transformers.LlamaForCausalLM(shape).to(torch.bfloat16)
    model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    if chosen.offload:
        glake.offload(model, budget=chosen.offload)  # before the Trainer or after: it is given the same model
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(shape.vocab_size, (64, chosen.tokens))]
    with tempfile.TemporaryDirectory() as folder:
        quiet = {"logging_steps": 1, "report_to": [], "save_strategy": "no"}
        settings = transformers.TrainingArguments(
            folder, max_steps=chosen.steps, per_device_train_batch_size=1, gradient_checkpointing=chosen.checkpointing, **quiet
        )
        transformers.Trainer(model=model, args=settings, train_dataset=rows).train()
    if torch.cuda.is_available():
        print(f"{torch.cuda.max_memory_allocated() / (1 << 30):.2f} GiB live at the peak")
    if chosen.offload:
        print(glake.offload.report())


if __name__ == "__main__":
    main()

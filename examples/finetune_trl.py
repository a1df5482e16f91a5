"""Supervised fine-tuning with TRL: a Llama of random weights, with the memory of a step under a budget, or TRL's own option.

    python finetune_trl.py                                       # tiny; needs torch, trl and datasets
    python finetune_trl.py --size 1b --tokens 8192 --offload 20GiB        # needs a GPU
    python finetune_trl.py --size 1b --tokens 8192 --activation-offloading     # SFTConfig's option, by GLake
"""

import argparse
import sys
import tempfile

try:
    import datasets
    import tokenizers
    import torch
    import transformers
    import trl
except ImportError as error:
    sys.exit(f"finetune_trl.py needs torch 2.8 or later, trl and datasets: pip install torch trl datasets ({error})")

import glake

# Hidden size and layers.
SIZES = {"tiny": (256, 4), "1b": (2048, 16), "8b": (4096, 32)}
WORDS = 32000


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--tokens", type=int, default=512, help="of a sequence")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--offload", metavar="BUDGET", help='what the process may take of the GPU, as "20GiB"')
    parser.add_argument("--activation-offloading", action="store_true", help="all activations leave")
    return parser.parse_args()


def main() -> None:
    chosen = arguments()
    if chosen.offload or chosen.activation_offloading:
        try:
            glake.enable()  # before the first use of CUDA
        except glake.Error as error:
            sys.exit(f"finetune_trl.py needs an NVIDIA GPU with its driver and a CUDA build of torch to offload: {error}")
    if chosen.activation_offloading:
        glake.offload.patch_trl()  # before the trainer is made
    hidden, layers = SIZES[chosen.size]
    torch.manual_seed(0)
    widths = {"hidden_size": hidden, "intermediate_size": hidden * 7 // 2, "num_hidden_layers": layers}
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 256}
    shape = transformers.LlamaConfig(vocab_size=WORDS, max_position_embeddings=chosen.tokens, use_cache=False, **widths, **heads)
    model = transformers.LlamaForCausalLM(shape)
    if chosen.offload:
        glake.offload(model, budget=chosen.offload)
    # Words are numbers: no tokenizer is downloaded.
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(number): number for number in range(WORDS)}, unk_token="0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0", pad_token="1", eos_token="2")
    rows = datasets.Dataset.from_list([{"input_ids": row.tolist()} for row in torch.randint(WORDS, (64, chosen.tokens))])
    with tempfile.TemporaryDirectory() as folder:
        quiet = {"logging_steps": 1, "report_to": [], "save_strategy": "no"}
        shared = {"max_length": chosen.tokens, "bf16": torch.cuda.is_available(), "gradient_checkpointing": False}
        offloads = chosen.activation_offloading
        settings = trl.SFTConfig(folder, max_steps=chosen.steps, per_device_train_batch_size=1, activation_offloading=offloads, **shared, **quiet)
        trl.SFTTrainer(model, args=settings, train_dataset=rows, processing_class=tokenizer).train()
    if chosen.offload or chosen.activation_offloading:
        print(glake.offload.report())


if __name__ == "__main__":
    main()

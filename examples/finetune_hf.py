"""Fine-tuning with Hugging Face's Trainer or TRL: a Llama of random weights, with the memory of a step under a budget.

    python finetune_hf.py                                        # tiny; needs torch, transformers and accelerate
    python finetune_hf.py --lora --size 8b --tokens 8192 --checkpointing --offload 40GiB     # needs a GPU, and peft
    python finetune_hf.py --trl --size 1b --tokens 8192 --offload 20GiB                      # TRL's SFTTrainer; needs trl and datasets
    python finetune_hf.py --trl --size 1b --tokens 8192 --activation-offloading              # SFTConfig's option, served by GLake
"""

import argparse
import sys
import tempfile

NEEDED = "torch 2.8 or later, transformers and accelerate; peft for --lora; trl and datasets for --trl"
try:
    import accelerate  # noqa: F401 (the Trainer imports it)
    import torch
    import transformers

    if "--lora" in sys.argv:
        import peft
    if "--trl" in sys.argv:
        import datasets
        import tokenizers
        import trl
except ImportError as error:
    sys.exit(f"finetune_hf.py needs {NEEDED}: pip install torch transformers accelerate peft trl datasets ({error})")

import glake

# Hidden size and layers.
SIZES = {"tiny": (256, 4), "1b": (2048, 16), "8b": (4096, 32)}
WORDS = 32000


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--tokens", type=int, default=512, help="length of a sequence")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lora", action="store_true", help="train adapters of peft's LoRA instead of all weights")
    parser.add_argument("--checkpointing", action="store_true", help="allow layers to be recomputed")
    parser.add_argument("--offload", metavar="BUDGET", help='GPU memory that the process may use, as "40GiB"')
    parser.add_argument("--trl", action="store_true", help="TRL's SFTTrainer instead of the Trainer")
    parser.add_argument("--activation-offloading", action="store_true", help="with --trl: offload all activations, without a budget")
    chosen = parser.parse_args()
    if chosen.activation_offloading and not chosen.trl:
        parser.error("--activation-offloading is an option of TRL: add --trl")
    return chosen


def llama(chosen: argparse.Namespace) -> torch.nn.Module:
    hidden, layers = SIZES[chosen.size]
    torch.manual_seed(0)
    widths = {"hidden_size": hidden, "intermediate_size": hidden * 7 // 2, "num_hidden_layers": layers}
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 256}
    shape = transformers.LlamaConfig(vocab_size=WORDS, max_position_embeddings=chosen.tokens, use_cache=False, **widths, **heads)
    model = transformers.LlamaForCausalLM(shape).to(torch.bfloat16)
    if chosen.lora:
        model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    return model


def trainer(chosen: argparse.Namespace, model: torch.nn.Module, folder: str) -> transformers.Trainer:
    quiet = {"logging_steps": 1, "report_to": [], "save_strategy": "no"}
    settings = {"max_steps": chosen.steps, "per_device_train_batch_size": 1, "gradient_checkpointing": chosen.checkpointing, **quiet}
    ids = torch.randint(WORDS, (64, chosen.tokens))
    if not chosen.trl:
        rows = [{"input_ids": row, "labels": row} for row in ids]
        return transformers.Trainer(model=model, args=transformers.TrainingArguments(folder, **settings), train_dataset=rows)
    # Each number is a word: no tokenizer is downloaded.
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(number): number for number in range(WORDS)}, unk_token="0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0", pad_token="1", eos_token="2")
    rows = datasets.Dataset.from_list([{"input_ids": row.tolist()} for row in ids])
    own = {"max_length": chosen.tokens, "bf16": torch.cuda.is_available(), "activation_offloading": chosen.activation_offloading}
    return trl.SFTTrainer(model, args=trl.SFTConfig(folder, **settings, **own), train_dataset=rows, processing_class=tokenizer)


def main() -> None:
    chosen = arguments()
    offloads = chosen.offload or chosen.activation_offloading
    if offloads:
        try:
            glake.enable()  # before the first use of CUDA
        except glake.Error as error:
            sys.exit(f"finetune_hf.py needs an NVIDIA GPU with its driver and a CUDA build of torch to offload: {error}")
    if chosen.activation_offloading:
        glake.offload.patch_trl()  # before the trainer is made
    model = llama(chosen)
    if chosen.offload:
        glake.offload(model, budget=chosen.offload)  # before the trainer is made or after it: both use the same model
    with tempfile.TemporaryDirectory() as folder:
        trainer(chosen, model, folder).train()
    if torch.cuda.is_available():
        print(f"{torch.cuda.max_memory_allocated() / (1 << 30):.2f} GiB live at the peak")
    if offloads:
        print(glake.offload.report())


if __name__ == "__main__":
    main()

"""Fine-tuning with Lightning's Trainer: a Llama of random weights, with the memory of a step under a budget.

    python finetune_lightning.py                                 # tiny; needs torch, transformers and lightning
    python finetune_lightning.py --size 1b --tokens 8192 --offload 20GiB       # needs a GPU
"""

import argparse
import sys

try:
    import lightning
    import torch
    import transformers
except ImportError as error:
    sys.exit(f"finetune_lightning.py needs torch 2.8 or later, transformers and lightning: pip install torch transformers lightning ({error})")

import glake

# Hidden size and layers.
SIZES = {"tiny": (256, 4), "1b": (2048, 16), "8b": (4096, 32)}


class Tuned(lightning.LightningModule):
    def __init__(self, shape: transformers.LlamaConfig) -> None:
        super().__init__()
        self.model = transformers.LlamaForCausalLM(shape).train()

    def training_step(self, ids: torch.Tensor, _place: int) -> torch.Tensor:
        loss = self.model(input_ids=ids, labels=ids).loss
        print(f"loss {loss.item():.4f}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--tokens", type=int, default=512, help="of a sequence")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--offload", metavar="BUDGET", help='what the process may take of the GPU, as "20GiB"')
    chosen = parser.parse_args()
    if chosen.offload:
        try:
            glake.enable()  # before the first use of CUDA
        except glake.Error as error:
            sys.exit(f"finetune_lightning.py --offload needs an NVIDIA GPU with its driver and a CUDA build of torch: {error}")
    hidden, layers = SIZES[chosen.size]
    torch.manual_seed(0)
    widths = {"hidden_size": hidden, "intermediate_size": hidden * 7 // 2, "num_hidden_layers": layers}
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 256}
    shape = transformers.LlamaConfig(vocab_size=32000, max_position_embeddings=chosen.tokens, use_cache=False, **widths, **heads)
    tuned = Tuned(shape)
    if chosen.offload:
        glake.offload(tuned.model, budget=chosen.offload)  # the module whose forward passes save what shall leave
    rows = torch.utils.data.DataLoader(torch.randint(shape.vocab_size, (chosen.steps, chosen.tokens)), batch_size=1)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(devices=1, max_epochs=1, precision="bf16-mixed", **quiet)
    trainer.fit(tuned, rows)
    if chosen.offload:
        print(glake.offload.report())


if __name__ == "__main__":
    main()

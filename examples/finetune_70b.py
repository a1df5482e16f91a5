"""LoRA of a model that is larger than the GPU: frozen weights that do not fit stream from pinned host memory.

    python finetune_70b.py --size 70b --tokens 8192 --budget 130GiB              # random weights, made block by block; needs a GPU
    python finetune_70b.py --model FOLDER --tokens 8192 --budget 130GiB          # a Llama in safetensors
    python finetune_70b.py                                                       # tiny, resident where there is no GPU

The model is made on the meta device and filled parameter by parameter, so that the host needs memory only for what streams: of 141 GB some 32
at 8,192 tokens on a GPU of 141 GB. Layers are recomputed, and the loss takes 1,024 tokens at a time.
"""

import argparse
import functools
import json
import pathlib
import sys
import time

try:
    import peft
    import torch
    import transformers
except ImportError as error:
    sys.exit(f"finetune_70b.py needs torch 2.8 or later, transformers and peft: pip install torch transformers peft ({error})")

import glake

# Hidden and intermediate size, layers, heads, heads of keys and values, vocabulary.
SIZES = {
    "tiny": (256, 704, 8, 4, 2, 512),
    "8b": (4096, 14336, 32, 32, 8, 128256),
    "70b": (8192, 28672, 80, 64, 8, 128256),
}
AT_ONCE = 1024


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--size", choices=SIZES, default="tiny", help="shape of a model of random weights")
    parser.add_argument("--model", type=pathlib.Path, metavar="FOLDER", help="a folder with config.json and safetensors instead")
    parser.add_argument("--tokens", type=int, default=512, help="length of a sequence")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--budget", help='GPU memory that the process may use, as "130GiB"; else all of it')
    chosen = parser.parse_args()
    if chosen.model is not None and not (chosen.model / "config.json").is_file():
        parser.error(f"--model: there is no {chosen.model / 'config.json'}")
    return chosen


def shape(chosen: argparse.Namespace) -> transformers.PretrainedConfig:
    if chosen.model is not None:
        return transformers.AutoConfig.from_pretrained(chosen.model)
    hidden, wide, layers, heads, shared, words = SIZES[chosen.size]
    counts = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": shared, "vocab_size": words}
    return transformers.LlamaConfig(hidden_size=hidden, intermediate_size=wide, max_position_embeddings=max(chosen.tokens, 8192), **counts)


class Tuned(torch.nn.Module):
    """A language model with adapters, whose forward is the loss."""

    def __init__(self, config: transformers.PretrainedConfig) -> None:
        super().__init__()
        config.use_cache = False
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            self.model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
        self.model.enable_input_require_grads()
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.train()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        inner = self.model.get_base_model()
        hidden = inner.model(input_ids=ids).last_hidden_state[:, :-1].flatten(0, 1)
        labels = ids[:, 1:].flatten()

        def part(rows: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(inner.lm_head(rows).float(), wanted, reduction="sum")

        parts = zip(hidden.split(AT_ONCE), labels.split(AT_ONCE))
        return sum(torch.utils.checkpoint.checkpoint(part, *each, use_reentrant=False) for each in parts) / labels.numel()


class Filler:
    """Fills parameters by name: adapters as peft does, the rest from a folder or with random values."""

    def __init__(self, tuned: Tuned, config: transformers.PretrainedConfig, folder: pathlib.Path | None) -> None:
        self.tuned, self.config, self.files = tuned, config, {}
        torch.manual_seed(0)
        self.noise = torch.empty(1 << 24, dtype=torch.bfloat16).normal_(0, 0.02)
        if folder is not None:
            self.files = files_of(folder)

    def __call__(self, name: str, out: torch.Tensor) -> None:
        owner, _, own = name.rpartition(".")
        plain = name.removeprefix("model.base_model.model.").replace(".base_layer", "")
        if plain in self.files:
            out.copy_(self.files[plain](plain))
        elif ".lora_A." in name:
            torch.nn.init.kaiming_uniform_(out, a=5**0.5)
        elif ".lora_B." in name:
            out.zero_()
        elif own.endswith("inv_freq"):
            # A buffer that no file has.
            out.copy_(getattr(type(self.tuned.get_submodule(owner))(config=self.config), own))
        elif self.files:
            sys.exit(f"finetune_70b.py: no file of --model has {plain}")
        elif out.dim() == 1:
            out.fill_(1)
        else:
            for part in out.view(-1).split(self.noise.numel()):
                part.copy_(self.noise[: part.numel()])


def files_of(folder: pathlib.Path) -> dict:
    """Returns what reads each tensor of a folder of safetensors."""
    import safetensors

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        found = json.loads(index.read_text())["weight_map"]
    else:
        with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
            found = dict.fromkeys(file.keys(), "model.safetensors")
    opened = functools.cache(lambda name: safetensors.safe_open(folder / name, "pt"))
    return {name: lambda name, file=file: opened(file).get_tensor(name) for name, file in found.items()}


def main() -> None:
    chosen = arguments()
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        glake.enable()  # before the first use of CUDA
    elif chosen.size != "tiny" or chosen.model is not None:
        sys.exit("finetune_70b.py needs an NVIDIA GPU for more than the tiny model")
    config = shape(chosen)
    tuned = Tuned(config)
    fill = Filler(tuned, config, chosen.model)
    if has_gpu:
        handle = glake.offload(tuned, budget=chosen.budget, load=fill)
    else:
        resident(tuned, fill)
    device = "cuda" if has_gpu else "cpu"
    optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=1e-4)
    for step in range(chosen.steps):
        begin = time.perf_counter()
        ids = torch.randint(config.vocab_size, (1, chosen.tokens), device=device)
        loss = tuned(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}, {chosen.tokens / (time.perf_counter() - begin):.0f} tokens/s", flush=True)
    if has_gpu:
        print(handle.report())
    if chosen.model is not None:
        tuned.model.save_pretrained("adapter")


def resident(tuned: Tuned, fill: Filler) -> None:
    """Fills a model on the host."""
    named = [(name, value) for name, value in (*tuned.named_parameters(), *tuned.named_buffers())]
    for name, value in named:
        if value.is_meta:
            made = torch.empty_like(value, device="cpu")
            fill(name, made)
            owner = tuned.get_submodule(name.rpartition(".")[0])
            own = name.rpartition(".")[2]
            if isinstance(value, torch.nn.Parameter):
                owner._parameters[own] = torch.nn.Parameter(made, requires_grad=value.requires_grad)
            else:
                owner._buffers[own] = made


if __name__ == "__main__":
    main()

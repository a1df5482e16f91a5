"""LoRA fine-tuning with recomputation, the workload that fragments most: a GPT-2 with random weights, so nothing is downloaded.

    python lora.py                  # needs a GPU, torch 2.0 or later, transformers and peft
"""

import sys

try:
    import peft
    import torch
    import transformers
except ImportError as error:
    sys.exit(f"lora.py needs torch 2.0 or later with CUDA, transformers and peft: pip install torch transformers peft ({error})")

import glake

GIB = 1 << 30


def main(steps: int = 20) -> None:
    try:
        glake.enable()
    except glake.Error as error:
        sys.exit(f"lora.py needs an NVIDIA GPU with its driver and a CUDA build of torch: {error}")
    torch.manual_seed(0)
    shape = transformers.GPT2Config(vocab_size=32000, n_positions=1024, n_embd=1024, n_layer=24, n_head=16, use_cache=False)
    model = transformers.GPT2LMHeadModel(shape).to("cuda", torch.bfloat16)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules=["c_attn"], fan_in_fan_out=True))
    model.print_trainable_parameters()
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-4)
    for step in range(steps):
        tokens = torch.randint(32000, (8, 256 + 64 * (step * 5 % 11)), device="cuda")
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    live, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    print(f"loss {loss.item():.4f}; {live / GIB:.2f} GiB live at the peak, {reserved / GIB:.2f} GiB reserved for it")


if __name__ == "__main__":
    main()

"""The models of all parts, of random weights, one loss for all, and a count of what autograd saves."""


def llama(a, torch, dropout=0.0):
    import peft, transformers

    heads = max(a.hidden // 128, 1)
    config = transformers.LlamaConfig(
        hidden_size=a.hidden, intermediate_size=a.hidden * 7 // 2, num_hidden_layers=a.layers, num_attention_heads=heads,
        num_key_value_heads=max(heads // 4, 1), vocab_size=128256 if a.hidden >= 2048 else 512,
        max_position_embeddings=max(8192, a.length), use_cache=False, attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    with torch.device(a.device):
        torch.set_default_dtype(torch.bfloat16)
        model = transformers.LlamaForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    lora = peft.LoraConfig(r=16, lora_alpha=32, lora_dropout=dropout, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, lora, autocast_adapter_dtype=False)
    model.train()
    return model, config.vocab_size


def gpt2(a, torch):
    """GPT-2 small at a batch that leaves the GPU waiting for the host; on the CPU a tiny one."""
    import transformers

    small = {} if a.device == "cuda" else {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 512}
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False, **small)).to(a.device, torch.bfloat16).train()


def layers_of(model):
    """The module whose forward passes save what is to leave: ``chunked_loss`` calls it, and not the whole model."""
    return model.get_base_model().model


def chunked_loss(torch, model, ids):
    """The same for all: logits of 1,024 tokens at a time, which are made again in the backward pass."""
    from torch.utils.checkpoint import checkpoint

    inner = model.get_base_model()
    hidden = layers_of(model)(input_ids=ids).last_hidden_state[:, :-1].flatten(0, 1)
    labels = ids[:, 1:].flatten()
    part = lambda rows, wanted: torch.nn.functional.cross_entropy(inner.lm_head(rows).float(), wanted, reduction="sum")
    parts = zip(hidden.split(1024), labels.split(1024))
    return sum(checkpoint(part, rows, wanted, use_reentrant=False) for rows, wanted in parts) / labels.numel()


def whole(torch, model):
    """A module whose forward is the loss: DDP learns of a backward pass from its own module's forward."""

    class Loss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids):
            return chunked_loss(torch, self.model, ids)

    return Loss()


class Unique:
    """Bytes that autograd saves, each once, by storage and range; without parameters and their views. Those of the layers, and with the loss."""

    def __init__(self, torch, model):
        self.torch, self.seen, self.bytes, self.saved, self.of_layers = torch, {}, 0, 0, 0
        self.stays = {p.untyped_storage()._cdata for p in [*model.parameters(), *model.buffers()]}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor)

    def pack(self, tensor):
        from torch.multiprocessing.reductions import StorageWeakRef

        storage = tensor.untyped_storage()
        if storage._cdata in self.stays or tensor.numel() * tensor.element_size() < 256 << 10:
            return tensor
        size = (sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride())) + 1) * tensor.element_size()
        key = (storage._cdata, tensor.storage_offset() * tensor.element_size(), size)
        self.saved += size
        if key not in self.seen or self.seen[key].expired():
            self.seen[key] = StorageWeakRef(storage)
            self.bytes += size
        return tensor

    def layers_ended(self, *_):
        """The loss has saved nothing yet."""
        self.of_layers = self.of_layers or self.bytes

"""Frozen weights that stream, on a GPU: losses, gradients and weights to the bit beside a model that stays on it, and what programs do.

    python tests/gpu/streaming.py [--steps 50] [--case NAME] [--device cpu]

Each case trains a tiny model three times, twice without and once with all blocks streamed, with deterministic kernels. glake is the
installed package, or ffi/python with the library that GLAKE_LIBRARY names. `--device cpu` runs the same over simulated memory. Cases of
transformers and peft are passed over without them. Ends with 1 if one failed, and with 0 without a GPU.
"""

import argparse, contextlib, importlib.util, os, pathlib, sys, tempfile, time, traceback

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "ffi/python/tests"))
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--case", default="", help="those with this in their name")
parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
a = parser.parse_args()
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
os.environ["HF_HUB_OFFLINE"] = "1"
if a.device == "cpu":
    os.environ["GLAKE_DEVICE"] = "sim"
if not importlib.util.find_spec("glake"):
    sys.path.append(str(ROOT / "ffi/python"))

import torch
import glake

if a.device == "cuda":
    if not torch.cuda.is_available():
        print("SKIPPED  streaming.py: there is no NVIDIA GPU here (--device cpu runs it over simulated memory)")
        sys.exit(0)
    glake.enable()
    torch.use_deterministic_algorithms(True)
else:
    torch.set_num_threads(1)
from glake.offload._budget import Offloaded
from glake.offload._memory import Cuda

HUGE = 1 << 50
has_hf = all(importlib.util.find_spec(name) for name in ("transformers", "peft", "accelerate"))
if has_hf:
    import peft, transformers

    transformers.utils.logging.set_verbosity_error()


def memory():
    if a.device == "cuda":
        return Cuda()
    from test_activations import Laid

    return Laid()


def stream(model, preset="fit", least=512):
    """Streams all blocks of a model on the host; the rest goes to the GPU."""
    handle = Offloaded(model, 8 << 30, preset, least, memory())
    handle.place(model, step=HUGE)
    told = handle.told()["weights"]
    assert told["kept_blocks"] == 0 and told["streamed_blocks"] > 0, told
    return handle


def base(**more):
    torch.manual_seed(1)
    shape = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, num_key_value_heads=2, use_cache=False, **more))


def lora(checkpoints=None, kind=torch.float32, tied=False, **more):
    model = base(tie_word_embeddings=tied).to(kind)
    torch.manual_seed(2)
    given = {"r": 8, "lora_dropout": 0.1, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **more}
    model = peft.get_peft_model(model, peft.LoraConfig(**given))
    if checkpoints is not None:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpoints})
    return model.train()


def own():
    """A model of torch alone."""
    from test_weights import Model

    torch.manual_seed(1)
    return Model(6)


def loss_of(model, ids):
    if "PeftModel" in type(model).__name__ or hasattr(model, "config"):
        return model(input_ids=ids, labels=ids).loss
    return model(ids % 64).float().square().mean()


def plain_step(model, ids):
    loss = loss_of(model, ids)
    loss.backward()
    return loss.item()


def autocast_step(model, ids):
    losses = []
    for part in ids.split(1):
        with torch.autocast(a.device, torch.bfloat16):
            losses.append(loss_of(model, part))
        losses[-1].backward()
    return tuple(loss.item() for loss in losses)


def reference_step(model, ids):
    policy = model(input_ids=ids).logits.float().log_softmax(-1)
    with model.disable_adapter(), torch.no_grad():
        reference = model(input_ids=ids).logits.float().log_softmax(-1)
    loss = (policy - reference).square().mean() - policy.mean()
    loss.backward()
    return loss.item()


def two_step(model, ids):
    losses = []
    for name in ("default", "other"):
        model.set_adapter(name)
        losses.append(loss_of(model, ids))
        losses[-1].backward()
    return tuple(loss.item() for loss in losses)


def with_two():
    model = lora()
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    return model


def merged_step(model, ids):
    model.merge_adapter()
    with torch.no_grad():
        merged = loss_of(model, ids).item()
    model.unmerge_adapter()
    return merged, plain_step(model, ids)


def unfreezes(model, optimizer, number):
    if number == 5:
        layer = model.get_base_model().model.layers[2].mlp.up_proj.base_layer
        optimizer.add_param_group({"params": [layer.weight.requires_grad_()]})


def adds(model, optimizer, number):
    """A new adapter is made on the host, where its layers' weights are."""
    if number == 3:
        model.add_adapter("late", peft.LoraConfig(r=2, target_modules=["q_proj"]))
        model.set_adapter("late")
        optimizer.add_param_group({"params": [p for name, p in model.named_parameters() if "late" in name]})


# Name: model, step, what else happens, preset, whether it needs transformers.
CASES = {
    "torch alone": (own, plain_step, None, "fit", False),
    "LoRA, dropout": (lora, plain_step, None, "fit", True),
    "bf16, reentrant checkpoints": (lambda: lora(True, torch.bfloat16), plain_step, None, "fit", True),
    "bf16, other checkpoints": (lambda: lora(False, torch.bfloat16), plain_step, None, "fit", True),
    "hybrid": (lambda: lora(False, torch.bfloat16), plain_step, None, "hybrid", True),
    "activations leave too": (lambda: lora(kind=torch.bfloat16), plain_step, None, "memory", True),
    "DoRA": (lambda: lora(False, use_dora=True), plain_step, None, "fit", True),
    "autocast, accumulation": (lora, autocast_step, None, "fit", True),
    "adapter off, as DPO": (lora, reference_step, None, "fit", True),
    "two adapters": (with_two, two_step, None, "fit", True),
    "merged and unmerged": (lora, merged_step, None, "fit", True),
    "unfrozen at step 5": (lora, plain_step, unfreezes, "fit", True),
    "an adapter added later": (lora, plain_step, adds, "fit", True),
    "tied head": (lambda: lora(tied=True), plain_step, None, "fit", True),
}


def train(model, step, each):
    torch.manual_seed(7)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    seen = []
    for number in range(a.steps):
        if each is not None:
            torch.manual_seed(number)
            each(model, optimizer, number)
        ids = torch.randint(0, 256, (2, 48 + number % 3)).to(a.device)
        optimizer.zero_grad()
        loss = step(model, ids)
        seen.append((loss, {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}))
        optimizer.step()
    return seen, {name: p.detach().cpu() for name, p in model.named_parameters()}


def differ(one, other):
    for number, ((loss, gradients), (another, others)) in enumerate(zip(one[0], other[0])):
        if loss != another:
            return f"step {number}: losses {loss} and {another}"
        wrong = [name for name in others if name not in gradients or not torch.equal(gradients[name], others[name])]
        if wrong or len(gradients) != len(others):
            return f"step {number}: gradients of {len(wrong)} parameters, as of {wrong[:1]}"
    wrong = [name for name in other[1] if not torch.equal(one[1][name], other[1][name])]
    return f"{len(wrong)} parameters, as {wrong[:1]}" if wrong else None


def exact(make, step, each, preset):
    plain = train(make().to(a.device), step, each)
    if found := differ(train(make().to(a.device), step, each), plain):
        return f"two plain runs differ: {found}"
    model = make()
    handle = stream(model, preset)
    if a.device == "cuda":
        # As the Trainer does: streamed weights stay where they are.
        model.cuda()
        assert any(not p.is_cuda for p in model.parameters()), "streamed weights moved"
    found = train(model, step, each)
    told = handle.told()["weights"]
    handle.remove()
    if said := differ(found, plain):
        return said
    for name, p in model.named_parameters():
        if not torch.equal(p.detach().cpu(), plain[1][name]):
            return f"{name} has other bytes behind remove()"
    merges = step is merged_step
    if told["bytes_in"] == 0 or (told["bytes_out"] > 0) != merges:
        return f"moved: {told}"
    return None


def programs():
    """What programs do beside steps: a name, and what is wrong, if anything."""
    model = lora()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    plain = lora().to(a.device)
    handle = stream(model)
    ids = torch.randint(0, 256, (2, 8)).to(a.device)
    with torch.no_grad():
        model.eval(), plain.eval()
        one, other = (each.generate(input_ids=ids, max_new_tokens=16, do_sample=False) for each in (model, plain))
    yield "generate", None if torch.equal(one, other) else "other tokens"
    wrong = [name for name, value in model.state_dict().items() if not torch.equal(value.cpu(), expected[name])]
    yield "state_dict", f"{wrong[:1]} differ" if wrong else None
    with tempfile.TemporaryDirectory() as folder:
        model.get_base_model().save_pretrained(folder)
        model.save_pretrained(os.path.join(folder, "adapter"))
        yield "save_pretrained", None
    try:
        layer = model.get_base_model().model.layers[0].mlp.up_proj.base_layer
        with glake.offload.uses(layer):
            torch.nn.functional.linear(torch.randn(1, layer.in_features, device=a.device), layer.weight)
        yield "glake.offload.uses", None
    except RuntimeError as error:
        yield "glake.offload.uses", str(error)
    if a.device == "cuda":
        def reads(module, inputs):
            torch.nn.functional.linear(torch.randn(1, layer.in_features, device=a.device), layer.weight)

        hook = model.get_base_model().model.norm.register_forward_pre_hook(reads)
        try:
            model(input_ids=ids)
            yield "a weight that is away", "no error"
        except RuntimeError as error:
            yield "a weight that is away", None if "glake.offload.uses" in str(error) else str(error)
        hook.remove()
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                model.get_base_model().model.layers[0].mlp(torch.randn(1, 4, 128, device="cuda"))
            yield "a capture", "no error"
        except Exception as error:
            yield "a capture", None if "captured" in str(error) else f"{type(error).__name__}: {error}"
    handle.remove()
    handle = model = None
    left = glake.offload.report()
    yield "nothing is left", None if left["entries"] == left["host_bytes"] == left["held_bytes"] == 0 else str(left)


def main():
    failed = 0
    for name, (make, step, each, preset, needs_hf) in CASES.items():
        if a.case not in name:
            continue
        if needs_hf and not has_hf:
            print(f"SKIPPED  {name}: transformers, peft and accelerate are needed", flush=True)
            continue
        begin = time.perf_counter()
        try:
            with contextlib.redirect_stderr(sys.stdout):
                said = exact(make, step, each, preset)
        except Exception:
            said = traceback.format_exc(limit=-3)
        failed += said is not None
        print(f"{'ok     ' if said is None else 'FAILED '}  {name}, {time.perf_counter() - begin:.1f} s{'' if said is None else ': ' + said}", flush=True)
    if has_hf and a.case in "programs":
        try:
            for name, said in programs():
                failed += said is not None
                print(f"{'ok     ' if said is None else 'FAILED '}  {name}{'' if said is None else ': ' + said}", flush=True)
        except Exception:
            failed += 1
            print(f"FAILED   programs: {traceback.format_exc(limit=-4)}", flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())

"""Frozen weights of Hugging Face models that stream, in unchanged loops: peft, Trainer, TRL, Accelerate, ranks.

Needs transformers, peft, accelerate and trl, and GLAKE_SOAK: it takes minutes.
"""

import contextlib
import importlib.util
import os
import pathlib
import tempfile
import unittest
import warnings

os.environ["GLAKE_DEVICE"] = "sim"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")

from test_weights import OfWeights, torch  # noqa: E402

NEEDED = ("transformers", "peft", "accelerate", "trl", "datasets")
LACKING = [name for name in NEEDED if not importlib.util.find_spec(name)]
if torch and not LACKING and os.environ.get("GLAKE_SOAK"):
    import peft
    import transformers
    from datasets import Dataset

    transformers.utils.logging.set_verbosity_error()
    SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4}

STEPS = int(os.environ.get("GLAKE_STEPS", "50"))


@unittest.skipUnless(torch and not LACKING and os.environ.get("GLAKE_SOAK"), f"needs GLAKE_SOAK=1 and {', '.join(LACKING) or 'torch'}")
class OfHuggingFace(OfWeights):
    def setUp(self):
        super().setUp()
        warnings.simplefilter("ignore")

    def base(self, tied=False, **more):
        torch.manual_seed(1)
        config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2, tie_word_embeddings=tied, use_cache=False, **more)
        return transformers.LlamaForCausalLM(config)

    def lora(self, base=None, checkpoints=None, **more):
        model = base or self.base()
        torch.manual_seed(2)
        config = {"r": 4, "lora_dropout": 0.1, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **more}
        model = peft.get_peft_model(model, peft.LoraConfig(**config))
        if checkpoints is not None:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpoints})
        return model.train()

    def step(self, model, ids):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.item()

    def same(self, make=None, **how):
        told = super().same(make, steps=how.pop("steps", STEPS), **how)
        self.assertGreater(told["bytes_in"], 0)
        self.assertEqual(told["bytes_out"], 0)
        return told


class Peft(OfHuggingFace):
    def test_lora_without_checkpoints(self):
        told = self.same(self.lora)
        # Of the first forward and backward nothing is known.
        self.assertLessEqual(told["demanded"], STEPS + 2)

    def test_lora_with_reentrant_checkpoints(self):
        told = self.same(lambda: self.lora(checkpoints=True))
        self.assertLessEqual(told["demanded"], STEPS + 2)

    def test_lora_with_other_checkpoints(self):
        told = self.same(lambda: self.lora(checkpoints=False))
        self.assertLessEqual(told["demanded"], STEPS + 2)

    def test_some_blocks(self):
        self.same(lambda: self.lora(checkpoints=False), stream=4)

    def test_dora(self):
        for checkpoints in (None, True, False):
            self.same(lambda checkpoints=checkpoints: self.lora(checkpoints=checkpoints, use_dora=True), steps=STEPS // 5)

    def test_hybrid_and_everything_saved_leaves(self):
        for preset in ("hybrid", "memory"):
            self.same(lambda: self.lora(checkpoints=False), preset=preset, steps=STEPS // 2)

    def test_autocast_and_accumulation(self):
        def step(model, ids):
            losses = []
            for part in ids.split(1):
                with torch.autocast("cpu", torch.bfloat16):
                    losses.append(model(input_ids=part, labels=part).loss)
                losses[-1].backward()
            return str([loss.item() for loss in losses])

        self.same(self.lora, step=step)

    def test_bf16(self):
        self.same(lambda: self.lora(self.base().bfloat16(), checkpoints=False))

    def test_two_adapters_and_none(self):
        def make():
            model = self.lora()
            model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
            return model

        def step(model, ids):
            losses = []
            for name in ("default", "other"):
                model.set_adapter(name)
                losses.append(model(input_ids=ids, labels=ids).loss)
                losses[-1].backward()
            with model.disable_adapter(), torch.no_grad():
                losses.append(model(input_ids=ids, labels=ids).loss)
            return str([loss.item() for loss in losses])

        self.same(make, step=step)

    def test_modules_to_save_and_tied_heads(self):
        self.same(lambda: self.lora(modules_to_save=["lm_head"]), steps=STEPS // 2)
        self.same(lambda: self.lora(self.base(tied=True)), steps=STEPS // 2)

    def test_merged_and_unmerged(self):
        def step(model, ids):
            model.merge_adapter()
            with torch.no_grad():
                merged = model(input_ids=ids, labels=ids).loss.item()
            model.unmerge_adapter()
            return merged, OfHuggingFace.step(self, model, ids)

        self.same_without_removal(step)

    def same_without_removal(self, step):
        found = []
        for streams in (False, False, True):
            model = self.lora()
            handle = self.offload(model) if streams else None
            found.append(self.train(model, STEPS // 5, step=step))
            if handle is not None:
                handle.remove()
        self.equal(found[1], found[0], "two plain runs differ")
        self.equal(found[2], found[0])

    def test_t5(self):
        def make():
            torch.manual_seed(1)
            config = transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=4, num_heads=4, decoder_start_token_id=0)
            model = transformers.T5ForConditionalGeneration(config)
            torch.manual_seed(2)
            targets = ["q", "k", "v", "o", "wi", "wo"]
            return peft.get_peft_model(model, peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=targets)).train()

        told = self.same(make)
        self.assertEqual(told["streamed_blocks"], 8)

    def test_generation_and_merging_for_good(self):
        plain, model = self.lora().eval(), self.lora().eval()
        handle = self.offload(model)
        ids = torch.randint(0, 64, (2, 5))
        for _ in range(2):
            one, other = (each.generate(input_ids=ids, max_new_tokens=8, do_sample=False) for each in (plain, model))
            self.assertTrue(torch.equal(one, other))
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            model.base_model.model.save_pretrained(os.path.join(folder, "base"))
            handle.remove()
            merged, expected = model.merge_and_unload(safe_merge=True), plain.merge_and_unload(safe_merge=True)
            for one, other in zip(merged.parameters(), expected.parameters()):
                self.assertTrue(torch.equal(one, other))

    def test_merging_for_good_while_it_streams(self):
        plain, model = self.lora().eval(), self.lora().eval()
        handle = self.offload(model)
        merged, expected = model.merge_and_unload(), plain.merge_and_unload()
        ids = torch.randint(0, 64, (2, 5))
        with torch.no_grad():
            self.assertTrue(torch.equal(merged(ids).logits, expected(ids).logits))
        handle.remove()
        for one, other in zip(merged.parameters(), expected.parameters()):
            self.assertTrue(torch.equal(one, other))


class Loops(OfHuggingFace):
    def data(self):
        torch.manual_seed(5)
        ids = torch.randint(0, 64, (32, 12)).tolist()
        return Dataset.from_dict({"input_ids": ids, "labels": ids, "attention_mask": [[1] * 12] * 32})

    def arguments(self, folder, kind=None, **more):
        given = {"output_dir": str(folder), "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 10, "save_steps": 5}
        given |= {"use_cpu": True, "report_to": [], "logging_steps": 1, "seed": 3, "learning_rate": 1e-2, "disable_tqdm": True, "save_safetensors": True}
        kind = kind or transformers.TrainingArguments
        known = set(kind.__dataclass_fields__)
        return kind(**{name: value for name, value in {**given, **more}.items() if name in known})

    def losses(self, trainer):
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    def adapters(self, model):
        return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}

    def alike(self, found, plain):
        self.assertEqual(found[0], plain[0])
        for name, value in plain[1].items():
            self.assertTrue(torch.equal(found[1][name], value), name)

    def runs(self, run):
        with tempfile.TemporaryDirectory() as folder:
            found = []
            for number, streams in enumerate((False, False, True)):
                with contextlib.redirect_stdout(None):
                    found.append(run(pathlib.Path(folder, str(number)), streams))
            self.alike(found[1], found[0])
            self.alike(found[2], found[0])

    def test_trainer_with_checkpoints_saves_and_resumes(self):
        def run(folder, streams):
            model = self.lora()
            handle = self.offload(model) if streams else None
            arguments = self.arguments(folder, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False})
            trainer = transformers.Trainer(model=model, args=arguments, train_dataset=self.data())
            trainer.train()
            whole = self.losses(trainer), self.adapters(model)
            if handle is not None:
                handle.remove()
            del trainer, model
            again = self.lora()
            handle = self.offload(again) if streams else None
            trainer = transformers.Trainer(model=again, args=arguments, train_dataset=self.data())
            trainer.train(resume_from_checkpoint=str(folder / "checkpoint-5"))
            resumed = self.losses(trainer), self.adapters(again)
            if handle is not None:
                handle.remove()
            self.alike(resumed, whole)
            return whole

        self.runs(run)

    def test_accelerate(self):
        def run(folder, streams):
            from accelerate import Accelerator

            model = self.lora(checkpoints=True)
            handle = self.offload(model) if streams else None
            accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
            prepared, optimizer = accelerator.prepare(model, optimizer)
            losses = []
            torch.manual_seed(4)
            for _ in range(10):
                with accelerator.accumulate(prepared):
                    ids = torch.randint(0, 64, (2, 10))
                    loss = prepared(input_ids=ids, labels=ids).loss
                    accelerator.backward(loss)
                    accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(loss.item())
            accelerator.save_state(str(folder))
            accelerator.load_state(str(folder))
            found = losses, self.adapters(model)
            if handle is not None:
                handle.remove()
            return found

        self.runs(run)

    def tokenizer(self):
        from tokenizers import Tokenizer, models, pre_tokenizers

        words = {f"w{number}": number for number in range(62)} | {"<pad>": 62, "<eos>": 63}
        raw = Tokenizer(models.WordLevel(words, unk_token="w0"))
        raw.pre_tokenizer = pre_tokenizers.Whitespace()
        return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="w0")

    def texts(self, count, length, seed):
        torch.manual_seed(seed)
        return [" ".join(f"w{each}" for each in row) for row in torch.randint(0, 60, (count, length)).tolist()]

    def test_trl_sft(self):
        def run(folder, streams):
            import trl

            model = self.lora()
            handle = self.offload(model) if streams else None
            data = Dataset.from_dict({"text": self.texts(32, 12, 5)})
            arguments = self.arguments(folder, trl.SFTConfig, dataset_text_field="text", max_length=16, bf16=False, gradient_checkpointing=True)
            trainer = trl.SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=self.tokenizer())
            trainer.train()
            found = self.losses(trainer), self.adapters(model)
            if handle is not None:
                handle.remove()
            return found

        self.runs(run)

    def test_trl_dpo_with_the_adapter_off(self):
        def run(folder, streams):
            import trl

            model = self.lora()
            handle = self.offload(model) if streams else None
            data = Dataset.from_dict({"prompt": self.texts(32, 4, 5), "chosen": self.texts(32, 6, 6), "rejected": self.texts(32, 6, 7)})
            arguments = self.arguments(folder, trl.DPOConfig, max_length=16, bf16=False, gradient_checkpointing=False)
            trainer = trl.DPOTrainer(model=model, args=arguments, train_dataset=data, processing_class=self.tokenizer())
            trainer.train()
            found = self.losses(trainer), self.adapters(model)
            if handle is not None:
                handle.remove()
            return found

        self.runs(run)


def _rank(rank, folder, streams, results):
    """Trains on one of two ranks, each with its own simulated GPU."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(29541 + streams), RANK=str(rank), WORLD_SIZE="2")
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    case = Loops("test_accelerate")
    case.setUp()
    model = case.lora(checkpoints=False)
    handle = case.offload(model) if streams else None
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    torch.manual_seed(100 + rank)
    losses = []
    for _ in range(10):
        ids = torch.randint(0, 64, (2, 10))
        loss = wrapped(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if handle is not None:
        handle.remove()
    torch.save((losses, case.adapters(model)), os.path.join(folder, f"{streams}-{rank}.pt"))
    torch.distributed.destroy_process_group()


class Ranks(OfHuggingFace):
    def test_ddp_on_two_ranks(self):
        with tempfile.TemporaryDirectory() as folder:
            for streams in (False, True):
                torch.multiprocessing.start_processes(_rank, (folder, streams, None), nprocs=2, start_method="spawn")
            for rank in range(2):
                plain, found = (torch.load(os.path.join(folder, f"{streams}-{rank}.pt")) for streams in (False, True))
                Loops.alike(self, found, plain)


if __name__ == "__main__":
    unittest.main()

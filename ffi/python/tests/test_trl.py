"""TRL's trainers with its own option, and with a model whose activations are offloaded: what they compute is the same to the bit.

Needs torch and TRL; what is missing is skipped."""

import contextlib
import copy
import io
import logging
import tempfile
import unittest

import glake
from programs import Program, gradients, llama, needs, sentences
from test_activations import torch

if torch:
    from glake.offload._activations import Activations
    from glake.offload._budget import Offloaded


@needs("trl", "datasets", "transformers")
class Trl(Program):
    KINDS = ("SFT", "DPO", "KTO", "Reward")
    RECOMPUTES = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}

    def setUp(self):
        super().setUp()
        import datasets

        datasets.disable_progress_bars()
        for name in ("transformers", "transformers.trainer", "trl"):
            logging.getLogger(name).setLevel(logging.ERROR)

    def trainer(self, offloads, kind="SFT", make=lambda model: model, adapters=False, **changed):
        """What one of TRL's trainers computes."""
        import datasets
        import transformers
        import trl

        found = []

        class Looks(transformers.TrainerCallback):
            def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
                found.append([None, gradients(model)])

        settings = {"max_steps": 5, "per_device_train_batch_size": 2, "logging_steps": 1, "use_cpu": True, "seed": 3, "bf16": False, **changed}
        more = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "gradient_checkpointing": False, **settings}
        if kind in ("DPO", "KTO"):
            # A step whose losses are not all ln 2, as the first is.
            more = {"learning_rate": 1e-2, **more}
        torch.manual_seed(5)
        model, others = make(llama() if kind != "Reward" else rewards()), {}
        if adapters:
            import peft

            task = "SEQ_CLS" if kind == "Reward" else "CAUSAL_LM"
            others["peft_config"] = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.1, task_type=task)
        elif kind in ("DPO", "KTO"):
            # With hooks of its own, where the model has some.
            others["ref_model"] = copy.deepcopy(model)
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            arguments = getattr(trl, f"{kind}Config")(output_dir=folder, max_length=16, activation_offloading=offloads, **more)
            rows = datasets.Dataset.from_list(rows_of(kind))
            torch.manual_seed(5)
            make_trainer = getattr(trl, f"{kind}Trainer")
            trainer = make_trainer(model, args=arguments, train_dataset=rows, processing_class=tokenizer(), callbacks=[Looks()], **others)
            if offloads:
                context = trainer.maybe_activation_offload_context
                self.assertIsInstance(context, glake.offload.OffloadActivations)
                context._packer.memory, context._packer.least = self.memory, 0
            trainer.train()
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        return [(loss, after) for loss, (_, after) in zip(losses, found)]

    def unchanged_under(self, kind, ways, **changed):
        """What a trainer computes, twice without, and with: TRL's own option, and a model that is hooked in some ways."""
        plain = self.trainer(False, kind, **changed)
        self.assertEqual(len(plain), 5)
        self.assertGreater(len({loss for loss, _ in plain}), 1)
        self.assertSame(plain, self.trainer(False, kind, **changed))
        for way in ways:
            handles = []

            def make(model):
                if way == "option":
                    return model
                # The budget leaves no room for all that the passes save.
                handle = Activations(model, 0, self.memory, True) if way == "replay" else Offloaded(model, "1MiB", way, 0, self.memory)
                if handle._replay is not None:
                    # Products are small.
                    handle._replay.least_inner = 0
                handles.append(handle)
                return model

            before = glake.offload.report()
            with self.subTest(kind=kind, way=way, **changed), glake.offload.patch_trl() if way == "option" else contextlib.nullcontext():
                self.assertSame(plain, self.trainer(way == "option", kind, make, **changed))
                after = glake.offload.report()
                # What stays is torch's own here, and none of the budget: other presets may have nothing leave.
                moved = after["bytes_out"] - before["bytes_out"]
                self.assertTrue(way not in ("option", "memory", "replay") or moved, "nothing was offloaded")
                self.assertTrue(way != "replay" or after["replayed"] > before["replayed"], "nothing was replayed")
            for handle in handles:
                handle.remove()

    def test_all_trainers(self):
        for kind in self.KINDS:
            self.unchanged_under(kind, ("option", "fit", "memory"), gradient_accumulation_steps=2)

    def test_all_trainers_that_recompute(self):
        for kind in self.KINDS:
            self.unchanged_under(kind, ("option", "fit", "replay"), **self.RECOMPUTES)

    @needs("peft")
    def test_all_trainers_of_adapters(self):
        for kind in self.KINDS:
            self.unchanged_under(kind, ("option", "hybrid", "replay"), adapters=True, gradient_accumulation_steps=2, **self.RECOMPUTES)

    def test_recomputed_layers_whose_inputs_its_base_would_copy(self):
        plain = self.trainer(False, **self.RECOMPUTES)
        asked = {**self.RECOMPUTES, "gradient_checkpointing_kwargs": {"use_reentrant": False, "offload": True}}
        with glake.offload.patch_trl(), self.warns("takes its place"):
            self.assertSame(plain, self.trainer(True, **asked))

    def test_whoever_took_the_names_before_has_ours_and_theirs_come_back(self):
        import sys
        import types

        from trl.models import activation_offloading as theirs

        before = theirs.OffloadActivations, theirs.NoOpManager
        early = sys.modules["trl.early"] = types.ModuleType("trl.early")
        self.addCleanup(sys.modules.pop, "trl.early")
        early.OffloadActivations = theirs.OffloadActivations
        handle = glake.offload.patch_trl()
        self.assertIs(glake.offload.patch_trl(), handle)
        self.assertIs(early.OffloadActivations, glake.offload.OffloadActivations)
        self.assertIs(theirs.NoOpManager, glake.offload.NoOpManager)
        handle.remove()
        handle.remove()
        self.assertEqual((theirs.OffloadActivations, theirs.NoOpManager, early.OffloadActivations), (*before, before[0]))
        again = glake.offload.patch_trl()
        self.assertIsNot(again, handle)
        again.remove()

    def test_a_head_s_hooks_keep_what_it_saves_and_its_inputs(self):
        with glake.offload.patch_trl():
            from trl.models import get_act_offloading_ctx_manager

            model = llama()
            manager = get_act_offloading_ctx_manager(model)
        manager._packer.memory, manager._packer.least = self.memory, 0
        ids = torch.randint(64, (2, 8))
        plain = llama()
        plain.load_state_dict(model.state_dict())
        plain(input_ids=ids, labels=ids).loss.backward()
        with manager:
            loss = model(input_ids=ids, labels=ids).loss
            # A second forward of it, of which no backward comes.
            model(input_ids=ids)
        loss.backward()
        for mine, theirs in zip(model.parameters(), plain.parameters()):
            self.assertTrue(torch.equal(mine.grad, theirs.grad))

    def test_what_is_laid_out_otherwise_is_refused(self):
        from trl.models import activation_offloading as theirs

        def without(name):
            value = getattr(theirs, name)
            delattr(theirs, name)
            self.addCleanup(setattr, theirs, name, value)

        class Other:
            def __init__(self, use_nvme=False):
                pass

        kept, theirs.OffloadActivations = theirs.OffloadActivations, Other
        try:
            with self.assertRaisesRegex(glake.TorchError, "without use_nvme, OffloadActivations.update_model_params"):
                glake.offload.patch_trl()
        finally:
            theirs.OffloadActivations = kept
        without("NoOpManager")
        with self.assertRaisesRegex(glake.TorchError, r"looked in trl.models.activation_offloading of TRL \d.* for NoOpManager"):
            glake.offload.patch_trl()


class WithoutTrl(unittest.TestCase):
    def test_it_says_what_to_install(self):
        import sys
        from unittest import mock

        with mock.patch.dict(sys.modules):
            for name in [name for name in sys.modules if name.partition(".")[0] == "trl"]:
                del sys.modules[name]
            sys.modules["trl"] = None
            with self.assertRaisesRegex(glake.TorchError, "pip install trl"):
                glake.offload.patch_trl()

    @unittest.skipUnless(torch, "torch is not installed")
    def test_torchtunes_and_trls_arguments_differ_in_their_order(self):
        from glake.offload import OffloadActivations

        for given in ((), (True,), (True, False)):
            OffloadActivations(*given, min_offload_size=2048, max_fwd_stash_size=3)
        self.assertEqual(OffloadActivations(True, True, max_fwd_stash_size=3, min_offload_size=2048)._packer.least, 2048)
        self.assertEqual(OffloadActivations(True, True)._packer.least, 1024)
        for given in ((True, True, 5), (True, True, 1024, 5), (True, True, 5, 1024)):
            with self.assertRaisesRegex(TypeError, "min_offload_size=.*max_fwd_stash_size=.*torchtune.*TRL"):
                OffloadActivations(*given)



def rewards():
    """A model that gives a number."""
    import transformers

    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    settings = transformers.LlamaConfig(**shape, num_key_value_heads=1, use_cache=False, num_labels=1, pad_token_id=1)
    return transformers.LlamaForSequenceClassification(settings)


def rows_of(kind):
    """What one of TRL's trainers learns from."""
    said = [" ".join(str(number) for number in row["input_ids"].tolist()) + " " for row in sentences(16, 5)]
    if kind == "SFT":
        return [{"input_ids": row["input_ids"].tolist()} for row in sentences()]
    if kind == "KTO":
        return [{"prompt": prompt, "completion": said[-1 - place], "label": place % 2 == 0} for place, prompt in enumerate(said)]
    return [{"prompt": prompt, "chosen": said[-1 - place], "rejected": said[place - 3]} for place, prompt in enumerate(said)]


def tokenizer():
    """One whose words are numbers."""
    import tokenizers
    import transformers

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(number): number for number in range(64)}, unk_token="0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0", pad_token="1", eos_token="2")


if __name__ == "__main__":
    unittest.main()

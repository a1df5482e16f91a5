"""Unchanged programs with a model whose activations are offloaded: the results are bit-identical.

Needs torch, and each program its library; what is missing is skipped.
"""

import copy
import io
import logging
import tempfile
import threading
import unittest
import warnings

import glake
import test_activations
from programs import Program, gradients, llama, needs, sentences
from test_activations import torch

if torch:
    from glake.offload._activations import Activations
    from glake.offload._budget import Offloaded


@needs("transformers", "accelerate")
class HuggingFace(Program):
    def setUp(self):
        super().setUp()
        logging.getLogger("transformers").setLevel(logging.ERROR)
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def trainer(self, make, make_model=llama, resumed=None, **changed):
        """Returns a Trainer's results, step by step."""
        import transformers

        found = []

        class Looks(transformers.TrainerCallback):
            def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
                found.append([None, gradients(model)])

        settings = {"max_steps": 3, "per_device_train_batch_size": 2, "logging_steps": 1, "use_cpu": True, "seed": 3, **changed}
        for key, value in {"report_to": [], "save_strategy": "no", "disable_tqdm": True}.items():
            settings.setdefault(key, value)
        arguments = transformers.TrainingArguments(output_dir=self.folder, **settings)
        trainer = transformers.Trainer(model=make(make_model()), args=arguments, train_dataset=sentences(), callbacks=[Looks()])
        trainer.train(resume_from_checkpoint=resumed)
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        # What is resumed has the losses of the steps before too.
        return [(loss, after) for loss, (_, after) in zip(losses[-len(found) :], found)]

    def test_a_trainer(self):
        self.unchanged(lambda make: self.trainer(make))

    def test_a_trainer_that_accumulates_clips_and_drops_out(self):
        made = lambda: llama(attention_dropout=0.1, attn_implementation="eager")
        self.unchanged(lambda make: self.trainer(make, made, gradient_accumulation_steps=4, max_grad_norm=0.01))

    def test_a_trainer_that_recomputes(self):
        for reentrant in (False, True):
            with self.subTest(reentrant=reentrant):
                asked = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
                self.unchanged(lambda make: self.trainer(make, gradient_accumulation_steps=2, **asked))

    @needs("peft")
    def test_a_trainer_of_adapters(self):
        import peft

        settings = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1, task_type="CAUSAL_LM")
        made = lambda: peft.get_peft_model(llama(), settings)
        self.unchanged(lambda make: self.trainer(make, made))
        self.unchanged(lambda make: self.trainer(make, made, gradient_checkpointing=True))

    def test_a_trainer_that_stops_and_goes_on(self):
        """A checkpoint written with offload is resumed without, and the other way round."""

        def program(first, second):
            def run(make):
                torch.manual_seed(5)
                with tempfile.TemporaryDirectory() as folder:
                    self.folder = folder
                    found = self.trainer(make if first else lambda model: model, max_steps=2, save_strategy="steps", save_steps=2)
                    import transformers

                    checkpoint, goes_on = f"{folder}/checkpoint-2", make if second else lambda model: model
                    model = transformers.LlamaForCausalLM.from_pretrained(checkpoint)
                    found += self.trainer(goes_on, lambda: model)
                    resumed = self.trainer(goes_on, resumed=checkpoint, max_steps=5)
                    self.assertEqual(len(resumed), 3)
                return found + resumed

            return run

        self.unchanged(program(True, False))
        self.unchanged(program(False, True))

    def test_the_offload_of_its_own_is_replaced_and_told(self):
        def program(make):
            # What would copy to pinned memory on the compute stream, and cannot without a GPU.
            own = {"gradient_checkpointing_kwargs": {"offload": bool(make is not plain)}}
            return self.trainer(make, gradient_checkpointing=True, **own)

        plain = lambda model: model
        torch.manual_seed(5)
        expected = program(plain)
        layers = []

        def make(model):
            self.handle = self.activations(model)
            layers.extend(model.model.layers)
            return model

        torch.manual_seed(5)
        out = glake.offload.report()["bytes_out"]
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = program(make)
        self.assertSame(expected, found)
        self.assertEqual(sum("glake.offload takes its place" in str(warning.message) for warning in told), 1)
        # The inputs of three layers in three steps, and what is saved beside them.
        self.assertGreaterEqual(glake.offload.report()["bytes_out"] - out, 3 * 3 * 2 * 12 * 32 * 4)
        ours = {layer._gradient_checkpointing_func for layer in layers}
        self.assertEqual([function.func.__module__ for function in ours], ["torch.utils.checkpoint"])
        self.assertFalse(next(iter(ours)).keywords["use_reentrant"])
        self.handle.remove()
        self.assertIn("save_on_cpu", layers[0]._gradient_checkpointing_func.func.__code__.co_names)

    def test_one_that_was_set_after_the_first_forwards_is_replaced_too(self):
        model = llama()
        handle = self.activations(model)
        ids = torch.randint(64, (2, 8))
        for _ in range(3):
            model(input_ids=ids, labels=ids).loss.backward()
        model.gradient_checkpointing_enable(offload=True)
        with self.warns("takes its place"):
            model(input_ids=ids, labels=ids).loss.backward()
        model.gradient_checkpointing_disable()
        handle.remove()
        handle.remove()

    def test_accelerate(self):
        import accelerate

        def program(make):
            accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
            model = make(llama())
            batches = torch.utils.data.DataLoader(sentences(), batch_size=2)
            model, optimizer, batches = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), batches)
            found = []
            for batch in batches:
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.1)
                    found.append((loss.item(), gradients(model)))
                    optimizer.step()
                    optimizer.zero_grad()
            return found

        self.unchanged(program)

    def test_images(self):
        import transformers

        shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 16, "patch_size": 4}

        def program(make):
            model = make(transformers.ViTForImageClassification(transformers.ViTConfig(**shape, num_labels=5, hidden_dropout_prob=0.1)))
            return loop(model, lambda: {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.randint(5, (2,))})

        self.unchanged(program)

    def test_experts_of_transformers(self):
        import transformers

        shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}

        def program(make):
            settings = transformers.MixtralConfig(**shape, num_key_value_heads=1, num_local_experts=8, num_experts_per_tok=1, use_cache=False)
            model = make(transformers.MixtralForCausalLM(settings))
            ids = torch.randint(64, (1, 3))
            return loop(model, lambda: {"input_ids": ids, "labels": ids})

        self.unchanged(program)


def loop(model, batch, steps=3):
    """A plain loop over a model of transformers."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.05), []
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**batch()).loss
        loss.backward()
        found.append((loss.item(), gradients(model)))
        optimizer.step()
    return found


@needs("lightning")
class Lightning(Program):
    def test_a_trainer(self):
        import lightning

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

        class Module(lightning.LightningModule):
            def __init__(self, net):
                super().__init__()
                self.net, self.found = net, []

            def training_step(self, batch, place):
                loss = self.net(batch[0]).square().mean()
                self.loss = loss.item()
                return loss

            def on_before_optimizer_step(self, optimizer):
                self.found.append((self.loss, gradients(self.net)))

            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters(), lr=1e-3)

        def program(make):
            net = make(torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Dropout(0.2), torch.nn.Linear(32, 16)))
            module = Module(net)
            rows = torch.utils.data.TensorDataset(torch.randn(16, 16))
            quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
            trainer = lightning.Trainer(accelerator="cpu", devices=1, max_epochs=1, accumulate_grad_batches=2, gradient_clip_val=0.1, **quiet)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=2))
            return module.found

        self.unchanged(program)


class Plain(Program):
    def steps(self, model, steps=4, inputs=lambda: torch.randn(8, 16), step=None):
        optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-3), []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(inputs()).square().mean()
            loss.backward()
            found.append((loss.item(), gradients(model)))
            optimizer.step()
        return found

    def block(self):
        return torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 16))

    def test_a_scaler_of_gradients_and_clipping(self):
        def program(make):
            model = make(torch.nn.Sequential(self.block(), self.block()))
            # One that overflows at first, so that steps are skipped.
            scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=2.0**40), torch.optim.SGD(model.parameters(), lr=0.1)
            found = []
            for _ in range(30):
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = model(torch.randn(8, 16)).float().square().mean()
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                found.append((loss.item(), [torch.nan_to_num(gradient) for gradient in gradients(model)]))
                scaler.step(optimizer)
                scaler.update()
            self.assertLess(scaler.get_scale(), 2.0**40)
            return found

        self.unchanged(program)

    def test_checkpoints_of_both_kinds(self):
        from torch.utils.checkpoint import checkpoint

        for reentrant in (False, True):
            for deterministic in (True, False):

                class Model(torch.nn.Module):
                    def __init__(self, blocks):
                        super().__init__()
                        self.first, self.blocks = torch.nn.Linear(16, 16), torch.nn.ModuleList(blocks)

                    def forward(self, x):
                        x = self.first(x)
                        for block in self.blocks:
                            x = x + checkpoint(block, x, use_reentrant=reentrant, preserve_rng_state=deterministic)
                        return x

                blocks = lambda: [self.block() if deterministic else torch.nn.Linear(16, 16) for _ in range(3)]
                with self.subTest(reentrant=reentrant, deterministic=deterministic):
                    self.unchanged(lambda make: self.steps(make(Model(blocks()))))

    def test_a_block_around_forward_and_backward_packs_nothing_in_the_backward(self):
        from torch.utils.checkpoint import checkpoint

        layer, taken = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64)), []
        x = torch.randn(64, 64, requires_grad=True)
        for reentrant in (False, True):
            before = glake.offload.report()["bytes_out"]
            with self.activations():
                checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
            taken.append(glake.offload.report()["bytes_out"] - before)
        # The input of the checkpoint.
        self.assertEqual(taken, [64 * 64 * 4] * 2)

    def test_compiled_blocks(self):
        for backend in ("eager", "aot_eager"):

            def program(make):
                torch._dynamo.reset()
                model = torch.nn.Sequential(torch.nn.Linear(16, 16), *[self.block() for _ in range(2)])
                for block in model[1:]:
                    block.compile(backend=backend)
                return self.steps(make(model))

            with self.subTest(backend=backend):
                self.unchanged(program)
        torch._dynamo.reset()

    def test_a_model_that_is_compiled_whole(self):
        def program(make):
            torch._dynamo.reset()
            return self.steps(torch.compile(make(torch.nn.Sequential(self.block(), self.block())), backend="aot_eager"))

        self.unchanged(program, 0)
        torch._dynamo.reset()

    def test_residual_convolutions_in_place(self):
        class Block(torch.nn.Module):
            def __init__(self):
                super().__init__()
                nn = torch.nn
                self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, padding=1))
                self.norm, self.act = nn.BatchNorm2d(8), nn.ReLU(inplace=True)

            def forward(self, x):
                found = self.norm(self.body(x))
                found += x
                return self.act(found)

        def program(make):
            nn = torch.nn
            model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2), Block(), Block(), nn.Flatten(), nn.LazyLinear(4))
            model(torch.randn(2, 3, 10, 10))
            return self.steps(make(model), inputs=lambda: torch.randn(2, 3, 10, 10))

        self.unchanged(program)

    def test_experts_that_get_no_token(self):
        class Experts(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.router = torch.nn.Linear(16, 8)
                self.experts = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.SiLU()) for _ in range(8)])

            def forward(self, x):
                weight, chosen = self.router(x).softmax(-1).max(-1)
                found = torch.zeros_like(x)
                for place, expert in enumerate(self.experts):
                    rows = (chosen == place).nonzero().squeeze(-1)
                    # Some experts have no rows: they are called all the same, or not at all.
                    if rows.numel() or place % 2:
                        found = found.index_add(0, rows, expert(x[rows]) * weight[rows, None])
                return x + found

        self.unchanged(lambda make: self.steps(make(torch.nn.Sequential(Experts(), Experts())), inputs=lambda: torch.randn(3, 16)))

    def test_a_loop_that_is_a_generator_whose_steps_run_on_threads_in_turn(self):
        def program(make):
            model = make(torch.nn.Sequential(self.block(), self.block()))
            found = []

            def loop():
                for seed in range(6):
                    torch.manual_seed(seed)
                    loss = model(torch.randn(8, 16)).square().mean()
                    # The forward on one thread, the backward on the next.
                    yield
                    model.zero_grad()
                    loss.backward()
                    found.append((loss.item(), gradients(model)))

            steps = loop()
            for _ in range(7):
                thread = threading.Thread(target=lambda: next(steps, None))
                thread.start()
                thread.join()
            return found

        self.unchanged(program)

    def test_a_generator_that_is_closed_within_a_block(self):
        activations, x = self.activations(), torch.ones(100, requires_grad=True)

        def generates():
            with activations:
                yield torch.exp(x).sum()

        steps = generates()
        loss = next(steps)
        steps.close()
        before = glake.offload.report()["bytes_out"]
        torch.exp(x)
        self.assertEqual(glake.offload.report()["bytes_out"], before)
        loss.backward()

    def test_what_was_trained_with_it_goes_on_without_and_back(self):
        def program(first, second):
            def run(make):
                model = torch.nn.Sequential(self.block(), self.block())
                if first:
                    model = make(model)
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
                found = self.train(model, optimizer)
                file = io.BytesIO()
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
                file.seek(0)
                stored = torch.load(file)
                model = torch.nn.Sequential(self.block(), self.block())
                if second:
                    model = make(model)
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
                model.load_state_dict(stored["model"])
                optimizer.load_state_dict(stored["optimizer"])
                torch.manual_seed(8)
                return found + self.train(model, optimizer)

            return run

        self.unchanged(program(True, False))
        self.unchanged(program(False, True))

    def train(self, model, optimizer):
        found = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 16)).square().mean()
            loss.backward()
            found.append((loss.item(), gradients(model)))
            optimizer.step()
        return found


class OtherHooks(Program):
    def told(self, model, x):
        before = glake.offload.report()["others"]
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model(x).sum().backward()
        return glake.offload.report()["others"] - before, [str(one.message) for one in said if "saved-tensor hooks of others" in str(one.message)]

    def test_hooks_within_the_module_keep_what_they_pack_and_are_told(self):
        import torch._dynamo

        # As in a program that compiles nothing.
        torch._dynamo.reset()

        def keeps(tensor):
            return tensor.clone()

        class Within(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(16, 16)

            def forward(self, x):
                with torch.autograd.graph.saved_tensors_hooks(keeps, lambda tensor: tensor):
                    return self.layer(x).tanh()

        model = torch.nn.Sequential(torch.nn.Linear(16, 16), Within(), Within())
        handle = self.activations(model)
        count, said = self.told(model, torch.randn(4, 16))
        self.assertEqual((count, len(said)), (2, 1))
        self.assertIn("keeps", said[0])
        # They are looked for in the first passes alone.
        self.told(model, torch.randn(4, 16))
        self.assertEqual(self.told(model, torch.randn(4, 16)), (0, []))
        self.assertFalse(torch.nn.modules.module._global_forward_pre_hooks)
        handle.remove()

    def test_hooks_around_the_module_keep_all(self):
        model = torch.nn.Linear(16, 16)
        handle, before = self.activations(model), glake.offload.report()["bytes_out"]
        packed = []

        def packs(tensor):
            packed.append(tensor)
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(packs, lambda tensor: tensor):
            count, said = self.told(model, torch.randn(4, 16, requires_grad=True))
        self.assertEqual((count, len(said), glake.offload.report()["bytes_out"]), (1, 1, before))
        self.assertTrue(packed)
        packed.clear()
        handle.remove()

    def test_checkpoints_and_blocks_in_which_nothing_leaves_are_no_others(self):
        from torch.utils.checkpoint import checkpoint

        class Within(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.one, self.two = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

            def forward(self, x):
                x = checkpoint(self.one, x, use_reentrant=False)
                with glake.offload.NoOpManager():
                    return self.two(x)

        model = Within()
        handle = self.activations(model)
        self.assertEqual(self.told(model, torch.randn(4, 16, requires_grad=True)), (0, []))
        handle.remove()


class Gathered(Program):
    def test_numbers_of_storages_that_are_gone_are_forgotten(self):
        from glake.offload._unsharded import Unsharded

        unsharded = Unsharded()
        stays = torch.ones(4).untyped_storage()
        unsharded.add(stays)
        for _ in range(5000):
            unsharded.add(torch.ones(4).untyped_storage())
            unsharded.add(stays)
        self.assertLessEqual(len(unsharded.storages), 64)
        self.assertIn(stays._cdata, unsharded.storages)
        # A storage that is made now has a number that is not held.
        self.assertFalse(any(torch.ones(4).untyped_storage()._cdata in unsharded.storages for _ in range(100)))


class Careless(Program):
    def test_wrong_arguments(self):
        for wrong in ("60GiB", 3, [torch.nn.Linear(2, 2)], lambda x: x):
            with self.assertRaisesRegex(TypeError, "torch.nn.Module"):
                glake.offload.activations(wrong)
        with self.assertRaises(ValueError):
            glake.offload.activations(least=-1)

    def test_twice_on_one_model_and_removed_in_any_order(self):
        for order in ((0, 1), (1, 0)):

            model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16))
            plain = copy.deepcopy(model)
            handles = [self.activations(model), self.activations(model)]
            x = torch.randn(4, 16)
            for removed in (None, *order):
                if removed is not None:
                    handles[removed].remove()
                for each in (model, plain):
                    each.zero_grad()
                    each(x).square().sum().backward()
                for mine, theirs in zip(model.parameters(), plain.parameters()):
                    self.assertTrue(torch.equal(mine.grad, theirs.grad))
            self.assertFalse(model._forward_pre_hooks or model._forward_hooks)

    def test_after_the_forward_began_and_removed_before_it_ends(self):
        class Gives(torch.nn.Module):
            def __init__(self, whole, does):
                super().__init__()
                self.whole, self.does = [whole], does

            def forward(self, x):
                self.does(self.whole[0])
                return x

        handles = []
        model = torch.nn.Sequential(torch.nn.Linear(16, 16))
        model.append(Gives(model, lambda whole: handles.append(self.activations(whole))))
        model.append(torch.nn.Tanh())
        # Its hook after the forward is on, the one before was not called.
        model(torch.randn(4, 16)).sum().backward()
        model[1].does = lambda whole: handles.pop().remove()
        model(torch.randn(4, 16)).sum().backward()
        model[1].does = lambda whole: None
        before = glake.offload.report()["bytes_out"]
        model(torch.randn(4, 16)).sum().backward()
        self.assertEqual((glake.offload.report()["bytes_out"], handles), (before, []))

    def test_transforms_of_functions_around_it_and_where_hooks_are_off(self):
        from torch.func import functional_call, grad, jvp, vmap

        model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16))
        x, weights = torch.randn(4, 16), dict(model.named_parameters())

        def computes():
            loss = lambda weights, x: functional_call(model, weights, (x,)).square().sum()
            found = [*grad(loss)(weights, x).values(), *vmap(grad(loss), in_dims=(None, 0))(weights, x[:, None]).values()]
            found += [jvp(lambda x: model(x), (x,), (x,))[1]]
            model.zero_grad()
            vmap(model)(x).square().sum().backward()
            found += gradients(model)
            model.zero_grad()
            with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
                model(x).square().sum().backward()
            return found + gradients(model)

        plain = computes()
        replays, budgets = lambda model: Activations(model, 0, self.memory, True), lambda model: Offloaded(model, "1GiB", "memory", 0, self.memory)
        for make in (self.activations, replays, budgets):
            handle = make(model)
            for mine, theirs in zip(computes(), plain, strict=True):
                self.assertTrue(torch.equal(mine, theirs))
            before = glake.offload.report()["bytes_out"]
            model(x).sum().backward()
            self.assertGreater(glake.offload.report()["bytes_out"], before)
            handle.remove()

    def test_without_parameters_frozen_in_evaluation_and_two_models(self):
        empty = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Dropout(0.5))
        frozen = torch.nn.Linear(16, 16).requires_grad_(False)
        trained, evaluated = torch.nn.Linear(16, 16), torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout(0.5)).eval()
        models = [empty, frozen, trained, evaluated]

        def run(offloads):
            handles = [self.activations(model) for model in models] if offloads else []
            found = []
            for _ in range(3):
                torch.manual_seed(4)
                x = torch.randn(4, 16, requires_grad=True)
                y = x
                for model in (*models, trained, empty):
                    y = model(y)
                y.square().sum().backward()
                found.append((y.sum().item(), [x.grad]))
            for handle in handles:
                handle.remove()
            return found

        self.assertSame(run(False), run(True))

    def test_a_frozen_model_saves_nothing_and_nothing_leaves(self):
        model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh()).requires_grad_(False)
        handle, before = self.activations(model), glake.offload.report()["bytes_out"]
        model(torch.randn(4, 16))
        self.assertEqual(glake.offload.report()["bytes_out"], before)
        handle.remove()

    def test_a_manager_is_entered_again_within_itself(self):
        nothing, x = glake.offload.NoOpManager(), torch.ones(100, requires_grad=True)
        with self.activations():
            with nothing, nothing:
                y = torch.exp(x)
            before = glake.offload.report()["bytes_out"]
            z = torch.exp(y).sum()
        self.assertGreater(glake.offload.report()["bytes_out"], before)
        z.backward()

    def test_what_a_manager_keeps_does_not_hold_itself(self):
        import gc

        from torch.multiprocessing.reductions import StorageWeakRef

        x = torch.ones(100, requires_grad=True)
        gc.disable()
        try:
            with glake.offload.NoOpManager():
                y = torch.exp(x)
            storage = StorageWeakRef(y.untyped_storage())
            del y
            self.assertTrue(storage.expired())
        finally:
            gc.enable()


del test_activations


if __name__ == "__main__":
    unittest.main()

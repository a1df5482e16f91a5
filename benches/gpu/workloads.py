"""Workloads whose allocator behaviour is known to be hard; each returns (seconds per step, losses).

BATCH, STEPS (only the first steps; None: all) and SCALE (of graphs) are set by the harness; FIGURES are a workload's own
figures, which the harness prints with its own.
"""
import random, threading, time
import torch

BATCH = 24
STEPS = None
SCALE = 1.0
FIGURES = {}


def _timed(fn):
    """Runs fn() to completion on the GPU; returns (seconds, its scalar result)."""
    t = time.time(); r = fn()
    if torch.cuda.is_available(): torch.cuda.synchronize()
    return time.time() - t, float(r)


def _train(model, opt, batches, vocab):
    """batches: (batch size, sequence length, training step?) in order; returns (seconds, losses)."""
    steps, losses = [], []
    for b, s, train in batches[:STEPS]:
        def step():
            x = torch.randint(0, vocab, (b, s), device="cuda")
            if not train:
                with torch.no_grad():
                    return model.eval()(input_ids=x, labels=x).loss
            loss = model.train()(input_ids=x, labels=x).loss
            loss.backward(); opt.step(); opt.zero_grad(set_to_none=True)
            return loss.detach()
        t, l = _timed(step); steps.append(t); losses.append(l)
    return steps, losses


def _opt_1_3b(lora, recompute):
    from transformers import OPTConfig, OPTForCausalLM
    cfg = OPTConfig(hidden_size=2048, num_hidden_layers=24, ffn_dim=8192, num_attention_heads=32, word_embed_proj_dim=2048, max_position_embeddings=2048)
    m = OPTForCausalLM(cfg).to(torch.bfloat16).cuda()
    if recompute:
        m.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False}); m.enable_input_require_grads()
    if lora:
        from peft import LoraConfig, get_peft_model
        m = get_peft_model(m, LoraConfig(r=128, lora_alpha=16, target_modules=["q_proj", "v_proj", "fc1", "fc2"], task_type="CAUSAL_LM"))
    opt = torch.optim.AdamW([q for q in m.parameters() if q.requires_grad], lr=1e-4, foreach=True)
    batches = [(BATCH, random.randrange(128, 1025), True) for _ in range(14)]
    batches.insert(5, (2 * BATCH, 700, False)); batches.insert(10, (2 * BATCH, 333, False))
    return _train(m, opt, batches, cfg.vocab_size)


def _two_streams(make, vocab, shape, jobs=2):
    """Two independent training jobs in one process, each on its own stream, half a step apart: while one runs its
    backward pass and frees activations, the other runs its forward pass and allocates them (the WAVELET setting).
    The window is the first job's steps after two of warm-up: all jobs run in it."""
    window = [0.0, 0.0]
    steps, losses, gate = [[] for _ in range(jobs)], [[] for _ in range(jobs)], threading.Barrier(jobs)
    errors = []
    def job(i):
        try: train(i)
        except BaseException as e: errors.append(e); gate.abort()   # the others must not wait for this one
    def train(i):
        torch.cuda.set_device(0)
        s = torch.cuda.Stream()
        with torch.cuda.stream(s):
            torch.manual_seed(i); m = make().cuda(); opt = torch.optim.AdamW(m.parameters(), lr=1e-5)
            for _ in range(i): gate.wait()
            for step in range(12):
                gate.wait(); t = time.time(); x = torch.randint(0, vocab, shape, device="cuda")
                if i == 0 and step == 2: window[0] = t
                loss = m(input_ids=x, labels=x if "LM" in type(m).__name__ else torch.zeros(shape[0], dtype=torch.long, device="cuda")).loss
                s.synchronize(); half = time.time() - t
                gate.wait(); t = time.time(); loss.backward(); opt.step(); opt.zero_grad(set_to_none=True); s.synchronize()
                steps[i].append(half + time.time() - t); losses[i].append(float(loss.detach())); del loss
                if i == 0: window[1] = time.time()
            for _ in range(jobs - 1 - i): gate.wait()
    ts = [threading.Thread(target=job, args=(i,)) for i in range(jobs)]
    [t.start() for t in ts]; [t.join() for t in ts]
    if errors: raise errors[0]
    # Each job warms up: its own first two steps are left out.
    FIGURES.update(window_s=round(window[1] - window[0], 3), window_steps=10 * jobs, steady_s=round(sum(sum(s[2:]) for s in steps), 3))
    return sum(steps, []), [l[-1] for l in losses]


def _fsdp_llama(layers, batch, lora):
    """FSDP2 over all ranks with activation checkpointing and random sequence lengths."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM
    dist.init_process_group("nccl"); random.seed(1)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        m = LlamaForCausalLM(LlamaConfig(hidden_size=4096, intermediate_size=11008, num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=32, vocab_size=32000, max_position_embeddings=4096))
    torch.set_default_dtype(torch.float32)
    m.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False}); m.enable_input_require_grads()
    base = m
    if lora:
        from peft import LoraConfig, get_peft_model
        m = get_peft_model(m, LoraConfig(r=64, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], task_type="CAUSAL_LM"))
        base = m.base_model.model
        for q in m.parameters(): q.data = q.data.to(torch.bfloat16)
    for layer in base.model.layers: fully_shard(layer)
    fully_shard(base)
    opt = torch.optim.AdamW([q for q in m.parameters() if q.requires_grad], lr=1e-5, foreach=True)
    batches = [(batch, random.randrange(300, 2049), True) for _ in range(12)]
    batches.insert(7, (2 * batch, 1024, False))
    return _train(m, opt, batches, 32000)


class _Convolution(torch.nn.Module):
    """A node's mean over its neighbours, as a graph convolution has it: gathered by edge, added up by node."""
    def __init__(self, width):
        super().__init__(); self.own, self.neighbours = torch.nn.Linear(width, width), torch.nn.Linear(width, width)

    def forward(self, x, source, target):
        messages = self.neighbours(x)[source]
        degree = torch.zeros(len(x), 1, device=x.device).index_add_(0, target, torch.ones(len(target), 1, device=x.device))
        return torch.relu(self.own(x) + torch.zeros_like(x).index_add_(0, target, messages) / degree.clamp(min=1)) + x


class _Attention(torch.nn.Module):
    """A node's mean over its neighbours with weights that are learned, one for each edge and head: a softmax over each node's edges."""
    def __init__(self, width, heads):
        super().__init__(); self.heads, self.project = heads, torch.nn.Linear(width, width)
        self.asks, self.answers = (torch.nn.Parameter(torch.randn(heads, width // heads) / width ** .5) for _ in range(2))

    def forward(self, x, source, target):
        h = self.project(x).view(len(x), self.heads, -1)
        scores = torch.nn.functional.leaky_relu((h * self.asks).sum(-1)[source] + (h * self.answers).sum(-1)[target], .2)
        index = target[:, None].expand_as(scores)
        most = torch.full((len(x), self.heads), -1e9, device=x.device).scatter_reduce(0, index, scores.detach(), "amax")
        weights = (scores - most[target]).exp()
        total = torch.zeros_like(most).index_add(0, target, weights)
        messages = h[source] * (weights / total[target])[..., None]
        return torch.relu(torch.zeros_like(h).index_add(0, target, messages).flatten(1)) + x


def _graphs(sizes, device, width=128, heads=4, classes=40):
    """Layers of message passing, one graph a step, each of its own size; it learns which of a node's features is the greatest.
    Returns (seconds, losses)."""
    model = torch.nn.ModuleList(
        [torch.nn.Linear(width, width)]
        + [layer for _ in range(3) for layer in (_Convolution(width), _Attention(width, heads))]
        + [torch.nn.Linear(width, classes)]).to(device)
    opt = torch.optim.SGD(model.parameters(), lr=.02, momentum=.9)
    first, *layers, last = model
    steps, losses = [], []
    for nodes, edges in sizes:
        def step():
            source, target = (torch.randint(0, nodes, (edges,), device=device) for _ in range(2))
            x = torch.randn(nodes, width, device=device); y = x[:, :classes].argmax(1)
            h = first(x)
            for layer in layers: h = layer(h, source, target)
            loss = torch.nn.functional.cross_entropy(last(h), y)
            loss.backward(); opt.step(); opt.zero_grad(set_to_none=True)
            return loss.detach()
        t, l = _timed(step); steps.append(t); losses.append(l)
    FIGURES.update(largest_edges=max(edges for _, edges in sizes), edges=sum(edges for _, edges in sizes))
    return steps, losses


def graphs(device="cuda"):
    from graphs import sizes   # of many sizes, few of them large: see there
    return _graphs(sizes(SCALE, random)[:STEPS], device)


def opt13_LR(): return _opt_1_3b(lora=True, recompute=True)   # the tutorial's strategy: LoRA + recomputation


def gpt2_full():
    from transformers import GPT2Config, GPT2LMHeadModel
    m = GPT2LMHeadModel(GPT2Config(n_embd=1600, n_layer=48, n_head=25)).cuda().to(torch.bfloat16)
    return _train(m, torch.optim.AdamW(m.parameters(), foreach=False), [(random.choice([4, 8, 12]), random.randrange(200, 1000), True) for _ in range(12)], 50257)


def convmix():
    import torchvision
    m = torchvision.models.resnet152().cuda(); opt = torch.optim.SGD(m.parameters(), lr=.1, momentum=.9); steps, losses = [], []
    for _ in range(14):
        b, r = random.choice([16, 32, 64, 96]), random.choice([160, 224, 256, 288, 320, 384])
        def step():
            with torch.autocast("cuda", dtype=torch.bfloat16): loss = m(torch.randn(b, 3, r, r, device="cuda")).float().square().mean()
            loss.backward(); opt.step(); opt.zero_grad(set_to_none=True); return loss.detach()
        t, l = _timed(step); steps.append(t); losses.append(l)
    return steps, losses


def wavelet_bert():
    from transformers import BertConfig, BertForSequenceClassification
    return _two_streams(lambda: BertForSequenceClassification(BertConfig(vocab_size=28996)), 28996, (48, 512))


def wavelet_bert_single():
    from transformers import BertConfig, BertForSequenceClassification
    return _two_streams(lambda: BertForSequenceClassification(BertConfig(vocab_size=28996)), 28996, (48, 512), jobs=1)


def fsdp_llama_full(): return _fsdp_llama(layers=16, batch=8, lora=False)

"""Tiny models to compare to the bit: blocks of a transformer, images, residual convolutions in place, experts without tokens."""


def blocks(torch, size, heads, dropout, experts):
    nn, functional = torch.nn, torch.nn.functional

    class Experts(nn.Module):
        """Each token's product is one expert's. Some experts have no token: those of odd numbers are called all the same."""

        def __init__(self):
            super().__init__()
            self.router = nn.Linear(size, experts)
            self.experts = nn.ModuleList([nn.Sequential(nn.Linear(size, size), nn.SiLU(), nn.Linear(size, size)) for _ in range(experts)])

        def forward(self, x):
            flat = x.flatten(0, 1)
            scores = self.router(flat).softmax(-1)
            chosen = scores.argmax(-1)
            weights = (scores * (chosen[:, None] == torch.arange(experts, device=x.device))).sum(-1)
            found = torch.zeros_like(flat)
            for place, expert in enumerate(self.experts):
                rows = (chosen == place).nonzero().squeeze(-1)
                if rows.numel() or place % 2:
                    found = found.index_add(0, rows, (expert(flat[rows]) * weights[rows, None]).to(found.dtype))
            return found.view_as(x)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.after, self.qkv, self.out = nn.LayerNorm(size), nn.LayerNorm(size), nn.Linear(size, 3 * size), nn.Linear(size, size)
            wide = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * size, size))
            self.wide = Experts() if experts else wide

        def forward(self, x):
            rows, length, _ = x.shape
            q, k, v = self.qkv(self.before(x)).view(rows, length, 3, heads, size // heads).permute(2, 0, 3, 1, 4)
            found = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
            x = x + functional.dropout(self.out(found.transpose(1, 2).reshape(rows, length, size)), dropout)
            return x + self.wide(self.after(x))

    return Block


def Tokens(torch, layers, size=256, dropout=0.1, experts=0, reentrant=None):
    """Blocks one after another, recomputed by one kind of checkpoints or none."""
    from torch.utils.checkpoint import checkpoint

    block = blocks(torch, size, size // 64, dropout, experts)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(size, size)
            self.layers = torch.nn.ModuleList([block() for _ in range(layers)])

        def forward(self, x):
            x = self.first(x)
            for layer in self.layers:
                x = layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant)
            return x

    return Model()


def Images(torch, layers, size=256, reentrant=None):
    """Patches of images through such blocks, behind one more token, which alone is read."""
    nn = torch.nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.patches, self.blocks = nn.Conv2d(3, size, 4, stride=4), Tokens(torch, layers, size, reentrant=reentrant)
            self.token, self.places = nn.Parameter(torch.randn(1, 1, size)), nn.Parameter(torch.randn(1, 65, size))
            self.norm, self.head = nn.LayerNorm(size), nn.Linear(size, 10)

        def forward(self, x):
            x = self.patches(x).flatten(2).transpose(1, 2)
            x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
            return self.head(self.norm(self.blocks(x))[:, 0])

    return Model()


def residual(torch):
    """Convolutions with BatchNorm, activations and sums in place."""
    nn = torch.nn

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            conv = lambda: nn.Conv2d(width, width, 3, padding=1, bias=False)
            self.body = nn.Sequential(conv(), nn.BatchNorm2d(width), nn.ReLU(inplace=True), conv(), nn.BatchNorm2d(width))
            self.act = nn.ReLU(inplace=True)

        def forward(self, x):
            found = self.body(x)
            found += x
            return self.act(found)

    stem = [nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    return nn.Sequential(*stem, Block(32), Block(32), nn.Conv2d(32, 64, 3, stride=2), nn.ReLU6(inplace=True), Block(64), nn.Flatten(), nn.LazyLinear(10))


def token_batches(torch, device, model, rows=None):
    """(model, what is hooked, the loss of a new batch); of few rows, where experts are to have none."""
    size, shape = model.first.in_features, ((rows, 1) if rows else (4, 128 if device == "cuda" else 16))
    model.to(device).train()
    return model, model, lambda wrapped: wrapped(torch.randn(*shape, size, device=device)).float().square().mean()


def image_batches(torch, device, model):
    model.to(device).train()
    images = lambda: torch.randn(8 if device == "cuda" else 2, 3, 32, 32, device=device)
    # What is lazy has its sizes from then on.
    with torch.no_grad():
        model(images())
    return model, model, lambda wrapped: wrapped(images()).float().square().mean()

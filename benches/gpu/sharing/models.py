"""Models of a worker: a Llama with random weights in plain torch, or on a simulated GPU real bytes and made-up
times.

Requests of a worker run beside each other: each has a run of tokens in one cache, a step gives each of them a token,
and a prompt is read in chunks between steps. Weights are summed a chunk of 2 MiB each, so that bytes that came back
elsewhere are seen too; so is a request's prompt in the cache, when it has been read and when the request is over."""

import ctypes, fcntl, hashlib, os, time, zlib

MIB = 1 << 20
HEAD = 128
# From so many MiB of weights on: hidden, inner.
SHAPES = [(4096, 8192, 32768), (1024, 4096, 16384), (0, 512, 2048)]


class Slot:
    """A request's run of tokens in the cache."""

    def __init__(self, start, room):
        self.start, self.room, self.length, self.token = start, room, 0, 1


def place(slots, tokens, room):
    """Returns the first place where `tokens` fit beside the taken slots, or None."""
    at = 0
    for slot in sorted(slots, key=lambda slot: slot.start):
        if slot.start - at >= tokens:
            break
        at = slot.start + slot.room
    return at if at + tokens <= room else None


class Llama:
    """RMSNorm, rotary positions, grouped-query attention over the cache, SwiGLU; greedy."""

    CHUNK = 256

    def __init__(self, size, kv, device="cuda", seed=0, file=None):
        import torch

        self.torch, self.device, self.kv_size = torch, device, kv
        # Wide and shallow, so that a step is bound by the GPU and not by how fast Python calls it.
        self.hidden, self.inner = next(shape for least, *shape in SHAPES if size >= least * MIB)
        self.heads, self.groups = self.hidden // HEAD, max(self.hidden // HEAD // 4, 1)
        hidden, inner, both = self.hidden, self.inner, self.hidden + 2 * self.groups * HEAD
        shapes = [(both, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)]
        layer = sum(rows * columns * 2 for rows, columns in shapes)
        head = hidden * 32 << 10 if hidden > 512 else 2 * MIB
        self.layers = max((size - head) // layer, 1)
        vocabulary = max((size - self.layers * layer) // (hidden * 4), 256)
        if file:
            from safetensors.torch import load_file

            loaded = load_file(file, device=device)
            self.weights = [loaded[str(number)] for number in range(len(loaded))]
        else:
            torch.manual_seed(seed)
            self.weights = [
                torch.empty(rows, columns, dtype=torch.bfloat16, device=device).normal_(0, 0.02)
                for rows, columns in [(vocabulary, hidden), (vocabulary, hidden), *shapes * self.layers]
            ]
        self.kv = None
        self.per_token = self.layers * 2 * self.groups * HEAD * 2
        self.tokens = kv // self.per_token
        self.vocabulary = vocabulary

    def make_kv(self):
        torch = self.torch
        self.kv = torch.empty(self.tokens, self.layers, 2, self.groups, HEAD, dtype=torch.bfloat16, device=self.device)

    def _rotated(self, x, cos, sin):
        first, second = x[..., : HEAD // 2], x[..., HEAD // 2 :]
        return self.torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def _attend(self, q, slot, first, layer):
        """Rows of one slot, one after another; a few heads at a time, for what it takes meanwhile is small."""
        torch, count, each = self.torch, q.shape[0], self.heads // self.groups
        end = first + count
        past = self.kv[slot.start : slot.start + end, layer]
        keys, values = past[:, 0].permute(1, 2, 0), past[:, 1].transpose(0, 1)
        q = q.view(count, self.groups, each, HEAD).permute(1, 2, 0, 3).reshape(self.groups, each * count, HEAD)
        later, found = None, []
        if count > 1:
            later = torch.arange(end, device=self.device) > torch.arange(first, end, device=self.device)[:, None]
        few = 4 if count > 1 else self.groups
        for at in range(0, self.groups, few):
            scores = torch.bmm(q[at : at + few] * HEAD**-0.5, keys[at : at + few])
            if count > 1:
                scores.view(-1, each, count, end).masked_fill_(later, float("-inf"))
            found.append(torch.bmm(torch.softmax(scores, -1), values[at : at + few]))
        out = found[0] if len(found) == 1 else torch.cat(found)
        return out.view(self.groups, each, count, HEAD).permute(2, 0, 1, 3).reshape(count, self.hidden)

    def _forward(self, tokens, parts):
        """Hidden states of rows: `parts` are (slot, its first position, rows) one after another."""
        torch, functional = self.torch, self.torch.nn.functional
        positions = torch.tensor(
            [at for _, first, rows in parts for at in range(first, first + rows)], device=self.device
        )
        rates = 10000.0 ** (-torch.arange(0, HEAD, 2, device=self.device) / HEAD)
        angles = positions[:, None, None] * rates
        cos, sin = angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)
        x = self.weights[0][tokens]
        wide = self.groups * HEAD
        for layer in range(self.layers):
            qkv, out, up, down = self.weights[2 + layer * 4 : 6 + layer * 4]
            q, k, v = (functional.rms_norm(x, (self.hidden,)) @ qkv.T).split((self.hidden, wide, wide), -1)
            q = self._rotated(q.view(-1, self.heads, HEAD), cos, sin)
            k, v = self._rotated(k.view(-1, self.groups, HEAD), cos, sin), v.view(-1, self.groups, HEAD)
            attended, row = [], 0
            for slot, first, rows in parts:
                at = slice(slot.start + first, slot.start + first + rows)
                self.kv[at, layer, 0], self.kv[at, layer, 1] = k[row : row + rows], v[row : row + rows]
                attended.append(self._attend(q[row : row + rows], slot, first, layer))
                row += rows
            x = x + (attended[0] if len(attended) == 1 else torch.cat(attended)) @ out.T
            gate, wanted = (functional.rms_norm(x, (self.hidden,)) @ up.T).chunk(2, -1)
            x = x + (functional.silu(gate) * wanted) @ down.T
        return x

    def shapes(self):
        """Prompts that are answered together, so that each shape of a computation was there once: rows of a chunk by
        four, each number of chunks, steps of some requests."""
        yield from ([rows + 1] for rows in range(1, self.CHUNK + 1, 4))
        yield from ([chunks * self.CHUNK + rows] for chunks in range(1, 16) for rows in (1, self.CHUNK // 2))
        yield from ([2] * count for count in range(2, 9))

    def prefill(self, slot, context):
        """Reads all of a prompt but its last token, and stops after each chunk."""
        torch = self.torch
        left = context - 1
        while left > 0:
            rows = min(left, self.CHUNK)
            with torch.no_grad():
                tokens = torch.arange(slot.length, slot.length + rows, device=self.device) * 7919 % self.vocabulary
                self._forward(tokens, [(slot, slot.length, rows)])
            slot.length += rows
            left -= rows
            yield
        self.wait()

    def step(self, slots):
        """A token for each."""
        torch = self.torch
        with torch.no_grad():
            tokens = torch.tensor([slot.token for slot in slots], device=self.device)
            x = self._forward(tokens, [(slot, slot.length, 1) for slot in slots])
            found = (self.torch.nn.functional.rms_norm(x, (self.hidden,)) @ self.weights[1].T).argmax(-1).tolist()
        for slot, token in zip(slots, found):
            slot.token, slot.length = token, slot.length + 1

    def wait(self):
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def kv_sum(self, slot, tokens):
        torch = self.torch
        words = self.kv[slot.start : slot.start + tokens].reshape(tokens, -1).view(torch.int64).sum(1)
        return int((words * torch.arange(1, tokens + 1, device=self.device)).sum().item())

    def digest(self):
        torch, digest = self.torch, hashlib.sha256()
        for weight in self.weights:
            words = weight.detach().reshape(-1).view(torch.int64)
            whole = words.numel() // 262144 * 262144
            sums = torch.cat([words[:whole].view(-1, 262144).sum(1), words[whole:].sum()[None]])
            digest.update(repr(sums.tolist()).encode())
        return digest.hexdigest()[:16]

    def save(self, path):
        from safetensors.torch import save_file

        save_file({str(number): weight.contiguous() for number, weight in enumerate(self.weights)}, path)

    def sleep(self):
        """The per-tensor algorithm of serving engines: each tensor to a pinned buffer that is kept; the cache is given
        up."""
        torch = self.torch
        if not hasattr(self, "buffers"):
            pin = self.device == "cuda"
            self.buffers = [torch.empty_like(weight, device="cpu", pin_memory=pin) for weight in self.weights]
        for weight, buffer in zip(self.weights, self.buffers):
            buffer.copy_(weight)
            weight.data = torch.empty(0, dtype=weight.dtype, device=self.device)
        self.kv = None
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def wake(self):
        torch = self.torch
        for weight, buffer in zip(self.weights, self.buffers):
            weight.data = torch.empty_like(buffer, device=self.device)
            weight.data.copy_(buffer)
        self.make_kv()
        self.wait()


class Simulated:
    """Blocks of a simulated GPU through the C interface. Computing takes time under a lock that all workers share, as
    kernels take turns."""

    BLOCKS, PREFILL, STEP = 8, 20000.0, 0.003

    def __init__(self, size, kv, device, seed=0, file=None):
        import glake
        from glake import _library

        self.glake, self.api, self.kv_size, self.seed = glake, _library.api(), kv, seed
        self.size = max(size // self.BLOCKS // (2 * MIB), 1) * 2 * MIB
        self.lock = open(os.path.join(device.split("@", 1)[1], "compute"), "w")
        self.per_token = max(kv // 16384, 16)
        self.tokens = kv // self.per_token
        self.weights, self.kept, self.kv = [self.api.alloc(0, self.size) for _ in range(self.BLOCKS)], None, 0
        saved = open(file, "rb") if file else None
        for number, address in enumerate(self.weights):
            word = hashlib.sha256(f"{seed} {number}".encode()).digest()
            self._fill(address, saved.read(self.size) if saved else word * (self.size // len(word)))

    def _array(self, address, size):
        class Array:
            __cuda_array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}

        return Array

    def _fill(self, address, data):
        self.glake.copy_(self._array(address, len(data)), data, wait=True)

    def make_kv(self):
        self.kv = self.api.alloc(0, self.kv_size)

    def shapes(self):
        return [[300, 2]]

    def _compute(self, seconds):
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        try:
            time.sleep(seconds)
        finally:
            fcntl.flock(self.lock, fcntl.LOCK_UN)

    def _write(self, slot, tokens):
        """Writes the bytes of tokens, which follow from their places."""
        for at in range(slot.length, slot.length + tokens):
            word = zlib.crc32(f"{slot.start} {at}".encode()).to_bytes(4, "little")
            ctypes.memmove(
                self.kv + (slot.start + at) * self.per_token, word * (self.per_token // 4), self.per_token // 4 * 4
            )
        slot.length += tokens

    def prefill(self, slot, context):
        left = context - 1
        while left > 0:
            rows = min(left, 512)
            self._compute(rows / self.PREFILL)
            self._write(slot, rows)
            left -= rows
            yield

    def step(self, slots):
        self._compute(self.STEP)
        for slot in slots:
            self._write(slot, 1)

    def kv_sum(self, slot, tokens):
        return zlib.crc32(ctypes.string_at(self.kv + slot.start * self.per_token, tokens * self.per_token))

    def digest(self):
        return f"{zlib.crc32(b''.join(ctypes.string_at(address, self.size) for address in self.weights)):08x}"

    def save(self, path):
        with open(path, "wb") as file:
            for address in self.weights:
                file.write(ctypes.string_at(address, self.size))

    def sleep(self):
        self.kept = self.kept or [bytearray(self.size) for _ in self.weights]
        for address, buffer in zip(self.weights, self.kept):
            self.glake.copy_(buffer, self._array(address, self.size), wait=True)
            self.api.free(address)
        self.api.free(self.kv)
        self.api.trim()

    def wake(self):
        self.weights = [self.api.alloc(0, self.size) for _ in self.kept]
        for address, buffer in zip(self.weights, self.kept):
            self._fill(address, buffer)
        self.make_kv()

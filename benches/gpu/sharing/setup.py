"""Number and sizes of the workers that share a GPU, and the files that describe them to `glake serve`, `glake plan` and the
workers."""

import dataclasses, json, pathlib

MIB, GIB = 1 << 20, 1 << 30
# What a step needs beside weights and cache; counted as the worker's own.
ACTIVATIONS = 256 * MIB
# What a process takes of a GPU that has all its memory elsewhere: what `glake plan` takes for it, and the simulator.
FLOOR = 640 * MIB


@dataclasses.dataclass
class Setup:
    """`weights`, `kv` and `budget` are GiB of a GPU; on a simulated one all but contexts is smaller by `scale`."""

    count: int
    weights: float
    kv: float
    budget: float
    device: str = "cuda"
    scale: int = 1
    decode_ms: float = 12.0

    @property
    def simulated(self):
        return self.device.startswith("sim")

    @property
    def names(self):
        return [f"w{place + 1:02}" for place in range(self.count)]

    @property
    def reserve(self):
        return 16 * MIB if self.simulated else max(512 * MIB, int(self.budget * GIB / 100))

    def _scaled(self, size):
        return max(int(size) // self.scale // (2 * MIB), 1) * 2 * MIB

    @property
    def weight_bytes(self):
        """Bytes of weight tensors; the configured GiB include what a step needs."""
        return self._scaled(self.weights * GIB - ACTIVATIONS)

    @property
    def kv_bytes(self):
        return self._scaled(self.kv * GIB)

    @property
    def growth(self):
        return self._scaled(ACTIVATIONS)

    @property
    def share(self):
        return self.weight_bytes + self.kv_bytes + self.growth

    def budget_bytes(self, budget=None):
        whole = int((budget or self.budget) * GIB)
        if not self.simulated:
            return whole
        fixed = FLOOR * self.count
        return fixed + self.reserve + self._scaled(whole - fixed - max(512 * MIB, whole // 100))

    def room(self, budget=None):
        """Workers that are resident together beside the contexts of all."""
        return max((self.budget_bytes(budget) - self.reserve - FLOOR * self.count) // self.share, 1)

    def node(self, preempt="step", budget=None, kv_per_token=None, link_gbps=None, floor=FLOOR):
        """The file for `glake serve`, which measures floors, and `glake plan`, which does not."""
        lines = ["[node]", f"budget = {self.budget_bytes(budget)}", f"reserve = {self.reserve}", f"floor = {floor}"]
        if link_gbps:
            lines.append(f"link_gbps = {link_gbps:.3f}")
        for name in self.names:
            lines += [
                "",
                "[[worker]]",
                f'name = "{name}"',
                f"weights = {self.weight_bytes}",
                f"kv = {self.kv_bytes + self.growth}",
                f"decode_ms = {self.decode_ms or 5.0}",
                f'preempt = "{preempt}"',
            ]
            if kv_per_token:
                lines.append(f"kv_per_token = {kv_per_token}")
        return "\n".join(lines) + "\n"

    def configuration(self, name):
        """A worker's own settings: room for a step comes with a refill, and what grows waits while others pin their
        memory first."""
        lines = [
            "[agent]",
            f'name = "{name}"',
            "[lease]",
            f"growth = {self.growth}",
            "grow_timeout_ms = 30000",
            "refill_timeout_ms = 60000",
            "[tiers]",
        ]
        return "\n".join(lines + (['extent = "4MiB"'] if self.simulated else [])) + "\n"

    def row(self):
        return dataclasses.asdict(self)

    def worker(self, **more):
        """Returns a worker's settings as JSON."""
        return json.dumps(
            {
                "device": self.device,
                "weights": self.weight_bytes,
                "kv": self.kv_bytes,
                "decode_ms": self.decode_ms,
                **more,
            }
        )


def text(path, content):
    path = pathlib.Path(path)
    path.write_text(content)
    return path

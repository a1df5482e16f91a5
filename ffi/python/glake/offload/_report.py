"""Report of offloaded bytes and plans."""

from __future__ import annotations

import dataclasses
import json
import os
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

from .. import _library
from ..errors import InvalidError


@dataclasses.dataclass
class Counts:
    """Counters kept in Python."""

    merged: int = 0
    stayed: int = 0
    narrowed: int = 0
    replayed: int = 0
    recomputed: int = 0
    others: int = 0


class Site(Protocol):
    """Source of the report of one site."""

    number: int

    def told(self, course: bool = False) -> dict[str, Any]:
        """Returns the site's goal, its latest plan and its passes."""


counts = Counts()
# Sites of modules and blocks that offload.
sites: weakref.WeakSet[Any] = weakref.WeakSet()


class Report(dict[str, Any]):
    """A dictionary that is printed as lines."""

    def __str__(self) -> str:
        lines = [f"offloaded now: {_size(self['host_bytes'])} of {_size(self['host_pinned_bytes'])} pinned, in {self['entries']} ranges"]
        for way, name in (("out", "out of the GPU"), ("in", "into the GPU")):
            busy, timed = self[f"busy_us_{way}"], self[f"timed_bytes_{way}"]
            rate = f", at {timed / busy / 1e3:.1f} GB/s" if busy else ""
            lines.append(f"{name}: {_size(self[f'bytes_{way}'])}{rate}")
        lines.append(f"saves merged: {self['merged']}, stayed for want of host memory, in memory that is not GLake's, or because a copy failed: {self['stayed']}")
        told = {"changed": "saves that a kernel changed unseen, which stay", "others": "hooks of others in the model, which keep what they pack"}
        lines += [f"{text}: {self[key]}" for key, text in told.items() if self[key]]
        for site in self["sites"]:
            lines += _lines(site)
        return "\n".join(lines)


def of(which: Iterable[Site], plot: str | os.PathLike[str] | None = None) -> Report:
    if plot is not None and not isinstance(plot, (str, os.PathLike)):
        raise TypeError(f"plot is {plot!r}: the path of a file, or None")
    told = [site.told(plot is not None) for site in which]
    if plot is not None:
        from . import _plot

        drawn = [site for site in told if site["plan"] is not None]
        if not drawn:
            raise InvalidError("there is no plan to draw: a pass has to end first")
        with open(plot, "w", encoding="utf-8") as file:
            file.write(_plot.svg(max(drawn, key=lambda site: site["plan"]["offloaded"]["bytes"])))
        for site in drawn:
            del site["plan"]["course"]
    return Report(**json.loads(_library.api().offload_stats_json()), **dataclasses.asdict(counts), sites=told)


def report(plot: str | os.PathLike[str] | None = None) -> Report:
    """Reports the bytes offloaded now, and since the start of the process.

    Args:
        plot: a file, such as ``"step.svg"``, for a plot of the latest plan's pass: memory over time, and copies. With several sites, the one
            that offloads the most.

    Returns:
        ``entries`` and ``host_bytes``: ranges offloaded now, and their host memory; ``bytes_out`` and ``bytes_in``: bytes copied from GPUs,
        and to them; ``merged``: saves that needed no copy, because another save had made it; ``stayed``: tensors that should have been
        offloaded but were not, for lack of host memory, because they are not GLake's, or because the driver refused a copy; ``narrowed``:
        bytes that needed no copy, because a narrow form restores them; ``changed``: tensors that a kernel wrote to in place without
        autograd's knowledge, after they were saved;
        ``replayed`` and ``recomputed``: leaves of checkpoints that were replayed, and that were recomputed; ``others``: forwards of
        modules, in the first passes of a site, that ran under saved-tensor hooks of others, which keep their tensors; and the other keys
        described in docs/METRICS.md.
        ``sites``: for each offloading module and block, its goal; the bytes that its plan keeps, offloads and recomputes; the expected
        duration of a pass and of its waits for copies, and those of the last timed pass; the gain from other GPUs' links; and the reason if
        there is no plan. It prints as text.

    Raises:
        InvalidError: there is no plan to draw.
        TypeError: ``plot`` is no path.
    """
    return of(sorted(sites, key=lambda site: site.number), plot)


def _size(amount: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if abs(amount) < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.2f} GiB"


def _ms(micros: float) -> str:
    return f"{micros / 1e3:.1f} ms"


def _weights(told: dict[str, Any]) -> str:
    kept, streamed = (f"{told[f'{kind}_blocks']} blocks {name} ({_size(told[f'{kind}_bytes'])})" for kind, name in (("kept", "on the GPU"), ("streamed", "stream")))
    moved = f"in {_size(told['bytes_in'])}, out {_size(told['bytes_out'])}"
    return f"  weights: {kept}, {streamed}; {moved}; {told['demanded']} of {told['uses']} uses had to wait for all of their bytes"


def _lines(site: dict[str, Any]) -> list[str]:
    budget = "" if site["budget"] is None else f" under {_size(site['budget'])} ({_size(site['beside_bytes'])} of it beside the pool)"
    lines = [f'a site, "{site["preset"]}"{budget}: {site["passes"]} passes, {site["diverged"]} not as their plan']
    if not site["passes"]:
        lines.append("  no pass has ended: is this the module whose forward the program calls, and is it on a GPU?")
    if site["above_budget"]:
        lines.append(f"  requests above the budget: {site['above_budget']}")
    if site["unplanned"]:
        lines.append(f"  no plan: {site['unplanned']}")
    if site.get("weights") is not None:
        lines.append(_weights(site["weights"]))
    plan = site["plan"]
    if plan is None:
        return lines
    parts = ", ".join(f"{plan[key]['items']} {key} ({_size(plan[key]['bytes'])})" for key in ("kept", "offloaded", "recomputed"))
    lines.append(f"  plan: {parts}; peak {_size(plan['peak_bytes'])}, host {_size(plan['host_bytes'])}")
    if plan["is_timed"]:
        recomputed = f", {_ms(plan['recompute_us'])} recomputing" if plan["recompute_us"] else ""
        lines.append(f"  a pass by the plan: {_ms(plan['expected_us'])}, {_ms(plan['expected_exposed_us'])} of it waiting for copies{recomputed}")
    if site["real_us"] is not None:
        lines.append(f"  the last pass that was timed: {_ms(site['real_us'])}, {_ms(site['real_exposed_us'])} of it waiting for copies")
    if plan["is_timed"] and plan["all_links_us"] is not None:
        lines.append(f"  with the links of other GPUs (glake.multi_path()): {_ms(plan['all_links_us'])}")
    return lines

"""A call of a checkpoint: its leaves are stored when they are computed, and replayed when it is recomputed.

::

    forward:  with Stores:    q = linear(x)  ─► computed, q stored        what it saves is the checkpoint's, as ever
    backward: with Replays:   q = linear(x)  ─► q read, what it saved is handed to the checkpoint again

The checkpoint stays torch's: it keeps what a call was given, sets generators and autocast back, counts what is saved and stops when it has all.
"""

from __future__ import annotations

import sys
import threading
import weakref
from types import TracebackType
from typing import Any

import torch
import torch.utils.checkpoint

from . import _bits, _dynamo
from ._interception import current
from ._memory import is_shortage
from ._record import Draws, Record, Sketch

# A leaf that was stored so often and never computed again is stored once in so many times.
_MOST_WAITS, _TRY_AGAIN = 16, 64


class Leaf:
    """State of one leaf of one checkpoint over all passes."""

    def __init__(self, kind: Any, weight: Any) -> None:
        self.kind = kind
        # A number of an object may be another one's later.
        self._weight = None if weight is None else weakref.ref(weight)
        # What it saved last.
        self.sketch: Sketch | None = None
        # Whether a replay was seen to be what a computation is, and whether what it gave is read when it is computed again.
        self.is_trusted, self.is_read = False, True
        # Why it is computed again for good.
        self.reason: str | None = None
        self.is_compared = False
        self.found: list[Any] = []
        # How often it was called and had not been compared yet.
        self._waits = 0

    def is_of(self, kind: Any, weight: Any) -> bool:
        return kind is self.kind and (self._weight is None or self._weight() is weight)

    def note_call(self) -> bool:
        """Counts a call of the leaf, and returns whether storing it would be useless: outputs that no backward pass needs, as of
        frozen layers, are never recomputed. Retried now and then.
        """
        if self.is_trusted or self.is_compared:
            return False
        self._waits += 1
        return self._waits > _MOST_WAITS and self._waits % _TRY_AGAIN != 0

    def is_watched(self) -> bool:
        """Whether its outputs are checked for writes."""
        return self.is_read and len(self.found) <= _MOST_WAITS

    def take(self) -> tuple[Any, ...]:
        """Takes the comparison results so far."""
        found, self.found = self.found, []
        return tuple(found)


class Scope:
    """One call of a checkpointed function. It lives as long as the checkpoint's saved arguments."""

    def __init__(self, replay: Any, number: int, place: int, sets_back: bool) -> None:
        # Of those that live, and of those of its forward pass.
        self.replay, self.number, self.place = replay, number, place
        # Whether its checkpoint sets generators back: else other values may be dropped when it is computed again.
        self._sets_back = sets_back
        # By turn; None: it is computed again, whatever plans say.
        self.records: list[Record | None] = []
        # By the weight that came last, how many leaves came.
        self._last = 0
        self._came: dict[int, int] = {}
        self.device: Any = None
        # Whether its forward pass is over, and whether a backward pass ran within it: that one needs the operations themselves.
        self.is_over, self.is_differentiated = False, False
        # Whether it was computed again.
        self.is_replayed = False

    def __del__(self) -> None:
        # Its graph is gone without a backward pass, and what it held with it.
        if self.records and not self.is_replayed and not sys.is_finalizing():
            self.replay.packer.replays(self.number, self.device, False)

    def key(self, weight: Any) -> tuple[Any, ...]:
        """Returns the key of the next leaf across passes. Experts and layers may come in another order or be absent, so a leaf
        is identified by its weight, and attention by the preceding weight.
        """
        if weight is not None:
            self._last = id(weight)
        came = self._came[self._last] = self._came.get(self._last, 0) + 1
        key = (self._sets_back, self._last, came)
        return key if self._last else (*key, self.place)


class _Inside:
    """Context of a thread inside a checkpoint. If the function raised, the context is left late, when the traceback is released."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    def __enter__(self) -> Any:
        self.before, self.is_over, self.thread = current.scope, False, threading.get_ident()
        current.scope = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.is_over = True
        if threading.get_ident() != self.thread:
            return
        inside = current.scope
        while isinstance(inside, _Inside) and inside.is_over:
            inside = inside.before
        current.scope = inside

    def leaf(self, kind: Any, function: Any, args: Any, kwargs: Any) -> Any:
        if self.is_over or kind.is_cheap(args, self._scope.replay.least_inner):
            return function(*args, **kwargs)
        if _is_transformed():
            # It has its turn all the same: that another thread has tangents may be so in one of both passes alone.
            self._passes_by()
            return function(*args, **kwargs)
        current.scope = None
        try:
            return self._leaf(kind, function, args, kwargs)
        finally:
            current.scope = self

    def _leaf(self, kind: Any, function: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError

    def _passes_by(self) -> None:
        """Skips a leaf in the order without storing or replaying it."""
        raise NotImplementedError


class Stores(_Inside):
    """Context of a checkpoint's forward pass."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        # Leaves that are not trusted yet: what each gave, at which version, and a copy.
        self._watched: list[tuple[Leaf, Any, int, Any]] = []

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)
        self._scope.is_over = True
        watched, self._watched = self._watched, []
        if kind is None:
            for leaf, output, version, copy in watched:
                # Kernels may write without counting it as a change. One that is counted is seen when it is to be handed out.
                if output._version == version:
                    leaf.found.append(_bits.are_same(output, copy.detach))

    def _passes_by(self) -> None:
        self._scope.records.append(None)

    def _leaf(self, kind: Any, function: Any, args: Any, kwargs: Any) -> Any:
        scope = self._scope
        replay, turn = scope.replay, len(scope.records)
        self._passes_by()
        call = kind.call(function, args, kwargs)
        if call is None or not call.inputs or not _may_draw(call):
            replay.computes_again(kind.name, "tensors")
            return function(*args, **kwargs)
        leaf = replay.leaf(scope.key(call.weight), kind, call.weight)
        sketch = leaf.sketch
        is_known = sketch is not None and sketch.is_of(call)
        if scope.is_differentiated:
            leaf.reason = leaf.reason or "backward"
        if leaf.reason is not None or (is_known and sketch.why is not None):
            replay.computes_again(kind.name, leaf.reason or sketch.why)
            return call.run()
        top = _top()
        if top is None:
            replay.computes_again(kind.name, "hooks")
            return call.run()
        if leaf.note_call():
            replay.computes_again(kind.name, "unread")
            return call.run()
        if leaf.is_read:
            replay.packer.leaf_begins(call.inputs[0])
        before = Draws(call.inputs[0].device) if call.draws else None
        saved: list[Any] = []
        if is_known and kind.is_steady and not sketch.beside:
            output = call.run()
        else:
            output = _observed(call, top, saved)
            if not is_known or not sketch.fits(saved):
                sketch = leaf.sketch = Sketch(kind, call, output, saved, replay.packer.least)
                if sketch.why is not None:
                    replay.computes_again(kind.name, sketch.why)
                    saved.clear()
                    return output
        after = Draws(call.inputs[0].device) if call.draws else None
        if before is not None and not call.drops and before.is_now():
            before = after = None
        record = Record(kind, leaf, sketch, before, after, call)
        # Its replay is told there, also where nothing of it is stored: the site's pass waits for that.
        scope.device, scope.records[turn] = output.device, record
        record.store(output, saved, replay.packer, scope.number)
        # The hooks that are on hold the list.
        saved.clear()
        if not record.is_stored:
            replay.computes_again(kind.name, "planned")
        elif not leaf.is_trusted:
            record.is_compared = True
            replay.packer.untimed(output)
            if leaf.is_watched():
                self._watch(leaf, output)
        return output

    def _watch(self, leaf: Leaf, output: Any) -> None:
        """Schedules a check, at the end of the layer's forward, that the output of a leaf was not written to."""
        try:
            self._watched.append((leaf, output.detach(), output._version, output.detach().clone()))
        except RuntimeError as error:
            if not is_shortage(error):
                raise
            # That cannot be told, and is another time.
            leaf.found.append(None)


class Replays(_Inside):
    """Context of one recomputation of a checkpoint."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        self._turn, self._is_other = 0, False

    def _passes_by(self) -> None:
        self._turn += 1

    def _leaf(self, kind: Any, function: Any, args: Any, kwargs: Any) -> Any:
        records, turn = self._scope.records, self._turn
        self._passes_by()
        record = records[turn] if turn < len(records) else None
        call = kind.call(function, args, kwargs)
        if call is None or not call.inputs or not _may_draw(call):
            return function(*args, **kwargs)
        if record is None or self._is_other:
            return call.run()
        replay = self._scope.replay
        if not record.is_of(kind, call):
            # From here on it is another computation than the one that was stored.
            self._is_other = True
            replay.computes_again(kind.name, "other")
            return call.run()
        top = _top()
        why = "hooks" if top is None else "backward" if self._scope.is_differentiated else record.hindrance()
        if why is not None:
            try:
                output = call.run()
            except BaseException as error:
                if _is_stop(error):
                    record.is_not_read()
                raise
            if why in ("changed", "backward"):
                # It would be again: nothing is stored of it from then on.
                record.leaf.reason = why
            if why != "planned":
                replay.computes_again(kind.name, why)
            return output
        if record.is_compared:
            return self._compare(record, call, top)
        try:
            output = record.replay(call, top[0])
        except BaseException as error:
            if _is_stop(error):
                record.is_not_read()
                replay.replayed()
            raise
        replay.replayed()
        return output

    def _compare(self, record: Record, call: Any, top: Any) -> Any:
        saved: list[Any] = []
        output, is_done = None, False
        try:
            output = _observed(call, top, saved)
            is_done = True
            return output
        except BaseException as error:
            is_done = _is_stop(error)
            raise
        finally:
            if is_done:
                record.leaf.found += record.compare(call, saved, output)
                record.leaf.is_compared = True
                if output is None:
                    record.is_not_read()
            saved.clear()


class _Again:
    """Enters a new ``Replays`` each time: a graph may be read more than once."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._inside: list[Replays] = []

    def __enter__(self) -> None:
        if not self._scope.is_over:
            self._scope.is_differentiated = True
        self._scope.is_replayed = True
        inside = Replays(self._scope)
        inside.__enter__()
        self._inside.append(inside)
        self._scope.replay.packer.replays(self._scope.number, self._scope.device, True)

    def __exit__(self, *error: object) -> None:
        # Several threads may be in one at a time.
        thread = threading.get_ident()
        inside = next((inside for inside in reversed(self._inside) if inside.thread == thread), None)
        if inside is not None:
            self._inside.remove(inside)
            inside.__exit__(None, None, None)
        self._scope.replay.packer.replays(self._scope.number, self._scope.device, False)


def contexts(replay: Any, context_fn: Any, plain: Any, sets_back: bool, is_debug: bool) -> Any:
    """Returns the ``context_fn`` of a checkpoint, combined with its own."""

    def ours() -> tuple[Any, Any]:
        scope = replay.scope(sets_back)
        return Stores(scope), _Again(scope)

    if replay is None or not is_eager():
        return context_fn
    if current.scope is not None:
        # Its leaves are stored with those of the one around it. That is what is replayed; when this one is computed again, all of it is.
        replay.leaves_alone("nested")
        return context_fn
    if context_fn is not plain or is_debug:
        replay.leaves_alone("context_fn")
        return context_fn
    return ours


def is_eager() -> bool:
    """Whether operations are computed, and not traced, captured or transformed."""
    if _dynamo.traces() or torch._C._functorch.maybe_current_level() is not None:
        return False
    return not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def _is_transformed() -> bool:
    """Whether tensors are wrapped, or have tangents."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0


def _may_draw(call: Any) -> bool:
    """Whether a draw of random numbers, if any, comes from a generator whose state is readable."""
    return not call.draws or call.inputs[0].device.type in ("cpu", "cuda")


def _top() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def _observed(call: Any, top: Any, saved: list[Any]) -> Any:
    """Computes a leaf, and records its saves. The active hooks receive them as well."""
    pack, unpack = top

    def packs(tensor: Any) -> Any:
        saved.append(tensor)
        return pack(tensor)

    torch._C._autograd._push_saved_tensors_default_hooks(packs, unpack)
    try:
        return call.run()
    finally:
        torch._C._autograd._pop_saved_tensors_default_hooks()


def _is_stop(error: BaseException) -> bool:
    return isinstance(error, torch.utils.checkpoint._StopRecomputationError)

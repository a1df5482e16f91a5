"""A checkpoint's call: its leaves are stored as they are computed, and handed out when it is computed again.

::

    forward:  with Stores:    q = linear(x)  ─► computed, q stored        what it saves is the checkpoint's, as ever
    backward: with Replays:   q = linear(x)  ─► q read, what it saved is handed to the checkpoint again

The checkpoint stays torch's: it keeps what a call was given, sets generators and autocast back, counts what is saved and stops when it has all.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from types import TracebackType
from typing import Any

from . import _bits
from ._interception import current
from ._record import Record


class Leaf:
    """What is known of one leaf of one checkpoint, pass after pass."""

    def __init__(self, signature: Any) -> None:
        self.signature = signature
        # Whether a replay was seen to be what a computation is, and whether what it gave is read when it is computed again.
        self.is_trusted, self.is_read = False, True
        # Why it is computed again for good.
        self.reason: str | None = None
        self.is_compared = False
        self.found: list[Any] = []


class Scope:
    """One call of a checkpointed function. It lives as long as what the checkpoint keeps for its backward pass."""

    def __init__(self, replay: Any, number: int, place: int) -> None:
        # Of those that live, and of those of its forward pass.
        self.replay, self.number, self.place = replay, number, place
        # By turn; None: it is computed again.
        self.records: list[Record | None] = []
        self.device: Any = None


class _Inside:
    """What a thread is inside of. A checkpoint whose function raised is left late: when the traceback goes."""

    def __enter__(self) -> Any:
        self.before, self.is_over, self._thread = current.scope, False, threading.get_ident()
        current.scope = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.is_over = True
        if threading.get_ident() != self._thread:
            return
        inside = current.scope
        while isinstance(inside, _Inside) and inside.is_over:
            inside = inside.before
        current.scope = inside

    def leaf(self, kind: Any, function: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError


class Alone(_Inside):
    """A checkpoint within another: what it has is computed again."""

    def leaf(self, kind: Any, function: Any, args: Any, kwargs: Any) -> Any:
        return function(*args, **kwargs)


class Stores(_Inside):
    """The forward pass of a checkpoint."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        # Leaves that are not trusted yet: what each gave, and a copy.
        self._watched: list[tuple[Leaf, Any, Any]] = []

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)
        watched, self._watched = self._watched, []
        if kind is None:
            for leaf, output, copy in watched:
                # Kernels may write without counting it as a change.
                leaf.found.append(_bits.are_same(output, copy))

    def leaf(self, kind: Any, function: Any, args: Any, kwargs: Any) -> Any:
        replay = self._scope.replay
        if self.is_over or kind.is_cheap(args, replay.least_inner):
            return function(*args, **kwargs)
        current.scope = None
        try:
            return self._leaf(kind, function, args, kwargs)
        finally:
            current.scope = self

    def _leaf(self, kind: Any, function: Any, args: Any, kwargs: Any) -> Any:
        scope = self._scope
        replay, turn = scope.replay, len(scope.records)
        scope.records.append(None)
        call = kind.call(function, args, kwargs)
        if isinstance(call, str):
            replay.computes_again(kind.name, call)
            return function(*args, **kwargs)
        leaf = replay.leaf(scope.place, turn, kind, call)
        top = _top()
        if leaf.reason is not None or top is None:
            replay.computes_again(kind.name, leaf.reason or "hooks")
            return call.run()
        record = Record(kind, leaf, call)
        like = call.inputs[0]
        replay.packer.leaf_begins(like)
        output, saved = _observed(call, top)
        why = record.store(call, output, saved, replay.packer, scope.number)
        saved.clear()
        if why is not None:
            replay.computes_again(kind.name, why)
            return output
        scope.records[turn] = record
        scope.device = like.device
        if not leaf.is_trusted:
            record.is_checked = True
            if leaf.is_read:
                self._watched.append((leaf, output.detach(), output.detach().clone()))
        return output


class Replays(_Inside):
    """A checkpoint that is computed again, once."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._turn, self._is_other = 0, False

    def leaf(self, kind: Any, function: Any, args: Any, kwargs: Any) -> Any:
        if self.is_over or kind.is_cheap(args, self._scope.replay.least_inner):
            return function(*args, **kwargs)
        current.scope = None
        try:
            return self._leaf(kind, function, args, kwargs)
        finally:
            current.scope = self

    def _leaf(self, kind: Any, function: Any, args: Any, kwargs: Any) -> Any:
        records, turn = self._scope.records, self._turn
        self._turn += 1
        record = records[turn] if turn < len(records) else None
        call = kind.call(function, args, kwargs)
        if isinstance(call, str):
            return function(*args, **kwargs)
        replay = self._scope.replay
        if record is None or self._is_other:
            return call.run()
        if record.misfit(kind, call):
            # From here on it is another computation than the one that was stored.
            self._is_other = True
            replay.computes_again(kind.name, "other")
            return call.run()
        top = _top()
        why = "hooks" if top is None else record.hindrance()
        if why is not None:
            if why == "changed":
                # It would be again: nothing is stored of it from then on.
                record.leaf.reason = why
            replay.computes_again(kind.name, why)
            return call.run()
        try:
            if record.is_checked:
                return self._compare(record, call, top)
            output = record.replay(call, top[0])
        except BaseException as error:
            if _is_stop(error):
                record.leaf.is_read = False
                if not record.is_checked:
                    replay.replayed()
            raise
        replay.replayed()
        return output

    def _compare(self, record: Record, call: Any, top: Any) -> Any:
        output, saved = None, []
        try:
            output = _observed(call, top, saved)[0]
            return output
        except BaseException as error:
            if not _is_stop(error):
                saved.clear()
            raise
        finally:
            if saved or output is not None:
                record.leaf.found += record.compare(call, saved, output)
                record.leaf.is_compared = True
                saved.clear()


class _Again:
    """Enters another ``Replays`` each time: a graph may be read more than once."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._inside: list[Replays] = []

    def __enter__(self) -> None:
        inside = Replays(self._scope)
        self._inside.append(inside)
        inside.__enter__()
        self._scope.replay.packer.replays(self._scope.number, self._scope.device, True)

    def __exit__(self, *error: Any) -> None:
        self._inside.pop().__exit__(*error)
        self._scope.replay.packer.replays(self._scope.number, self._scope.device, False)


def contexts(replay: Any, context_fn: Any, plain: Any, is_debug: bool) -> Any:
    """A checkpoint's ``context_fn`` in place of its own."""

    def ours() -> tuple[Any, Any]:
        if current.scope is not None:
            # Within another checkpoint, computed for the first time or again. What it has is left alone, both times.
            if replay is not None:
                replay.computes_again("checkpoint", "nested")
            theirs, again = context_fn()
            return _both(Alone(), theirs), again
        scope = replay.scope()
        return Stores(scope), _Again(scope)

    if current.scope is None:
        if context_fn is not plain or is_debug:
            replay.computes_again("checkpoint", "context_fn")
            return context_fn
        if not _is_eager():
            return context_fn
    elif is_debug or not _is_eager():
        return context_fn
    return ours


@contextlib.contextmanager
def _both(one: Any, other: Any) -> Any:
    with one, other:
        yield


def _is_eager() -> bool:
    """Whether this is computed, and not traced, captured or transformed."""
    import torch

    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None or torch._C._functorch.maybe_current_level() is not None:
        return False
    return not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def _top() -> Any:
    import torch

    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def _observed(call: Any, top: Any, saved: list[Any] | None = None) -> tuple[Any, list[Any]]:
    """Computes a leaf: what it gave and, in order, what it saved. The hooks that are on have what is saved, as ever."""
    import torch

    pack, unpack = top
    saved = [] if saved is None else saved

    def packs(tensor: Any) -> Any:
        saved.append(tensor)
        return pack(tensor)

    torch._C._autograd._push_saved_tensors_default_hooks(packs, unpack)
    try:
        return call.run(), saved
    finally:
        torch._C._autograd._pop_saved_tensors_default_hooks()


def _is_stop(error: BaseException) -> bool:
    stop = getattr(sys.modules.get("torch.utils.checkpoint"), "_StopRecomputationError", None)
    return stop is not None and isinstance(error, stop)

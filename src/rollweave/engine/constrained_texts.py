"""The texts of an engine's constrained requests: which of them are held until their
next mask is computed (`engine/matchers`), and the masks.

Invariants: a request is held from the moment at which its text begins or grows until
its mask has come, or it ends; a step waits at most `MASKS_S` for masks.
"""

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from rollweave.engine.matchers import MaskReply, Matchers
from rollweave.engine.request_state import RequestState
from rollweave.schema.serving import Constraint, FinishReason

MASKS_S: Final = 0.01
"""Maximum seconds that a step waits for masks that are being computed. A request whose
mask comes later waits for the next step.
"""


Finish = Callable[[RequestState, FinishReason, str], None]
"""Ends a live request, with an error or ""."""


class ConstrainedTexts:
    """All methods belong to the engine's thread. `between_steps` queues a call of a
    function on it, from any thread.
    """

    def __init__(
        self,
        make: Callable[[Callable[[str, MaskReply], None]], Matchers],
        *,
        vocab: int,
        between_steps: Callable[[Callable[[], None]], None],
        finish: Finish,
    ) -> None:
        self._make, self._vocab = make, vocab
        self._between_steps, self._finish = between_steps, finish
        self._matchers: Matchers | None = None
        self._texts: dict[str, RequestState] = {}
        self._ids = map(str, itertools.count())
        self._held: set[str] = set()
        self._changed = threading.Condition()
        self._awaited: set[str] = set()
        """The held texts for which the next step waits."""

    @property
    def held(self) -> int:
        """Number of requests that are held."""
        return len(self._held)

    def begin(self, state: RequestState, constraint: Constraint) -> None:
        """Hold a request until the first mask of its text has come."""
        if self._matchers is None:
            self._matchers = self._make(self._computed)
        state.text_id = next(self._ids)
        self._texts[state.text_id] = state
        self._hold(state)
        tokens = state.entry.tokens[state.prompt_tokens :]
        self._matchers.begin(state.text_id, constraint, ends=sorted(state.stop_ids), tokens=tokens)

    def extend(self, state: RequestState, token: int) -> None:
        """Hold a request until the mask after its newest token has come."""
        assert self._matchers is not None, "the text has begun"
        self._hold(state)
        self._matchers.feed(state.text_id, token)

    def end(self, state: RequestState) -> None:
        """Forget the text of a request that ends."""
        assert self._matchers is not None, "the text has begun"
        self._release(state)
        del self._texts[state.text_id]
        self._matchers.end(state.text_id)

    def wait(self) -> None:
        """Wait for the masks that the next step needs."""
        if self._awaited:
            with self._changed:
                self._changed.wait_for(lambda: not self._awaited, MASKS_S)
                self._awaited.clear()

    def forbidden(self, states: Sequence[RequestState]) -> dict[int, npt.NDArray[np.bool_]]:
        """Return, for the rows that are constrained, the tokens that they must not
        get.
        """
        if not self._texts:
            return {}
        masks = (state.forbidden for state in states)
        return {row: mask for row, mask in enumerate(masks) if mask is not None}

    def close(self) -> None:
        """End the process that computes the masks."""
        if self._matchers is not None:
            self._matchers.close()

    def _hold(self, state: RequestState) -> None:
        state.entry.held = True
        self._held.add(state.text_id)
        with self._changed:
            self._awaited.add(state.text_id)

    def _release(self, state: RequestState) -> None:
        state.entry.held = False
        self._held.discard(state.text_id)
        with self._changed:
            self._awaited.discard(state.text_id)

    def _computed(self, text_id: str, reply: MaskReply) -> None:
        """Pass on a reply; called on another thread."""
        self._between_steps(lambda: self._take(text_id, reply))
        with self._changed:
            self._awaited.discard(text_id)
            self._changed.notify()

    def _take(self, text_id: str, reply: MaskReply) -> None:
        """Let a request continue, or end it."""
        state = self._texts.get(text_id)
        if state is None:
            return  # it has ended
        self._release(state)
        if reply.error:
            self._finish(state, FinishReason.REFUSED, reply.error)
        elif not reply.complete:
            bits = np.frombuffer(reply.mask, dtype=np.uint8)
            allowed = np.unpackbits(bits, count=self._vocab, bitorder="little")
            state.forbidden = ~allowed.view(np.bool_)
        elif state.logprobs:
            self._finish(state, FinishReason.STOP, "")
        else:
            error = "sampling.constraint cannot be met: no token can begin the text"
            self._finish(state, FinishReason.REFUSED, error)

# SPDX-License-Identifier: Apache-2.0
"""The compiled call path in front of a group's blocking calls; see core/bindings/fast_call.cc.

A call goes through the Python method until its plan is bound; `learn` then shows the compiled path
which plan that was, and from the next call on the method is not entered any more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from commute import _core
from commute._arrays import CODES, Buffer
from commute._runner import Runner
from commute.group.shared_arrays import SharedPart
from commute.plan import Collective, shared_bounds


class FastCalls:
    """One compiled callable per collective; none where NumPy is unknown."""

    def __init__(
        self,
        runner: Runner,
        methods: dict[Collective, Callable[..., Any]],
        *,
        ranks: int,
        fetches: bool,
        head_words: int,
        timeout: float,
    ) -> None:
        """`head_words`: of what a scatter tells ahead of its blocks."""
        descrs: list[object] = [np.dtype(name) if name != "bfloat16" else None for name in CODES]
        sample = np.zeros(3, dtype=np.float32)
        address = sample.__array_interface__["data"][0]
        self.calls: dict[Collective, Any] = {}
        self._knows_tensors = False
        for collective, method in methods.items():
            call = _core.fast_call(
                runner.engine, int(collective), method, runner.finish, descrs, sample, address
            )
            if call is None:
                return
            roots = ranks if collective.rooted else 1
            _core.expect(call, roots, shared_bounds(collective, fetches), timeout)
            self.calls[collective] = call
        scatter, broadcast = (self.calls[one] for one in (Collective.SCATTER, Collective.BROADCAST))
        _core.send_heads_by(scatter, broadcast, head_words)

    def learn(self, collective: Collective, executor: _core.Executor, nbytes: int) -> None:
        """This is the plan that is chosen for so many bytes."""
        call = self.calls.get(collective)
        if call is not None:
            _core.learn(call, executor, nbytes)
        torch = sys.modules.get("torch")
        if not self._knows_tensors and hasattr(torch, "Tensor"):
            self._learn_tensors(torch)

    def learn_direct(
        self, collective: Collective, executor: _core.Executor, buffer: Buffer, part: SharedPart
    ) -> None:
        """This is the plan for this part of an array that all ranks reach."""
        call = self.calls.get(collective)
        if call is not None:
            _core.learn_direct(call, executor, buffer.address, buffer.nbytes, *part)

    def forget_direct(self) -> None:
        """A new array may lie where another has been."""
        for call in self.calls.values():
            _core.forget_direct(call)

    def _learn_tensors(self, torch: Any) -> None:
        self._knows_tensors = True
        exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
        for call in self.calls.values():
            _core.learn_tensors(call, torch.Tensor, exchange)

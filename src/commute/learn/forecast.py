# SPDX-License-Identifier: Apache-2.0
"""How many features there will be, from how they grew so far: so that the servers make room once,
instead of moving every row two or three times while its table grows.

The features seen after reading a share x of the data grow as x^b (Heaps' law), and the more of
them are known the slower: b falls. Both are taken from the last two doublings of x. What is
forecast is not far away, as an exponent errs by a power: after 1/32 of the data what there will be
after 1/8, after 1/8 what there will be in the end.
"""

from __future__ import annotations

import math

__all__ = ["Forecast"]

AT = tuple(0.5**n for n in range(7, 2, -1))  # shares of the data; the last three are used
UNTIL = {AT[2]: AT[4], AT[4]: 1.0}
FEW = 1 << 16  # features: room for them is made in no time


class Forecast:
    """Is told how many features there are, when it is due, and says for how many to make room.

    >>> forecast = Forecast()
    >>> [forecast.after(x, round(4e6 * x**0.6)) for x in (1/128, 1/64, 1/32, 1/16, 1/8)]
    [0, 0, 1148698, 0, 4000000]
    """

    def __init__(self) -> None:
        self._due = list(AT)
        self._seen: list[tuple[float, float]] = []  # logarithms of a share, and of its features

    def is_due(self, share: float) -> bool:
        """Whether it wants to know how many there are now."""
        return bool(self._due) and share >= self._due[0]

    @property
    def is_over(self) -> bool:
        """Whether it wants to know nothing more."""
        return not self._due

    def after(self, share: float, features: int) -> int:
        """How many to make room for; 0: nothing to do."""
        passed = [at for at in self._due if at <= share]
        self._due = self._due[len(passed) :]
        if features < FEW:
            return 0
        self._seen.append((math.log2(share), math.log2(features)))
        if len(self._seen) < 3 or passed[-1] not in UNTIL:
            return 0
        return round(math.exp2(self._extended(math.log2(UNTIL[passed[-1]]))))

    def _extended(self, until: float) -> float:
        """The curve through the last three points, by halves of a doubling; it never falls."""
        (x0, y0), (x1, y1), (x, y) = self._seen[-3:]
        before, now = (y1 - y0) / (x1 - x0), (y - y1) / (x - x1)
        bend = min(0.0, 2 * (now - before) / (x - x0))
        middle = (x1 + x) / 2
        while x < until:
            step = min(0.5, until - x)
            y += step * max(0.0, now + bend * (x + step / 2 - middle))
            x += step
        return y

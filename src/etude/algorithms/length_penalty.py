"""The concave length penalty of the Composer 2 report, section 4.2."""

from __future__ import annotations

import math


def concave_penalty(x: float, k: float, q: float) -> float:
    """C_{k,q}(x) = ((1 + kx)^(1-q) - 1) / (k (1-q)) for x >= 0, k > 0, q > 0.

    C(0) = 0, C'(x) = (1 + kx)^-q, so C'(0) = 1; q -> 0 gives x, q -> 1 gives ln(1 + kx) / k, and q > 1 saturates at
    1 / (k (q - 1)). Computed through expm1 and log1p, exact near q = 1.
    """
    log = math.log1p(k * x)
    if abs(1.0 - q) < 1e-6:
        return log / k
    return math.expm1((1.0 - q) * log) / (k * (1.0 - q))

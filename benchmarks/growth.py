"""How a layer's time grows with the number of tokens: the exponent of each attention.

python -m benchmarks.growth --tokens 4096 --tokens 16384 --out benchmarks/results
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from benchmarks import common
from elfatt_sd.benchmarking import layer
from elfatt_sd.benchmarking.report import Results, make_exponents

TOKENS = (4096, 9216, 16384, 36864, 65536)


def growth(tokens: Sequence[int] = TOKENS, **options: Any) -> Results:
    """Time a layer at each size; see `layer`. The results have `exponents` as well."""
    results = layer(tokens=tokens, kind="growth", **options)
    results["exponents"] = make_exponents(results["groups"])
    return results


if __name__ == "__main__":
    parser = common.options(__doc__, "tokens", "batch", "repeats", "device", "dtype")
    parser.add_argument("--max-seconds", type=float, default=math.inf, help="leave out what may take longer for a call")
    chosen = parser.parse_args()
    given = {name: getattr(chosen, name) for name in ("batch", "repeats", "max_seconds", "device", "dtype")}
    common.run(chosen, growth, tokens=chosen.tokens or TOKENS, **given)

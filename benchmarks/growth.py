"""How a layer's time grows with the number of tokens: the exponent of each attention.

python -m benchmarks.growth --tokens 4096 --tokens 16384 --out benchmarks/results
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import common
from elfatt_sd.benchmarking import layer
from elfatt_sd.benchmarking.report import Results
from elfatt_sd.measure import Spread

TOKENS = (4096, 9216, 16384, 36864, 65536)


def growth(tokens: Sequence[int] = TOKENS, **options: Any) -> Results:
    """Time a layer at each size; see `layer`. The results have `exponents` as well."""
    results = layer(tokens=tokens, kind="growth", **options)
    results["exponents"] = make_exponents(results["groups"])
    return results


def make_exponents(groups: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, float] | None]]:
    """Fit the growth of each method's time with the tokens, for each part of a layer's results; see `fit_exponent`."""
    times: dict[str, dict[str, dict[int, Sequence[float]]]] = {}
    for group in groups:
        for name, taken in group["times"].items():
            if taken:
                times.setdefault(group["key"]["part"], {}).setdefault(name, {})[group["key"]["tokens"]] = taken
    return {part: {name: fit_exponent(own) for name, own in methods.items()} for part, methods in times.items()}


def fit_exponent(times: Mapping[int, Sequence[float]]) -> dict[str, float] | None:
    """Return median, least and greatest of the slope of time over tokens in double logarithm, over the rounds.

    Args:
        times: seconds in each round, by the number of tokens; rounds that not all sizes have are left out.

    Returns:
        None for fewer than two sizes.
    """
    if len(times) < 2:
        return None
    sizes = [math.log(tokens) for tokens in times]
    turns = zip(*times.values(), strict=False)
    slopes = (statistics.linear_regression(sizes, [math.log(taken) for taken in turn]).slope for turn in turns)
    return Spread.over(slopes)._asdict()


if __name__ == "__main__":
    parser = common.options(__doc__, "tokens", "batch", "repeats", "device", "dtype")
    parser.add_argument("--max-seconds", type=float, default=math.inf, help="leave out what may take longer for a call")
    chosen = parser.parse_args()
    given = {name: getattr(chosen, name) for name in ("batch", "repeats", "max_seconds", "device", "dtype")}
    common.run(chosen, growth, tokens=chosen.tokens or TOKENS, **given)

"""Names of what is timed, as tables and results show them."""

from __future__ import annotations

import re
from collections.abc import Collection

from elfatt_sd.benchmarking.presets import EXPLAINED
from elfatt_sd.methods import Softmax
from elfatt_sd.peers import PEERS

UNPATCHED, PEER, FLOOR, EXACT_THROUGH = "untouched", "tomesd", "floor", "exact, "
COMPILED, AUTOTUNED, KEPT = ", compiled", ", autotuned", ", freed memory kept"  # at the end of a name


def plain_name(name: str) -> str:
    return name.removesuffix(COMPILED).removesuffix(AUTOTUNED).removesuffix(KEPT)


def is_reference(name: str) -> bool:
    plain = plain_name(name)
    return plain == UNPATCHED or is_peer(plain) or plain.startswith((FLOOR, EXACT_THROUGH))


def is_peer(name: str) -> bool:
    return name.partition(":")[0] in PEERS


def differs_by_step(name: str) -> bool:
    return is_peer(name) and name.partition(":")[0] != PEER


_LEGEND = {  # by the names that it explains
    UNPATCHED: "`untouched` is the model with PyTorch's fused attention",
    Softmax.name: f"`{Softmax.name}` is PyTorch's fused attention",
    f"{PEER}.*": "`tomesd` is the package",
    **{f"{name}(:.*)?": f"`{name}` is that of {PEERS[name].package or 'diffusers'}" for name in PEERS if name != PEER},
    FLOOR: "`floor` leaves out the self-attention layers of the finest level",
    f"{EXACT_THROUGH}.*": "`exact, BACKEND` attends exactly in every self-attention layer, through that backend",
    "floor of .*": "`floor of N levels` leaves out those of the N finest levels",
    "floor: .*": "`floor: similarities` is the product that finds the most similar tokens, and nothing else",
    r"[\w-]+:.*=.*": "`METHOD:SETTING=VALUE` is a method with a setting changed; `ratio=0` merges nothing",
    f".*{COMPILED}": "`compiled` rows ran through `torch.compile`",
    f".*{AUTOTUNED}": "`autotuned` rows patch the layers that the method makes faster, as measured before",
    f".*{KEPT}": "`freed memory kept` rows ran in processes that called `elfatt_sd.keep_freed_memory`",
    **EXPLAINED,
}


def legend(names: Collection[str]) -> str:
    said = [text for pattern, text in _LEGEND.items() if any(re.fullmatch(pattern, name) for name in names)]
    return "; ".join(said) + "." if said else ""

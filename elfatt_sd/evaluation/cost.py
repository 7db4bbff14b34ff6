"""What each row computes, by multiply-adds: `cost.json`, worked out from the denoiser's layers, not measured."""

from __future__ import annotations

from typing import Any

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.protocols import Cell, Protocol
from elfatt_sd.evaluation.run import COST_FILE, Run
from elfatt_sd.files import write_json
from elfatt_sd.patch import plan
from elfatt_sd.running import rows_of


def write_cost(run: Run, pipe: Any) -> None:
    """Write the cost of all rows, unless it is there.

    Args:
        run: its protocol says what the rows are.
        pipe: its pipeline, not patched.
    """
    path = run.folder / COST_FILE
    if not path.is_file():
        rows = {cell.name: row_cost(pipe, run.protocol, cell) for cell in run.protocol.cells if not cell.peer}
        write_json(path, {"identity": run.protocol.identity, "rows": rows})


def row_cost(pipe: Any, protocol: Protocol, cell: Cell) -> dict[str, Any]:
    """Return what an image of a row takes.

    Returns:
        `density`: multiply-adds of the self-attention layers as a fraction of those of the untouched pipeline, averaged
        over the steps; `multiply_adds`: of all calls of the denoiser for one image, None where they cannot be counted;
        `reason`: why there are none, otherwise None.
    """
    frames = protocol.frames if protocol.frames > 1 else None
    try:
        found = plan(pipe, cell.config(), height=protocol.height, width=protocol.width, frames=frames)
        call = found.call
    except ElfattError as error:
        return {"density": None, "multiply_adds": None, "reason": str(error)}
    calls = protocol.steps * rows_of(pipe, protocol.guidance)
    density = found.multiply_adds_after / found.multiply_adds_before if found.multiply_adds_before else 1.0
    return {"density": density, "multiply_adds": None if call.after is None else call.after * calls, "reason": None}

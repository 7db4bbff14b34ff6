"""What each row computes, by multiply-adds: `cost.json`, worked out from the denoiser's layers, not measured."""

from __future__ import annotations

from typing import Any

from elfatt_sd.errors import ElfattError
from elfatt_sd.evaluation.images import load_protocol_pipeline
from elfatt_sd.evaluation.protocols import Cell, Protocol
from elfatt_sd.evaluation.records import Cost, is_whole
from elfatt_sd.evaluation.run import COST_FILE, Run
from elfatt_sd.files import write_json
from elfatt_sd.patch import plan
from elfatt_sd.running import rows_of


def write_cost(run: Run, pipe: Any = None) -> None:
    """Write the cost of all rows, unless it is there."""
    path, identity = run.folder / COST_FILE, run.record.identity
    if not is_whole(path, Cost, identity):
        rows = row_costs(run.protocol, load_protocol_pipeline(run.protocol) if pipe is None else pipe)
        write_json(path, {"identity": identity, "rows": rows})


def row_costs(protocol: Protocol, pipe: Any) -> dict[str, Any]:
    return {cell.name: row_cost(pipe, protocol, cell) for cell in protocol.cells if not cell.peer}


def row_cost(pipe: Any, protocol: Protocol, cell: Cell) -> dict[str, Any]:
    """Return what an image of a row takes."""
    frames = protocol.frames if protocol.frames > 1 else None
    try:
        found = plan(pipe, cell.config(), height=protocol.height, width=protocol.width, frames=frames)
        call = found.call
    except ElfattError as error:
        return {"density": None, "multiply_adds": None, "reason": str(error)}
    calls = protocol.steps * rows_of(pipe, protocol.guidance)
    density = found.multiply_adds_after / found.multiply_adds_before if found.multiply_adds_before else 1.0
    return {"density": density, "multiply_adds": None if call.after is None else call.after * calls, "reason": None}

"""What tuning found: the settings, how close and how fast they are on held-out images, and the curve they are on."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

from elfatt_sd.config import SETTINGS, PatchConfig, is_hub_id
from elfatt_sd.drawing.compare import BRIGHTER, difference, side_by_side
from elfatt_sd.errors import ElfattError, ElfattFailure, need, shortened
from elfatt_sd.evaluation.report.charts import BASE, INK, METHODS, drawing, figure_and_axes, legend_above, to_png
from elfatt_sd.evaluation.report.page import SIDE, data_uri, flatten, page_template, webp
from elfatt_sd.files import check_writable, write_file
from elfatt_sd.measure import times_as_fast
from elfatt_sd.patch import apply_patch, remove_patch
from elfatt_sd.phases import Phase, reused_steps, words_of_reuse
from elfatt_sd.toy import PROMPT
from elfatt_sd.tuning.model import Choice
from elfatt_sd.tuning.proof import Budget, Measure, Point, Proof, peak_of
from elfatt_sd.tuning.runs import png

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CHOSEN, _TRIED = METHODS[1], METHODS[5]
_MARKERS = {"elfatt": "o", "elfatt-fast": "s", "elfatt-quality": "^"}
Pipeline = TypeVar("Pipeline")
UNTOUCHED = PatchConfig("untouched")


@dataclass(frozen=True)
class Tuned:
    config: PatchConfig  # the settings; without phases where the pipeline is best left untouched
    budget: Budget  # what was asked for
    measure: Measure  # how closeness was measured
    proof: Proof | None  # of the settings, on held-out images; None where the pipeline is best left untouched
    nearest: Proof | None  # of the closest settings that were proved, whether or not they keep to the budget
    points: tuple[Point, ...]  # what was run, of the search and of the proofs; presets too
    curve: tuple[Choice, ...]  # the choices that were predicted to be best, from untouched to the fastest
    untouched_seconds: float  # of an untouched image
    floor: float  # closeness of two untouched images of one seed; infinity where the model repeats itself bit for bit
    images: float  # how many untouched images could have been drawn in the time that tuning took
    record: dict[str, Any]  # model, size, steps, device and versions, as plain data

    def apply(self, pipe: Pipeline) -> Pipeline:
        """Patch a pipeline with the settings; it is left untouched where that is best."""
        return apply_patch(pipe, self.config) if self.config.active else remove_patch(pipe)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the settings as JSON, for `--config` and `PatchConfig.load`."""
        self.config.save(path)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the settings as a folder with a card, for `apply_patch`, `--method` and the hub (extra `eval`)."""
        check_writable(Path(folder), f"folder={str(folder)!r}")
        self._write(Path(folder), Path(folder).absolute().name)

    def push_to_hub(self, repo_id: str, *, token: str | None = None, private: bool = False) -> str:
        """Write that folder as a repository of the hub, `owner/name`, and return its address."""
        from huggingface_hub import HfApi

        with TemporaryDirectory() as folder:
            self._write(Path(folder), repo_id)
            try:
                api = HfApi(token=token)
                address = str(api.create_repo(repo_id, private=private, exist_ok=True))
                api.upload_folder(repo_id=repo_id, folder_path=folder)
            except Exception as error:
                raise ElfattFailure(f"repo_id={repo_id!r} could not be written: {shortened(error)}") from error
        return address

    def _write(self, folder: Path, name: str) -> None:
        from huggingface_hub import ModelCard, ModelCardData

        need("the card of settings", "jinja2", "matplotlib")
        if (proof := self.proof) is None:
            raise ElfattError("the settings leave the pipeline untouched: there is nothing to share; ask for less.")
        model, first = self.config.origin["model"], proof.order[0]
        base = model if is_hub_id(model) else None
        data = ModelCardData(library_name="elfatt-sd", base_model=base, tags=["elfatt-sd", "diffusers"])
        card = ModelCard.from_template(data, str(Path(__file__).with_name("card.md.j2")), tuned=self, name=name)
        with drawing():
            plot = to_png(curve(self))
        drawn = [each[first].frames[0] for each in (proof.untouched, proof.tuned)]
        close = self.measure.words(proof.point.closeness[first])
        pair = side_by_side(drawn, [("untouched", ""), ("tuned", close)], proof.samples[first].prompt)
        for file, content in {"README.md": str(card).encode(), "curve.png": plot, "pair.png": png(pair)}.items():
            write_file(folder / file, content)
        self.config.save(folder / SETTINGS)  # last: with it the folder is whole

    def report(self, folder: str | os.PathLike[str]) -> Path:
        """Write a page with the curve, the map of the choices, and images side by side, and return its path."""
        need("the page of a tuning", "jinja2", "matplotlib")
        check_writable(Path(folder), f"folder={str(folder)!r}")
        with drawing():
            plot = to_png(curve(self))
        page, settings = Path(folder, "index.html"), Path(folder, SETTINGS)
        self.save(settings)
        config, steps, pairs = self.config, self.record["calls"], []
        if proof := self.proof:
            for number in proof.order:
                images = proof.untouched[number].frames[0], proof.tuned[number].frames[0]
                pairs.append((number, *(webp([each], SIDE) for each in (*images, difference(*images)))))
        plan, ends = reused_steps(config.reuse, steps), [(round(end * steps), end) for end in (0.0, *config.stretches)]
        text = page_template(Path(__file__).with_name("page.html.j2")).render(
            tuned=self,
            model=self.record["model"],
            lines=self.lines(),
            notes=self._notes(),
            peaks=[peak_of(proof.untouched), peak_of(proof.tuned)] if proof else [],
            plot=plot,
            data_uri=data_uri,
            pairs=pairs,
            brighter=BRIGHTER,
            settings=settings,
            prompt=PROMPT,
            quote=shlex.quote,
            layers=[(each.layers, config.for_layer(each.layers)) for each in config.per_layer] or [("all", config)],
            stretches=[(first, last, plan[first:last], end) for (first, _), (last, end) in itertools.pairwise(ends)],
            short=_short,
            facts=flatten(self.record),
        )
        write_file(Path(folder, "curve.png"), plot)
        write_file(page, text.encode("utf-8"))
        return page

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON; values that are not finite are null."""
        proof = self.proof and {
            **_point(self.proof.point),
            "promised": _finite(self.proof.bound),
            "confidence": self.proof.confidence,
            "lowest": _finite(self.proof.lowest),
            "excluded": self.proof.promise.excludes(len(self.proof.samples)),
            "samples": [sample._asdict() for sample in self.proof.samples],
        }
        return {
            "config": self.config.to_dict(),
            "asked": dataclasses.asdict(self.budget),
            "metric": self.measure.name,
            "proof": proof,
            "nearest": self.nearest and {**_point(self.nearest.point), "promised": _finite(self.nearest.bound)},
            "points": list(map(_point, self.points)),
            "untouched_seconds": self.untouched_seconds,
            "noise_floor": _finite(self.floor),
            "images": self.images,
            **self.record,
        }

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        words, proof, asked = self.measure.words, self.proof, f"asked for: {self.budget.words(self.measure)}"
        if proof is None:
            why = "no choice that is as close as asked was faster in the images that were drawn"
            if not any(choice.saved > 0 for choice in self.curve):
                why = "no approximation is faster than exact attention in any layer, at this size on this machine"
            lines = [f"untouched: {why}", asked]
            if near := self.nearest:
                lines.append(f"the nearest that can be promised: {near.words()}; {near.point.fast}")
        else:
            point, images = proof.point, len(proof.samples)
            phases = [phase for phase in self.config.all_phases if not phase.exact]
            kinds = sorted({phase.attention.name for phase in phases if not phase.dense})
            kinds += sorted({f"attention in {phase.attention_dtype}" for phase in phases if phase.attention_dtype})
            layers = f"{len(self.config.per_layer)} have settings of their own"
            if not self.config.per_layer:
                layers = f"all have the settings of {self.config.method}"
            sample, before, after = proof.samples[proof.order[0]], peak_of(proof.untouched), peak_of(proof.tuned)
            fast = "measured " * (not point.busy) + times_as_fast(point.speed, point.busy)
            if self.budget.speed is not None:
                fast += f", {proof.speed_bound:.2f} promised"
            memory = f"peak memory: {after / 2**30:.2f} GiB, untouched {before / 2**30:.2f} GiB"
            lines = [
                f"{point.name}: {proof.words()}; {fast}",
                asked,
                f"the farthest of {images} held-out images: {words(proof.lowest)} ({sample.prompt!r}, seed "
                f"{sample.seed}); at most {proof.promise.excludes(images):.0%} of all are farther",
                memory if before and after else "memory: not measured",
                f"layers: {layers} ({', '.join(kinds)})" if kinds else "layers: all exact",
                *words_of_reuse(self.config.reuse, self.record["calls"]),
            ]
        if self.points:
            lines.append(f"{'what was run':<16} {'times as fast':>13} {self.measure.name:>9} {'images':>6}")
        for point in sorted(self.points, key=lambda each: each.times):
            times = "busy" if point.busy else f"{point.times:.2f}"
            name = "★ " * (proof is not None and point is proof.point) + point.name
            lines.append(f"{name:<16} {times:>13} {point.mean:>9.{self.measure.digits}f} {len(point.closeness):>6}")
        return [*lines, *self._notes()]

    def _notes(self) -> list[str]:
        lines = [point.busy for point in self.points if point.busy][:1]
        if self.floor != math.inf:
            again = f"two untouched images of one seed have {self.measure.words(self.floor)}"
            lines.append(f"the model does not repeat itself: {again}")
        return [*lines, f"tuning took the time of {self.images:.0f} untouched images of {self.untouched_seconds:.2f} s"]


def _point(point: Point) -> dict[str, Any]:
    return {
        "name": point.name,
        "predicted_psnr": None if point.predicted is None else _finite(point.predicted),
        "closeness": list(map(_finite, point.closeness)),
        "speed": list(point.speed),
        "busy": bool(point.busy),
        "config": point.config.to_dict(),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def curve(tuned: Tuned) -> Figure:
    """Draw closeness over speed: what was run, with names in the legend as points may lie close, and the choice."""
    figure, axes = figure_and_axes(3.6, 4.6)
    proven = None if tuned.proof is None else tuned.proof.point
    shown = [point for point in tuned.points if point is not proven and math.isfinite(point.mean)]
    if own := [(point.times, point.mean) for point in shown if point.predicted is not None]:
        axes.plot(*zip(*own, strict=True), ".", color=_TRIED, label="tried choices")
    for point in shown:
        if point.predicted is None:
            axes.plot(point.times, point.mean, _MARKERS.get(point.name, "D"), color=BASE, label=point.name)
    if tuned.proof is not None and proven is not None and math.isfinite(proven.mean):
        far = abs(proven.mean - tuned.proof.bound)
        error = [[far], [0.0]] if tuned.measure.higher else [[0.0], [far]]
        span = [[proven.times - min(proven.speed)], [max(proven.speed) - proven.times]]
        style: dict[str, Any] = {"color": _CHOSEN, "markersize": 12, "linewidth": 1}
        axes.errorbar(proven.times, proven.mean, error, span, "*", label="chosen: mean, promised", **style)
    if tuned.budget.closeness is not None:
        axes.axhline(tuned.budget.closeness, color=INK, linewidth=0.8, linestyle=":", label="asked for")
    if tuned.budget.speed is not None:
        axes.axvline(tuned.budget.speed, color=INK, linewidth=0.8, linestyle=":", label="asked for")
    busy = any(point.busy for point in tuned.points)
    axes.set_xlabel(f"times as fast as untouched ({'machine busy: not to be trusted' if busy else 'right is better'})")
    better = "up" if tuned.measure.higher else "down"
    unit = f" in {tuned.measure.unit}" if tuned.measure.unit else ""
    axes.set_ylabel(f"{tuned.measure.name} to untouched{unit} ({better} is better)")
    legend_above(figure, axes)
    return figure


def _short(phase: Phase) -> str:
    if phase.dense:
        return phase.attention_dtype or "exact"
    keys = max(int(getattr(phase.attention, name, 0)) for name in ("keys", "block_size", "agents"))
    text = f"{phase.attention.name.replace('_', ' ')} {keys or ''}".strip()
    if phase.merge.ratio:
        text = f"merge {phase.merge.ratio:.0%}"
    rows = ", with guidance" * phase.residual_guidance
    return text + (f", shared by {phase.residual_steps}{rows}" if phase.residual_steps > 1 else "")

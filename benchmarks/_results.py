"""Figures of all engines, and the ratios between them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from _case import OURS, Unit, peer_of


@dataclass(frozen=True)
class Spread:
    """Median, least and largest of figures."""

    median: float
    least: float
    largest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one figure."""
        return cls(median(values), min(values), max(values))


@dataclass
class Scenario:
    """The figures of one line of the table, a list an engine, in order of the rounds."""

    group: str
    label: str
    unit: Unit
    engines: dict[str, list[float]] = field(default_factory=dict)

    def ratio(self, peer: str) -> Spread | None:
        """Ours against a peer's, round by round: above 1 ours is better. None without both."""
        pairs = list(zip(self.engines.get(OURS, ()), self.engines.get(peer, ()), strict=False))
        if peer == OURS or not pairs or not all(ours and theirs for ours, theirs in pairs):
            return None
        better = self.unit.more_is_better
        return Spread.of([ours / theirs if better else theirs / ours for ours, theirs in pairs])

    def shown(self) -> dict[str, str]:
        """Each peer's engine with the best median: a peer is quoted by its best setting."""
        best = max if self.unit.more_is_better else min
        settings: dict[str, list[str]] = {}
        for name in self.engines:
            settings.setdefault(peer_of(name), []).append(name)
        return {
            peer: best(names, key=lambda name: median(self.engines[name]))
            for peer, names in settings.items()
        }


@dataclass
class Results:
    """All that was measured, on what, and what could not be.

    Attributes:
        about: the machine, the model and the settings.
        versions: of each engine.
        notes: engines that are missing, failed, or cannot do something.
        scenarios: the figures, in the order in which they came.
    """

    about: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    scenarios: list[Scenario] = field(default_factory=list)

    def add(self, group: str, label: str, unit: Unit, engine: str, value: float) -> None:
        """Add one figure."""
        for scenario in self.scenarios:
            if (scenario.group, scenario.label) == (group, label):
                break
        else:
            scenario = Scenario(group, label, unit)
            self.scenarios.append(scenario)
        scenario.engines.setdefault(engine, []).append(value)

    def note(self, text: str) -> None:
        """Add a note, unless it is there."""
        if text not in self.notes:
            self.notes.append(text)

    def save(self, path: Path) -> None:
        """Write all of it as JSON, and which setting of each peer is shown."""
        scenarios = [{**vars(s), "unit": s.unit.value, "shown": s.shown()} for s in self.scenarios]
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**vars(self), "scenarios": scenarios}, indent=1, ensure_ascii=False)
        path.write_text(text + "\n", "utf-8")

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read what :meth:`save` wrote."""
        raw = json.loads(path.read_text("utf-8"))
        scenarios = [
            Scenario(s["group"], s["label"], Unit(s["unit"]), s["engines"])
            for s in raw.pop("scenarios")
        ]
        return cls(**raw, scenarios=scenarios)

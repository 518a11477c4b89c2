"""What a recipe measures and shows: numbers per step, time per phase, a curve."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["History", "save_curve", "table"]


@dataclass
class History:
    """One entry per step, and the seconds of each phase."""

    rewards: list[float] = field(default_factory=list)  # mean over the whole batch
    staleness: list[int] = field(default_factory=list)  # largest in the batch, in versions
    versions: list[int] = field(default_factory=list)  # after the step's sync
    clipped: list[float] = field(default_factory=list)  # share of tokens
    mismatch: float = 0.0  # of log-probabilities, rollout against trainer at the same version
    phases: dict[str, float] = field(default_factory=dict)
    groups: int = 0  # that came back from the workers
    dropped: int = 0  # of them, as too stale

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to phase `name`."""
        began = time.monotonic()
        yield
        self.phases[name] = self.phases.get(name, 0.0) + time.monotonic() - began


def table(history: History, seconds: float) -> str:
    """Time per phase, as text."""
    steps = len(history.rewards)
    rows = [f"{'phase':<18} {'seconds':>8} {'ms/step':>8} {'share':>6}"]
    rest = seconds - sum(history.phases.values())
    for name, spent in {**history.phases, "other": rest}.items():
        each = "" if name in ("start", "other") else f"{1000 * spent / steps:.1f}"
        rows.append(f"{name:<18} {spent:>8.2f} {each:>8} {spent / seconds:>6.0%}")
    rows.append(f"{'all':<18} {seconds:>8.2f}")
    return "\n".join(rows)


def save_curve(rewards: list[float], path: Path, *, title: str, chance: float) -> str:
    """Draw the reward curve; says what it did, or why it could not."""
    try:
        import matplotlib
    except ImportError:
        return "no reward curve: matplotlib is not installed (pip install matplotlib)"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(range(1, len(rewards) + 1), rewards)
    axes.axhline(chance, color="grey", linestyle=":", label="a random model")
    axes.set(xlabel="step", ylabel="mean reward of the batch", ylim=(0, 1.02), title=title)
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return f"reward curve: {path}"

"""The sweep file: its keys, and checks that report all problems at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

from pydantic import Field, StringConstraints, ValidationError

from configs.errors import ConfigError
from configs.load import leaves, read_yaml, schema_keys
from configs.schema import Section

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]  # part of a folder's name
Rates = Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(strict=False, min_length=1)]
Names = Annotated[tuple[Name, ...], Field(strict=False, min_length=1)]
Overrides = dict[str, Any]

# Keys that are determined by a cell's place in the grid, and by what.
OWNED_KEYS = {
    "optim.lr": "the grid's lrs",
    "run.seed": "the grid's seeds",
    "run.name": "the cell",
    "run.dir": "the sweep's dir and name",
    "run.resume": "the sweep, which always resumes",
    "run.init_from": "nothing: a cell starts from scratch",
    "train.stop_step": "nothing: a cell runs to train.steps",
}


class Pilot(Section):
    """How an arm's alpha is chosen: by final losses at these rates with one seed (measures.choose_alpha)."""

    alphas: dict[Name, Rates] = Field(min_length=1, description="arm -> candidates for its qk_control.alpha")
    lrs: Rates = Field(description="learning rates at which each candidate is tried")
    seed: int = Field(0, ge=0, description="the pilot's seed; cells that are also in the grid run once")


class Grid(Section):
    """Arms times learning rates times seeds, compared with each other."""

    about: str = Field("", description="a sentence for the report")
    overrides: Overrides = Field(default_factory=dict, description="configuration keys of all cells of this grid")
    arms: Names | None = Field(None, description="names of its arms; null: all")
    lrs: Rates = Field(description="base learning rates (optim.lr)")
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(strict=False, min_length=1, description="run.seed")
    pilot: Pilot | None = Field(None, description="how alpha is chosen; null: as set by the arms")


class Divergence(Section):
    """When a run counts as diverged and is stopped; a non-finite loss always does."""

    window: int = Field(20, ge=1, description="steps over which the training loss is averaged")
    margin: float = Field(
        1.0, gt=0, description="nats by which that mean may exceed the loss at the start, and the lowest such mean"
    )


class Timing(Section):
    """Timing of every arm: repeated short stretches, one arm after the other, with nothing else running."""

    rounds: int = Field(5, ge=1, description="stretches of each arm")
    steps: int = Field(40, ge=2, description="steps of a stretch")
    skip_steps: int = Field(10, ge=1, description="first steps of a stretch that are not counted")
    grids: Names | None = Field(None, description="grids whose arms are timed; null: all")


class Slurm(Section):
    """Options of the script that `--print-slurm` prints."""

    options: tuple[str, ...] = Field((), strict=False, description="options of sbatch, e.g. --gpus-per-node=8")
    setup: str = Field("", description="shell commands before the sweep, e.g. source .venv/bin/activate")
    max_running: int = Field(8, ge=1, description="cells that may run at once")


class Sweep(Section):
    """The sweep file."""

    name: Name | None = Field(None, description="name of the sweep's folder; default: the file's name")
    dir: str = Field("runs", min_length=1, description="folder that holds the sweep's folder")
    base: str = Field(min_length=1, description="configuration file of all cells, as given to train.py")
    overrides: Overrides = Field(default_factory=dict, description="configuration keys of all cells")
    arms: dict[Name, Overrides] = Field(min_length=1, description="name -> configuration keys, e.g. of qk_control")
    baseline: Name = Field("none", description="the arm with which the others are compared")
    grids: dict[Name, Grid] = Field(min_length=1, description="name -> grid; arms are compared within a grid")
    tolerance: float = Field(
        0.1, gt=0, description="nats by which a usable rate's final validation loss may exceed the grid's best"
    )
    divergence: Divergence = Field(default_factory=Divergence)
    timing: Timing | None = Field(default_factory=Timing, description="null: no timing")
    processes: int | None = Field(
        None, ge=1, description="cells that run at once; null: as many as fit on the cores or GPUs, with `ranks` each"
    )
    ranks: int = Field(1, ge=1, description="ranks of a cell, on one node")
    launcher: Literal["deepspeed", "torchrun"] = Field("deepspeed", description="starts cells of several ranks")
    slurm: Slurm = Field(default_factory=Slurm)

    @property
    def folder(self) -> Path:
        """The folder that holds the cells' folders and the report."""
        assert self.name is not None
        return Path(self.dir) / self.name

    def arms_of(self, grid: str) -> tuple[str, ...]:
        """Returns the names of a grid's arms in order."""
        return self.grids[grid].arms or tuple(self.arms)


def load_sweep(path: str | Path) -> Sweep:
    """Reads and checks a sweep file; the cells' configurations are checked by `launch.sweep.cells`.

    Raises:
        ConfigError: Has one line per problem.
    """
    tree = read_yaml(path)
    if tree.get("name") is None:
        tree["name"] = Path(path).stem
    try:
        sweep = Sweep.model_validate(tree)
    except ValidationError as error:
        items = error.errors()
        wrong = [item["loc"] for item in items]
        reported = [item for item in items if item["type"] != "too_short" or not _holds_any(item["loc"], wrong)]
        raise ConfigError([f"{path}: {_field_problem(item)}" for item in reported]) from None
    problems = [f"{path}: {problem}" for problem in _find_problems(sweep)]
    if problems:
        raise ConfigError(problems)
    return sweep


def flatten(overrides: Overrides) -> dict[str, Any]:
    """Returns dotted key -> value of a tree whose keys may be dotted already.

    A mapping with keys of the user's choice (data.val_sources) is one value, so that it replaces the base's mapping.
    """
    mappings = {key for key, field in schema_keys() if get_origin(field.annotation) is dict}
    return {key: value for key, value in leaves(overrides, whole=mappings) if key}


def _find_problems(sweep: Sweep) -> Iterator[str]:
    for name, grid in sweep.grids.items():
        arms = sweep.arms_of(name)
        yield from _unknown_arms(f"grids.{name}.arms", arms, tuple(sweep.arms))
        if sweep.baseline not in arms:
            yield f"grids.{name}: has no arm {sweep.baseline!r}, the baseline; its arms: {', '.join(arms)}"
        if grid.pilot is not None:
            yield from _unknown_arms(f"grids.{name}.pilot.alphas", tuple(grid.pilot.alphas), arms)
    timing = sweep.timing
    if timing is not None:
        if timing.skip_steps >= timing.steps:
            yield f"timing.skip_steps: {timing.skip_steps} is not below timing.steps={timing.steps}"
        for name in timing.grids or ():
            if name not in sweep.grids:
                yield f"timing.grids: {name!r} is not a grid; known: {', '.join(sweep.grids)}"
    places = {"overrides": sweep.overrides}
    places |= {f"grids.{name}.overrides": grid.overrides for name, grid in sweep.grids.items()}
    places |= {f"arms.{name}": overrides for name, overrides in sweep.arms.items()}
    for place, overrides in places.items():
        for key in OWNED_KEYS.keys() & flatten(overrides).keys():
            yield f"{place}.{key}: cannot be set here; it comes from {OWNED_KEYS[key]}"


def _unknown_arms(key: str, arms: tuple[str, ...], known: tuple[str, ...]) -> Iterator[str]:
    for arm in arms:
        if arm not in known:
            yield f"{key}: {arm!r} is not an arm; known: {', '.join(known)}"


def _holds_any(place: tuple[int | str, ...], wrong: Iterable[tuple[int | str, ...]]) -> bool:
    """Returns whether a wrong place is inside `place`: a list whose entries are all wrong is also reported as empty."""
    return any(other[: len(place)] == place and other != place for other in wrong)


def _field_problem(error: Any) -> str:
    key = ".".join(str(part) for part in error["loc"] if part != "[key]")
    if error["type"] == "extra_forbidden":
        known = {name.rpartition(".")[2]: name for name, _ in schema_keys(Sweep)}
        near = difflib.get_close_matches(str(error["loc"][-1]), known, n=1, cutoff=0.7)
        return f"{key}: unknown key" + (f"; did you mean {near[0]}?" if near else "")
    if error["type"] == "missing":
        return f"{key}: is required"
    if error["type"] == "too_short":
        return f"{key}: is empty; expected at least one entry"
    if error["type"] == "tuple_type":
        return f"{key}: {error['input']!r} is not a list"
    if error["type"] in ("model_type", "dict_type"):
        return f"{key}: {error['input']!r} is not a mapping of keys"
    message = error["msg"].removeprefix("Input should be ")
    return f"{key}: {error['input']!r} is not allowed; expected {message}"

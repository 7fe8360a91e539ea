"""The recipes that `skerry init --from` writes: the scripts in `skerry/runtime/recipes`, as they are tested."""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING, Final

from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

PLAIN: Final = "loop"
# The file of each recipe, the shortest way to begin first.
FILES: Final = {
    PLAIN: "loop.py",
    "hf": "hf_trainer.py",
    "lightning": "lightning_trainer.py",
    "torchft": "from_torchft.py",
    "torchtitan": "from_torchtitan.py",
    "data-loader": "resumable_data_loader.py",
    "schedule": "schedule.py",
    "mixed-precision": "mixed_precision.py",
    "tensorboard": "tensorboard_metrics.py",
    "wandb": "wandb_metrics.py",
}


def script_of(recipe: str) -> str:
    """Return the training script of a recipe. Raises Invalid for an unknown one."""
    if recipe not in FILES:
        raise Invalid(f"no recipe {recipe!r}; choose one of {', '.join(FILES)}")
    return (folder() / FILES[recipe]).read_text()


def folder() -> Traversable:
    """The folder of the recipes in the installed package."""
    return resources.files("skerry.runtime") / "recipes"

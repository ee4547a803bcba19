"""The typed config of one run, and the part of it that identifies the run."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    field_serializer,
)

# Parts of a task that are top-level keys of the config, to be short to type: data.limit=2000.
PARTS = ("data", "model", "trainer")

Scale = Literal["paper", "desktop", "laptop", "smoke"]
SCALES = get_args(Scale)  # the largest first

GPU_MEMORY = 1.0  # GiB that a run needs on a GPU, if its experiment does not say it

# Keys that do not change the results of a run: runs that differ only in these are the same run.
OUTSIDE_IDENTITY = {
    "seed", "device", "threads", "tracking", "results", "published", "records", "force",
    "cpu_scale", "cpu_threads", "checkpoint_every", "deterministic", "metrics", "best",
    "runs_per_gpu", "gpu_memory",
}  # fmt: skip

# Keys of a node that are not arguments of its class or function. `_version_` is ours: increase it
# when the code computes different numbers, so that runs of the old code are not reused.
SPECIAL_KEYS: dict[str, Any] = {
    "_target_": str,
    "_version_": PositiveInt,
    "_partial_": bool,
    "_convert_": Literal["none", "partial", "object", "all"],
    "_recursive_": bool,
}


class Tracking(BaseModel):
    """Where a tracker stores its copy of the record."""

    model_config = ConfigDict(extra="forbid")
    mode: Literal["auto", "online", "offline", "tensorboard", "off"]
    project: str = "adashift"  # of W&B
    entity: str | None = None


class Config(BaseModel):
    """The resolved settings of one run."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    experiment: str
    optimizer_name: str
    scale: Scale
    cpu_scale: Literal["paper", "desktop", "laptop"]
    cpu_threads: PositiveInt | None = None  # what an experiment requests; `threads` is what it gets
    metrics: list[str] = []  # what the experiment records, the main one first; * is any text
    best: Literal["highest", "lowest"] | None = None  # of the main metric; None: neither
    steps: PositiveInt | None  # None: decided by the epochs of the task
    log_every: PositiveInt | None  # None: every epoch
    schedule: dict[str, Any] | None = None  # a factor of the learning rate; None: 1
    task: dict[str, Any]
    optimizer: dict[str, Any]
    seed: Annotated[int, Field(ge=0, lt=2**32)]
    device: Annotated[
        str,
        Field(
            pattern=r"^(auto|cpu|cuda(:\d+)?|mps)$",
            description="auto, cpu, cuda, cuda:1 (a number) or mps",
        ),
    ]
    threads: Annotated[int, Field(ge=1, le=256)] | None  # on a CPU; None: all
    tracking: Tracking
    results: Path
    published: Path
    records: Literal["own", "published", "all"]
    force: bool
    checkpoint_every: NonNegativeFloat  # seconds
    deterministic: bool | None = None  # None: true on a CPU, where it costs nothing
    speed: Literal["exact", "fast"] = "exact"  # fast: rounds differently, so it is another run
    runs_per_gpu: Annotated[
        str,
        BeforeValidator(str),
        Field(pattern=r"^(auto|[1-9]\d*)$", description="auto or a whole number that is 1 or more"),
    ] = "auto"
    gpu_memory: PositiveFloat = GPU_MEMORY

    @field_serializer("schedule", "task", "optimizer", when_used="json")
    def with_named_constants(self, node: Any) -> Any:
        """Write inf as "inf", which is read as a number again: JSON has no inf."""
        return json.loads(json.dumps(node), parse_constant=lambda name: str(float(name)))

    def identity(self) -> dict[str, Any]:
        """The part of the config that determines the results."""
        usual = {"speed"} if self.speed == "exact" else set()
        values = self.model_dump(mode="json", exclude=OUTSIDE_IDENTITY | usual)
        return {key: value for key, value in values.items() if value is not None}

    @property
    def shown_scale(self) -> str:
        """The scale, marked if the run is not exact."""
        return self.scale if self.speed == "exact" else f"fast {self.scale}"

    def digest(self) -> str:
        text = json.dumps(canonical(self.identity()), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


def canonical(node: Any) -> Any:
    """Return the canonical form of a node: equal for two nodes that describe the same thing.

    It has the name and version of a class or function, not its module, so that a module can move
    without changing the identity of its runs. 0 and 0.0 are the same setting.

    >>> canonical({"_target_": "torch.optim.Adam", "_partial_": True, "lr": 1})
    {'_target_': 'Adam', '_version_': 1.0, 'lr': 1.0}
    """
    if isinstance(node, dict):
        settings = {
            key: canonical(value)
            for key, value in node.items()
            if key not in SPECIAL_KEYS and (key, value) != ("fused", None)  # the class's default
        }
        if "_target_" not in node:
            return settings
        name = str(node["_target_"]).rpartition(".")[2]
        version = canonical(node.get("_version_", 1))
        return {"_target_": name, "_version_": version, **settings}
    if isinstance(node, list):
        return [canonical(value) for value in node]
    exact = isinstance(node, int) and not isinstance(node, bool) and abs(node) < 2**53
    return float(node) if exact else node


def leaves(node: dict[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a nested dictionary: dotted key → value."""
    flat: dict[str, Any] = {}
    for key, value in node.items():
        inner = isinstance(value, dict)
        flat |= leaves(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return flat

"""The typed schema of conf/: a typo or a wrong type stops before anything is trained."""

from __future__ import annotations

import copy
import difflib
import hashlib
import importlib
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import traceback
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import hydra.utils
from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveInt,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
)

ROOT = Path(__file__).resolve().parent.parent
CONF = ROOT / "conf"
LONGEST = 80  # characters of a value in a message
GUESSABLE = ("experiment", "optimizer", "tracking")

# Parts of a task that stand at the top of the config, short to type: data.limit=2000.
PARTS = ("data", "model", "trainer")

# What a config node becomes when it is called, and nothing else, makes two runs the same run.
OUTSIDE_IDENTITY = {
    "seed", "device", "threads", "tracking", "results", "published", "records", "force",
    "cpu_scale", "cpu_threads", "checkpoint_every", "deterministic",
}  # fmt: skip


# The keys of a node that are not arguments of its class or function. `_version_` is ours: raise it
# when the code computes other numbers, so that runs of the old code are not taken for new ones.
FLAGS: dict[str, Any] = {
    "_target_": str,
    "_version_": PositiveInt,
    "_partial_": bool,
    "_convert_": Literal["none", "partial", "object", "all"],
    "_recursive_": bool,
}


class ConfigError(Exception):
    """A request that cannot be run. The message is one line: the key, what is wrong, the cure."""


class NotPublishedError(ConfigError):
    """A product whose runs are not all published, where only published ones may be used."""


class Tracking(BaseModel):
    """Where W&B keeps its copy of the record."""

    model_config = ConfigDict(extra="forbid")
    mode: Literal["auto", "online", "offline", "off"]
    project: str
    entity: str | None


class Config(BaseModel):
    """One training run, resolved: every number in it is the number that is used."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    experiment: str
    optimizer_name: str
    scale: Literal["paper", "laptop", "smoke"]
    cpu_scale: Literal["paper", "laptop"]
    cpu_threads: PositiveInt | None = None  # what an experiment asks for; `threads` is what it gets
    steps: PositiveInt | None  # None: what the task says, which counts in epochs
    log_every: PositiveInt | None  # None: every epoch
    schedule: dict[str, Any] | None = None  # a factor of the learning rate; None: 1
    task: dict[str, Any]
    optimizer: dict[str, Any]
    seed: Annotated[int, Field(ge=0, lt=2**32)]
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?|mps)$")]
    threads: Annotated[int, Field(ge=1, le=256)] | None  # of a CPU; None: all
    tracking: Tracking
    results: Path
    published: Path
    records: Literal["own", "published", "all"]
    force: bool
    checkpoint_every: NonNegativeFloat  # seconds
    deterministic: bool | None = None  # None: on a CPU, where it costs nothing

    def identity(self) -> dict[str, Any]:
        """The part of the config that decides what comes out."""
        values = self.model_dump(mode="json", exclude=OUTSIDE_IDENTITY)
        return {key: value for key, value in values.items() if value is not None}

    def digest(self) -> str:
        text = json.dumps(canonical(self.identity()), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


def canonical(node: Any) -> Any:
    """What two nodes have in common if they describe the same thing.

    A class or function counts by its name and version: a module can move and keep its runs.
    0 and 0.0 are the same setting.

    >>> canonical({"_target_": "torch.optim.Adam", "_partial_": True, "lr": 1})
    {'_target_': 'Adam', '_version_': 1.0, 'lr': 1.0}
    """
    if isinstance(node, dict):
        settings = {key: canonical(value) for key, value in node.items() if key not in FLAGS}
        if "_target_" not in node:
            return settings
        name = str(node["_target_"]).rpartition(".")[2]
        version = canonical(node.get("_version_", 1))
        return {"_target_": name, "_version_": version, **settings}
    if isinstance(node, list):
        return [canonical(value) for value in node]
    exact = isinstance(node, int) and not isinstance(node, bool) and abs(node) < 2**53
    return float(node) if exact else node


def has_gpu() -> bool:
    """Whether a CUDA device is at hand, without importing torch (figures are drawn without it)."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not hidden and shutil.which("nvidia-smi") is not None


def count_gpus() -> int:
    """Of this process, as CUDA_VISIBLE_DEVICES allows, without importing torch."""
    if not has_gpu():
        return 0
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return len(visible.split(","))
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return len(listed.stdout.splitlines())


def jobs_at_once(threads: int | None) -> int:
    """How many runs this machine takes: one for each GPU, else as many as the cores serve."""
    return count_gpus() or max(1, (os.cpu_count() or 1) // (threads or 1))


def at_scale(paper: Any, laptop: Any, smoke: Any, *, _root_: DictConfig) -> Any:
    """`${at_scale:50,6,1}` in a YAML file: the value at paper, laptop and smoke scale."""
    value = {"paper": paper, "laptop": laptop, "smoke": smoke}[_root_.scale]
    return OmegaConf.create(value) if isinstance(value, list) else value  # --resolve wants nodes


def choices_of(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


OmegaConf.register_new_resolver("at_scale", at_scale, replace=True)
OmegaConf.register_new_resolver("root", lambda: str(ROOT), replace=True)
OmegaConf.register_new_resolver("choices", lambda group: " ".join(choices_of(group)), replace=True)
OmegaConf.register_new_resolver("jobs_at_once", jobs_at_once, replace=True)
OmegaConf.register_new_resolver("cores_of_a_job", lambda threads: threads or 1, replace=True)
OmegaConf.register_new_resolver("gpus_of_a_job", lambda: min(1, count_gpus()), replace=True)


def compose(overrides: Sequence[str]) -> Config:
    """The config of one run, from overrides as typed on the command line of `run.py`.

    >>> compose(["experiment=counterexample_stochastic", "optimizer=adam"]).steps
    10000000
    """
    with one_line_errors(), config_source() as loader:
        words = [parsed(word) for word in overrides]
        loader.validate_sweep_overrides_legal(words, RunMode.RUN, from_shell=False)
        groups = [word for word in words if chooses_a_file(word, loader)]
        chosen, choices = choose(tuple(str(word.input_line) for word in groups))
        cfg = copy.deepcopy(chosen)
        values = [word for word in words if word not in groups]
        loader._apply_overrides_to_config(values, cfg)
        return resolve(cfg, choices)


class Files(CachingConfigRepository):
    """The files of conf/, each of which is parsed once in a process."""

    def load_config(self, config_path: str) -> ConfigResult | None:
        return copy.deepcopy(super().load_config(config_path))  # Hydra merges into what it is given


FILES: dict[Path, Files] = {}


@cache
def parsed(word: str) -> Override:
    return OverridesParser.create().parse_overrides([word])[0]


def chooses_a_file(word: Override, loader: ConfigLoaderImpl) -> bool:
    """Whether an override names a file of conf/, as optimizer=adam does."""
    return loader.repository.group_exists(word.key_or_group) and not isinstance(word.value(), dict)


@cache
def choose(groups: tuple[str, ...]) -> tuple[DictConfig, dict[str, Any]]:
    """What the chosen files say, and which they are.

    Hydra's own `compose` loads its settings of logging and launching each time, which takes
    eight times as long, and a figure or a status composes hundreds of runs.
    """
    with config_source() as loader:
        files = FILES.setdefault(CONF, Files(loader.repository))
        words = [parsed(word) for word in groups]
        defaults = create_defaults_list(
            files, "config", words, prepend_hydra=False, skip_missing=False
        )
        cfg = loader._compose_config_from_defaults_list(defaults.defaults, files)
        OmegaConf.set_struct(cfg, True)
        return cfg, defaults.overrides.known_choices


@cache
def sweep_points(name: str) -> list[list[str]]:
    """The overrides of every run of `run.py -m sweep=<name>`.

    >>> sweep_points("lr")[0]
    ['optimizer.lr=0.0001']
    """
    path = CONF / "sweep" / f"{name}.yaml"
    if not path.exists():
        raise ConfigError(
            f"sweep={name} is unknown: choose one of {', '.join(choices_of('sweep'))}"
        )
    with one_line_errors():
        sweeper = OmegaConf.load(path).sweeper
        params = [f"{key}={values}" for key, values in sweeper.get("params", {}).items()]
        return expand(params, sweeper.get("points", []))


def expand(words: Sequence[str], points: Sequence[str] = ()) -> list[list[str]]:
    """The overrides of every run: each point with the product of all that the words list.

    >>> expand(["seed=0,1"], ["optimizer.n=5 optimizer.m=1", "optimizer.n=9 optimizer.m=2"])[1]
    ['optimizer.n=5', 'optimizer.m=1', 'seed=1']
    """
    overrides = OverridesParser.create().parse_overrides(list(words))
    (product,) = BasicSweeper.split_arguments(overrides, max_batch_size=None)
    return [[*shlex.split(point), *rest] for point in points or [""] for rest in product]


@contextmanager
def config_source() -> Iterator[ConfigLoaderImpl]:
    """Hydra's loader of conf/, which is already open inside run.py."""
    if GlobalHydra.instance().is_initialized():
        yield cast(ConfigLoaderImpl, GlobalHydra.instance().config_loader())
        return
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield cast(ConfigLoaderImpl, GlobalHydra.instance().config_loader())


def resolve(cfg: DictConfig, choices: dict[str, Any]) -> Config:
    """Fill in names and scale, check every type and range; `cfg` is changed."""
    OmegaConf.set_struct(cfg, False)
    if (several := cfg.pop("runs", None)) is not None:
        raise ConfigError(f"runs={several} is more than one run: it needs run.py -m")
    cfg.experiment, cfg.optimizer_name = choices["experiment"], choices["optimizer"]
    if cfg.scale == "auto":
        # Published results are the same everywhere, whatever this machine could train.
        cfg.scale = "paper" if has_gpu() and cfg.records != "published" else cfg.cpu_scale
    values = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(values, dict)
    refuse_missing(values)
    values["results"] = folder_of("results", values["results"], ROOT / "results")
    values["published"] = folder_of("published", values["published"], ROOT / "results/published")
    move_parts(values)
    config = Config.model_validate(values)
    check_ranges(config.optimizer)
    return config


def move_parts(values: dict[Any, Any]) -> None:
    """Put the parts of the task where they belong."""
    for part in PARTS:
        if part not in values:
            continue
        if part in values["task"]:
            raise ConfigError(f"task.{part} is an unknown key: {part} stands at the top, {part}.…=")
        values["task"][part] = values.pop(part)


def folder_of(key: str, given: Any, usual: Path) -> Path:
    """The folder that the user names, relative to the current one; else the usual one."""
    if given is None:
        return usual
    if not str(given).strip():
        raise ConfigError(f"{key}= is empty: name a folder, or leave it out")
    return Path(str(given)).expanduser().absolute()


def refuse_missing(values: dict[Any, Any]) -> None:
    missing = sorted(key for key, value in leaves(values).items() if value == "???")
    if missing:
        raise ConfigError(
            f"{missing[0]} has no value: there is no conf/tuned/{values['experiment']}/"
            f"{values['optimizer_name']}.yaml that sets it; add that file or pass {missing[0]}=…"
        )


def leaves(node: dict[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key → value."""
    flat: dict[str, Any] = {}
    for key, value in node.items():
        inner = isinstance(value, dict)
        flat |= leaves(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return flat


# What every optimizer agrees on, so that the message can name the key and the cure; whatever else
# an optimizer refuses is reported in its own words.
RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "lr": (lambda x: x >= 0, "a number that is 0 or more"),
    "betas": (lambda x: len(x) == 2 and all(0 <= b <= 1 for b in x), "two numbers in [0, 1)"),
    "eps": (lambda x: x >= 0, "a number that is 0 or more"),
    "momentum": (lambda x: x >= 0, "a number that is 0 or more"),
    "n": (lambda x: x >= 1, "a whole number that is 1 or more"),
}


LARGEST = (
    1e20  # torch cannot multiply a float32 tensor by what is far above; the rest is for 1/(1−β)
)


def check_ranges(optimizer: dict[str, Any]) -> None:
    for name, value in optimizer.items():
        parts = value if isinstance(value, list) else [value]
        if any(isinstance(x, int | float) and not abs(x) <= LARGEST for x in parts):
            raise ConfigError(
                f"optimizer.{name}={shown(value)} is refused: give a number up to {LARGEST:g}"
            )
    for name, (fits, wanted) in RANGES.items():
        value = optimizer.get(name)
        if value is None:
            continue
        try:
            good = fits(value)
        except TypeError:
            good = False
        if not good:
            raise ConfigError(f"optimizer.{name}={shown(value)} is refused: give {wanted}")


def build(node: dict[str, Any], key: str, **extra: Any) -> Any:
    """Make the object that a config node describes; a bad argument is named by its key."""
    checked = check_call(node, key, extra)
    try:
        return hydra.utils.instantiate(checked, **extra)
    except HydraException as error:
        if isinstance(error.__cause__, OSError):  # data or disk: no setting is to blame
            raise error.__cause__ from None
        raise ConfigError(f"{key}: {last_line(error.__cause__ or error)}") from error


def check_call(node: dict[str, Any], key: str, extra: dict[str, Any]) -> dict[str, Any]:
    """The node with every argument in the type that its `_target_` asks for, or a refusal."""
    checked = {k: as_type(f"{key}.{k}", node[k], hint) for k, hint in FLAGS.items() if k in node}
    checked.pop("_version_", None)  # Hydra would pass it on
    if "_target_" not in checked:
        raise ConfigError(f"{key}._target_ is missing: name the class or function")
    target = find(checked["_target_"], key)
    parameters = inspect.signature(target).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    hints = type_hints(target)
    for name, value in node.items():
        if name in FLAGS:
            continue
        if name not in parameters and not takes_any:
            raise ConfigError(
                f"{key}.{name} is unknown: {node['_target_']} takes "
                f"{', '.join(p for p in parameters if p not in extra and p != 'params')}"
            )
        if isinstance(value, dict) and "_target_" in value:
            checked[name] = check_call(value, f"{key}.{name}", {})
        else:
            checked[name] = as_type(f"{key}.{name}", value, hints.get(name, Any))
    return checked


def find(path: str, key: str) -> Any:
    """The class or function with a dotted name."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{key}._target_={path} cannot be imported: {error}") from error


def type_hints(target: Any) -> dict[str, Any]:
    try:
        function = target.__init__ if inspect.isclass(target) else target
        return typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError):  # a hint that only its own module's type checker can read
        return {}


def as_type(key: str, value: Any, hint: Any) -> Any:
    try:
        adapter = TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
        return adapter.validate_python(value)
    except PydanticUserError as error:  # the hint is a class of ours
        raise ConfigError(f"{key}={shown(value)} is refused: its _target_ is missing") from error
    except ValidationError as error:
        problem = error.errors()[0]
        raise ConfigError(f"{key}={shown(value)} is refused: {problem['msg'].lower()}") from error


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn what Hydra, OmegaConf and pydantic say into a ConfigError of one line."""
    try:
        yield
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"]))
        value = shown(problem["input"])
        if problem["type"] == "extra_forbidden":
            raise ConfigError(f"{key} is an unknown key; known are {known_keys()}") from error
        if problem["type"] == "missing":
            raise ConfigError(f"{key} has no value: give {key}=…") from error
        raise ConfigError(f"{key}={value} is refused: {problem['msg'].lower()}") from error
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(str(error))) from error
    except MemoryError as error:
        raise ConfigError(f"memory is not enough: {last_line(error)}") from error
    except Exception as error:
        if "Config group override" in str(error):
            raise ConfigError(
                "experiment, optimizer, scale and tracking cannot be null: name one of their files"
            ) from error
        if isinstance(error, RuntimeError) and "memory" in str(error):  # torch's own
            raise ConfigError(f"memory is not enough: {last_line(error)}") from error
        if not raised_by_hydra(error):
            raise
        raise ConfigError(f"cannot read the arguments: {last_line(error)}") from error


def raised_by_hydra(error: BaseException) -> bool:
    """Whether it comes from inside of Hydra, which trips over some arguments."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    module = str(frame.f_globals.get("__name__"))
    return module.split(".")[0] in ("hydra", "omegaconf", "antlr4")


def explain(text: str) -> str:
    """One line with the cure for what Hydra spreads over many."""
    launcher = re.search(r"'hydra/launcher/(\w+)'|hydra/launcher=(\w+)", text)
    if launcher:
        return "this engine's launcher is not installed: make setup-cluster"
    unknown_choice = re.search(r"Could not find '([\w-]+)/([^']+)'", text)
    if unknown_choice:
        group, choice = unknown_choice.groups()
        return f"{group}={choice} is unknown: choose one of {', '.join(choices_of(group))}"
    unknown_key = re.search(r"Could not override '([^']+)'", text)
    if unknown_key:
        key = unknown_key.group(1)
        add = f" (+{key}=… adds a key that its class takes)" if "." in key else ""
        return f"{key} is an unknown key{guess(key)}{add}"
    line = " ".join(text.split("\n")[0].split())
    return f"cannot read an argument: {line}" if "override_grammar" in text else line


def known_keys() -> str:
    return ", ".join(sorted({*Config.model_fields, *PARTS} - {"optimizer_name"}))


def guess(key: str) -> str:
    """A near miss among the names that appear in conf/."""
    names = set(Config.model_fields)
    for path in (p for group in GUESSABLE for p in (CONF / group).glob("*.yaml")):
        names.update(re.findall(r"^\s*(?:- )?([A-Za-z]\w*):", path.read_text(), re.MULTILINE))
    if key in names:
        return f" here: +{key}=… adds it"
    near = difflib.get_close_matches(key.split(".")[-1], names, n=1)
    return f": did you mean {near[0]}?" if near else f"; known at the top are {known_keys()}"


def last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def shown(value: Any) -> str:
    text = json.dumps(value, default=str).strip('"')
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"

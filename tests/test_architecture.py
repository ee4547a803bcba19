"""The allowed imports between packages, as in docs/design.md."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# package or module → what it may import from this repository; a name covers its submodules
ARROWS = {
    "run": {
        "experiments.config", "experiments.progress", "experiments.products.specs",
        "experiments.products.summaries", "experiments.records", "experiments.training",
    },
    "hydra_plugins": {
        "experiments.config", "experiments.products.specs", "experiments.products.sweep_table",
        "experiments.records", "experiments.training.scheduler", "experiments.training.slurm",
    },
    "benchmarks": {"adashift", "benchmarks", "experiments"},
    "experiments.__main__": {
        "experiments.config", "experiments.products", "experiments.records",
        "experiments.training.scheduler", "experiments.training.signals",
        "experiments.training.torchrun",
    },
    "experiments.products": {
        "experiments.config", "experiments.products", "experiments.progress",
        "experiments.records",
    },
    "experiments.products.make": {
        "experiments.config", "experiments.products", "experiments.records",
        "experiments.training.pool",
    },
    "experiments.products.plan": {
        "experiments.config", "experiments.products", "experiments.progress",
        "experiments.records", "experiments.training.costs",
    },
    "experiments.products.verify": {
        "experiments.config", "experiments.records", "experiments.training.pool",
        "experiments.training.scheduler",
    },
    "experiments.training.pool": {
        "experiments.config", "experiments.data.files", "experiments.records",
        "experiments.training",
    },
    "experiments.training.scheduler": {
        "experiments.config", "experiments.progress", "experiments.records",
        "experiments.training.forecast", "experiments.training.watch",
    },
    "experiments.training.forecast": {
        "experiments.config", "experiments.progress", "experiments.records",
    },
    "experiments.training.watch": {
        "experiments.config", "experiments.progress", "experiments.records",
    },
    "experiments.training": {
        "experiments.config", "experiments.progress", "experiments.records", "experiments.task",
        "experiments.training",
    },
    "experiments.training.collectives": set(),
    "experiments.records": {"experiments.config", "experiments.records"},
    "experiments.config": {"experiments.config"},
    "experiments.tasks": {
        "adashift", "experiments.data", "experiments.models", "experiments.task",
        "experiments.tasks", "experiments.training.collectives",
    },
    "experiments.task": set(),
    "experiments.schedules": set(),
    "experiments.progress": set(),
    "experiments.models": {"experiments.models"},
    "experiments.data": {"experiments.data", "experiments.progress"},
    "experiments": set(),
    "adashift.analysis.theory": set(),
    "adashift": {"adashift"},
}  # fmt: skip

# third-party package → the only modules that may import it
KEPT_IN = {
    "torch": {
        "adashift", "benchmarks", "experiments.data", "experiments.models", "experiments.task",
        "experiments.tasks", "experiments.training",
    },
    "torchvision": {"benchmarks", "experiments.data", "experiments.models"},
    "wandb": {"experiments.records.tracking.wandb"},
    "tensorboard": {"experiments.records.tracking.tensorboard"},
    "wandb_workspaces": {"experiments.products.dashboard"},
    "matplotlib": {"benchmarks", "experiments.products.figures"},
    "hydra": {"run", "hydra_plugins", "experiments.config"},
}  # fmt: skip


# formulas need no torch, nor does a process that only starts others
NEVER = {
    "adashift.analysis.theory": {"torch"},
    "experiments.training.forecast": {"torch"},
    "experiments.training.scheduler": {"torch"},
    "experiments.training.watch": {"torch"},
}


def covers(name: str, module: str) -> bool:
    return module == name or module.startswith(name + ".")


def rule_of(module: str) -> str | None:
    """The longest name in ARROWS that covers the module."""
    return max((name for name in ARROWS if covers(name, module)), key=len, default=None)


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def read_sources() -> dict[str, str]:
    """Module name → source of every module."""
    folders = ("adashift", "experiments", "benchmarks", "hydra_plugins")
    paths = [ROOT / "run.py", *(path for name in folders for path in (ROOT / name).rglob("*.py"))]
    return {module_name(path): path.read_text() for path in paths}


SOURCES = read_sources()


def imports(source: str) -> Iterator[str]:
    """Every imported name, at the top or inside a function, except imports for type checking."""
    tree = ast.parse(source)
    for_types = [
        n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)
    ]
    skipped = {id(inner) for outer in for_types for inner in ast.walk(outer)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "write absolute imports"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def broken_arrows(module: str, source: str) -> list[str]:
    found, rule = [], rule_of(module)
    for name in imports(source):
        package = name.split(".")[0]
        if package in ("run", "experiments", "adashift", "benchmarks"):
            if rule is None or not any(covers(ok, name) for ok in ARROWS[rule]):
                found.append(f"{module} → {name}")
        elif package in NEVER.get(module, ()) or not any(
            covers(ok, module) for ok in KEPT_IN.get(package, {module})
        ):
            found.append(f"{module} → {name}")
    return found


def test_every_import_is_allowed():
    for module, source in SOURCES.items():
        assert broken_arrows(module, source) == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("adashift.optimizer", "import experiments.config"),
        ("adashift.analysis.theory", "import torch"),
        ("adashift._spatial", "import hydra"),
        ("experiments.products.figures", "from experiments.training.loop import train"),
        ("experiments.products.claims", "def late():\n    import torch"),
        ("experiments.tasks.lemmas", "from experiments.records.record import Record"),
        ("experiments.records.index", "from experiments.products import specs"),
        ("experiments.training.execute", "from experiments.products import specs"),
        ("experiments.products.report", "from benchmarks import common"),
        ("experiments.task", "import wandb"),
        ("experiments.new_module", "from experiments.tasks import lemmas"),
    ],
)
def test_a_forbidden_import_is_found(module, line):
    assert len(broken_arrows(module, f"{SOURCES.get(module, '')}\n{line}\n")) == 1


def test_python_names_no_config_files_except_the_specs():
    """conf/ names Python objects; Python code reads only conf/figure, table, claim and plan."""
    for module, source in SOURCES.items():
        nodes = ast.walk(ast.parse(source))
        texts = {str(node.value) for node in nodes if isinstance(node, ast.Constant)}
        named = {text for text in texts if text.endswith((".yaml", ".yml"))}
        allowed = {"*.yaml", ".yaml", "_style.yaml", "_names.yaml", "_metrics.yaml", "plan.yaml"}
        assert named <= allowed, module

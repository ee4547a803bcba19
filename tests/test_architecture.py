"""The arrows of docs/design.md: who may import whom. Anything else is an accident."""

import ast
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# package or module → what it may import of this repository; a name covers everything below it
ARROWS = {
    "run": {
        "experiments.config", "experiments.products.specs", "experiments.records",
        "experiments.training",
    },
    "hydra_plugins": {
        "experiments.config", "experiments.products.specs", "experiments.records",
        "experiments.training.scheduler",
    },
    "benchmarks": {"adashift", "benchmarks", "experiments"},
    "experiments.__main__": {
        "experiments.config", "experiments.products", "experiments.records",
        "experiments.training.scheduler", "experiments.training.signals",
    },
    "experiments.products": {
        "experiments.config", "experiments.products", "experiments.records",
    },
    "experiments.products.make": {
        "experiments.config", "experiments.products", "experiments.records",
        "experiments.training.pool",
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

# package from outside → the only modules that may import it
KEPT_IN = {
    "torch": {
        "adashift", "benchmarks", "experiments.data", "experiments.models", "experiments.task",
        "experiments.tasks", "experiments.training",
    },
    "torchvision": {"benchmarks", "experiments.data", "experiments.models"},
    "wandb": {"experiments.records.tracking"},
    "wandb_workspaces": {"experiments.products.dashboard"},
    "matplotlib": {"benchmarks", "experiments.products.figures"},
    "hydra": {"run", "hydra_plugins", "experiments.config"},
}  # fmt: skip


# formulas need no torch, nor does a process that only starts others
NEVER = {"adashift.analysis.theory": {"torch"}, "experiments.training.scheduler": {"torch"}}


def covers(name: str, module: str) -> bool:
    return module == name or module.startswith(name + ".")


def rule_of(module: str) -> str | None:
    """The longest name of ARROWS that covers the module."""
    return max((name for name in ARROWS if covers(name, module)), key=len, default=None)


def modules(root: Path) -> Iterator[tuple[str, Path]]:
    for path in [
        root / "run.py",
        *(root / "adashift").rglob("*.py"),
        *(root / "experiments").rglob("*.py"),
        *(root / "benchmarks").rglob("*.py"),
        *(root / "hydra_plugins").rglob("*.py"),
    ]:
        yield ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"), path


def imports(path: Path) -> Iterator[str]:
    """Every name that is imported, at the top or inside a function, but not for types alone."""
    tree = ast.parse(path.read_text())
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
            assert node.level == 0, f"{path}: write imports from the root"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def broken_arrows(root: Path) -> list[str]:
    found = []
    for module, path in modules(root):
        rule = rule_of(module)
        for name in imports(path):
            package = name.split(".")[0]
            if package in ("run", "experiments", "adashift", "benchmarks"):
                if rule is None or not any(covers(ok, name) for ok in ARROWS[rule]):
                    found.append(f"{module} → {name}")
            elif package in NEVER.get(module, ()) or not any(
                covers(ok, module) for ok in KEPT_IN.get(package, {module})
            ):
                found.append(f"{module} → {name}")
    return found


def test_the_arrows_hold():
    assert broken_arrows(ROOT) == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("adashift/optimizer.py", "import experiments.config"),
        ("adashift/analysis/theory.py", "import torch"),
        ("adashift/_spatial.py", "import hydra"),
        ("experiments/products/figures.py", "from experiments.training.loop import train"),
        ("experiments/products/claims.py", "    import torch"),
        ("experiments/tasks/lemmas.py", "from experiments.records.record import Record"),
        ("experiments/records/index.py", "from experiments.products import specs"),
        ("experiments/training/execute.py", "from experiments.products import specs"),
        ("experiments/products/report.py", "from benchmarks import common"),
        ("experiments/task.py", "import wandb"),
        ("experiments/somewhere.py", "from experiments.tasks import lemmas"),
    ],
)
def test_a_broken_arrow_is_found(tmp_path, file, line):
    for folder in ("adashift", "benchmarks", "experiments", "hydra_plugins"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "run.py", tmp_path)
    assert broken_arrows(tmp_path) == []
    with (tmp_path / file).open("a") as f:
        f.write(f"\ndef late():\n{line}\n" if line.startswith(" ") else f"\n{line}\n")
    assert len(broken_arrows(tmp_path)) == 1


def test_python_names_no_yaml_but_the_specs():
    """conf names Python; Python reaches into conf/figure, conf/table and conf/claim alone."""
    for module, path in modules(ROOT):
        nodes = ast.walk(ast.parse(path.read_text()))
        texts = {str(node.value) for node in nodes if isinstance(node, ast.Constant)}
        named = {text for text in texts if text.endswith((".yaml", ".yml"))}
        assert named <= {"*.yaml", ".yaml", "_style.yaml"}, module

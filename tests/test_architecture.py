"""The arrows of docs/design.md: who may import whom. Anything else is an accident."""

import ast
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# module → the modules of this repository that it may import; a name covers everything below it
ARROWS = {
    "run": {
        "experiments.agreement", "experiments.config", "experiments.execute",
        "experiments.parallel", "experiments.runs", "experiments.stopping",
    },
    "hydra_plugins": {"experiments.config", "experiments.record", "experiments.runs"},
    "experiments.__main__": {
        "experiments.config", "experiments.dashboard", "experiments.make", "experiments.publish",
        "experiments.record", "experiments.report", "experiments.runs", "experiments.status",
        "experiments.stopping", "experiments.verify",
    },
    "experiments.make": {
        "experiments.agreement", "experiments.claims", "experiments.config",
        "experiments.execute", "experiments.figures", "experiments.grids", "experiments.index",
        "experiments.record", "experiments.runs", "experiments.tables",
    },
    "experiments.publish": {
        "experiments.archive", "experiments.config", "experiments.make", "experiments.record",
        "experiments.report", "experiments.runs",
    },
    "experiments.verify": {
        "experiments.agreement", "experiments.archive", "experiments.config",
        "experiments.execute", "experiments.runs",
    },
    "experiments.agreement": {"experiments.archive", "experiments.runs"},
    "experiments.archive": {"experiments.record"},
    "experiments.dashboard": {"experiments.config", "experiments.runs"},
    "experiments.status": {"experiments.config", "experiments.record", "experiments.runs"},
    "experiments.execute": {
        "experiments.archive", "experiments.checkpoint", "experiments.config", "experiments.loop",
        "experiments.parallel", "experiments.progress", "experiments.record", "experiments.runs",
        "experiments.stopping", "experiments.task", "experiments.team",
    },
    "experiments.parallel": set(),
    "experiments.team": {
        "experiments.checkpoint", "experiments.config", "experiments.parallel",
        "experiments.record",
    },
    "experiments.checkpoint": {"experiments.config", "experiments.record"},
    "experiments.stopping": set(),
    "experiments.bench": {
        "adashift", "experiments.looks", "experiments.record", "experiments.timing",
    },
    "experiments.timing": {"experiments.config", "experiments.record"},
    "experiments.torture": {
        "experiments.config", "experiments.execute", "experiments.runs", "experiments.timing",
    },
    "experiments.bench_engines": {
        "experiments.config", "experiments.runs", "experiments.timing", "experiments.torture",
    },
    "experiments.bench_training": {
        "experiments.config", "experiments.data", "experiments.execute", "experiments.timing",
        "experiments.loop", "experiments.record",
    },
    "experiments.loop": {
        "experiments.checkpoint", "experiments.progress", "experiments.record",
        "experiments.stopping", "experiments.task",
    },
    "experiments.task": set(),
    "experiments.tasks": {
        "adashift", "experiments.data", "experiments.models", "experiments.parallel",
        "experiments.task",
        "experiments.tasks",
    },
    "experiments.models": {"experiments.models"},
    "experiments.data": {"experiments.data", "experiments.progress"},
    "experiments.figures": {"experiments.looks", "experiments.record", "experiments.runs"},
    "experiments.looks": {"experiments.config"},
    "experiments.index": {"experiments.record", "experiments.runs"},
    "experiments.report": {
        "experiments.claims", "experiments.figures", "experiments.index", "experiments.looks",
        "experiments.record", "experiments.runs",
    },
    "experiments.tables": {
        "experiments.claims", "experiments.config", "experiments.record", "experiments.runs",
    },
    "experiments.grids": {
        "experiments.claims", "experiments.config", "experiments.figures", "experiments.record",
        "experiments.runs", "experiments.tables",
    },
    "experiments.claims": {
        "experiments.config", "experiments.index", "experiments.record", "experiments.runs",
    },
    "experiments.schedules": set(),
    "experiments.statistics": set(),
    "experiments.runs": {"experiments.archive", "experiments.config", "experiments.record"},
    "experiments.record": {"experiments.config"},
    "experiments.progress": set(),
    "experiments.config": set(),
    "experiments": set(),
    "adashift.theory": set(),
    "adashift": {"adashift"},
}  # fmt: skip

# package from outside → the only modules that may import it
KEPT_IN = {
    "torch": {"adashift", "experiments.bench", "experiments.bench_training", "experiments.task",
              "experiments.timing",
              "experiments.tasks", "experiments.models", "experiments.data", "experiments.loop",
              "experiments.checkpoint", "experiments.execute", "experiments.parallel",
              "experiments.team"},
    "torchvision": {"experiments.bench", "experiments.bench_training", "experiments.data",
                    "experiments.models"},
    "wandb": {"experiments.record"},
    "wandb_workspaces": {"experiments.dashboard"},
    "matplotlib": {"experiments.bench", "experiments.figures"},
    "hydra": {"run", "hydra_plugins", "experiments.config", "experiments.figures",
              "experiments.claims"},
}  # fmt: skip


NEVER = {"adashift.theory": {"torch"}}  # formulas can be had without it


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
            if package in ("run", "experiments", "adashift"):
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
        ("adashift/theory.py", "import torch"),
        ("adashift/spatial.py", "import hydra"),
        ("experiments/figures.py", "from experiments.loop import train"),
        ("experiments/claims.py", "    import torch"),
        ("experiments/tasks/lemmas.py", "from experiments.record import Record"),
        ("experiments/task.py", "import wandb"),
        ("experiments/somewhere.py", "from experiments.tasks import lemmas"),
    ],
)
def test_a_broken_arrow_is_found(tmp_path, file, line):
    for folder in ("adashift", "experiments", "hydra_plugins"):
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

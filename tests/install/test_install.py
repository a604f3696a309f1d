"""requirements/install.sh on both kinds of machine: the real pip and the real uv, tiny wheels, no network."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import uv
from stand_in_index import DEFAULT, HOSTS, PYTORCH, StandIn

LOCK = "# made for a test\nalpha==1.0\nbeta==2.0\ntorch==9.9+cpu\n"
# A build back end in the project: the last step installs the project, editable, and needs nothing from an index.
BACKEND = """
import pathlib, zipfile
def build_editable(folder, *_):
    files = {"project.pth": str(pathlib.Path(__file__).parent / "src"), "project-1.dist-info/RECORD": "",
             "project-1.dist-info/METADATA": "Metadata-Version: 2.1\\nName: project\\nVersion: 1\\n",
             "project-1.dist-info/WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"}
    with zipfile.ZipFile(pathlib.Path(folder, "project-1-py3-none-any.whl"), "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return "project-1-py3-none-any.whl"
"""
PROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
# Starts the real uv of this environment: the wheel that install.sh asks for need not weigh 17 MB.
LAUNCHER = f"import os, sys\nos.execv({uv.find_uv_bin()!r}, [{uv.find_uv_bin()!r}, *sys.argv[1:]])\n"


def pinned_uv(root: Path) -> str:
    return re.search(r"^UV=(uv==\S+)", (root / "requirements" / "install.sh").read_text(), re.M).group(1)


class Machine:
    """A clone of the repository, an index, and a user whose pip has no configuration."""

    def __init__(self, root: Path, folder: Path):
        self.folder, self.clone, self.venv = folder, folder / "clone", folder / "clone" / ".venv"
        (self.clone / "src").mkdir(parents=True)
        shutil.copytree(root / "requirements", self.clone / "requirements")
        shutil.copy(root / "Makefile", self.clone)
        self.lock = self.clone / "requirements" / "cpu.lock"
        self.lock.write_text(LOCK)
        for name, text in {"setup.py": "", "backend.py": BACKEND, "pyproject.toml": PROJECT}.items():
            (self.clone / name).write_text(text)
        (self.clone / "src" / "project.py").write_text("")
        self.index = StandIn(folder)
        self.torch = self.index.add("torch", "9.9+cpu", PYTORCH, torch="")
        self.index.add("alpha", "1.0", alpha="import beta")
        self.index.add("beta", "2.0", beta="")
        self.index.add("torch", "9.8", torch="")
        self.index.add("uv", pinned_uv(root).removeprefix("uv=="), uv__main=LAUNCHER)
        foreign = r"(?i)pip_|uv_|ssl_|.*_proxy$|pythonpath$|make"
        self.environment = {key: value for key, value in os.environ.items() if not re.match(foreign, key)}
        self.environment |= {"HOME": str(folder), "UV_CACHE_DIR": str(folder / "cache"), "PYTHON": sys.executable}
        self.environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1", "PIP_RETRIES": "0"}
        self.environment |= {"UV_HTTP_RETRIES": "0", "HTTPS_PROXY": self.index.url, "PROGRESS_SECONDS": "0.2"}
        self.environment |= dict.fromkeys(("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"), str(self.index.certificate))

    def has_own_source(self) -> None:
        """Configure pip, and take the network away."""
        self.environment |= {"PIP_INDEX_URL": f"{self.index.url}{DEFAULT}/", "PIP_FIND_LINKS": str(self.torch.parent)}

    def start(self, *command: str) -> subprocess.Popen:
        """Start a command, install.sh by default, in the clone."""
        command = command or ("sh", "requirements/install.sh", ".venv", "requirements/cpu.lock")
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, cwd=self.clone, env=self.environment, start_new_session=True, **streams)

    def install(self, *command: str) -> tuple[int, str]:
        """Return exit status and output."""
        started = self.start(*command)
        output, _ = started.communicate(timeout=120)
        return started.returncode, output

    def install_all(self, *command: str) -> str:
        """Install without an error, so that everything can be imported; return the output."""
        status, output = self.install(*command)
        assert status == 0 and self.imports("alpha", "torch", "project"), output
        return output

    def imports(self, *modules: str) -> bool:
        """Return whether the new environment imports the modules."""
        command = [self.venv / "bin" / "python", "-c", f"import {', '.join(modules)}"]
        return subprocess.run(command, cwd=self.folder, env=self.environment, capture_output=True).returncode == 0

    def asked(self, index: str) -> set[str]:
        """Return the packages that an index was asked for, through the proxy."""
        pages = [path.removesuffix("/") for host, path in self.index.asked if host and path.endswith("/")]
        return {page.removeprefix(f"{index}/") for page in pages if page.startswith(f"{index}/")}


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    """An environment with pip only: made once, copied by tests that are not about making it."""
    path = tmp_path_factory.mktemp("bare") / "venv"
    subprocess.run([sys.executable, "-m", "venv", path], check=True)
    return path


@pytest.fixture
def new_machine(root, tmp_path):
    machine = Machine(root, tmp_path)
    yield machine
    machine.index.close()


@pytest.fixture
def machine(new_machine, bare):
    """A machine that has an environment already."""
    shutil.copytree(bare, new_machine.venv, symlinks=True)
    return new_machine


def test_a_pip_that_sees_the_pinned_torch_installs_everything(machine):
    machine.has_own_source()
    output = machine.install_all()
    assert "with pip" in output and "with uv" not in output and not machine.imports("uv")
    assert not machine.asked(DEFAULT) | machine.asked(PYTORCH)


def test_without_any_configuration_uv_finds_torch_in_pytorchs_index(machine):
    """Nothing tells pip or uv of an index; the proxy sees which they ask by themselves."""
    output = machine.install_all()
    assert "pip sees no torch==9.9+cpu" in output and "with uv" in output
    assert machine.asked(PYTORCH) == {"torch"}
    assert {"uv", "alpha", "beta"} <= machine.asked(DEFAULT)
    hosts = {path.split("/torch")[0]: host for host, path in machine.index.asked if "/torch/" in path}
    assert (hosts[DEFAULT], hosts[PYTORCH]) == HOSTS


@pytest.mark.matrix  # uv's own sources: the test above; pip's: the first one
def test_pips_mirror_of_the_package_index_and_its_certificate_are_passed_on_to_uv(machine):
    """uv itself does not read pip's settings, and would ask the default index, which a company's network forbids."""
    certificate = machine.environment.pop("SSL_CERT_FILE")
    machine.environment |= {"PIP_INDEX_URL": f"{machine.index.url}{DEFAULT}/", "PIP_CERT": certificate}
    assert "with uv" in machine.install_all()
    assert machine.asked(PYTORCH) == {"torch"} and not machine.asked(DEFAULT)


def test_killed_in_the_middle_and_repaired_by_the_next_call(machine):
    """The kill leaves a package that looks installed and is not; pip alone would pass over it."""
    machine.has_own_source()
    machine.index.held = "beta-2.0-py3-none-any.whl"
    started = machine.start("make", "venv")
    _read_until(started, r"  \d+ s: \d+ packages in place; .*beta")
    os.killpg(started.pid, signal.SIGKILL)
    started.communicate()
    assert not (machine.venv / ".installed").exists()
    half = next(machine.venv.glob("lib/python*/site-packages")) / "alpha-1.0.dist-info"
    half.mkdir()
    (half / "METADATA").write_text("Metadata-Version: 2.1\nName: alpha\nVersion: 1.0\n")

    machine.index.release.set()
    assert "is incomplete: removing it" in machine.install_all("make", "venv")
    assert machine.install("make", "venv") == (0, "make: Nothing to be done for 'venv'.\n")


@pytest.mark.matrix  # an environment that is made anew: the test above
@pytest.mark.parametrize("broken", ["bin/python", "lib/python*/site-packages/pip/_internal/commands"])
def test_an_environment_that_lost_its_python_or_its_pip_is_made_anew(machine, broken):
    """As after the removal of the Python it was made with. Its stamp is there, and newer than the lock."""
    machine.has_own_source()
    (machine.venv / "leftover").touch()
    (victim,) = machine.venv.glob(broken)
    if victim.is_symlink():
        (machine.venv / ".installed").touch()
        victim.unlink()
        victim.symlink_to("/no/such/python3.11")
    else:
        shutil.rmtree(victim)
    machine.install_all("make", "venv")
    assert not (machine.venv / "leftover").exists()


@pytest.mark.parametrize(("happens", "said"), [
    ("a package is missing", ["pip could not install requirements/cpu.lock", "No matching distribution", "beta==2.1"]),
    ("PyTorch's index is out of reach", ["uv could not install", "PyTorch's index", "find-links", "torch==9.9+cpu"]),
    ("no index is reached", ["pip sees neither torch==9.9+cpu nor uv==", "HTTPS_PROXY"]),
])  # fmt: skip
def test_what_fails_is_named_with_cause_and_remedy(machine, happens, said):
    if happens == "a package is missing":
        machine.has_own_source()
        machine.lock.write_text(LOCK.replace("beta==2.0", "beta==2.1"))
    elif happens == "PyTorch's index is out of reach":
        machine.index.unreachable.add(HOSTS[1])
    else:
        machine.index.close()
    status, output = machine.install("make", "venv")
    assert status != 0 and not (machine.venv / ".installed").exists()
    report = [line for line in output.splitlines() if not re.match(r"make\b.*Error|  \d+ s: ", line)]
    assert len(report) <= 11, "ten lines at most, after those of progress, and one that names the log"
    assert [words for words in (*said, "run the same command again") if words not in "\n".join(report)] == [], output


def _read_until(process: subprocess.Popen, said: str) -> None:
    output = ""
    while not re.search(said, output):
        assert (line := process.stdout.readline()), f"never said: {said}\n{output}"
        output += line


def test_a_folder_that_is_no_environment_is_left_alone(new_machine):
    new_machine.venv.mkdir()
    (new_machine.venv / "thesis.tex").write_text("years of work")
    status, output = new_machine.install()
    assert status != 0 and "is no virtual environment" in output and "Name another folder" in output
    assert [path.name for path in new_machine.venv.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(("module", "text", "said"), [
    ("ensurepip", "raise ImportError", "lacks the module venv or ensurepip (Debian, Ubuntu: apt install python3.1"),
    ("sitecustomize", "import sys; sys.version_info = (3, 13, 0)", "is Python 3.13"),
    (None, "", "does not run here"),
])  # fmt: skip
def test_a_python_that_will_not_do_is_named_with_the_reason(root, tmp_path, module, text, said):
    python = tmp_path / "its-python"
    if module:
        (tmp_path / f"{module}.py").write_text(text)
        python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
        python.chmod(0o755)
    script = root / "requirements" / "find_python.sh"
    done = subprocess.run(["sh", script], env={**os.environ, "PYTHON": str(python)}, capture_output=True, text=True)
    assert done.returncode == 1 and not done.stdout
    assert f"{python} {said}" in done.stderr and "make quickstart PYTHON=" in done.stderr


@pytest.mark.parametrize("lock", ["cpu.lock", "gpu.lock"])
def test_the_locks_have_the_pinned_uv(root, lock):
    """The tests above run the uv that users get."""
    assert pinned_uv(root) in (root / "requirements" / lock).read_text().splitlines()

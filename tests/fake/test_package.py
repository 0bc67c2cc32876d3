"""What is installed, and what lies at the top of the repository."""

from __future__ import annotations

import configparser
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

import weightsync

ROOT = Path(__file__).resolve().parents[2]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]

TOP_LEVEL = {
    ".ci",
    ".dockerignore",
    ".github",
    ".gitignore",
    ".pre-commit-config.yaml",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "MANIFEST.in",
    "Makefile",
    "README.md",
    "SECURITY.md",
    "benchmarks",
    "docs",
    "examples",
    "mkdocs.yml",
    "pyproject.toml",
    "setup.py",
    "tests",
    "weightsync",
}

ENTRY_POINTS = {
    "console_scripts": {"weightsync": "weightsync.__main__:main"},
    "vllm.general_plugins": {"weightsync": "weightsync.vllm.plugin:register"},
}


def files_of_the_repository() -> list[str]:
    """Return the names of all files that git does not ignore."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source distribution, built from a copy: nothing of an earlier build gets in, and nothing stays behind."""
    folder = tmp_path_factory.mktemp("sdist")
    source = folder / "source"
    for name in files_of_the_repository():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    code = f"from setuptools.build_meta import build_sdist; build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    (built,) = folder.glob("*.tar.gz")
    return built


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built from the source distribution."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(sdist)]
    subprocess.run(command, check=True)
    (built,) = folder.glob("*.whl")
    return built


def test_source_distribution_holds_the_repository(sdist: Path):
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames() if archive.getmember(name).isfile()}
    missing = {name for name in files_of_the_repository() if not name.startswith(".")} - held
    assert missing == set()
    assert {name.partition("/")[0] for name in held - {*files_of_the_repository()}} == {
        "PKG-INFO",
        "setup.cfg",
        "weightsync.egg-info",
    }


def test_wheel_holds_every_module(wheel: Path):
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "weightsync").rglob("*.py")}
    assert held == modules | {"weightsync/py.typed"}


def test_wheel_metadata(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        (info,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        entry_points = configparser.ConfigParser(delimiters=["="])
        entry_points.read_string(archive.read(f"{info}/entry_points.txt").decode())
        metadata = archive.read(f"{info}/METADATA").decode()
        license_text = archive.read(f"{info}/licenses/LICENSE").decode()
    assert {group: dict(entry_points[group]) for group in entry_points.sections()} == ENTRY_POINTS
    assert f"\nVersion: {weightsync.__version__}\n" in metadata
    assert set(re.findall(r"^Project-URL: (\w+), https://", metadata, re.MULTILINE)) == {
        "Changelog",
        "Documentation",
        "Issues",
        "Source",
    }
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert "Apache License" in license_text


def test_wheel_installs_and_imports(wheel: Path, tmp_path: Path):
    subprocess.run([*PIP, "install", "--no-deps", "--target", str(tmp_path), str(wheel)], check=True)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import weightsync; print(weightsync.__file__)"
    printed = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert printed.stdout.strip() == str(tmp_path / "weightsync" / "__init__.py")


def test_entry_points_lead_somewhere():
    for group, points in ENTRY_POINTS.items():
        for name, target in points.items():
            found = {point.value: point for point in importlib.metadata.entry_points(group=group, name=name)}
            assert target in found, (
                f"this Python has no entry point {name} = {target} in {group}, so neither the command nor vLLM finds "
                "weightsync: run `pip install --no-deps --no-build-isolation -e .`"
            )
            assert callable(found[target].load())


def test_top_level_of_the_repository():
    tracked = {name.split("/")[0] for name in files_of_the_repository()}
    lock_files = {name for name in tracked if name.startswith("requirements-") and name.endswith(".lock")}
    assert lock_files == {f"requirements-{name}.lock" for name in ("cpu", "docs", "gpu", "oldest", "trl", "verl")}
    assert tracked - lock_files == TOP_LEVEL


def test_issue_forms_ask_for_the_doctor():
    forms = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")}
    assert forms.pop("config")["contact_links"]
    assert all({"name", "description", "body"} <= form.keys() for form in forms.values())
    assert any("weightsync doctor" in part["attributes"]["label"] for part in forms["fault"]["body"])


def test_lock_files_pin_every_package():
    for lock in sorted(ROOT.glob("*.lock")):
        lines = [line for line in lock.read_text().splitlines() if not line.startswith("#")]
        names = [line.split("==")[0] for line in lines]
        assert all(line.count("==") == 1 for line in lines), f"{lock.name} has a line that is not name==version"
        assert names == sorted(set(names)), f"{lock.name} is not sorted, or has a package twice"
        assert not {"torchaudio", "torchcodec"} & set(names), f"{lock.name}: its head says why not"


def test_a_vllm_that_takes_no_plug_in_starts_nevertheless(tmp_path: Path):
    factory = tmp_path / "vllm" / "distributed" / "weight_transfer" / "factory.py"
    factory.parent.mkdir(parents=True)
    factory.write_text("class WeightTransferEngineFactory:\n    def register_engine(other): ...\n")
    for folder in factory.relative_to(tmp_path).parents[:-1]:
        (tmp_path / folder / "__init__.py").touch()  # or Python takes the vLLM that is installed
    code = f"import sys; sys.path[:0] = {[str(tmp_path), str(ROOT)]}; import weightsync.vllm.plugin as p; p.register()"
    code += f"; assert sys.modules['vllm.distributed.weight_transfer.factory'].__file__ == {str(factory)!r}"
    subprocess.run([sys.executable, "-c", code], check=True)

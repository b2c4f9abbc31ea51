"""The wheel, as a user has it: built, and installed outside the checkout into an environment that has no checkout.

    python tests/packaging/wheel.py [PYTEST OPTION...]

runs the quick tests of all but the source's own laws against it; `make nightly` does. Nothing is fetched: the build
backend and what the package needs are those of this environment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
BESIDE = ("tests", "examples", "docs", "pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "mkdocs.yml")
"""What tests read beside the package."""
ABOUT_SOURCES = ("tests/law", "tests/docs", "tests/packaging")


def build_wheel(folder: Path) -> Path:
    """The wheel of this checkout, built into `folder` with the backend that is installed here."""
    backend = "from hatchling.build import build_wheel; import sys; print(build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", backend, str(folder)], cwd=REPOSITORY, check=True, capture_output=True, text=True
    )
    return folder / done.stdout.split()[-1]


def install(wheel: Path, folder: Path) -> Path:
    """The interpreter of a new environment in `folder` with the wheel, and all but this package of this environment."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    place = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    )
    # a path that a .pth names is searched, and .pth files in it, such as that of this checkout, are not read
    base = [entry for entry in sys.path if Path(entry).name.endswith("-packages")]
    (Path(place.stdout.strip()) / "base.pth").write_text("\n".join(base) + "\n")
    pip = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--force-reinstall", wheel]
    subprocess.run(pip, check=True, env=environment())
    return python


def environment() -> dict[str, str]:
    """This process's, without what would lead back to the checkout."""
    left_out = {"PYTHONPATH", "VIRTUAL_ENV", "PIP_REQUIRE_VIRTUALENV"}
    return {name: value for name, value in os.environ.items() if name not in left_out}


def main(options: list[str]) -> int:
    """Build, install, and run the quick tests in a copy of what lies beside the package."""
    with tempfile.TemporaryDirectory(prefix="mm-autoparallel-wheel-") as name:
        folder = Path(name)
        python = install(build_wheel(folder), folder / "environment")
        for entry in BESIDE:
            source = REPOSITORY / entry
            if source.is_dir():
                shutil.copytree(source, folder / "beside" / entry)
            else:
                (folder / "beside").mkdir(exist_ok=True)
                shutil.copy(source, folder / "beside" / entry)
        command = [python, "-m", "pytest", "-q", "-m", "not slow and not nightly", *options]
        command += [f"--ignore={entry}" for entry in ABOUT_SOURCES]
        return subprocess.run(command, cwd=folder / "beside", env=environment(), check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

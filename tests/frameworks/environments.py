"""Makes the environments in which frameworks check exported plans, and runs those checks.

    python tests/frameworks/environments.py --folder DIR [NAME...] [--only-make]

NAME is a file of environments/ without its ending: the framework's requirements, exact, for an environment of their
own, which lies in DIR/NAME and is made where it is not there yet. Then NAME_parser.py runs with `--environment
DIR/NAME`. No NAME: all. Prints a line a framework; exits with 1 where a check fails. Needs PyPI for the making alone.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ALONE = " without what they ask for"
"""Before packages that pip installs by themselves: a check has stand-ins for the rest."""
NAMES = sorted(path.stem for path in (HERE / "environments").glob("*.txt"))


def make(name: str, environment: Path) -> None:
    """The environment of `name`, whole or not at all: one that was not finished is made again."""
    done = environment / "made"
    requirements = HERE / "environments" / f"{name}.txt"
    if done.is_file() and done.read_text(encoding="utf-8") == requirements.read_text(encoding="utf-8"):
        return
    print(f"{name}: making {environment}", flush=True)
    venv.create(environment, with_pip=True, clear=True)
    pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "-r", str(requirements)], check=True)
    text = requirements.read_text(encoding="utf-8")
    if alone := re.findall(rf"^#{ALONE}: (.*)$", text, re.MULTILINE):
        subprocess.run([*pip, "--no-deps", *alone[0].split()], check=True)
    done.write_text(text, encoding="utf-8")


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*NAMES, []], help=", ".join(NAMES))
    parser.add_argument("--folder", type=Path, required=True, metavar="DIR")
    parser.add_argument("--only-make", action="store_true", help="make the environments, check nothing")
    arguments = parser.parse_args()
    failed = []
    for name in arguments.names or NAMES:
        environment = arguments.folder.resolve() / name
        make(name, environment)
        if arguments.only_make:
            continue
        script = HERE / f"{name}_parser.py"
        if not script.exists():  # tinker, whose check needs a checkout
            continue
        done = subprocess.run([sys.executable, str(script), "--environment", str(environment)], check=False)
        failed += [name] if done.returncode else []
    print(f"failed: {', '.join(failed)}" if failed else "all checks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

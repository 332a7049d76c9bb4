"""Builds the simulated device's library with the plain compiler, once for each torch."""

import fcntl
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import torch

NAME = "simulated_device_native"
SOURCES = Path(__file__).with_name("csrc")
FLAGS = (
    "-O1",
    "-DNDEBUG",  # as torch was built: its classes differ without
    "-std=c++20",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
    # torch's headers, as the compiler sees them:
    "-Wno-interference-size",
    "-Wno-stringop-overflow",
)
_TORCH = Path(torch.__file__).parent


class BuildError(RuntimeError):
    """The simulated device cannot be built; it says why."""


class NoCompilerError(BuildError):
    """There is nothing to build it with."""


def cache_folder() -> Path:
    """Return the folder of built libraries: `$REPRO_CACHE`, else the user's cache folder.

    Nobody else may write there, since what lies in it is loaded into the process.

    Raises:
        BuildError: It cannot be made, belongs to somebody else, or others may write there.
    """
    given = os.environ.get("REPRO_CACHE")
    root = Path(given or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "repro")
    folder = root.expanduser() / "simulated_device"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise BuildError(f"{error}: name a folder that can be written as $REPRO_CACHE") from error
    found = folder.stat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise BuildError(
            f"{folder} belongs to user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}: "
            f"it must be user {os.getuid()}'s own, and writable for no other; name another folder "
            "as $REPRO_CACHE"
        )
    return folder


def build() -> Path:
    """Compile the library where that has not been done, and return its path.

    Its name hashes sources, flags, compiler, Python and torch. Of several processes that want it
    at once, one builds it.

    Raises:
        NoCompilerError: There is no compiler, or no system that it is for.
        BuildError: The compiler failed, or the cache folder cannot be used.
    """
    if platform.system() != "Linux":
        raise NoCompilerError(f"the simulated device runs on Linux, not on {platform.system()}")
    compiler = shutil.which(os.environ.get("CXX") or "g++")
    if compiler is None:
        raise NoCompilerError(
            f"there is no C++ compiler {os.environ.get('CXX') or 'g++'!r}: install g++, or name "
            "one as $CXX"
        )
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    key = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        key.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    key.update(
        repr((version, FLAGS, suffix, torch.__version__, torch.version.git_version)).encode()
    )
    target = cache_folder() / f"{NAME}-{key.hexdigest()[:16]}" / f"{NAME}{suffix}"
    if target.exists():
        return target
    with (cache_folder() / "lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _make(compiler, target)
    return target


def _make(compiler: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=cache_folder(), prefix="building-") as scratch:
        # All at once: torch's headers take longer than what is here, and are read once.
        whole = Path(scratch) / "all.cpp"
        lines = [f'#include "{path.name}"\n' for path in sorted(SOURCES.glob("*.cpp"))]
        whole.write_text("".join(lines), encoding="utf-8")
        made = Path(scratch) / target.name
        includes = [_TORCH / "include", _TORCH / "include/torch/csrc/api/include"]
        includes.append(Path(sysconfig.get_paths()["include"]))
        options = [*FLAGS, f"-I{SOURCES}", *(f"-isystem{path}" for path in includes)]
        libraries = [f"-L{_TORCH / 'lib'}", f"-Wl,-rpath,{_TORCH / 'lib'}"]
        libraries += ["-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]
        _run([compiler, *options, "-shared", str(whole), "-o", str(made), *libraries])
        target.parent.mkdir(mode=0o700, exist_ok=True)
        made.replace(target)  # whole, or not there


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
    if done.returncode:
        raise BuildError(f"failed with {done.returncode}: {' '.join(command)}\n{done.stderr}")

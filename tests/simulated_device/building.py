"""Builds the simulated device's library with the plain compiler, once for each torch."""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sysconfig
from pathlib import Path

import torch

from repro.measure.files import cache_folder, replacing

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


def build() -> Path:
    """Compile the library where that has not been done, and return its path.

    Its name hashes sources, flags, compiler, Python and torch. It lies in `$REPRO_CACHE`, else in
    the user's cache folder, where nobody else may write, since it is loaded into the process. Of
    several processes that want it at once, one builds it.

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
    built_for = version, FLAGS, suffix, torch.__version__, torch.version.git_version
    key.update(repr(built_for).encode())
    folder = cache_folder() / "simulated_device"
    target = folder / f"{NAME}-{key.hexdigest()[:16]}" / f"{NAME}{suffix}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        if os.fstat(lock).st_uid not in (os.geteuid(), 0) or os.fstat(lock).st_mode & 0o022:
            os.close(lock)
            raise PermissionError(f"Others can write it and put any code there: {folder}")
    except OSError as error:
        raise BuildError(f"{error}: name another folder as $REPRO_CACHE") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            target.parent.mkdir(mode=0o700, exist_ok=True)
            with replacing(target) as made:
                _make(compiler, made)
    finally:
        os.close(lock)
    return target


def _make(compiler: str, made: Path) -> None:
    # All at once: torch's headers take longer than what is here, and are read once.
    whole = "".join(f'#include "{path.name}"\n' for path in sorted(SOURCES.glob("*.cpp")))
    includes = [_TORCH / "include", _TORCH / "include/torch/csrc/api/include"]
    includes.append(Path(sysconfig.get_paths()["include"]))
    options = [*FLAGS, f"-I{SOURCES}", *(f"-isystem{path}" for path in includes)]
    libraries = [f"-L{_TORCH / 'lib'}", f"-Wl,-rpath,{_TORCH / 'lib'}"]
    libraries += ["-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]
    command = [compiler, *options, "-shared", "-x", "c++", "-", "-o", str(made), *libraries]
    done = subprocess.run(command, input=whole, capture_output=True, text=True, encoding="utf-8")
    if done.returncode:
        raise BuildError(f"failed with {done.returncode}: {' '.join(command)}\n{done.stderr}")

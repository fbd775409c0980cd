"""Builds torch_kvswap/_C.abi3.so: one library for every torch from 2.11 on, with and without CUDA.

It sees torch through the stable ABI only, and its kernels are an image in it that the driver loads.
So nvcc need not match torch's CUDA, and a torch without CUDA will do. torch's own extension builder
insists on both; that is why the compilers are called from here.

KVSWAP_CUDA           auto, the default: with kernels if nvcc is found; 1: or else stop; 0: without
KVSWAP_WERROR         1: the compilers' warnings are errors
TORCH_CUDA_ARCH_LIST  such as "9.0;10.0+PTX", instead of architectures chosen by nvcc's version
CUDA_HOME, CUDA_PATH, CXX, CXXFLAGS, LDFLAGS, MAX_JOBS have their usual meaning.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, NoReturn

from setuptools import Extension, __version__, setup
from setuptools.command.build_ext import build_ext

OLDEST_CUDA = (12, 0)
OLDEST_SETUPTOOLS = (77, 0)  # reads pyproject.toml's license
OLDEST_TORCH = (2, 11)
TORCH_TARGET = "-DTORCH_TARGET_VERSION=0x020b000000000000ULL"  # the same, for torch's headers


class Cuda(NamedTuple):
    nvcc: Path
    version: tuple[int, ...]


def say(message: str) -> None:
    print(f"torch_kvswap: {message}\n", end="", flush=True)  # one write: several threads call this


def fail(message: str) -> NoReturn:
    raise SystemExit(f"torch_kvswap: {message}")


def release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def find_torch() -> Path:
    """The folder of the torch to build against. It is not imported: that takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        fail(
            f"{sys.executable} has no torch to build against. Install torch 2.11 or later, and "
            "build with --no-build-isolation, which lets the build see it."
        )
    version = importlib.metadata.version("torch")
    if release(version) < OLDEST_TORCH:
        fail(f"torch {version} of {sys.executable} is too old: 2.11 or later is needed.")
    return Path(spec.submodule_search_locations[0])


def words(variable: str) -> list[str]:
    return shlex.split(os.environ.get(variable, ""))


def find_cxx() -> list[str]:
    cxx = words("CXX") or ["g++"]
    if shutil.which(cxx[0]) is None:
        fail(f"there is no C++ compiler {cxx[0]}. Install g++, or name another compiler in CXX.")
    return cxx


def cuda_homes() -> Iterator[Path]:
    """Where CUDA may be, best first."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            yield Path(os.environ[name])
    yield Path("/usr/local/cuda")
    nvcc = shutil.which("nvcc")
    if nvcc is not None:
        # It may be a link or a script that calls the real one; the real one says where it is.
        command = [nvcc, "--dryrun", "-x", "cu", "-c", os.devnull]
        answer = subprocess.run(command, capture_output=True, text=True)
        top = re.search(r"^#\$ TOP=(.+)$", answer.stderr, re.MULTILINE)
        yield Path(top[1]) if top else Path(nvcc).resolve().parent.parent


def cuda_in(home: Path) -> Cuda | None:
    """The CUDA in the folder `home`, if all that is needed of it is there."""
    nvcc = home.resolve() / "bin" / "nvcc"
    if not nvcc.exists() or not (home / "include" / "cuda_runtime.h").exists():
        return None
    report = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True)
    version = release(report.stdout.partition("release")[2])
    return Cuda(nvcc, version) if version >= OLDEST_CUDA else None


def find_cuda() -> Cuda | None:
    """The CUDA to compile the kernels with, or None if they are left out."""
    choice = os.environ.get("KVSWAP_CUDA") or "auto"
    if choice not in ("auto", "1", "0"):
        fail(f"KVSWAP_CUDA is {choice!r}; it can be auto, 1 or 0.")
    if choice == "0":
        say("the kernels are left out: KVSWAP_CUDA is 0")
        return None
    homes = list(cuda_homes())
    cuda = next(filter(None, map(cuda_in, homes)), None)
    if cuda is None:
        missing = f"no CUDA 12.0 or later is in {', '.join(map(str, homes))}"
        if choice == "1":
            fail(f"KVSWAP_CUDA is 1, but {missing}. Name its folder in CUDA_HOME.")
        say(f"the kernels are left out: {missing}")
    return cuda


def architectures(version: tuple[int, ...], wanted: str | None = None) -> list[str]:
    """nvcc's flags for TORCH_CUDA_ARCH_LIST, or for what an nvcc of this version can do."""
    wanted = wanted or ("8.0 9.0 10.0+PTX" if version >= (12, 8) else "8.0 9.0+PTX")
    flags = []
    for item in re.split(r"[;,\s]+", wanted.strip()):
        match = re.fullmatch(r"(\d+)\.(\d[af]?)(\+PTX)?", item)
        if match is None:
            fail(f"TORCH_CUDA_ARCH_LIST has {item!r}; write such as 9.0, 9.0a or 9.0+PTX.")
        number = match[1] + match[2]
        for code in ("sm", "compute") if match[3] else ("sm",):
            flags.append(f"-gencode=arch=compute_{number},code={code}_{number}")
    return flags


def call(command: list[str], advice: str = "") -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    sys.stdout.write(done.stdout)
    if done.returncode != 0:
        fail(f"status {done.returncode} from: {shlex.join(command)}{advice}")


class BuildLibrary(build_ext):
    """Compiles csrc/**/*.cpp with the C++ compiler. What nvcc makes of csrc/**/NAME.cu is in the
    library as bytes, `kvswap_NAME_image`."""

    def build_extension(self, ext: Extension) -> None:
        torch, cxx = find_torch(), find_cxx()
        cuda, werror = find_cuda(), os.environ.get("KVSWAP_WERROR") == "1"
        common = ["-std=c++17", "-O3", "-Icsrc"]
        host = [TORCH_TARGET, "-isystem", str(torch / "include"), "-fPIC", "-fvisibility=hidden"]
        host += ["-Wall", "-Wextra", *(["-Werror"] * werror), *words("CXXFLAGS")]
        link = [f"-L{torch / 'lib'}", "-ltorch_cpu", "-ldl", "-lrt", "-lpthread", *words("LDFLAGS")]
        commands, self.cxx = {}, cxx
        if cuda:
            host += [f"-DKVSWAP_WITH_KERNELS={cuda.version[0] * 1000 + cuda.version[1] * 10}"]
            nvcc = [str(cuda.nvcc), "-ccbin", [w for w in cxx if w[0] != "-"][-1], *common]
            nvcc += architectures(cuda.version, os.environ.get("TORCH_CUDA_ARCH_LIST"))
            nvcc += ["-Werror=all-warnings"] * werror
            commands = {source: [*nvcc, "-fatbin"] for source in Path("csrc").rglob("*.cu")}
        commands |= {Path(source): [*cxx, *common, *host] for source in ext.sources}
        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)) as pool:
            objects = pool.map(self.compile, commands.keys(), commands.values())
        # What is undefined is to be found now and not at load.
        checks = ["-Wl,-z,defs", "-Wl,--version-script=csrc/exports.map", "-Wl,--as-needed"]
        library = Path(self.get_ext_fullpath(ext.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        call([*cxx, "-shared", *checks, *map(str, objects), *link, "-o", str(library)])

    def compile(self, source: Path, command: list[str]) -> Path:
        """The object of `source`. Its name says what it was made from, so it is made only once."""
        state = hashlib.sha256(shlex.join([*command, importlib.metadata.version("torch")]).encode())
        for file in [source, *sorted(Path("csrc").rglob("*.h"))]:
            state.update(file.read_bytes())
        product = Path(self.build_temp, f"{'-'.join(source.parts[1:])}-{state.hexdigest()[:16]}.o")
        if not product.exists():
            say(f"compiling {source}")
            product.parent.mkdir(parents=True, exist_ok=True)
            part = product.with_suffix(".part")
            advice = "\nKVSWAP_CUDA=0 leaves the kernels out." if source.suffix == ".cu" else ""
            if source.suffix == ".cu":
                image, name = product.with_suffix(".fatbin"), f"kvswap_{source.stem}_image"
                call([*command, str(source), "-o", str(image)], advice)
                command, source = [*self.cxx, "-Wa,--noexecstack"], product.with_suffix(".s")
                place = f".section .rodata\n.balign 64\n.global {name}\n"
                source.write_text(f'{place}{name}: .incbin "{image}"\n')
            call([*command, "-c", str(source), "-o", str(part)], advice)
            part.rename(product)
        return product


if __name__ == "__main__":
    os.chdir(Path(__file__).resolve().parent)
    if release(__version__) < OLDEST_SETUPTOOLS:
        fail(f"setuptools {__version__} is too old: pip install 'setuptools>=77'.")
    sources = sorted(map(str, Path("csrc").rglob("*.cpp")))
    setup(
        ext_modules=[Extension("torch_kvswap._C", sources, py_limited_api=True)],
        cmdclass={"build_ext": BuildLibrary},
        options={"bdist_wheel": {"py_limited_api": "cp310"}},
    )

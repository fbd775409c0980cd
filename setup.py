"""Builds torch_kvswap/_C: one library for every torch from 2.11 on, with and without CUDA.

It sees torch through the stable ABI only, and its kernels are an image in it that the driver loads.
So nvcc need not match torch's CUDA, and a torch without CUDA will do. torch's own extension builder
insists on both; that is why the compilers are called from here, through ninja. Python is called
through nanobind, which is needed for the build only: one library for Python 3.12 and later, which
has what nanobind needs in its stable ABI, and one each for 3.10 and 3.11.

KVSWAP_CUDA           auto, the default: with kernels if nvcc is found; 1: or else stop; 0: without
KVSWAP_WERROR         1: the compilers' warnings are errors
TORCH_CUDA_ARCH_LIST  such as "9.0;10.0+PTX", instead of architectures chosen by nvcc's version
CUDA_HOME, CUDA_PATH, CXX, CXXFLAGS, LDFLAGS, MAX_JOBS have their usual meaning.
"""

import filecmp
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from fcntl import LOCK_EX, flock
from pathlib import Path
from typing import NamedTuple, NoReturn

from setuptools import Distribution, Extension, __version__, setup
from setuptools.command.build_ext import build_ext

try:
    import ninja
except ImportError:
    ninja = None  # find_ninja() says what to do
try:
    import nanobind
except ImportError:
    nanobind = None  # find_nanobind() does

OLDEST_CUDA = (12, 0)
OLDEST_SETUPTOOLS = (77, 0)  # reads pyproject.toml's license
OLDEST_TORCH = (2, 11)
TORCH_TARGET = "-DTORCH_TARGET_VERSION=0x020b000000000000ULL"  # the same, for torch's headers
LANGUAGE = ["-std=c++17", "-O3", "-Icsrc"]
HAS_STABLE_ABI = sys.version_info >= (3, 12) and not sysconfig.get_config_var("Py_GIL_DISABLED")


class Package(NamedTuple):
    folder: Path
    version: str


class Cuda(NamedTuple):
    nvcc: Path
    version: tuple[int, ...]


def say(message: str) -> None:
    print(f"torch_kvswap: {message}", flush=True)


def fail(message: str) -> NoReturn:
    raise SystemExit(f"torch_kvswap: {message}")


def repository() -> str | None:
    """Where the sources are, if a workflow of the repository builds."""
    if name := os.environ.get("GITHUB_REPOSITORY"):
        return f"{os.environ['GITHUB_SERVER_URL']}/{name}"
    return None


def long_description() -> str:
    """README and changelog. Links in it lead to the repository, because an index has no files."""
    text = "\n".join(Path(name).read_text() for name in ("README.md", "CHANGELOG.md"))
    if (home := repository()) is None:
        return text
    text = re.sub(r"!\[([^]]*)\]\((?!http)", rf"![\1]({home}/raw/main/", text)
    return re.sub(r"(?<!!)\[([^]]*)\]\((?!http|#)", rf"[\1]({home}/blob/main/", text)


def release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def find_torch() -> Package:
    """The torch to build against. It is not imported: that takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        fail(
            f"{sys.executable} has no torch to build against. Install torch 2.11 or later, and "
            "build with --no-build-isolation, which lets the build see it."
        )
    version = importlib.metadata.version("torch")
    if release(version) < OLDEST_TORCH:
        fail(f"torch {version} of {sys.executable} is too old: 2.11 or later is needed.")
    return Package(Path(spec.submodule_search_locations[0]), version)


def find_ninja() -> str:
    # BIN_DIR is empty where ninja is elsewhere than this Python, as in pip's isolated builds.
    program = ninja and shutil.which(os.path.join(ninja.BIN_DIR, "ninja"))
    if not program:
        fail(
            f"{sys.executable} has no ninja, which runs the compilers. Install it: "
            "pip install 'ninja>=1.11'"
        )
    return program


def find_nanobind() -> Package:
    if nanobind is None:
        fail(
            f"{sys.executable} has no nanobind, which binds C++ to Python. Install it: "
            "pip install 'nanobind>=3.1'"
        )
    return Package(Path(nanobind.__file__).parent, nanobind.__version__)


def werror() -> bool:
    choice = os.environ.get("KVSWAP_WERROR") or "0"
    if choice not in ("0", "1"):
        fail(f"KVSWAP_WERROR is {choice!r}; it must be 0 or 1.")
    return choice == "1"


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
        fail(f"KVSWAP_CUDA is {choice!r}; it must be auto, 1 or 0.")
    if choice == "0":
        say("the kernels are left out: KVSWAP_CUDA is 0")
        return None
    homes = list(cuda_homes())
    cuda = next(filter(None, map(cuda_in, homes)), None)
    if cuda is None:
        missing = f"no CUDA 12.0 or later is in {', '.join(map(str, homes))}"
        if choice == "1":
            fail(
                f"KVSWAP_CUDA is 1, but {missing}. Name its folder in CUDA_HOME, or set "
                "KVSWAP_CUDA=0 to leave the kernels out."
            )
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


# The commands as ninja reads them. It fills in $in and $out, quoted for the shell.


def shell(command: list[str]) -> str:
    return ninja.escape(shlex.join(command))


def cpp_command(torch: Package, nanobind: Package, cxx: list[str], cuda: Cuda | None) -> str:
    command = [*cxx, *LANGUAGE, TORCH_TARGET, "-isystem", f"{torch.folder}/include", "-fPIC"]
    command += ["-fvisibility=hidden", "-Wall", "-Wextra", *(["-Werror"] * werror())]
    if cuda:
        command += [f"-DKVSWAP_WITH_KERNELS={cuda.version[0] * 1000 + cuda.version[1] * 10}"]
    # The depfile lists the headers of torch and nanobind, but not every change of them makes these
    # newer than the objects: uv and conda link files out of a cache. So the command says the
    # versions.
    versions = f"torch {torch.version}, nanobind {nanobind.version}"
    flags = shell(words("CXXFLAGS"))
    return f"{shell(command)} $python {flags} -MD -MF $out.d -c $in -o $out # {versions}"


def python_flags(nanobind: Package) -> list[str]:
    """For what includes nanobind, whose headers are not ours to mend."""
    includes = [sysconfig.get_path("include"), str(nanobind.folder / "include")]
    flags = [word for folder in includes for word in ("-isystem", folder)]
    flags += ["-Os", "-DNDEBUG", "-DNB_DOMAIN=torch_kvswap", "-fno-strict-aliasing"]
    return [*flags, *(["-DPy_LIMITED_API=0x030C0000"] * HAS_STABLE_ABI)]


def nanobind_command(nanobind: Package, cxx: list[str]) -> str:
    command = [*cxx, "-std=c++17", "-fPIC", "-fvisibility=hidden", *python_flags(nanobind)]
    command += ["-isystem", str(nanobind.folder / "ext" / "robin_map" / "include")]
    command += words("CXXFLAGS")
    return f"{shell(command)} -c $in -o $out # nanobind {nanobind.version}"


def cu_command(cxx: list[str], cuda: Cuda) -> str:
    host_compiler = [word for word in cxx if not word.startswith("-")][-1]  # of "ccache g++"
    command = [str(cuda.nvcc), "-ccbin", host_compiler, *LANGUAGE, "-fatbin"]
    command += architectures(cuda.version, os.environ.get("TORCH_CUDA_ARCH_LIST"))
    command += ["-Werror=all-warnings"] * werror()
    return f"{shell(command)} -MD -MF $out.d $in -o $out"


def embed_command(cxx: list[str]) -> str:
    file = """-DFILE='"'$in'"'"""
    return f"{shell(cxx)} -DNAME=kvswap_${{name}}_image {file} -c csrc/embed.S -o $out"


def link_command(torch: Package, cxx: list[str]) -> str:
    # Python's functions stay undefined: the interpreter has them.
    checks = ["-Wl,--version-script=csrc/exports.map", "-Wl,--as-needed"]
    libraries = [f"-L{torch.folder}/lib", "-ltorch_cpu", "-ldl", "-lrt", "-lpthread"]
    libraries += words("LDFLAGS")
    return f"{shell([*cxx, '-shared', *checks])} $in {shell(libraries)} -o $out"


def write_build(
    folder: Path, torch: Package, nanobind: Package, cxx: list[str], cuda: Cuda | None
) -> Path:
    """Write build.ninja into `folder`. Returns the path of the library that ninja makes there.

    The C++ compiler compiles csrc/**/*.cpp. What nvcc makes of csrc/**/NAME.cu is in the library as
    bytes, `kvswap_NAME_image`.
    """
    place, headers = ninja.escape(str(folder)), {"depfile": "$out.d", "deps": "gcc"}
    with (folder / "build.ninja").open("w") as file:
        build = ninja.Writer(file, width=sys.maxsize)  # wrapped lines lose spaces in quotes
        build.variable("builddir", place)
        build.rule(
            "compile_cpp", cpp_command(torch, nanobind, cxx, cuda), "compiling $in", **headers
        )
        build.rule("compile_nanobind", nanobind_command(nanobind, cxx), "compiling nanobind")
        combined = ninja.escape(str(nanobind.folder / "src" / "nb_combined.cpp"))
        objects = build.build(f"{place}/nanobind.o", "compile_nanobind", combined)
        for source in sorted(map(str, Path("csrc").rglob("*.cpp"))):
            flags = python_flags(nanobind) if source.startswith("csrc/bindings/") else []
            if source == "csrc/bindings/module.cpp":
                # Which interface the Python files expect: loader.py compares it.
                stub = hashlib.sha256(Path("torch_kvswap/_C.pyi").read_bytes()).hexdigest()
                flags.append(f'-DKVSWAP_STUB="{stub}"')
            variables = {"python": shell(flags)} if flags else None
            objects += build.build(
                f"{place}/{source}.o", "compile_cpp", source, variables=variables
            )
        if cuda:
            build.rule("compile_cu", cu_command(cxx, cuda), "compiling $in", **headers)
            build.rule("embed", embed_command(cxx), "embedding $in")
            for source in sorted(Path("csrc").rglob("*.cu")):
                image = build.build(f"{place}/{source}.fatbin", "compile_cu", str(source))
                name, embed = {"name": source.stem}, "csrc/embed.S"
                objects += build.build(f"{image[0]}.o", "embed", image, embed, variables=name)
        build.rule("link", link_command(torch, cxx), "linking $out")
        build.build(f"{place}/_C.so", "link", objects, "csrc/exports.map")
    return folder / "_C.so"


def run_ninja(program: str, folder: Path, advice: str) -> None:
    jobs = ["-j", os.environ["MAX_JOBS"]] if os.environ.get("MAX_JOBS") else []
    done = subprocess.run([program, "-f", str(folder / "build.ninja"), *jobs])
    if done.returncode != 0:
        fail(f"the build failed. Above is the command that failed, and what it said.{advice}")


def replace(library: Path, built: Path) -> None:
    """A process that loads the library meanwhile gets the old or the new one, and never a part."""
    if not (library.exists() and filecmp.cmp(built, library, shallow=False)):
        part = library.with_suffix(".part")
        shutil.copy(built, part)
        part.replace(library)


class BuildLibrary(build_ext):
    def run(self) -> None:
        torch, cxx, cuda, program = find_torch(), find_cxx(), find_cuda(), find_ninja()
        nanobind = find_nanobind()
        library = Path(self.get_ext_fullpath(self.extensions[0].name))
        folder = Path(self.build_temp, "with-kernels" if cuda else "without-kernels")
        for parent in (Path("build"), folder, library.parent):
            parent.mkdir(parents=True, exist_ok=True)
        with Path("build", "setup.lock").open("w") as lock:
            flock(lock, LOCK_EX)  # one build of a checkout at a time
            built = write_build(folder, torch, nanobind, cxx, cuda)
            run_ninja(program, folder, " KVSWAP_CUDA=0 leaves the kernels out." if cuda else "")
            replace(library, built)


class Linked(Distribution):
    """With the links that an index shows; pyproject.toml cannot know them."""

    def parse_config_files(self, *arguments: object, **options: object) -> None:
        super().parse_config_files(*arguments, **options)
        if home := repository():
            self.metadata.project_urls = {
                "Source": home,
                "Documentation": f"{home}/tree/main/docs",
                "Issues": f"{home}/issues",
                "Changelog": f"{home}/blob/main/CHANGELOG.md",
            }


if __name__ == "__main__":
    os.chdir(Path(__file__).resolve().parent)
    if release(__version__) < OLDEST_SETUPTOOLS:
        fail(f"setuptools {__version__} is too old: pip install 'setuptools>=77'.")
    setup(
        distclass=Linked,
        long_description=long_description(),
        long_description_content_type="text/markdown",
        ext_modules=[Extension("torch_kvswap._C", [], py_limited_api=HAS_STABLE_ABI)],
        cmdclass={"build_ext": BuildLibrary},
        options={"bdist_wheel": {"py_limited_api": "cp312"}} if HAS_STABLE_ABI else {},
    )

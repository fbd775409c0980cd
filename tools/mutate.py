"""Plants one fault at a time in the sources, and says which of them no test notices.

    python tools/mutate.py --count 14 --seed 1 --report mutants.json [--only csrc/offload]

Each operator (drop a wait, swap a comparison, ...) plants `count` faults, chosen by the seed. The
library is built with each of them and the fast tests of the file's folder run. With --all-tests,
what they let pass meets all tests. Works in the checkout in which it is called, which must be
clean, and restores it. With PATH=/usr/lib/ccache:$PATH CXXFLAGS=-O0 it compiles faster.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
# The tests of each folder, those first that are fast and find most.
TESTS = {
    "csrc/bindings": [
        *("test_invalid_arguments.py", "test_handler.py", "test_result.py", "test_manager*.py"),
        *("test_hashing.py", "test_submit.py", "test_ids.py"),
        *("test_prefix_cache.py", "test_interrupts.py"),
    ],
    "csrc/prefix": [
        *("test_manager*.py", "test_eviction.py", "test_*prefix_cache.py"),
        "test_out_of_memory.py",
    ],
    "csrc/copy": [
        *("test_batch.py", "test_strided.py", "test_packed.py", "test_staged*.py"),
        *("test_handler.py", "test_encoded_*.py", "test_address_guard.py", "test_pinning.py"),
        *("test_swap_blocks*.py", "test_relay*.py", "test_fuzz.py", "test_copy_method.py"),
    ],
    "csrc/cuda": [
        *("test_failures.py", "test_native.py", "test_stream_devices.py", "test_batch.py"),
        *("test_lifetime.py", "test_pinning.py", "test_doctor.py"),
    ],
    "csrc/device": [
        *("test_handler.py", "test_failures.py", "test_staged*.py", "test_channel.py"),
        *("test_stream_devices.py", "test_pinning.py", "test_lifetime.py"),
    ],
    "csrc/encoding": [
        *("test_codec.py", "test_slot_states.py", "test_encoded_*.py", "test_encoding.py"),
        *("test_packed.py", "test_staged*.py"),
    ],
    "csrc/offload": [
        *("test_handler.py", "test_scheduler.py", "test_job_table.py", "test_failures.py"),
        *("test_channel.py", "test_copy_plan.py", "test_handler_*.py", "test_rebind.py"),
        *("test_groups.py", "test_metrics.py", "test_staged*.py", "test_encoded_*.py"),
        *("test_submit.py", "test_pinning.py", "test_copy_method.py", "test_stream_devices.py"),
        *("test_lifetime.py", "test_relay*.py", "test_exchange.py", "test_fuzz.py"),
        "test_out_of_memory.py",
    ],
    "csrc/ops": [
        *("test_ops.py", "test_expand_block_ids.py", "test_swap_blocks*.py"),
        *("test_generic_ops.py", "test_ops_on_device.py", "test_batch.py"),
        *("test_stream_devices.py", "test_address_guard.py", "test_compile.py"),
    ],
    "csrc": ["test_memory.py", "test_pinning.py", "test_failures.py", "test_ops.py"],
    "torch_kvswap/integrations/sglang.py": ["test_sglang*.py"],
    "torch_kvswap/integrations/vllm": ["test_vllm*.py"],
    "torch_kvswap/integrations/transformers": ["test_transformers*.py"],
}


class Mutant(NamedTuple):
    operator: str
    file: str
    line: int
    before: str
    after: str
    source: str  # of the whole file


def statements(text: str) -> Iterator[tuple[int, int]]:
    """Begin and end of each C++ statement that stands alone on its lines."""
    no_statement = r"//|case |default:|return\b|else\b|using |virtual |void "
    for match in re.finditer(rf"(?m)^ +(?!{no_statement})[\w(*:~]", text):
        begin, depth = match.end() - 1, 0
        for end in range(begin, len(text)):
            depth += (text[end] in "([") - (text[end] in ")]")
            if depth < 0 or text[end] in "{}":
                break
            if text[end] == ";" and depth == 0:
                yield begin, end + 1
                break


DROPPED = {
    "drop-wait": r"[^;]*\b(wait_event|wait_value|\w*\.wait(_for)?|order_after|order_before)\(",
    "drop-notify": r"[^;]*notify_(one|all)\(",
    "drop-check": r"(KVSWAP_CHECK|check_\w+|refuse_\w+)\(|\w*fail(<\w+>)?\(|throw",
    "drop-statement": r"(?!KVSWAP|check_|refuse_|throw|fail|const |auto |int |bool |size_t |"
    r"std::|uint|int64|double |static |constexpr )[\w.\->\[\]*+(]+( [-+|]?= |\(|\+\+|;)",
}
# With its first argument, which has parentheses in parentheses at most.
DRIVER_CHECK = r"KVSWAP_DRIVER_CHECK\(((?:[^,()]|\((?:[^()]|\([^()]*\))*\))*),"
REPLACED: dict[str, list[tuple[str, str]]] = {
    "off-by-one": [
        *((r" < ", " <= "), (r" <= ", " < "), (r" > ", " >= "), (r" >= ", " > ")),
        *((r" \+ 1\b", " + 2"), (r" - 1\b", " - 2"), (r"= 0; ", "= 1; ")),
    ],
    "swap-condition": [
        *((r" && ", " || "), (r" \|\| ", " && "), (r" == ", " != "), (r" != ", " == ")),
        (r"\bif \((?!const |auto )(.*)\) (?=\w|\{)", r"if (!(\1)) "),
    ],
    "skip-error-path": [
        (r"\bif \((.*(error|problem|failed|result).*)\) (?=\w|\{)", "if (false) "),
        (r"\bthrow;", ";"),
        (DRIVER_CHECK, r"(void)(\1); (void)sizeof("),
    ],
    "wrong-index": [
        (r"\[i\]", "[0]"),
        (r"\[i - 1\]", "[i]"),
        (r"\bfront\(\)", "back()"),
        (r"\bback\(\)", "front()"),
        (r"\bkStores\b", "kLoads"),
        (r"\bstd::min\b", "std::max"),
        (r"\bstd::max\b", "std::min"),
        (r"\bsrc(?=[._\[])", "dst"),
        (r"\bblocks\(\)", "slots()"),
    ],
}


def native_mutants(file: str, text: str) -> Iterator[Mutant]:
    def mutant(operator: str, begin: int, end: int, new: str) -> Mutant:
        line = text.count("\n", 0, begin) + 1
        return Mutant(operator, file, line, text[begin:end], new, text[:begin] + new + text[end:])

    for begin, end in statements(text):
        for operator, pattern in DROPPED.items():
            if re.match(pattern, text[begin:end]):
                yield mutant(operator, begin, end, ";")
    for operator, pairs in REPLACED.items():
        for pattern, new in pairs:
            for match in re.finditer(pattern, text):
                start = text.rfind("\n", 0, match.start()) + 1
                if not re.match(r"\s*(//|#|template|static_assert)", text[start:]):
                    yield mutant(operator, *match.span(), match.expand(new))


SWAPPED: dict[type[ast.cmpop], type[ast.cmpop]]
SWAPPED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
OPPOSED: dict[type[ast.cmpop], type[ast.cmpop]]
OPPOSED = {ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is}
OPPOSED |= {ast.In: ast.NotIn, ast.NotIn: ast.In}


class _Sites(ast.NodeTransformer):
    """Applies the `wanted`-th change that is possible; counts them."""

    def __init__(self, wanted: int = -1) -> None:
        self.wanted, self.sites = wanted, list[tuple[str, int]]()

    def _change(self, operator: str, node: ast.AST, new: ast.AST) -> ast.AST:
        self.sites.append((operator, getattr(node, "lineno", 0)))
        return ast.copy_location(new, node) if len(self.sites) - 1 == self.wanted else node

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return self._change("drop-check", node, ast.Pass())

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.value, ast.Call):
            return node
        waits = "wait" in ast.unparse(node.value.func)
        return self._change("drop-wait" if waits else "drop-statement", node, ast.Pass())

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)
        test = ast.UnaryOp(ast.Not(), node.test)
        return self._change("swap-condition", node, ast.If(test, node.body, node.orelse))

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return self._change("swap-condition", node, ast.BoolOp(other, node.values))

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        for operator, table in (("off-by-one", SWAPPED), ("swap-condition", OPPOSED)):
            if (other := table.get(type(node.ops[0]))) is not None:
                ops = [other(), *node.ops[1:]]
                return self._change(operator, node, ast.Compare(node.left, ops, node.comparators))
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if type(node.value) is not int:
            return node
        return self._change("off-by-one", node, ast.Constant(node.value + 1))

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        self.generic_visit(node)
        new = ast.ExceptHandler(node.type, node.name, [ast.Pass()])
        return self._change("skip-error-path", node, new)


def python_mutants(file: str, text: str) -> Iterator[Mutant]:
    count = _Sites()
    count.visit(ast.parse(text))
    lines = text.splitlines()
    for number, (operator, line) in enumerate(count.sites):
        tree = ast.fix_missing_locations(_Sites(number).visit(ast.parse(text)))
        yield Mutant(operator, file, line, lines[line - 1].strip(), "", ast.unparse(tree))


def all_mutants(only: list[str]) -> Iterator[Mutant]:
    for path in sorted([*ROOT.glob("csrc/**/*"), *ROOT.glob("torch_kvswap/integrations/**/*.py")]):
        file = str(path.relative_to(ROOT))
        if only and not any(file.startswith(name) for name in only):
            continue
        if path.match("kernels/*.h"):
            continue  # for the GPU, which most machines lack
        if path.suffix in (".cpp", ".h"):
            yield from native_mutants(file, path.read_text())
        elif path.suffix == ".py" and path.stem != "__init__":
            yield from python_mutants(file, path.read_text())


def choose(only: list[str], operators: list[str], count: int, seed: int) -> list[Mutant]:
    by_operator: dict[str, dict[str, Mutant]] = {}
    for mutant in all_mutants(only):
        by_operator.setdefault(mutant.operator, {})[mutant.source] = mutant  # each once
    chosen = []
    for operator in operators or sorted(by_operator):
        found = list(by_operator[operator].values())
        chosen += random.Random(f"{seed} {operator}").sample(found, min(count, len(found)))
    return chosen


def failure(command: list[str], seconds: int) -> str | None:
    """None if the command ends well in time, else why not. Ends all of its processes."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            if process.wait(seconds) == 0:
                return None
        except subprocess.TimeoutExpired:
            return f"no end in {seconds} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        lines = output.read().splitlines() or [""]
        return next((line for line in lines if line.startswith(("FAILED", "ERROR"))), lines[-1])


def tests_of(file: str) -> list[str]:
    """Those of its own name first."""
    folder = max((name for name in TESTS if file.startswith(name)), key=len)
    found = {pattern: [*(ROOT / "tests").rglob(pattern)] for pattern in TESTS[folder]}
    if not all(found.values()):
        raise SystemExit(f"no tests: {[pattern for pattern in found if not found[pattern]]}")
    own = [*(ROOT / "tests").rglob(f"test_{Path(file).stem.partition('_')[0]}*.py")]
    paths = [sorted(some, key=lambda path: path.name) for some in (own, *found.values())]
    return list(dict.fromkeys(str(path) for some in paths for path in some))


def judge(mutant: Mutant, all_tests: bool) -> tuple[str, str]:
    """ "no build", "killed", "killed by all tests" or "survived", and by what."""
    path = ROOT / mutant.file
    original = path.read_text()
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    fast = [*pytest, "-m", "not slow and not gpu", *tests_of(mutant.file)]
    try:
        path.write_text(mutant.source)
        build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        if path.suffix != ".py" and (why := failure(build, 900)) is not None:
            return "no build", why
        if (why := failure(fast, 600)) is not None:
            return "killed", why
        if all_tests and (why := failure([*pytest, "-n2"], 1800)) is not None:
            return "killed by all tests", why
        return "survived", ""
    finally:
        path.write_text(original)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=14, help="faults of each operator")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[], help="folders or files")
    parser.add_argument("--operators", nargs="*", default=[], help="all, where none is named")
    parser.add_argument("--all-tests", action="store_true")
    parser.add_argument("--report", type=Path, help="a JSON file")
    options = parser.parse_args()
    verdicts = []
    for mutant in choose(options.only, options.operators, options.count, options.seed):
        verdict, why = judge(mutant, options.all_tests)
        verdicts.append({"verdict": verdict, "why": why, **mutant._asdict(), "source": None})
        where = f"{mutant.file}:{mutant.line} {mutant.operator}"
        print(f"{verdict}: {where}: {mutant.before!r} -> {mutant.after!r} {why}", flush=True)
        if options.report:
            options.report.write_text(json.dumps(verdicts, indent=1))
    for (operator, verdict), number in sorted(
        Counter((entry["operator"], entry["verdict"]) for entry in verdicts).items()
    ):
        print(f"{operator}: {number} {verdict}")


if __name__ == "__main__":
    main()

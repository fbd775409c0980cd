"""`python -m torch_kvswap COMMAND`: a command is a module with `main(arguments) -> exit code`."""

import sys
from importlib import import_module

# Imported only when run: a command must not fail because another one cannot be imported.
COMMANDS = {
    "doctor": ("torch_kvswap.cli.doctor", "report what this installation can do on this machine"),
    "serve": ("torch_kvswap.cli.serve", "keep host pages for the engines of this machine"),
}


def main(arguments: list[str]) -> int:
    """Runs a command with its arguments. Returns its exit code; 2 for an unknown command."""
    name = arguments[0] if arguments else "--help"
    if name in COMMANDS:
        module, _ = COMMANDS[name]
        code: int = import_module(module).main(arguments[1:])
        return code
    if name == "--version":
        from torch_kvswap import __version__

        print(f"torch_kvswap {__version__}")
        return 0
    width = max(map(len, COMMANDS))
    usage = "\n".join(
        [
            "usage: python -m torch_kvswap COMMAND ...",
            "       python -m torch_kvswap --version",
            *(f"  {command:{width}}  {purpose}" for command, (_, purpose) in COMMANDS.items()),
        ]
    )
    if name in ("-h", "--help"):
        print(usage)
        return 0
    print(f"torch_kvswap has no command {name!r}\n{usage}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

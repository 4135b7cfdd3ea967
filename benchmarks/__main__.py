"""Command line of the benchmarks. Each command is a module with `add_parser`."""

from __future__ import annotations

import argparse
import sys
import traceback

from benchmarks.gpu import checks, pack
from benchmarks.gpu import command as gpu
from benchmarks.harness import memory
from benchmarks.harness.report import CRASHED
from benchmarks.kernels import compile, host, profile, rows, tune
from benchmarks.suites import attention, decode, distributed, linear, losses, overhead, packed
from commandline.errors import UsageError
from commandline.start import start
from commandline.variants import load_plugin

COMMANDS = (
    attention, linear, decode, packed, distributed, losses, overhead, host, rows, compile, profile,
    tune, checks, pack, gpu, memory,
)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Check and time attention kernels. COMMAND --help describes a command.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in COMMANDS:
        module.add_parser(commands)
    args = parser.parse_args(argv)
    try:
        if getattr(args, "plugin", None) is not None:
            load_plugin(args.plugin)
        return args.run(args)
    except BrokenPipeError:  # see `start`
        raise
    except (UsageError, OSError) as error:  # OSError: a file cannot be read or written
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    except Exception:
        traceback.print_exc()
        return CRASHED  # not 1, the status of wrong results


if __name__ == "__main__":
    sys.exit(start(main))

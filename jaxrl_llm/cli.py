"""The command line: jaxrl-llm train | evaluate | sample | methods | report."""

from __future__ import annotations

import argparse
import logging
import os
import platform
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import platformdirs

# JAX and everything that needs it is imported by the commands, so that --help is quick.

_CONFIG_HELP = "a Python file, and in it the function that returns the config (default: get_config)"
_SET_HELP = (
    "change the config by a dotted path: rollout.temperature=0.9, objective.loss=my_fork.gate:soft_gate"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, 2 for the user's errors, 130 when interrupted."""
    args = _parser().parse_args(argv)
    _log_to_stderr()
    try:
        args.run(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `jaxrl-llm methods | head`
        sys.stderr.close()
        return 0
    except Exception as error:
        if args.debug or not _is_users(error):
            raise
        print(f"error: {error}\n(--debug shows where it was raised)", file=sys.stderr)
        return 2
    return 0


def _is_users(error: Exception) -> bool:
    """Returns whether the message alone helps: errors that this package raises on purpose, and files.

    An error from inside JAX or another library is a bug somewhere, and needs its traceback.
    """
    if isinstance(error, OSError):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    ours = bool(frames) and Path(frames[-1].filename).is_relative_to(Path(__file__).parent)
    return ours and isinstance(error, (ValueError, RuntimeError))


class _Stderr(logging.Handler):
    """Prints messages to the standard error of the moment, which a live display may have redirected."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


def _log_to_stderr() -> None:
    logger = logging.getLogger("jaxrl_llm")
    if not logger.handlers:
        logger.addHandler(_Stderr())
        logger.setLevel(logging.INFO)
        logger.propagate = False


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxrl-llm", description="Reinforcement learning of language models in JAX.", allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run, summary: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        command.set_defaults(run=run)
        return command

    def add_set(command: argparse.ArgumentParser) -> None:
        command.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help=_SET_HELP)

    train = add("train", _train, "Train, or go on with the run in the folder.")
    train.add_argument("--config", required=True, metavar="FILE[:RECIPE]", help=_CONFIG_HELP)
    train.add_argument("--run-dir", required=True, type=Path, metavar="DIR", help="where the run is kept")
    add_set(train)

    evaluate = add("evaluate", _evaluate, "Measure a run's held-out accuracy, pass@k and maj@k.")
    evaluate.add_argument("--run-dir", required=True, type=Path, metavar="DIR")
    evaluate.add_argument("--step", type=int, metavar="N", help="which checkpoint (default: the newest)")
    add_set(evaluate)

    sample = add(
        "sample", _sample, "Print responses to a prompt, from a run or from the model it starts from."
    )
    where = sample.add_mutually_exclusive_group(required=True)
    where.add_argument("--config", metavar="FILE[:RECIPE]", help=_CONFIG_HELP)
    where.add_argument("--run-dir", type=Path, metavar="DIR", help="sample from a checkpoint of this run")
    sample.add_argument("--step", type=int, metavar="N", help="which checkpoint (default: the newest)")
    sample.add_argument("--prompt", required=True, metavar="TEXT")
    sample.add_argument("--n", type=int, default=4, help="responses (default: 4)")
    sample.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default: 1.0)")
    add_set(sample)

    methods = add("methods", _methods, "List the recipes and every stage function.")
    how = methods.add_mutually_exclusive_group()
    how.add_argument("--markdown", action="store_true", help="print Markdown")
    how.add_argument("--readme", type=Path, metavar="FILE", help="write the tables between FILE's markers")

    report = add("report", _report, "Write one HTML page with the curves and samples of one or several runs.")
    report.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
    report.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE")
    return parser


def _keep_compiled_programs() -> None:
    """Lets the second start of a config read its compiled programs from the user's cache.

    One folder a machine, since a program may use instructions that another processor does not have; the
    oldest are dropped over 8 GB. `JAX_COMPILATION_CACHE_DIR` names another folder.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    import jax

    folder = platformdirs.user_cache_path("jaxrl_llm") / "compiled" / platform.node()
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", 8_000_000_000)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _train(args: argparse.Namespace) -> None:
    from jaxrl_llm import config as cfg

    config = cfg.override(cfg.load_config(args.config), args.set)
    cfg.check(config)
    from jaxrl_llm.train import train

    _keep_compiled_programs()
    train(config, args.run_dir)


def _saved_config(args: argparse.Namespace):
    """Returns the config of a run folder with the overrides of the command line."""
    from jaxrl_llm import config as cfg

    path = args.run_dir / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{args.run_dir} is no run folder: it has no config.json")
    return cfg.override(cfg.from_json(path.read_text()), args.set)


def _evaluate(args: argparse.Namespace) -> None:
    config = _saved_config(args)
    from jaxrl_llm.inspection import evaluate_run

    _keep_compiled_programs()
    for name, value in evaluate_run(args.run_dir, step=args.step, config=config).items():
        print(f"{name:<24} {value:.4g}")


def _sample(args: argparse.Namespace) -> None:
    from jaxrl_llm import config as cfg

    if args.step is not None and args.run_dir is None:
        raise ValueError("--step names a checkpoint of a run: give --run-dir instead of --config")
    if args.n < 1 or args.temperature < 0:
        raise ValueError(f"--n is {args.n} and --temperature {args.temperature}: at least 1, and at least 0")
    config = _saved_config(args) if args.run_dir else cfg.override(cfg.load_config(args.config), args.set)
    from jaxrl_llm.inspection import sample

    _keep_compiled_programs()
    texts = sample(
        config, args.run_dir, step=args.step, prompt=args.prompt, n=args.n, temperature=args.temperature
    )
    for i, text in enumerate(texts, 1):
        print(f"--- {i} ---\n{text}")


def _methods(args: argparse.Namespace) -> None:
    from jaxrl_llm import methods

    if args.readme:
        args.readme.write_text(methods.with_table(args.readme.read_text()))
    elif args.markdown:
        print(methods.to_markdown())
    else:
        methods.print_table()


def _report(args: argparse.Namespace) -> None:
    from jaxrl_llm.report import write_report

    print(write_report(args.runs, args.out))


if __name__ == "__main__":
    sys.exit(main())

"""The end of a training command: the exit code and the next command."""

from __future__ import annotations

import signal

from xformer.cli._console import program, quote
from xformer.families.run_directory import COMMANDS, RunDirectory
from xformer.runs.console import make_console
from xformer.runs.launch import TrainedRun

INIT_HELP = """With --init, training starts from a public checkpoint or a run, with its tokenizer. The learning rate \
is then 5e-5 unless set (5e-4 with --lora), warm-up takes at most a tenth of --max-steps, and \\[model] has only \
dropout, attention_dropout, activation_dropout and rematerialize. `xformer export DIR OUT` writes the tuned model \
in the Hugging Face format.

Uses all cores; XFORMER_NUM_THREADS=N limits the number of threads.
"""


def exit_code(run: TrainedRun) -> int:
    """Return the exit code of a command that trained: after a signal, what a shell reports for one."""
    number = signal.Signals.__members__.get(run.reason.removeprefix("stopped by "))
    return 0 if number is None else 128 + number


def finish(run: TrainedRun) -> int:
    """Print the next command, on rank 0, and return the exit code."""
    console, path = make_console(quiet=run.rank > 0), quote(run.directory)
    if code := exit_code(run):
        console.print(f"everything is saved; continue with: {program()} resume {path}")
        return code
    task = RunDirectory(run.directory).read_config()["task"]
    options = {"language_modeling": "", "chat": " --chat --prompt TEXT"}.get(task, " --input FILE --output FILE")
    console.print(f"next: {program()} {COMMANDS[task]} --model {path}{options}")
    return 0

"""Faults in one rank of a real run: `sitecustomize` in the project's folder changes a module as it is imported."""

from pathlib import Path

from projects import Project

_SITE = """
import os, signal, sys
start = os.environ.get("XTRAIN_RESTART") or os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0
if os.environ.get("RANK") == "{rank}" and int(start) in {starts}:
    import importlib.abc, importlib.machinery

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def change(module):
{change}

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name != "{module}":
                return None
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                change(module)

            spec.loader.exec_module = exec_module
            return spec

    if "{module}" in sys.modules:  # of a forked rank
        change(sys.modules["{module}"])
    sys.meta_path.insert(0, Finder())
"""
# Kills its rank at the beginning of a step, counted from 1.
AT_STEP = """
        made = module.Step.__init__

        def __init__(self, *, index, **more):
            if index + 1 == {step}:
                die()
            made(self, index=index, **more)

        module.Step.__init__ = __init__
"""
# Kills its rank while the second checkpoint is being written.
AT_SAVE = """
        write = module.write_tensors
        calls = []

        def write_tensors(*arguments):
            calls.append(1)
            if len(calls) == 2:
                die()
            return write(*arguments)

        module.write_tensors = write_tensors
"""
AT_SETUP = """
        raise RuntimeError("this rank does not come up")
"""
PLACES = {
    AT_STEP: "xtrain.runtime.nn.batch",
    AT_SAVE: "xtrain.runtime.store.writing",
    AT_SETUP: "xtrain.runtime.nn.optimizer",
}


def sabotage(project: Project, fault: str, *, rank: int, starts: tuple[int, ...] = (0,), step: int = 0) -> None:
    """Let `fault` happen in `rank` of the given starts, the first being 0."""
    change = fault.format(step=step) if fault is AT_STEP else fault
    text = _SITE.format(rank=rank, starts=starts, change=change, module=PLACES[fault])
    (project.folder / "sitecustomize.py").write_text(text)


def environment(project: Project) -> dict[str, str]:
    """In which the sabotage of a project takes place."""
    return {**project.environment, "PYTHONPATH": str(Path(project.folder))}

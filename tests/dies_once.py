"""
train.py, except that rank 1 kills itself while update 4 is saved, unless there is a file "died",
which it leaves behind.
"""
import os
import runpy
import signal
from pathlib import Path

from muon import Optimizer

gather = Optimizer.gather


def gather_or_die(optimizer):
    if optimizer.rank == 1 and optimizer.updates == 4 and not os.path.exists("died"):
        Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return gather(optimizer)


Optimizer.gather = gather_or_die
train = Path(__file__).resolve().parents[1] / "train.py"
runpy.run_path(str(train), run_name="__main__")

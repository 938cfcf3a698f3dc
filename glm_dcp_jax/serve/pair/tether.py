"""`python -m glm_dcp_jax.serve.pair.tether PID MODULE [flags]`: a module that does not outlive the process PID."""

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run the module as a program, which the kernel kills when its parent, PID, ends in whatever way."""
    parent, module, *arguments = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it was gone before it could be asked for
        sys.exit(1)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

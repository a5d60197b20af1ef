"""Ends a worker whose run has died."""

import ctypes
import os
import signal
import sys
import threading
import time

from composer_jax.pipeline import controller

_PR_SET_PDEATHSIG = 1  # In <sys/prctl.h>.


def die_with_parent() -> None:
  """Makes this process end soon after the run that started it, however it dies.

  Does nothing in a worker that was not started by a `RolloutProcess`.
  """
  parent = int(os.environ.get(controller.PARENT, '0'))
  if not parent:
    return
  if sys.platform == 'linux':
    # Also while this process is stopped, or a library holds the lock of Python.
    # It means the thread that started this process: the main one of its parent.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

  def watch():
    # Not os.getppid() at the start: the parent may have died while this process
    # was still importing.
    while os.getppid() == parent:
      time.sleep(0.5)
    os._exit(1)

  threading.Thread(target=watch, name='parent-watch', daemon=True).start()

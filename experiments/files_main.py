"""Shared by mains that turn files into files: flags, readable errors."""

import os
import sys
from collections.abc import Callable

from absl import logging

from experiments import start


def main(run: Callable[[], None]) -> None:
  """Runs `run` under absl.

  Errors that a user can cause (ValueError, OSError) end the program with one
  line. `run` should import its libraries itself, so that --help is quick.
  """

  def call():
    if not start.DEBUG.value:
      # Orbax warns about ways to save that are not used here.
      logging.set_verbosity(logging.ERROR)
    # Files need no accelerator, whose memory jax would take.
    os.environ['JAX_PLATFORMS'] = 'cpu'
    try:
      run()
    except KeyboardInterrupt:
      sys.exit('Stopped; run the same command again.')

  start.run(call, errors=(ValueError, OSError))

"""What mains share that turn files into files: flags, readable errors."""

import sys
import traceback
from collections.abc import Callable

from absl import app, flags, logging

_DEBUG = flags.DEFINE_bool(
  'debug', False, 'Prints the traceback of an error that has a message.'
)


def main(run: Callable[[], None]) -> None:
  """Runs `run` under absl.

  Errors that a user can cause (ValueError, OSError) end the program with one
  line. It imports its libraries itself, so that --help is quick.
  """

  def call(argv):
    if len(argv) > 1:
      raise app.UsageError(f'Unknown arguments {argv[1:]}.')
    if not _DEBUG.value:
      # Orbax warns of ways to save that are not these.
      logging.set_verbosity(logging.ERROR)
    try:
      run()
    except (ValueError, OSError) as error:
      if _DEBUG.value:
        traceback.print_exc()
      sys.exit(f'error: {error}')
    except KeyboardInterrupt:
      sys.exit('Stopped; run the same command again.')

  app.run(call)

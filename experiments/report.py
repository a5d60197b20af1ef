"""Writes report.html of whatever a workdir holds.

  python -m experiments.report --workdir=runs/tiny

Every run writes its own at its end, also when it is interrupted. This is for a
run that was killed, and for a look at one that is still going: it only reads
what is there and replaces the page.
"""

import sys

from absl import app, flags

from composer_jax.report import document

_WORKDIR = flags.DEFINE_string(
  'workdir', 'runs/tiny', 'Of the run. The page is written into it.'
)


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'Unknown arguments {argv[1:]}.')
  try:
    path = document.write_report(_WORKDIR.value)
  except (ValueError, OSError) as error:
    sys.exit(f'error: {error}')
  print(f'Report: {path}')


if __name__ == '__main__':
  app.run(main)

"""Writes report.html from what a workdir holds.

  python -m experiments.report --workdir=runs/tiny

  python -m experiments.report --workdir=runs/a --compare=runs/b,runs/c

Every run writes its page at its end, also when it is interrupted. This main is
for a run that was killed or still goes on; it reads the workdir and replaces
the page only. With --compare it writes comparison.html instead: the curves of
all these runs, their evaluations by axis, and where their configs differ.
"""

from absl import flags

from composer_jax.report import document
from experiments import start

_WORKDIR = flags.DEFINE_string(
  'workdir', 'runs/tiny', 'Folder of the run, into which the page is written.'
)
_COMPARE = flags.DEFINE_list(
  'compare', [], 'Folders of other runs, to be compared with it.'
)


def _main() -> None:
  if _COMPARE.value:
    path = document.write_comparison(_WORKDIR.value, _COMPARE.value)
    print(f'Comparison: {path}')
  else:
    print(f'Report: {document.write_report(_WORKDIR.value)}')


if __name__ == '__main__':
  start.run(_main, errors=(ValueError, OSError))

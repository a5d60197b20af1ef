"""Renews composer_jax/corpus/pinned.sources after constraints.txt was renewed.

  python -m experiments.pin_corpus

Takes versions and files from this environment, which has to be one of the new
constraints.txt. The names stay; to add or remove one, edit the list first. The
default corpus is another one afterwards, and so are all figures of it.
"""

import pathlib

from composer_jax.core import files
from composer_jax.corpus import sources
from experiments import files_main


def renew(path: pathlib.Path) -> None:
  """Writes a list of releases anew, after what is installed."""
  text = path.read_text()
  lines = [line for line in text.splitlines() if line.startswith('#')]
  for name in sources.read_pins([str(path)]):
    package = name.partition('==')[0]
    source = sources.find(name)
    if source is None:
      raise ValueError(f'{package} is not installed here; install it first.')
    renewed = f'{package}=={source.version}'
    if renewed != name:
      print(f'{name} -> {source.version}')
    lines.append(f'{renewed} sha256={source.sha256()}')
  files.write_atomic(path, ('\n'.join(lines) + '\n').encode())


if __name__ == '__main__':
  files_main.main(lambda: renew(sources.PINNED_LIST))

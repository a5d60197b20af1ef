"""Small, tested, pure Python packages that feature-deletion tasks are made of.

  python -m experiments.make_tasks --config=configs/tasks/packages.py \
      --out=runs/tasks

Their tests pass without a network. Numbers are in experiments/studies/deletion.
"""

import ml_collections


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Returns packages and options; `packages.py:small` has two packages."""
  if arg not in ('', 'small'):
    raise ValueError(
      f"configs/tasks/packages.py takes no argument or 'small', not {arg!r}."
    )
  c = ml_collections.ConfigDict()
  # Releases and the SHA-256 of their sdists. No task of a held-out package is
  # ever trained on.
  c.packages = _packages()
  c.options = dict(
    seed=0,
    body=11,  # valid tasks wanted of each package and tier
    symbol=10,
    class_=5,
    file=3,
    closure=6,
    tries=3.0,  # candidates tried for each task wanted
    max_share=0.6,  # largest share of tests that a feature may break
    min_tests=10,  # always passing tests; else the package is refused
    max_unstable=0.02,  # share of tests that change with their order
    hidden_share=0.25,  # share of failing test functions that agents never see
    max_guards=120,  # other tests that a task keeps
    suite_s=60.0,  # a slower suite is refused
    timeout_s=60.0,  # limit of a run of a task's tests
  )
  c.sandbox = dict(
    level='auto',
    workers=2,  # packages at a time
    wall_s=400.0,
    cpu_s=400.0,
    memory_bytes=2 * 2**30,
    processes=64,
    file_bytes=64 * 2**20,
    output_bytes=16 * 2**20,
  )
  if arg == 'small':
    names = ('cachetools', 'toolz')
    c.packages = {name: _packages()[name] for name in names}
  return c


def _packages() -> dict:
  def pin(version: str, sha256: str, *requires: str, held_out: bool = False):
    return dict(
      version=version, sha256=sha256, requires=requires, held_out=held_out
    )

  return {
    'boltons': pin(
      '26.2.0',
      'd39cfd15c1a1c3bd4d705c82252fa9edb8e4f5e8cc039f8e39afac7b1b47e92c',
    ),
    'cachetools': pin(
      '8.0.0',
      '5ed01bd676800d51f0025605e4fd8ad0891550513e7b0a4c3da478463764e5c3',
      held_out=True,
    ),
    'humanize': pin(
      '4.17.0',
      '1d6a36c453dbfbb3f0b34601d2e0b4ce5d48d780305cd45714843f0068fde6ac',
    ),
    'idna': pin(
      '3.20',
      'a7db850025b95ded1eae8a46181a1a6c56c92c96f0e2b005d9ff8dc0210cab44',
    ),
    'inflection': pin(
      '0.5.1',
      '1a29730d366e996aaacffb2f1f1cb9593dc38e2ddd30c91250c6dde09ea9b417',
    ),
    'isodate': pin(
      '0.7.2',
      '4cd1aa0f43ca76f4a6c6c0292a85f40b35ec2e43e315b59f06e6d32171a953e6',
    ),
    'itsdangerous': pin(
      '2.2.0',
      'e0050c0b7da1eea53ffaf149c0cfbb5c6e2e2b69c4bef22c81fa6eb73e5f6173',
    ),
    'jsonpointer': pin(
      '3.12',
      '7a3dcc11b64053eaa9c549e85e413f8d40a075215f793a331bed9182a14251ae',
    ),
    'markdown': pin(
      '3.11.3',
      '81eb91631dc97ad1efbc76019ef0f80fe90ca49ddf81546752d79989c3bfff3e',
    ),
    'mistune': pin(
      '3.4.0',
      '2eaf7952af928ca8d33b779762effc1da517b62c6ad85ec8ca957e3b07b9782a',
    ),
    'more-itertools': pin(
      '11.2.1',
      'cbf08fd0af284dc69718b9b76a8e6203df624d70209ea511e4219d350c856f63',
    ),
    'parse': pin(
      '1.22.4',
      '706d458feed5a81b02768d3156e8070baf6cee7d150a3a3c0cd43101a875c3b5',
    ),
    'platformdirs': pin(
      '4.14.7',
      '5472257c1cf97a14658af52997011c7e59e4aebf3a24950b973c11b579e1b074',
    ),
    'pyasn1': pin(
      '0.6.5',
      '6b11616a6bcf3a40e635f082bb232fa57b5e0dd7f517bd7ddd69ec3794508a47',
    ),
    'pyrsistent': pin(
      '0.20.0',
      '4c48f78f62ab596c679086084d0dd13254ae4f3d6c72a83ffdf5ebdef8f265a4',
    ),
    'rfc3986': pin(
      '2.0.0',
      '97aacf9dbd4bfd829baad6e6309fa6573aaf1be3f6fa735c8ab05e46cecb261c',
    ),
    'schema': pin(
      '0.7.8',
      'e86cc08edd6fe6e2522648f4e47e3a31920a76e82cce8937535422e310862ab5',
    ),
    'semver': pin(
      '3.1.1',
      '149b26cabada6f63212f97e94505d21578cb1d280cf714827f328d5e70765fea',
      held_out=True,
    ),
    'simpleeval': pin(
      '1.0.8',
      'b417f869c11f2de034eb919820a825f35d12ce99f63a43971947ce73679eb9ba',
      held_out=True,
    ),
    'sqlparse': pin(
      '0.6.1',
      'ca722573f848ff2d30e40ea30f53a104b7dea7635ea9285891263eb2c58fb6e7',
    ),
    'tabulate': pin(
      '0.10.0',
      'e2cfde8f79420f6deeffdeda9aaec3b6bc5abce947655d17ac662b126e48a60d',
      held_out=True,
    ),
    'tinydb': pin(
      '4.9.0',
      '6928b1fa785186bda7952a0ba05aaeedc883ede565ca9c7d608de44e5e75de70',
    ),
    'tomlkit': pin(
      '0.15.2',
      '83e32755ba1d20d9340bd069ee97e9f6232ba2346b63ffcba425de01f7e327a6',
    ),
    'toolz': pin(
      '1.2.0',
      '9667a038e9d6ecba37995e26cb2f59ec6420b6ad8dd9677de59db9b956b08490',
    ),
    'voluptuous': pin(
      '0.16.0',
      '006535e22fed944aec17bef6e8725472476194743c87bd233e912eb463f8ff05',
    ),
    'xmltodict': pin(
      '1.0.4',
      '6d94c9f834dd9e44514162799d344d815a3a4faec913717a9ecbfa5be1bb8e61',
    ),
  }

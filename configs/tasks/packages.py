"""Tested, pure Python packages that feature-deletion tasks are made of.

  python -m experiments.make_tasks --config=configs/tasks/packages.py \
      --out=runs/tasks

The factory refuses what it can make no task of. Which packages have been made,
what they gave, and which are still to be tried: experiments/studies/deletion.
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
    # Valid tasks wanted of each package and tier, 60 together. What deletes
    # several definitions takes them from the tiers of one.
    body=30,
    symbol=18,
    class_=4,
    file=2,
    closure=6,
    min_lines=3,  # of code, of a deleted body or symbol
    max_lines=10_000,
    # Shown tests that describe what no prose does; 0 accepts what nothing does.
    examples=3,
    tries=2.0,  # candidates tried for each task wanted
    max_share=0.6,  # largest share of tests that a feature may break
    min_tests=10,  # always passing tests; else the package is refused
    max_unstable=0.02,  # share of tests that change with their order
    hidden_share=0.25,  # share of failing test functions that agents never see
    max_guards=120,  # other tests that a task keeps
    suite_s=240.0,  # of a processor; a slower suite is refused
    timeout_s=60.0,  # limit of a run of a task's tests
  )
  c.sandbox = dict(
    level='auto',
    workers=2,  # packages at a time
    wall_s=7500.0,  # a busy machine takes longer for its processor time
    cpu_s=1500.0,
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
    'algorithms': pin(
      '1.0.1',
      'e2d140bc315eb1e106f2ab8c1f2ec595e01cb1ef0aa1506d20f93f75cf9fd8b1',
    ),
    'blinker': pin(
      '1.9.0',
      'b4ce2265a7abece45e7cc896e98dbebe6cead56bcf805a3d23136d145f5445bf',
    ),
    'boltons': pin(
      '26.2.0',
      'd39cfd15c1a1c3bd4d705c82252fa9edb8e4f5e8cc039f8e39afac7b1b47e92c',
    ),
    'bracex': pin(
      '3.2.2',
      'd18976160b3ba01a57d5c53a5c8c3aa2506efa9e0a3a62467251f82b8f563fde',
    ),
    'cachetools': pin(
      '8.0.0',
      '5ed01bd676800d51f0025605e4fd8ad0891550513e7b0a4c3da478463764e5c3',
      held_out=True,
    ),
    'chardet': pin(
      '7.7.0',
      '0ba38a05201b0abf7570c12d8af45c30b2af835bd5cc52bfc7105082eda82c1e',
    ),
    'configobj': pin(
      '5.0.9',
      '03c881bbf23aa07bccf1b837005975993c4ab4427ba57f959afdd9d1a2386848',
    ),
    'decorator': pin(
      '5.3.1',
      '4cbcdd55a6efadb9dbea26b858f4fb3264567b52d69ca0d25b721b553f60ea82',
    ),
    'diff-match-patch': pin(
      '20241021',
      'beae57a99fa48084532935ee2968b8661db861862ec82c6f21f4acdd6d835073',
    ),
    'distro': pin(
      '1.9.0',
      '2fa77c6fd8940f116ee1d6b94a2f90b13b5ea8d019b98bc8bafdcabcdd9bdbed',
    ),
    'docstring-parser': pin(
      '0.18.0',
      '292510982205c12b1248696f44959db3cdd1740237a968ea1e2e7a900eeb2015',
    ),
    'docutils': pin(
      '0.23',
      '746f5060322511280a1e50eb76846ed6bf2342984b2ac04dc42caa1a8d78799e',
    ),
    'ftfy': pin(
      '6.3.1',
      '9b3c3d90f84fb267fe64d375a07b7f8912d817cf86009ae134aa03e1819506ec',
      'wcwidth',
    ),
    'funcy': pin(
      '2.1',
      '8979feb3de7120afd1d00e5a8eae810c1942e4bfbc91697151e9ee1e49f79284',
    ),
    'geographiclib': pin(
      '2.1',
      '6a6545e6262d0ed3522e13c515713718797e37ed8c672c31ad7b249f372ef108',
    ),
    'hijridate': pin(
      '2.6.0',
      'afe4644c4d1fe3cfd2aa3c28bfa660405c12e5ba53249ba942ec68c7bb216e00',
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
    'jinja2': pin(
      '3.1.6',
      '0137fb05990d35f1275a587e9aee6d56da821fc83491a0fb838183be43f66d6d',
      'markupsafe',
    ),
    'json5': pin(
      '0.17.3',
      '8d0278ad34ebaa9c3af76d9519274811830224a2d1cd5af156dbd067f461b8a4',
    ),
    'jsonpickle': pin(
      '4.1.4',
      '8adf24cca611809b55ff5ed2ace850e1a3e4370dad5d363df71569b8f46c9645',
    ),
    'jsonpointer': pin(
      '3.12',
      '7a3dcc11b64053eaa9c549e85e413f8d40a075215f793a331bed9182a14251ae',
    ),
    'lark': pin(
      '1.3.1',
      'b426a7a6d6d53189d318f2b6236ab5d6429eaf09259f1ca33eb716eed10d2905',
    ),
    'markdown': pin(
      '3.11.3',
      '81eb91631dc97ad1efbc76019ef0f80fe90ca49ddf81546752d79989c3bfff3e',
    ),
    'markdown-it-py': pin(
      '4.3.0',
      '91a58fa5b72c71a40cf7177250fd767480d7a2bb3ac426ccfb76fb90305fdaaa',
    ),
    'marshmallow': pin(
      '4.4.0',
      '9e6ffa8511012ca89732324c1c253efd7b4d35632dcbdf80aa793fe01804af3e',
      'simplejson',
    ),
    'mistune': pin(
      '3.4.0',
      '2eaf7952af928ca8d33b779762effc1da517b62c6ad85ec8ca957e3b07b9782a',
    ),
    'more-itertools': pin(
      '11.2.1',
      'cbf08fd0af284dc69718b9b76a8e6203df624d70209ea511e4219d350c856f63',
    ),
    'mpmath': pin(
      '1.4.1',
      'efd6d1b75f09d69524a67609949812668b28e81ecbfe0ab449ced8c13e92642e',
    ),
    'netaddr': pin(
      '1.3.0',
      '5c3c3d9895b551b763779ba7db7a03487dc1f8e3b385af819af341ae9ef6e48a',
    ),
    'networkx': pin(
      '3.7',
      'fd77a511bd90f39f3d016351345b52cf5319b813bdca01de3f755d3cca62e96a',
    ),
    'oauthlib': pin(
      '4.0.1',
      '3d73febdb6faa00f277c81fb04be7b7586fb96fc3b7f0b9c772dada69a25ede7',
    ),
    'ordered-set': pin(
      '4.1.0',
      '694a8e44c87657c59292ede72891eb91d34131f6531463aab3009191c77364a8',
    ),
    'packageurl-python': pin(
      '0.17.6',
      '1252ce3a102372ca6f86eb968e16f9014c4ba511c5c37d95a7f023e2ca6e5c25',
    ),
    'parse': pin(
      '1.22.4',
      '706d458feed5a81b02768d3156e8070baf6cee7d150a3a3c0cd43101a875c3b5',
    ),
    'parso': pin(
      '0.8.7',
      'eaaac4c9fdd5e9e8852dc778d2d7405897ec510f2a298071453e5e3a07914bb1',
    ),
    'passlib': pin(
      '1.7.4',
      'defd50f72b65c5402ab2c573830a6978e5f202ad0d984793c8dde2c4152ebe04',
    ),
    'pathvalidate': pin(
      '3.3.1',
      'b18c07212bfead624345bb8e1d6141cdcf15a39736994ea0b94035ad2b1ba177',
    ),
    'persiantools': pin(
      '6.2.0',
      '21ae1ed27292d8a153946f6b16a660cb84a2d829e0a3a0afefee3e9f83ad41b8',
    ),
    'petl': pin(
      '1.7.30',
      '9621fe7f9d81dafec3bf440496118ec1b288215400810a90f683a02c6d120792',
    ),
    'platformdirs': pin(
      '4.14.7',
      '5472257c1cf97a14658af52997011c7e59e4aebf3a24950b973c11b579e1b074',
    ),
    'portion': pin(
      '2.6.3',
      '4dd6a68bb1cd7a553d9b1f556818708b973c4a8855244e0af79e2586bba5794e',
      'sortedcontainers',
    ),
    'pyasn1': pin(
      '0.6.5',
      '6b11616a6bcf3a40e635f082bb232fa57b5e0dd7f517bd7ddd69ec3794508a47',
    ),
    'pycodestyle': pin(
      '2.15.0',
      '318f5db083869b4c4dad922d0b11124fb27ab181b6730b93371da671e31bd50e',
    ),
    'pydash': pin(
      '8.1.0',
      '30914c3e9d377ea2cd0d3c0a4f252889b08392f730a5eb4d117e5b598cdf1d52',
      'typing_extensions',
    ),
    'pyjwt': pin(
      '2.15.1',
      '4f259e80cdfb6b3fc18a7de51fd1ef9ec79652f25019bae68975ca2468a34df8',
    ),
    'pyparsing': pin(
      '3.3.3',
      '928ae7e20211f3b6f3915a72f06a0cfd29ab9d24279dd6346b6b1a7146397d36',
    ),
    'pyrsistent': pin(
      '0.20.0',
      '4c48f78f62ab596c679086084d0dd13254ae4f3d6c72a83ffdf5ebdef8f265a4',
    ),
    'python-dateutil': pin(
      '4.0.0',
      'd7295ff14fdc0f92f662100bfb6c551d160ca090f2939f1ec5b9794265c03f06',
      'six',
    ),
    'pytz': pin(
      '2026.6',
      '3b0fc2727707663d6e517936f444fd8a8b240f1fc32f4bf7ee03274245945284',
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
    'sqlglot': pin(
      '30.30.0',
      'b8e344042c85d7baa1d0d827127dfe1611ce9ac59bceab6fe370665baeb14ce7',
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
    'tenacity': pin(
      '9.2.1',
      'a606b5c808d0cded4a359d5b9932d867ff2a6a6b64d37350260fd01bbdf83839',
    ),
    'texttable': pin(
      '1.7.2',
      'dc16ea6b35fbf5291ba6ef79d79e37d9b3ca6acd7bae3ca3450488d7c2e19c99',
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
    'uritools': pin(
      '6.1.5',
      '5a46002351b745a6910f24167abc1ba0a7f78818121fffb32dbe1fc7767f462f',
    ),
    'validators': pin(
      '0.36.0',
      '92ad9ed00bbed320b784cec0ea90b213cf08904cf605b3d0852cfa4108e32a2c',
    ),
    'voluptuous': pin(
      '0.16.0',
      '006535e22fed944aec17bef6e8725472476194743c87bd233e912eb463f8ff05',
    ),
    'w3lib': pin(
      '2.5.0',
      'a7ddf714508ddc1b8563bd19ace2feb28080bbaca39326cbc964359f6754f615',
    ),
    'webcolors': pin(
      '25.10.0',
      '62abae86504f66d0f6364c2a8520de4a0c47b80c03fc3a5f1815fedbef7c19bf',
    ),
    'webencodings': pin(
      '0.6.1',
      '565f9ad031c702dae404e27a099e3e09186a3ab1b9520f06d215502b651fd910',
    ),
    'werkzeug': pin(
      '3.1.9',
      '55ca7c70a75689be937aa27f8ff4b018f06ff4838fc73045560bf0f5a1291060',
      'markupsafe',
    ),
    'xmltodict': pin(
      '1.0.4',
      '6d94c9f834dd9e44514162799d344d815a3a4faec913717a9ecbfa5be1bb8e61',
    ),
  }

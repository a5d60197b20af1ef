"""What the zygote of boxes prepares once, inside its sandbox.

Standard library only.
"""

import importlib
import os
import site
import sys

from composer_jax.sandbox.inside import confine

_USERS = (
  'root:x:0:0:root:{home}:/bin/sh\nagent:x:{uid}:{uid}:agent:{home}:/bin/sh\n'
)
_GROUPS = 'root:x:0:\nagent:x:{uid}:\n'
_HOSTS = '127.0.0.1 localhost\n::1 localhost\n'
_HOME = '/tmp/home'


def furnish(config: dict) -> None:
  """Makes the few files that programs expect, and the interpreter's folder."""
  if config['level'] != 'rlimits':
    for folder in ('/etc', config['venv'], config['boxes']):
      confine.mount_workspace(folder, 1 << 40, 1 << 24)
      os.chmod(folder, 0o755)
    _write_etc(config['uid'])
    if config['images']:
      # Among what a run gets rid of in one step.
      images = f'{config["boxes"]}/images'
      os.mkdir(images, 0o755)
      confine.bind(config['images'], images)
      confine.unmount(config['images'])
      config['images'] = images
  else:
    os.mkdir(config['venv'], 0o755)
    os.mkdir(config['boxes'], 0o711)
  _write_environment(config)
  if config['level'] != 'rlimits':
    for folder in ('/etc', config['venv']):
      confine.make_read_only(folder)


def _write_etc(uid: int | None) -> None:
  uid = 65534 if uid is None else uid
  for name, text in (
    ('passwd', _USERS.format(uid=uid, home=_HOME)),
    ('group', _GROUPS.format(uid=uid)),
    ('hosts', _HOSTS),
    ('nsswitch.conf', 'passwd: files\ngroup: files\nhosts: files\n'),
  ):
    with open(f'/etc/{name}', 'w') as file:
      file.write(text)
  if os.path.isdir('/boot/alternatives'):
    os.symlink('/boot/alternatives', '/etc/alternatives')


def _write_environment(config: dict) -> None:
  """A virtual environment around the interpreter and the given packages."""
  venv = config['venv']
  name = f'python{sys.version_info.major}.{sys.version_info.minor}'
  library = f'{venv}/lib/{name}'
  os.mkdir(f'{venv}/bin')
  os.makedirs(library)
  with open(f'{venv}/pyvenv.cfg', 'w') as file:
    home = os.path.dirname(config['interpreter'])
    file.write(f'home = {home}\ninclude-system-site-packages = false\n')
  for link in ('python', 'python3', name):
    os.symlink(config['interpreter'], f'{venv}/bin/{link}')
  if config['packages']:
    os.symlink(config['packages'], f'{library}/site-packages')
  else:
    os.mkdir(f'{library}/site-packages')


def adopt(config: dict) -> bool:
  """Makes this interpreter that of the environment, with pytest imported.

  Returns:
    Whether the packages hold pytest.
  """
  sys.executable = config['python']
  site.main()
  try:
    pytest_config = importlib.import_module('_pytest.config')
  except ModuleNotFoundError:
    return False
  # What every run imports before its first test.
  names = [f'_pytest.{name}' for name in pytest_config.default_plugins]
  for name in ('pytest', 'pdb', *names):
    importlib.import_module(name)
  return True

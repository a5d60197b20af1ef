"""Makes what a micro VM boots: initial file system and disks; finds a kernel.

Files of the cache are written aside and renamed. Their names have a digest of
their content's sources, so that none ever has to be updated.
"""

import dataclasses
import glob
import hashlib
import json
import os
import pathlib
import platform
import shutil
import stat
import subprocess
import sys
import tempfile

_PACKAGE = 'linux-image-cloud-amd64'
# In the order in which they depend on each other. Some kernels have them built
# in, according to their list of modules.
_MODULES = (
  'virtio_ring', 'virtio', 'virtio_mmio', 'virtio_console', 'virtio_blk',
  'overlay',
)  # fmt: skip
_LEFT_OUT = (
  'site-packages', 'dist-packages', 'test', 'tests', 'idlelib', 'tkinter',
  'turtledemo', 'ensurepip', 'lib2to3', 'config-*', '*.opt-[12].pyc', '*.a',
)  # fmt: skip
# For shells in boxes; busybox provides all others.
_PROGRAMS = (
  'sh', 'bash', 'env', 'cat', 'ls', 'cp', 'mv', 'rm', 'mkdir', 'rmdir', 'ln',
  'chmod', 'touch', 'head', 'tail', 'sort', 'uniq', 'wc', 'cut', 'tr', 'tee',
  'echo', 'printf', 'pwd', 'sleep', 'true', 'false', 'test', 'grep', 'sed',
  'find', 'xargs', 'diff', 'patch', 'tar', 'gzip', 'basename', 'dirname',
  'readlink', 'realpath', 'stat', 'dd', 'mkfifo', 'mktemp', 'id', 'kill',
)  # fmt: skip
INIT = """#!/bin/busybox sh
b=/bin/busybox
$b mount -t devtmpfs dev /dev
$b mount -t sysfs sys /sys
for m in {modules}; do $b insmod /modules/$m.ko; done
for d in /sys/block/vd*; do
  read -r s < $d/serial
  if [ $s = root ]; then $b mount -t ext4 -o ro /dev/${{d##*/}} /root; fi
done
for d in /sys/block/vd*; do
  read -r s < $d/serial
  if [ $s != root ]; then
    $b mount -t ext4 -o ro,nodev,nosuid /dev/${{d##*/}} /root/$s
  fi
done
$b mount -t tmpfs -o mode=0755 run /root/run
$b mount -t tmpfs tmp /root/tmp
$b cp -a /code /config.json /root/run
$b mount -t proc proc /root/proc
$b mount --move /dev /root/dev
$b mount --move /sys /root/sys
$b mount -t cgroup2 cgroup /root/sys/fs/cgroup
# An emulated guest gets less done in a second.
export COMPOSER_SANDBOX_PATIENCE=12
exec $b switch_root /root {python} -I -S /run/code/{agent}
"""
# A guest that only reports that it has started.
PROBE = """#!/bin/busybox sh
/bin/busybox mount -t devtmpfs dev /dev
for m in {modules}; do /bin/busybox insmod /modules/$m.ko; done
echo up > /dev/vport0p1
/bin/busybox sleep 60
"""
_AGENT = 'composer_jax/sandbox/remote/microvm/guest.py'


@dataclasses.dataclass(frozen=True)
class Kernel:
  image: pathlib.Path
  modules: pathlib.Path


def cache() -> pathlib.Path:
  root = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
  folder = pathlib.Path(root) / 'composer_jax' / 'microvm'
  folder.mkdir(parents=True, exist_ok=True)
  return folder


def find_kernel() -> Kernel:
  """Finds the newest kernel with modules.

  COMPOSER_VM_KERNEL names an image, or a folder with an unpacked package.

  Raises:
    ValueError: there is none.
  """
  given = os.environ.get('COMPOSER_VM_KERNEL')
  roots = [given] if given else [str(cache() / 'kernel'), '/']
  tried = []
  for root in roots:
    pattern = f'{root}/boot/vmlinuz-*'
    newest = sorted(glob.glob(pattern), key=os.path.getmtime, reverse=True)
    for image in [root] if os.path.isfile(root) else newest:
      version = os.path.basename(image).partition('-')[2]
      above = os.path.dirname(os.path.dirname(os.path.abspath(image)))
      for folder in (f'{above}/lib/modules', f'{above}/usr/lib/modules'):
        modules = pathlib.Path(folder, version)
        if (modules / 'kernel').is_dir():
          return Kernel(pathlib.Path(image), modules)
      tried.append(f'{image} (no modules)')
    tried.append(pattern)
  raise ValueError(
    f'no kernel for a micro VM in {", ".join(tried)}; install the package '
    f'{_PACKAGE}, or unpack the one that it depends on into '
    f'{cache() / "kernel"}, or set COMPOSER_VM_KERNEL to such a folder with '
    'boot/vmlinuz-* and lib/modules.'
  )


def program(name: str, package: str) -> str:
  path = shutil.which(name) or shutil.which(name, path='/usr/sbin:/sbin')
  if not path:
    raise ValueError(f'no program `{name}`; the package is called {package}.')
  return path


def _run(
  *command: str, check: bool = False
) -> subprocess.CompletedProcess[str]:
  return subprocess.run(command, check=check, capture_output=True, text=True)


def initrd(kernel: Kernel, init: str, config: dict) -> bytes:
  """Archives busybox, the modules and the sandbox's own files."""
  paths = {name: _module(kernel, name) for name in _MODULES}
  modules = {name: path for name, path in paths.items() if path}
  _, python = _interpreter()
  text = init.format(modules=' '.join(modules), python=python, agent=_AGENT)
  busybox = pathlib.Path(program('busybox', 'busybox-static'))
  files = {
    'init': text.encode(),
    'bin/busybox': busybox.read_bytes(),
    'config.json': json.dumps(config).encode(),
  }
  for name, path in modules.items():
    files[f'modules/{name}.ko'] = path.read_bytes()
  package = pathlib.Path(__file__).parents[3]
  for path in [package / '__init__.py', *package.glob('sandbox/**/*.py')]:
    inner = path.relative_to(package.parent)
    files[f'code/{inner}'] = path.read_bytes()
  return _archive(files, ('dev', 'sys', 'root'))


def _module(kernel: Kernel, name: str) -> pathlib.Path | None:
  for path in kernel.modules.glob(f'kernel/**/{name}.ko'):
    return path
  if f'/{name}.ko' in (kernel.modules / 'modules.builtin').read_text():
    return None
  raise ValueError(
    f'the kernel {kernel.image} has no module {name}, or a compressed one; '
    f'use that of the package {_PACKAGE}.'
  )


def _archive(files: dict[str, bytes], folders: tuple[str, ...]) -> bytes:
  """Writes the `newc` format of cpio, parents first."""
  entries = dict.fromkeys(folders, None)
  for name, data in files.items():
    parts = name.split('/')
    for depth in range(1, len(parts)):
      entries.setdefault('/'.join(parts[:depth]), None)
    entries[name] = data
  pieces = []
  for number, (name, data) in enumerate(
    [*entries.items(), ('TRAILER!!!', b'')]
  ):
    kind = stat.S_IFDIR if data is None else stat.S_IFREG
    content = data or b''
    fields = [number + 1, kind | 0o755, 0, 0, 1, 0, len(content), 0, 0, 0, 0]
    fields += [len(name) + 1, 0]
    head = '070701' + ''.join(f'{field:08X}' for field in fields) + name + '\0'
    for piece in (head.encode(), content):
      pieces += [piece, bytes(-len(piece) % 4)]
  return b''.join(pieces)


def _interpreter() -> tuple[pathlib.Path, pathlib.Path]:
  """Returns the standard library's folder and the base interpreter."""
  python = getattr(sys, '_base_executable', None) or sys.executable
  library = os.path.dirname(os.path.realpath(os.__file__))
  return pathlib.Path(library), pathlib.Path(os.path.realpath(python))


def system_disk() -> pathlib.Path:
  """Makes the guest's root: this interpreter at the same path, and a shell."""
  library, python = _interpreter()
  about = [str(library), str(python), python.stat().st_mtime_ns, _PROGRAMS]
  about += [_LEFT_OUT, platform.libc_ver(), sys.version]
  name = f'system-{_digest(about)}.ext4'
  if (cache() / name).exists():
    return cache() / name
  with tempfile.TemporaryDirectory(dir=cache()) as folder:
    root = pathlib.Path(folder)
    os.chmod(root, 0o755)
    _stage_system(root, library, python)
    return pack(root, cache() / name)


def _stage_system(root, library: pathlib.Path, python: pathlib.Path) -> None:
  for name in ('lib', 'lib64', 'bin', 'sbin'):
    (root / 'usr' / name).mkdir(parents=True)
    (root / name).symlink_to(f'usr/{name}')
  for name in ('dev', 'proc', 'sys', 'run', 'tmp', 'images', 'packages', 'etc'):
    (root / name).mkdir()
  ignore = shutil.ignore_patterns(*_LEFT_OUT)
  target = root / str(library).lstrip('/')
  shutil.copytree(library, target, ignore=ignore, dirs_exist_ok=True)
  for name in ('site-packages', 'dist-packages'):
    (target / name).mkdir()  # where packages are bound
  copied = [python, *(x for x in target.rglob('*.so'))]
  busybox = pathlib.Path(program('busybox', 'busybox-static'))
  shutil.copy2(busybox, root / 'usr/bin/busybox')
  applets = _run(str(busybox), '--list', check=True).stdout.split()
  for name in {*applets, *_PROGRAMS}:
    path = shutil.which(name, path='/usr/bin:/bin')
    if name in _PROGRAMS and path:
      shutil.copy2(path, root / 'usr/bin' / name)
      copied.append(pathlib.Path(path))
    elif name != 'busybox':
      (root / 'usr/bin' / name).symlink_to('busybox')
  words = _run('ldd', *map(str, copied)).stdout.replace('=>', ' ').split()
  # By the paths at which the loader finds them.
  libraries = {x for x in words if x.startswith('/') and os.path.isfile(x)}
  for path in [python, *libraries]:
    inner = root / str(path).lstrip('/')
    inner.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(path, inner)


def pack(folder: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
  """Makes a disk with a folder's content, under its name when it is whole."""
  blocks = inodes = 0
  for parent, names, files in os.walk(folder):
    inodes += 1 + len(files)
    for entry in [*names, *files]:
      size = os.lstat(os.path.join(parent, entry)).st_size
      blocks += 1 + size // 4096
  inodes += inodes // 8 + 64
  blocks += blocks // 8 + inodes // 8 + 2048
  handle, text = tempfile.mkstemp(dir=target.parent, prefix='.writing-')
  os.close(handle)
  try:
    made = _run(
        program('mke2fs', 'e2fsprogs'), '-q', '-t', 'ext4', '-b', '4096',
        '-m', '0', '-N', f'{inodes}', '-O', '^has_journal', '-E',
        'root_owner=0:0', '-d', str(folder), text, f'{blocks * 4}k',
    )  # fmt: skip
    if made.returncode:
      raise ValueError(f'cannot make a disk of {folder}: {made.stderr.strip()}')
    os.chmod(text, 0o644)
    os.replace(text, target)
  finally:
    pathlib.Path(text).unlink(missing_ok=True)
  return target


def _digest(value: object) -> str:
  return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]

"""Guests that boot, end and are replaced."""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

from composer_jax.sandbox import base, packages
from composer_jax.sandbox import open as sandbox_open
from composer_jax.sandbox.remote.microvm import image, qemu
from composer_jax.sandbox.remote.microvm import keeper as microvm_keeper
from composer_jax.sandbox.remote.microvm import machine as microvm
from tests.sandbox import conftest

LIMITS = conftest.LIMITS
NUMBER = {'m.py': 'def f(x): return x + 1'}


@pytest.fixture(scope='module')
def kernel():
  """A kernel; skips where the machine lacks what a guest needs."""
  try:
    image.program('qemu-system-x86_64', 'qemu-system-x86')
    image.program('busybox', 'busybox-static')
    image.program('mke2fs', 'e2fsprogs')
    return image.find_kernel()
  except ValueError as error:
    pytest.skip(f'no QEMU: {error}')


@pytest.fixture(scope='module')
def images(tmp_path_factory):
  folder = tmp_path_factory.mktemp('images')
  (folder / 'one' / 'package').mkdir(parents=True)
  (folder / 'one' / 'package' / 'a.py').write_text('VALUE = 7\n')
  (folder / 'one' / 'test_a.py').write_text(
    'from package import a\ndef test_a():\n  assert a.VALUE == 7\n'
  )
  return folder


@pytest.fixture(scope='module')
def vm(kernel, images):
  with microvm.MicroVM(
    LIMITS, images=images, packages=packages.gather(('pytest',)), size=2
  ) as sandbox:
    yield sandbox


def test_an_emulated_guest_boots_and_answers(kernel, tmp_path):
  initrd = tmp_path / 'initrd'
  initrd.write_bytes(image.initrd(kernel, image.PROBE, {}))
  guest = qemu.Guest(
    qemu.VirtualMachine(
        kernel=str(kernel.image), initrd=str(initrd), disks={}, memory_mb=128,
        cores=1, accelerator='tcg',
    )
  )  # fmt: skip
  try:
    assert guest.wait_for_line(60) == 'up', guest.console
  finally:
    guest.close()


def test_a_machine_has_no_network_and_disks_that_nothing_writes(monkeypatch):
  monkeypatch.setattr(image, 'program', lambda *_: 'qemu')
  machine = qemu.VirtualMachine(
      kernel='k', initrd='i', disks={'root': 'r', 'images': 'd'},
      memory_mb=300, cores=2, accelerator='kvm',
  )  # fmt: skip
  command = machine.command(7)
  pairs = set(zip(command, command[1:]))
  assert ('-nic', 'none') in pairs and '-nodefaults' in command
  drives = [b for a, b in pairs if a == '-drive']
  assert len(drives) == 2 and all('readonly=on' in x for x in drives)
  assert not [x for x in command if 'net' in x.split(',')[0].split('-')]
  filters = [b for a, b in pairs if a == '-sandbox']
  assert len(filters) == 1 and 'spawn=deny' in filters[0]
  assert 'tsc_early_khz' not in ' '.join(command)


def test_what_a_host_lacks_is_named_with_its_cure(monkeypatch, tmp_path):
  monkeypatch.setenv('COMPOSER_VM_KERNEL', str(tmp_path))
  with pytest.raises(
    ValueError, match='linux-image-cloud-amd64, or .*, or set COMPOSER_VM_'
  ):
    image.find_kernel()
  (tmp_path / 'boot').mkdir()
  (tmp_path / 'boot' / 'vmlinuz-9').write_text('')
  with pytest.raises(ValueError, match=r'vmlinuz-9 \(no modules\)'):
    image.find_kernel()
  modules = tmp_path / 'lib' / 'modules' / '9'
  (modules / 'kernel').mkdir(parents=True)
  kernel = image.find_kernel()
  assert (kernel.image.name, kernel.modules) == ('vmlinuz-9', modules)
  (modules / 'modules.builtin').write_text('kernel/drivers/virtio/virtio.ko\n')
  if shutil.which('busybox'):
    with pytest.raises(ValueError, match='no module virtio_ring'):
      image.initrd(kernel, image.INIT, {})
  with pytest.raises(ValueError, match='package is called qemu-system-x86'):
    image.program('qemu-no-such', 'qemu-system-x86')


def test_the_accelerator_is_probed_once(monkeypatch):
  probes = []
  monkeypatch.setattr(image, 'program', lambda *_: 'qemu')
  monkeypatch.setattr(
    microvm, '_probe_kvm', lambda: probes.append(1) or ('tcg', 'it hangs')
  )
  microvm.choose_accelerator.cache_clear()
  try:
    assert microvm.choose_accelerator() == ('tcg', 'it hangs')
    assert microvm.choose_accelerator() == ('tcg', 'it hangs')
    assert len(probes) == 1
  finally:
    microvm.choose_accelerator.cache_clear()


def test_a_program_ends_with_the_host_that_started_it(tmp_path):
  pid_file = tmp_path / 'pid'
  keeper = subprocess.Popen(
      [
          sys.executable, '-I', '-S', microvm_keeper.__file__, 'sh', '-c',
          f'trap "" HUP TERM; echo $$ > {pid_file}; exec sleep 60',
      ],
      stdin=subprocess.PIPE,
  )  # fmt: skip
  end = time.monotonic() + 120
  while time.monotonic() < end:
    if pid_file.exists() and pid_file.read_text():
      break
    time.sleep(0.01)
  pid = int(pid_file.read_text())
  keeper.stdin.close()
  assert keeper.wait(10) == 1
  with pytest.raises(ProcessLookupError):
    os.kill(pid, 0)


def test_a_disk_holds_a_folder_or_is_not_there(tmp_path):
  if not shutil.which('mke2fs', path='/usr/sbin:/sbin'):
    pytest.skip('no QEMU: no mke2fs')
  (tmp_path / 'a').mkdir()
  (tmp_path / 'a' / 'x').write_text('found on the disk')
  disk = image.pack(tmp_path / 'a', tmp_path / 'disk.ext4')
  assert b'found on the disk' in disk.read_bytes()
  with pytest.raises(ValueError, match='cannot make a disk'):
    image.pack(tmp_path / 'b', tmp_path / 'other.ext4')
  assert sorted(x.name for x in tmp_path.iterdir()) == ['a', 'disk.ext4']


@pytest.mark.slow
def test_a_guest_offers_what_every_sandbox_does(vm):
  assert (vm.level, vm.about['cgroup'], vm.about['seccomp']) == (
    'microvm', 'v2', 'on',
  )  # fmt: skip
  assert vm.about['accelerator'].startswith(('kvm', 'tcg'))
  result = vm.call(NUMBER, 'm', 'f', [[1]])
  assert (result.level, result.value) == ('microvm', [['ok', 2]])
  with contextlib.closing(vm.open('one', {'b.txt': b'b'})) as box:
    command = base.Command(
      argv=('-m', 'pytest', '-q', '-p', 'no:cacheprovider'), warm=True
    )
    result = box.run(command)
    assert (result.status, result.exit_code) == ('ok', 0), result
    assert '1 passed' in result.output and result.level == 'microvm'
    assert box.files() == ('b.txt', 'package/a.py', 'test_a.py')
    assert box.changes() == {'b.txt': 'added'}


@pytest.mark.slow
def test_a_lost_guest_is_replaced_and_its_boxes_say_so(kernel, images):
  with microvm.MicroVM(LIMITS, images=images) as sandbox:
    box = sandbox.open('one')
    os.kill(_child_of(sandbox._guest._process.pid), signal.SIGKILL)
    result = box.run(base.Command(argv=('true',)))
    assert result.status == 'infrastructure'
    with pytest.raises(base.SandboxLost):
      box.read('test_a.py', 100)
    assert sandbox.call(NUMBER, 'm', 'f', [[1]]).value == [['ok', 2]]
    with contextlib.closing(sandbox.open('one')) as box:
      assert box.read('package/a.py', 100) == b'VALUE = 7\n'


@pytest.mark.slow
def test_a_kvm_that_hangs_is_left_within_the_deadline(kernel):
  accelerator, reason = microvm._probe_kvm(2.0)
  assert accelerator in ('kvm', 'tcg') and reason


HOST = """
import os, sys, time
from composer_jax.sandbox import base
from composer_jax.sandbox.remote.microvm import machine as microvm
sandbox = microvm.MicroVM(base.Limits(
    wall_s=10.0, cpu_s=5.0, memory_bytes=256 << 20, processes=8,
    file_bytes=1 << 20, output_bytes=1 << 16))
print(sandbox._guest._process.pid, flush=True)
time.sleep(120)
"""


@pytest.mark.slow
def test_no_guest_outlives_a_host_that_is_killed(kernel):
  root = pathlib.Path(__file__).parents[3]
  with subprocess.Popen(
    [sys.executable, '-c', HOST], cwd=root, stdout=subprocess.PIPE, text=True
  ) as host:
    keeper = int(host.stdout.readline())
    guest = _child_of(keeper)
    host.kill()
  end = time.monotonic() + 120
  while _runs(guest) and time.monotonic() < end:
    time.sleep(0.05)
  assert not _runs(guest)


@pytest.mark.slow
def test_it_can_be_asked_for_by_name(kernel):
  with sandbox_open.open_sandbox('microvm', LIMITS) as sandbox:
    assert sandbox.level == 'microvm'


def _child_of(pid: int) -> int:
  path = pathlib.Path(f'/proc/{pid}/task/{pid}/children')
  return int(path.read_text().split()[0])


def _runs(pid: int) -> bool:
  try:
    text = pathlib.Path(f'/proc/{pid}/stat').read_text()
  except FileNotFoundError:
    return False
  return text.rpartition(')')[2].split()[0] != 'Z'

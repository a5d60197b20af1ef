"""Sandboxes in the actors of a Ray cluster of this machine alone."""

import contextlib
import secrets
import shutil
import sys
import tempfile
import threading

import pytest

from composer_jax.sandbox import base
from composer_jax.sandbox import open as sandbox_open
from composer_jax.sandbox.remote import ray_placement
from tests.sandbox import conftest

LIMITS = conftest.LIMITS
NUMBER = {'m.py': 'def f(x): return x + 1'}


def test_the_extra_is_named_where_ray_is_missing(monkeypatch):
  monkeypatch.setitem(sys.modules, 'ray', None)
  with pytest.raises(ValueError, match=r"pip install -e '\.\[ray\]'"):
    sandbox_open.open_sandbox('ray', LIMITS)


def test_a_seat_answers_like_the_sandbox_in_it():
  seat = ray_placement.SandboxActor(
    sandbox_open.open_sandbox, 'rlimits', LIMITS, allow_unsafe=True
  )
  try:
    opened, _ = seat.answer(
      {'do': 'open', 'image': '', 'written': ['a'], 'removed': []}, (b'a',)
    )
    reply, parts = seat.answer(
      {'do': 'read', 'box': opened['box'], 'arguments': ['a', 9]}, ()
    )
    assert (reply, parts) == ({}, (b'a',))
    reply, _ = seat.answer(
      {'do': 'read', 'box': opened['box'], 'arguments': ['../a', 9]}, ()
    )
    assert reply['error'] == 'refused'
    reply, _ = seat.answer({'do': 'files', 'box': 77, 'folder': '.'}, ())
    assert reply == {'error': 'value', 'reason': 'box 77 is closed.'}
  finally:
    seat.close()


@pytest.fixture(scope='module')
def cluster():
  with pytest.MonkeyPatch.context() as patch:
    # Ray reports its use to its makers by default, and reads these variables
    # when it is imported.
    patch.setenv('RAY_USAGE_STATS_ENABLED', '0')
    patch.setenv('RAY_AUTH_MODE', 'token')
    patch.setenv('RAY_AUTH_TOKEN', secrets.token_hex(32))
    import ray

    folder = tempfile.mkdtemp(prefix='ray-')  # its sockets need a short name
    try:
      ray.init(
          num_cpus=2, include_dashboard=False, log_to_driver=False,
          _temp_dir=folder, _node_ip_address='127.0.0.1',
          object_store_memory=80 << 20,
      )  # fmt: skip
      yield ray
    finally:
      ray.shutdown()
      shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope='module')
def images(tmp_path_factory):
  folder = tmp_path_factory.mktemp('images')
  (folder / 'one').mkdir()
  (folder / 'one' / 'a.txt').write_text('a')
  return folder


@pytest.fixture(scope='module')
def sandbox(cluster, images):
  conftest.open_or_skip('unshare').close()
  with sandbox_open.open_sandbox('ray', LIMITS, images=images) as sandbox:
    yield sandbox


@pytest.mark.slow
def test_calls_and_boxes_run_in_an_actor(sandbox):
  assert sandbox.level == 'ray'
  assert sandbox.call(NUMBER, 'm', 'f', [[1]]).value == [['ok', 2]]
  with contextlib.closing(sandbox.open('one', {'b': b'b'})) as box:
    result = box.run(base.Command(argv=('sh', '-c', 'cat a.txt b; exit 3')))
    assert (result.status, result.exit_code, result.output) == ('ok', 3, 'ab')
    with pytest.raises(base.FileRefused):
      box.read('../x', 10)
    assert box.changes() == {'b': 'added'}


@pytest.mark.slow
def test_the_death_of_an_actor_is_reported_and_it_is_replaced(cluster, sandbox):
  box = sandbox.open('one')
  actor = box._sandbox._transport._actor
  killer = threading.Timer(1.0, cluster.kill, [actor])
  killer.start()
  result = box.run(base.Command(argv=('sleep', '99')))
  assert result.status == 'infrastructure' and 'actor' in result.error
  with pytest.raises(base.SandboxLost):
    box.read('a.txt', 10)
  results = [sandbox.call(NUMBER, 'm', 'f', [[x]]) for x in range(4)]
  assert [x.value for x in results] == [[['ok', x + 1]] for x in range(4)]
  box.close()


@pytest.mark.slow
def test_an_actor_that_cannot_begin_says_why(cluster, images):
  with pytest.raises((base.SandboxLost, ValueError), match='rlimits|refused'):
    ray_placement.RaySandbox(
      sandbox_open.open_sandbox, 'rlimits', LIMITS, num_cpus=0.1
    )

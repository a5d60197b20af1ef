"""Who may join a run: of its key, its code and its files, and no other."""

import dataclasses
import json

import pytest

from composer_jax.delta.format import keys
from composer_jax.fleet import joining
from composer_jax.fleet.leases import holder
from tests.fleet import groups


@pytest.fixture
def shown(tmp_path):
  """shown(**identity) shows a run in a store; returns its documents."""

  def show(**identity):
    docs = joining.open_documents(
      str(tmp_path / 'store'), tmp_path / 'run.key', 'policy'
    )
    content = docs.put_file(b'{"a": 1}')
    docs.write_setup(
      {
        'config': {
          'fleet': {'lease_s': 16.0, 'save_s': 4.0},
          'delta': {'poll_s': 0.5},
        },
        'level': 'static',
        'identity': joining.code() | identity,
        'files': {'tokenizer.json': content},
      }
    )
    return docs

  return show


def join(docs, tmp_path, within_s=0.0):
  folder = tmp_path / 'worker'
  return joining.join(docs, tmp_path / 'run.key', folder, within_s=within_s)


def test_a_worker_gets_all_it_needs_from_the_store(shown, tmp_path):
  joined = join(shown(imported='abc'), tmp_path)
  joined.check({'imported': 'abc'})
  tokenizer = tmp_path / 'worker' / 'tokenizer.json'
  assert json.loads(tokenizer.read_text()) == {'a': 1}
  key = keys.open_key(tmp_path / 'worker' / joining.KEY)
  assert key.text == keys.open_key(tmp_path / 'run.key').text
  leases = joined.leases('w', 1.0, 8, groups.RULES)
  assert (leases._times.beat_s, leases._times.poll_s) == (2.0, 0.5)
  # Again, as after a restart.
  tokenizer.write_text('other')
  join(shown(), tmp_path)
  assert json.loads(tokenizer.read_text()) == {'a': 1}


@pytest.mark.parametrize('name', ['code', 'jax', 'python'])
def test_another_commit_or_library_is_refused_by_name(shown, tmp_path, name):
  with pytest.raises(
    ValueError, match=f"{name} is 'other' there and .* here.*the same commit"
  ):
    join(shown(**{name: 'other'}), tmp_path)
  assert not (tmp_path / 'worker').exists()


def test_another_import_or_task_set_is_refused_by_name(shown, tmp_path):
  joined = join(shown(task_set='a', imported='b'), tmp_path)
  with pytest.raises(ValueError, match="may not join.*task_set is 'a' there"):
    joined.check({'task_set': 'c', 'imported': 'b'})


def test_another_key_is_refused_before_anything_is_believed(shown, tmp_path):
  shown()
  store, other = str(tmp_path / 'store'), tmp_path / 'other.key'
  docs = joining.open_documents(store, other, 'policy')
  with pytest.raises(ValueError, match='fleet/policy/setup.*cannot be trusted'):
    join(docs, tmp_path)


def test_waiting_for_no_run_ends_with_what_to_do(tmp_path):
  docs = joining.open_documents(
    str(tmp_path / 'store'), tmp_path / 'run.key', 'none'
  )
  with pytest.raises(ValueError, match="shows no run 'none' within 0 s"):
    join(docs, tmp_path)


def test_a_store_that_is_only_read_needs_another_for_writes(tmp_path):
  with pytest.raises(ValueError, match='can only be read'):
    joining.open_documents('http://localhost:1', tmp_path / 'run.key', 'policy')


def test_a_changed_setup_ends_a_worker_by_name(shown, tmp_path):
  docs = shown()
  leases = dataclasses.replace(join(docs, tmp_path), digest='old').leases(
    'w', 0.0, 8, groups.RULES
  )
  orders = dict(leases=[], is_over=False, setup='new', ledger='l', sequence=1)
  docs.write(docs.place('orders', 'w'), orders)
  with pytest.raises(ValueError, match='another setup.*start the worker again'):
    leases.take(0)
  assert isinstance(leases, holder.StoredLeases)


def test_free_names_are_free_and_plain():
  names = {joining.free_name() for _ in range(50)}
  assert len(names) == 50
  for name in names:
    holder.documents.check_name(name)

"""Laws of the stream: exact resume, determinism, every token once an epoch."""

import collections
import json

import jax
import numpy as np
import pytest

from composer_jax.data import stream
from composer_jax.text import fim
from composer_jax.text import tokenizer as tokenizer_lib
from tests.text import infilled

T = tokenizer_lib.Tokenizer
SEQ_LEN = 48


def make_documents(masked=False, longest=200):
  """Documents in which no token occurs twice, so that tokens can be traced."""
  rng = np.random.default_rng(0)
  documents, first = [], 10
  for length in [1, 0, longest, *rng.integers(1, longest, 12)]:
    body = np.arange(first, first + length, dtype=np.int32)
    first += length
    document = np.concatenate([[T.BOS], body, [T.EOD]]).astype(np.int32)
    documents.append((document, document % 3 == 0) if masked else document)
  return documents


def make(documents=None, **options):
  defaults = {'batch_size': 4, 'seq_len': SEQ_LEN, 'seed': 7, 'fim_rate': 0.5}
  documents = make_documents() if documents is None else documents
  return stream.lm_stream(documents, **{**defaults, **options})


def take(iterator, count):
  return [next(iterator) for _ in range(count)]


def assert_equal(first, second):
  jax.tree.map(np.testing.assert_array_equal, first, second)


def segments(batches):
  """Yields (tokens, positions, loss weights) of every segment."""
  for b in batches:
    for row in range(b.tokens_BT.shape[0]):
      for s in range(1, int(b.segment_ids_BT[row].max()) + 1):
        where = b.segment_ids_BT[row] == s
        yield (
          b.tokens_BT[row][where],
          b.positions_BT[row][where],
          b.loss_weights_BT[row][where],
        )


KINDS = {
  'fim': {'fim_rate': 0.5},
  'plain': {'fim_rate': 0.0},
  'whole': {
    'fim_rate': 0.0,
    'whole': True,
    'documents': make_documents(masked=True, longest=SEQ_LEN - 2),
  },
}
OPENING = {'fim_rate': 0.0, 'opening': 9}


@pytest.mark.parametrize('kind', [*KINDS, 'opening'])
@pytest.mark.parametrize('stop', [0, 1, 5, 23])
def test_resume_is_exact(kind, stop):
  """Also across the end of an epoch, and through JSON."""
  options = (KINDS | {'opening': OPENING})[kind]
  whole = take(make(**options), stop + 12)
  first = make(**options)
  take(first, stop)
  state = json.loads(json.dumps(first.get_state()))
  second = make(**options)
  take(second, 2)
  second.set_state(state)
  assert_equal(take(second, 12), whole[stop:])


def test_state_of_another_stream_is_refused():
  state = make().get_state()
  documents = make_documents()
  documents[2][5] += 1
  for other in (make(seed=8), make(documents), make(batch_size=5)):
    with pytest.raises(ValueError, match='Restore them or start a new'):
      other.set_state(state)


def test_seed_decides_everything():
  first, second, other = (take(make(seed=s), 20) for s in (3, 3, 4))
  assert_equal(first, second)
  assert any((a.tokens_BT != b.tokens_BT).any() for a, b in zip(first, other))


def test_epochs_differ_in_order():
  batches = [b.tokens_BT for b in make(fim_rate=0, num_epochs=2)]
  rows = np.concatenate(batches)
  starts = [tuple(row[:2]) for row in rows if row[0] == T.BOS]
  assert len(set(starts)) > 1


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('num_epochs', [1, 3])
def test_every_token_once_per_epoch(kind, num_epochs):
  options = {**KINDS[kind], 'num_epochs': num_epochs}
  batches = list(make(**options))
  documents = options.get('documents', make_documents())
  expected = collections.Counter()
  for document in documents:
    tokens = document[0] if isinstance(document, tuple) else document
    expected.update(tokens[tokens >= 10].tolist())
  seen = collections.Counter()
  for tokens, _, _ in segments(batches):
    seen.update(tokens[tokens >= 10].tolist())
  assert seen == collections.Counter(
    {token: n * num_epochs for token, n in expected.items()}
  )


def test_texts_among_transcripts_have_an_epoch_of_their_own():
  transcripts = KINDS['whole']['documents']
  texts = [d[0] for d in transcripts[::2]]
  expected = [collections.Counter() for _ in range(3)]
  for tokens, mask in transcripts:
    if mask[:4].any():
      expected[0].update(tokens[:4].tolist())
    expected[2].update(tokens.tolist())
  for tokens in texts:
    expected[1].update(tokens.tolist())
  expected = [expected[0], *expected, expected[2]]
  total = collections.Counter()
  for num_epochs, tokens_of_epoch in enumerate(expected, start=1):
    total += tokens_of_epoch
    seen = collections.Counter()
    for tokens, _, _ in segments(
      make(
        [*texts, *transcripts],
        fim_rate=0.0,
        whole=True,
        opening=4,
        num_epochs=num_epochs,
      )
    ):
      seen.update(tokens.tolist())
    assert seen == total


@pytest.mark.parametrize('kind', ['plain', 'whole'])
def test_the_first_epochs_have_openings_alone(kind):
  options = {**KINDS[kind], 'opening': 4}
  documents = options.get('documents', make_documents())
  opening, whole = collections.Counter(), collections.Counter()
  without_loss = 0
  for document in documents:
    tokens = document[0] if isinstance(document, tuple) else document
    whole.update(tokens.tolist())
    if isinstance(document, tuple) and not document[1][:4].any():
      without_loss += 1
    else:
      opening.update(tokens[:4].tolist())
  assert (without_loss > 0) == (kind == 'whole')
  for num_epochs, expected in (
    (1, opening),
    (2, opening + opening),
    (3, opening + opening + whole),
  ):
    seen = collections.Counter()
    for tokens, _, _ in segments(make(**options, num_epochs=num_epochs)):
      seen.update(tokens.tolist())
    assert seen == expected


@pytest.mark.parametrize('kind', KINDS)
def test_a_segment_is_a_run_of_one_document(kind):
  documents = KINDS[kind].get('documents', make_documents())
  is_fim = 0
  for tokens, positions, _ in segments(take(make(**KINDS[kind]), 60)):
    np.testing.assert_array_equal(positions, np.arange(len(tokens)))
    is_fim += T.FIM_PREFIX in tokens
    body = infilled.restore(tokens)
    body = body[body >= 10]
    np.testing.assert_array_equal(np.diff(body), 1)
    homes = [
      set(body.tolist()) <= set((d[0] if isinstance(d, tuple) else d).tolist())
      for d in documents
    ]
    assert any(homes)
  assert (is_fim > 0) == (kind == 'fim')


@pytest.mark.parametrize('kind', KINDS)
def test_loss_weights(kind):
  """Zero on padding and on first tokens; else the mask, or one."""
  batches = take(make(**KINDS[kind]), 30)
  for tokens, _, weights in segments(batches):
    assert weights[0] == 0
    expected = tokens % 3 == 0 if kind == 'whole' else np.ones(len(tokens))
    np.testing.assert_array_equal(weights[1:], expected[1:])
  for b in batches:
    padding = b.segment_ids_BT == 0
    assert not b.loss_weights_BT[padding].any()
    assert (b.tokens_BT[padding] == T.PAD).all()


def test_pieces_are_rearranged_with_the_marks_of_their_tokenizer():
  own = fim.OWN
  marks = fim.Marks(bos=9001, eod=9002, prefix=9003, middle=9004, suffix=9005)
  swaps = {getattr(own, f): getattr(marks, f) for f in marks.__slots__}
  ends = {own.bos: marks.bos, own.eod: marks.eod}
  documents = [
    np.array([ends.get(t, t) for t in d.tolist()], np.int32)
    for d in make_documents()
  ]
  pairs = zip(make(), make(documents, fim_marks=marks))
  for _, (b, foreign) in zip(range(6), pairs):
    expected = b.tokens_BT.copy()
    for mark, other in swaps.items():
      # Padding has an id that is no mark's.
      expected[b.tokens_BT == mark] = other
    np.testing.assert_array_equal(foreign.tokens_BT, expected)
  assert (expected == marks.middle).any()


@pytest.mark.parametrize('batch_size', [1, 3])
def test_any_number_of_rows_streams_without_end(batch_size):
  rows = [b.tokens_BT for b in take(make(batch_size=batch_size), 12)]
  expected = [b.tokens_BT for b in take(make(batch_size=12), batch_size)]
  np.testing.assert_array_equal(np.concatenate(rows), np.concatenate(expected))


def test_shapes_and_types():
  b = next(make())
  dtypes = [leaf.dtype for leaf in jax.tree.leaves(b)]
  assert {leaf.shape for leaf in jax.tree.leaves(b)} == {(4, SEQ_LEN)}
  assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(b))
  assert b.loss_weights_BT.dtype == np.float32
  assert dtypes.count(np.int32) == 3


def test_rows_but_the_last_are_full():
  batches = list(make(fim_rate=0, num_epochs=1))
  used = np.concatenate([b.segment_ids_BT for b in batches]) > 0
  total = sum(map(len, make_documents()))
  assert used.reshape(-1)[:total].all()
  assert not used.reshape(-1)[total:].any()


def test_errors():
  with pytest.raises(ValueError, match='hold no token'):
    make([np.zeros(0, np.int32)])
  with pytest.raises(ValueError, match='hold no token'):
    make([])
  with pytest.raises(ValueError, match=r'fim_rate \(0.5\) needs documents'):
    make(make_documents(masked=True))
  with pytest.raises(ValueError, match='does not fit whole'):
    next(make(fim_rate=0, whole=True))
  with pytest.raises(ValueError, match=r'batch_size \(0\)'):
    make(batch_size=0)
  with pytest.raises(ValueError, match='2 tokens and a mask of 3'):
    make([(np.ones(2, np.int32), np.ones(3, bool))], fim_rate=0)


@pytest.mark.parametrize('rows', [(0, 1), (1, 3), (2,)])
def test_a_process_gets_its_rows_of_every_batch(rows):
  """Their state is that of a process with all rows, which may go on with it."""
  whole, part = make(), make(rows=rows)
  for _ in range(9):
    expected = jax.tree.map(lambda a: a[list(rows)], next(whole))
    assert_equal(next(part), expected)
  assert part.fingerprint == whole.fingerprint
  assert part.get_state() == whole.get_state()
  whole.set_state(json.loads(json.dumps(part.get_state())))
  assert_equal(jax.tree.map(lambda a: a[list(rows)], next(whole)), next(part))


def test_held_out_rows_of_a_process_end_with_the_others():
  whole = list(make(num_epochs=1))
  assert len(list(make(num_epochs=1, rows=(3,)))) == len(whole)

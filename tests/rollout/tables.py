"""Shared by tests of the slots: a table, and the engine's calls on it."""

import collections
import weakref

import numpy as np

from composer_jax.core import records
from composer_jax.rollout import options, sessions, slots

CHUNK = 3


def request(session, context=3, new=2, stop_tokens=(9,)):
  if isinstance(context, int):
    context = range(context)
  return records.SampleRequest(
    session=session,
    context_T=np.array(list(context), np.int32),
    max_new_tokens=new,
    stop_tokens=stop_tokens,
    seed=(0,),
  )


def make_table(share_sampled=False, **changes):
  sizes = {'num_slots': 2, 'max_len': 16, 'page_size': 4, 'num_pages': 8}
  limits = options.EngineOptions(**(sizes | changes))
  return slots.Slots(limits, 0, (1, 2), share_sampled=share_sampled)


def routes(positions, version=0):
  """Returns routes that hold the position of their token and the version."""
  return np.stack(
    [positions, np.full_like(positions, version)], axis=-1
  ).astype(np.uint16)


def extend(table, session, finite=True):
  """Dispatches and reads one chunk of a session, as the engine would."""
  start, end = session.chunk(CHUNK)
  table.extend(session, end - start)
  if finite:
    routes_TMA = routes(np.arange(start, end)[:, None])
    table.extended(session, start, end - start, routes_TMA)
  else:
    table.fail(session, start, end - start, 0)
  return end - start


def make_report(decoding, tokens, version=0):
  """Returns a report of len(tokens) steps that sample alike in every row."""
  rows = len(decoding)
  remaining = np.array([s.at_work.remaining for s in decoding])
  tokens_TB = np.full((len(tokens), rows), sessions.NOT_SAMPLED, np.int32)
  running = np.ones(rows, bool)
  for step, token in enumerate(tokens):
    running &= remaining > step
    tokens_TB[step, running] = token
    if token in (9, sessions.NOT_FINITE):
      break
  starts = np.array([s.consumed for s in decoding])
  positions_TB = starts + np.arange(len(tokens))[:, None]
  return sessions.Sampled(
    tokens_TB=tokens_TB,
    logprobs_TB=-positions_TB.astype(np.float32),
    raw_logprobs_TB=-positions_TB.astype(np.float32),
    top_ids_TBX=np.zeros((*tokens_TB.shape, 0), np.int32),
    top_logprobs_TBX=np.zeros((*tokens_TB.shape, 0), np.float32),
    expert_ids_TMBA=routes(positions_TB[:, None], version),
    version=version,
  )


def decode(table, decoding, tokens, version=0):
  """Reads such a report; returns a weak reference to one of its arrays."""
  report = make_report(decoding, tokens, version)
  table.sampled([(s, s.at_work) for s in decoding], report)
  return weakref.ref(report.tokens_TB)


def finish(table, tokens=(5,)):
  """Serves all requests to their end; returns outcomes by session."""
  for _ in range(1000):
    if table.num_unfinished == len(table.finished):
      return {f.session: f for f in table.take_finished()}
    table.admit()
    for session in table.prefilling():
      extend(table, session)
    if decoding := table.decoding():
      decode(table, decoding, tokens)
  raise AssertionError('a request never ended')


def check_books(table):
  """Checks that each page is free or held as often as it is named."""

  held = collections.Counter(table.holdings.prefixes.held)
  for session in table.sessions.values():
    assert len(set(session.pages)) == len(session.pages)
    held.update(session.pages)
  pages = table.holdings.pages
  for page in range(len(pages.references)):
    assert pages.references[page] == held[page]
  assert pages.num_free == len(pages.references) - len(held)

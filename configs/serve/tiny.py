"""A server on a few CPU cores, for the models of configs/composer.

  python -m experiments.serve --config=configs/serve/tiny.py \
      --source=runs/tiny
"""

import ml_collections


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Returns the fields of EngineOptions and ServeOptions; takes no `arg`."""
  if arg:
    raise ValueError(f'configs/serve/tiny.py takes no argument, not {arg!r}.')
  c = ml_collections.ConfigDict()
  c.numerics = 'fast'  # 'batch_invariant': the same bits whatever is beside
  c.devices = 1  # the first devices, which share the model
  # Shapes that are compiled once; see rollout.engine.EngineOptions.
  c.engine = dict(
    num_slots=16,  # sequences sampled together
    # Tokens of a context window, prompt and answer. 0: as in the run; of an
    # import 8192, or all its positions if those are fewer.
    max_len=0,
    prefill_chunk=64,  # context tokens that a row consumes in one dispatch
    prefill_rows=4,  # sequences whose context is consumed together
    decode_steps=4,  # tokens between two looks at requests and weights
    max_stop_tokens=8,
    num_top=20,  # the most top_logprobs that a request may ask for
    page_size=64,
    num_pages=0,  # 0: enough for every slot at max_len
    on_swap='keep',  # with --follow; or 'refresh': computes KV caches anew
    experts='',  # format whose codes are held, as 'nvfp4'; '': values
    cache_dtype='',  # of the KV cache: 'float8_e4m3fn'; '': of activations
    # Who drafts: 'ngrams', the model's 'heads', or 'none'; up to 4 or 2 tokens.
    speculation=dict(drafter='none', depth=4),
  )
  c.limits = dict(
    max_queue=64,  # choices that wait for a slot; more get 429
    max_choices=16,  # choices of a request
    max_body_bytes=1 << 20,
    default_max_tokens=256,
    max_connections=512,
    head_timeout_s=20.0,  # for the headers of a request to come
    request_timeout_s=300.0,  # waiting included
    drain_s=30.0,  # after SIGTERM, for what is running
    session_idle_s=600.0,  # idle time of sessions of /v1/tokens
    max_sessions=256,
    stall_s=60.0,  # without a step until /health says so
    poll_s=0.5,  # between looks at the store, with --follow
  )
  # With --record: seconds after the last answer within which events count. A
  # folder that was made with others is refused; see live.events.WindowOptions.
  c.record = dict(
    edit_kept_s=7200.0,
    follow_up_s=3600.0,
    thumb_s=3600.0,
    tool_call_s=600.0,
    kept_after_s=3600.0,  # least age of an edit that is reported as kept
  )
  return c

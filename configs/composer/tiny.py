"""The whole loop on two CPU cores: pretraining, SFT and RL of a coding agent.

  ./run.sh
  python -m experiments.composer --config=configs/composer/tiny.py \
      --workdir=runs/tiny

About ten minutes on two cores: pretraining 2 to 3.5, SFT 1.8, RL 4.9. One run
with hints passed 0.54 of 200 held-out episodes before RL and 0.91 after it, and
its invalid calls went from 14.8 to 2.1 %. One of before there were hints, with
muon.coefficients='keller', passed 0.68 and 0.94.

Arguments after a colon: `tiny.py:smoke` runs every stage with numbers so small
that the whole job takes seconds (the tests do).
"""

from typing import Any

import ml_collections

from configs.models import tiny as model_tiny


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  if arg not in ('', 'smoke'):
    raise ValueError(f"tiny.py takes no argument or 'smoke', not {arg!r}.")
  c = ml_collections.ConfigDict()
  c.seed = 0
  c.initial = ''  # random weights; or a folder made by experiments.hf_import
  # Devices of pretraining and SFT; their product is emulated on a CPU. That of
  # RL is rl.mesh.
  c.mesh = dict(replica=2, fsdp=1, context=1)
  c.layout = 'data_parallel'  # or 'hsdp', the dual-mesh layout
  c.parallel = _parallel()
  # Its `numerics` and `moe.replay_alpha` are for rollouts, evaluations and RL;
  # pretraining and SFT, on the whole mesh, are always 'fast'.
  c.model = model_tiny.get_config()
  c.tokenizer = dict(
    train_bytes=2_000_000,  # of the corpus that the merges are learnt from
  )
  c.data = dict(
    sources=('stdlib', 'site-packages'),  # or folders, sdists, lists
    weights=(),  # shares of max_bytes, one a source; () for equal ones
    archives='',  # folder of sdists and wheels, for pypi:NAME==VERSION
    max_bytes=12_000_000,
    heldout_share=0.05,  # of packages, for the held-out loss
    fim_rate=0.3,  # share of documents rearranged for fill-in-the-middle
  )
  c.cpt = dict(
    steps=300,
    batch_size=16,  # rows
    accumulate=1,  # microbatches a step, one after another, for less memory
    seq_len=256,
    learning_rate=5e-3,  # peak, of Muon at Moonlight's scale
    adam_learning_rate=2e-3,  # peak, of what AdamW keeps
    warmup_steps=20,
    decay_steps=100,  # linear, to a tenth of the peak
    weight_decay=0.1,
    grad_clip=1.0,  # global norm
    optimizer='muon',  # on matrices, AdamW on the rest; or 'adam' on all
    muon=_muon(),  # unused by 'adam'
    bias_update_rate=1e-3,  # of the routers' selection bias, per step
    checkpoint_every=100,
    eval_every=100,
    eval_batches=8,
    log_every=10,
  )
  c.sft = dict(
    **{
      **c.cpt.to_dict(),
      'steps': 280,
      'batch_size': 12,
      'seq_len': 320,
    },
  )
  c.demonstrations = dict(
    count=7000,  # transcripts, generated on training tasks only
    conversations='',  # file of your own beside them, for an imported model
    # Each is a probability per decision; RL has to unlearn them.
    wrong_tool=0.1,
    wrong_arguments=0.05,
    detour=0.03,
    skip_read=0.02,
    wrong_edit=0.08,
    broken_edit=0.1,
    skip_test=0.5,
    give_up=0.35,  # after an error or a failed test
  )
  _reinforcement(c)
  c.evaluation = dict(
    episodes=200,  # held-out, before and after RL
  )
  c.telemetry = dict(tensorboard=True, wandb=False)
  if arg == 'smoke':
    _shrink(c)
  return c


def _parallel() -> dict[str, Any]:
  """What devices exchange, on every mesh; results differ by rounding alone."""
  return dict(
    # Of tokens to experts: 'ring' (every token to every shard), 'a2a' (to those
    # of its experts, in fixed slots), 'ragged_a2a' (likewise, densely packed;
    # not on a CPU), or 'auto', which prints why.
    transport='auto',
    # Rows that an expert shard has room for, in means. A step that needs more
    # is repeated with the next bucket, at last the worst case. () for that
    # always, which takes most memory.
    buckets=(1.0, 1.25, 2.0),
    # 'zigzag' gives each context shard an early and a late piece of a row, so
    # that all attend to as many keys; 'auto' does where there are several.
    sequence_order='auto',
  )


def _muon() -> dict[str, Any]:
  """What pretraining and SFT choose of Muon; RL is Adam's."""
  return dict(
    beta=0.95,  # of the momentum
    rms=0.2,  # of an update at learning rate 1; AdamW's is 0.2 to 0.4
    # Of Newton-Schulz. 'polar_express' brings singular values into 0.87-1.12,
    # 'quintic' into 0.95-1.15, 'keller' (Muon's first) into 0.68-1.20;
    # 'deepseek_v4' to 1 within 0.1 %, in ten steps, which cost twice as much.
    coefficients='polar_express',
    steps=0,  # of it; 0 takes as many as the list is meant for
    # 'gram' iterates on the small side, a fifth less work where a matrix is 3.5
    # times as long as wide; 'auto' does where it pays; or 'standard'.
    method='auto',
    # Of its operands, and of what devices exchange: half the bytes in bfloat16,
    # where singular values may move by a per cent. 'auto' is bfloat16 on
    # accelerators, float32 on a CPU.
    dtype='auto',
    wire_dtype='auto',
    momentum_dtype='float32',  # 'bfloat16' halves this state of the optimizer
    # True: one matrix at a time, so that equal momenta give the same bits on
    # every mesh; slower on accelerators.
    deterministic=False,
    # Steps from one orthogonalisation of whole matrices to the next. Between
    # them each device takes its own block, and nothing is exchanged (MuonBP):
    # cheaper, and another update. 1 takes whole matrices always.
    period=1,
    block_ratio=1.0,  # of the step size of blocks to that of whole matrices
    neuron_norm=False,  # NorMuon: equal step sizes for the units of a matrix
    # Largest attention logit; a head above it has its query and key scaled down
    # (QK-clip; Kimi K2 has 100). 0 neither clips nor measures.
    qk_clip=0.0,
    # (regex of a parameter's name, role) instead of the role by its axes:
    # ('router', 'embed->route') puts routers on Muon, ('attention/out$',
    # 'heads,head_dim->embed') takes all heads as one matrix, 'adam' for AdamW.
    roles=(),
  )


def _reinforcement(c: ml_collections.ConfigDict) -> None:
  """Episodes, what judges them, the engine that plays them, and RL."""
  c.tasks = _tasks()
  c.episode = dict(
    max_tokens=320,
    max_turns=10,
    max_call_tokens=64,
    max_sampled_tokens=10_000,  # of all windows of an episode
    max_seconds=3600.0,  # ends what hangs; far away, as it makes runs differ
    temperature=1.0,
  )
  c.summary = _summary()
  c.rewards = dict(
    version=0,  # of these prices, which rewards.json of the workdir may change
    invalid_penalty=0.1,  # of reward, per invalid call
    failed_edit_penalty=0.0,  # per edit that changed nothing
    open_todo_penalty=0.0,  # per to-do that is open at the end
    unfinished_penalty=0.0,  # for not calling finish
    shell_only_penalty=0.0,  # for doing everything by `run`
    # Without a price on effort a wrong edit that is mended later earns as much
    # as a right one, and RL unlearns to get it right at once.
    effort_coefficient=0.1,
    effort_scale=80.0,  # sampled tokens, about an episode's
    effort_q=0.5,
    effort_turn_tokens=8.0,
    effort_answer_weight=0.0,  # of a token of a tool's answer
  )
  c.hints = _hints()
  c.curriculum = _curriculum()
  c.sandbox = dict(
    # The strongest that works here; or bwrap, unshare, microvm, rlimits, or
    # static: execute nothing.
    level='auto',
    allow_unsafe=False,  # rlimits isolates nothing: for trusted code only
    workers=2,
    # Distributions that programs in a workspace can import; 'pytest' for
    # deletion tasks.
    packages=(),
    wall_s=2.0,
    cpu_s=1.0,
    memory_bytes=256 * 2**20,
    processes=8,
    file_bytes=2**20,
    output_bytes=2**16,
  )
  c.rollout = dict(
    devices=1,  # that share the model out; on a CPU one is fastest
    num_slots=64,
    prefill_chunk=32,  # tokens a session consumes per prefill step
    prefill_rows=8,  # sessions in a prefill step; or several numbers, buckets
    decode_rows=(),  # buckets of sessions in a decode step; () for num_slots
    decode_steps=4,  # tokens per dispatch; weights change between dispatches
    page_size=64,  # tokens; of the KV cache
    num_pages=0,  # of the KV cache; 0 for num_slots sessions at their longest
    record_routes=True,  # which experts each token passed; replay needs it
    share_prefixes=True,  # the prompt of a group is computed once
    # What running sessions do with keys and values of older weights: 'keep'
    # them, or 'refresh' them (all their tokens are consumed anew).
    on_swap='keep',
  )
  c.rl = dict(
    # Devices of the trainer, in the layout above if there are several. One by
    # default: on a CPU the rollout process needs the other core.
    mesh=dict(replica=1, fsdp=1, context=1),
    steps=125,
    prompts=8,
    rollouts_per_prompt=8,
    placement='processes',  # or 'colocated': one process takes turns
    max_staleness=1,  # optimizer steps; 0 equals the synchronous loop
    learning_rate=3e-4,
    warmup_steps=3,
    decay_steps=95,  # linear, to a tenth
    adam_b1=0.9,
    adam_b2=0.95,
    grad_clip=1.0,
    loss=_loss(),
    kl_coefficient=0.0,  # of the k1 penalty against the SFT policy
    reward='verdict',  # 'shuffled' is the control that must not learn
    replay=True,  # of the routes that the engine recorded
    gate=_gate(),
    rows=8,
    seq_len=320,
    checkpoint_every=5,
    mismatch_every=10,  # steps; measured both with and without replay
    episodes_every=10,
    wait_timeout_s=300.0,
    max_restarts=3,
  )
  c.delta = _delta()


def _tasks() -> dict[str, Any]:
  """What is practised, and with which tools."""
  return dict(
    family='list_functions',  # or 'deletion'; see deletion.py
    folder='',  # of a set that experiments.make_tasks made, for deletion
    tiers=(),  # of deletions; () for all
    repository=dict(  # unused by list_functions, whose tools are its own
      tools=(
        *('read', 'search', 'list', 'edit', 'write', 'run', 'test', 'todo'),
        'finish',
      ),
      max_todos=30,
      bounds=dict(
        answer_chars=8000,  # of an answer; the rest is left out
        file_bytes=2**20,  # of a file that is read or written
        matches=50,  # that a search shows
        paths=200,  # that a list shows
        run_s=60.0,
        search_s=20.0,
      ),
    ),
  )


def _summary() -> dict[str, Any]:
  """When a window ends with a summary, from which the next one begins."""
  return dict(
    trigger=0,  # tokens that no window exceeds; 0 for no summaries
    max_tokens=128,  # of a summary
    max_summaries=8,  # of an episode
    plan_tokens=64,  # of the to-do list that a new window begins with
    query=(
      'Your context is full. Summarise what you did, what you found out and '
      'what is left to do: you will go on with that summary alone.'
    ),
  )


def _hints() -> dict[str, Any]:
  """Advice on faulty calls, which a teacher reads and the policy does not."""
  return dict(
    templates=(  # (kind of mistake, text); see agent/mistakes.py
      ('unknown_tool', 'Reminder: the available tools are {tools}.'),
      ('bad_arguments', 'Reminder: usage: {usage}. Avoid: {answer}'),
      ('not_a_call', 'Reminder: write one short call of {tools}.'),
      ('failed_edit', 'Reminder: look before you edit. Avoid: {answer}'),
      ('unfinished_todo', 'Reminder: {todos} to-dos are open; do them first.'),
    ),
    max_hints=4,  # of an episode; each costs a forward pass over its context
    loss=dict(
      weight=1.0,  # of a hinted turn beside a rollout of advantage 1; 0: off
      divergence='reverse',  # KL(policy || teacher), or 'forward', or 'jsd'
      jsd_mix=0.5,  # the teacher's share of the mixture, in 'jsd'
      top_k=0,  # words of the teacher that are told apart; 0 for all
      teacher='frozen',  # the SFT policy; or 'ema', a slow average
      ema_rate=0.01,
      ratio_cap=2.0,  # of p_train / p_rollout
      token_cap=0.0,  # nats beyond which a token pulls no harder; 0 for none
    ),
  )


def _curriculum() -> dict[str, Any]:
  """Whether hard tasks are drawn more often, and solved ones no more."""
  return dict(
    enabled=False,  # in order
    candidates=4,  # for each group, of tasks that are generated
    # Weight of a kind of task: its turns and sampled tokens, relative to all.
    turns_power=1.0,
    tokens_power=1.0,
    max_weight=4.0,
    prior_groups=4.0,  # of average difficulty, believed before the first
    solved_rate=0.97,  # of rollouts, from which a kind is solved
    solved_groups=8,  # seen before that is believed
    solved_weight=0.0,  # of solved kinds; 0 drops them while there are others
  )


def _loss() -> dict[str, Any]:
  """Which policy gradient, and how much of p_train / p_rollout it believes."""
  return dict(
    # 'tis' (truncated importance sampling), 'sequence_mask', 'icepop', 'cispo',
    # 'grpo', 'dapo' or 'gspo'; see rl/policy_loss.py.
    name='tis',
    ratio_cap=2.0,  # of a token's ratio, in 'tis' and 'sequence_mask'
    bounds=(),  # (low, high) of the others and of the mask; () for the usual
    # Tokens of a rollout are divided by: a 'constant' (Dr. GRPO), their number
    # ('sequence', GRPO), or that of the step ('token', DAPO).
    normalizer='constant',
  )


def _delta() -> dict[str, Any]:
  """How each policy of RL reaches the engine; no result depends on it."""
  return dict(
    # Folder or URL (s3://bucket/run) of this run alone; '' for workdir/store.
    store='',
    poll_s=0.05,  # between looks of the rollout process; more for a URL
    tier='small',  # fewest bytes; or 'fast', for more bytes in less time
    # Versions between full ones, which only late joiners and repair read.
    keyframe_every=100,
    skip_levels=(8,),  # also deltas from so many versions back, for laggards
    # Codes a change in the context of those before it: fewer bytes, but who
    # missed a version needs a skip delta or a keyframe.
    history=False,
    keyframes='orbax',  # plain checkpoints; or 'packed', two thirds of them
    # Seconds after which receivers distrust a pointer that nobody renewed, as
    # the trainer does while it runs; 0 for never.
    expires_s=7 * 86400.0,
    verify=True,  # decode and compare each bundle before it is published
    threads=1,  # that encode, and that decode; each side has a core of two
  )


def _gate() -> dict[str, str | float]:
  """What the mismatch of rollout and trainer may be, in float32.

  Measured on three runs of first_loop.py: of fresh tokens a mean k3 of 6e-14,
  with replay; at staleness 1, with the policy one step on, a mean k3 of at most
  0.010, at most 0.0016 of tokens at a ratio of 2, and at least 0.956 of routes
  unchanged.
  """
  return dict(
    action='stop',  # before such a step is applied; or 'flag', or 'off'
    # Nats a token. Rounding is 1e-13; one step of RL moves a policy by 1e-8 to
    # 1e-2. Without replay near ties are routed otherwise: allow 1e-4.
    max_kl_fresh=1e-9,
    max_kl=0.1,  # nats a token, stale or not: ten times the largest seen
    max_p99=2.0,  # nats, of a token's k3: a ratio of 4, or of an eighteenth
    max_large_ratio_share=0.1,  # R3's sign of a collapse
    # Of routes, lowest layer. A tape that is a token off has 0.1, so that a
    # fifth of the trajectories may not be.
    min_agreement=0.8,
  )


def _shrink(c: ml_collections.ConfigDict) -> None:
  """Keeps every stage and shortens it to what a test can afford."""
  c.data.max_bytes = 400_000
  c.data.sources = ('stdlib',)
  c.tokenizer.train_bytes = 200_000
  c.model.num_layers = 2
  c.model.embed_dim = 32
  c.model.attention.head_dim = 16
  c.model.attention.num_heads = 2
  c.model.attention.num_kv_heads = 1
  c.model.dense_ffw_dim = 64
  c.model.moe.ffw_dim = 32
  c.model.moe.num_experts = 4
  for stage in (c.cpt, c.sft):
    stage.steps = 6
    stage.batch_size = 4
    stage.seq_len = 192
    stage.warmup_steps = 2
    stage.decay_steps = 2
    stage.checkpoint_every = 2
    stage.eval_every = 3
    stage.eval_batches = 1
    stage.log_every = 1
  c.demonstrations.count = 40
  c.rollout.num_slots = 8
  c.rollout.prefill_rows = 4
  c.rl.steps = 4
  c.rl.warmup_steps = 1
  c.rl.decay_steps = 2
  c.rl.prompts = 2
  c.rl.rollouts_per_prompt = 4
  c.rl.max_staleness = 0
  c.rl.rows = 4
  c.rl.checkpoint_every = 1
  c.rl.mismatch_every = 2
  c.rl.episodes_every = 2
  c.delta.keyframe_every = 3
  c.delta.skip_levels = (2,)
  c.episode.max_tokens = 192
  c.episode.max_turns = 4
  c.episode.max_call_tokens = 24
  c.rl.seq_len = 192
  c.evaluation.episodes = 8

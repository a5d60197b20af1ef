"""Tokens per second of the whole training step, beside Hugging Face's.

  python -m benchmarks.train_step [--quick]
  python -m benchmarks.train_step --gpu [--tiny] [--trace=FOLDER]

'hf': one step (forward, next-token loss, backward, AdamW 3e-4) of a Qwen3-MoE
of 17.6M parameters (4 layers, 8 experts of which a token passes 2, untied
vocabulary of 8192) in float32 on 4 x 256 tokens. The peer is transformers'
`Qwen3MoeForCausalLM` on torch with its fused AdamW, with the fastest of its
expert implementations, compiled or not, in a process of its own: once with
MKL's fast path unlocked, and once with MKL as shipped (`peer_process`). Both
processes are pinned to one core, on one thread, with the allocator set as
`run.sh` sets it, take turns and count CPU seconds; both normalise the loss by
the 4 x 255 predicted tokens and clip nothing. Ours also rounds its weights to
the policy's bfloat16 grid and reports the norms of gradient and update, as it
always does. The limit is the step's matrix products alone, each timed by
itself. Further lines say where the time goes.

'dense': the tiny model's step (Muon and AdamW, with clipping) against itself
with every expert computed for every token, which is what `jax.lax.ragged_dot`
does on a CPU. Its limit is the useful arithmetic at the speed of a dense
product on this machine.

'--gpu': see `train_step_gpu`; `--tiny` runs the same code anywhere.
"""

import argparse

from benchmarks import interleaved


def _hf(is_quick: bool) -> None:
  from benchmarks import peer_process, train_step_hf, train_step_products
  from benchmarks import train_step_case as case
  from benchmarks import train_step_profile as profile

  model = case.qwen3_17m()
  rows, length = 4, 256
  tokens_BT = case.random_tokens(rows, length, model.vocab_size)
  name = f'17.6M Qwen3-MoE shape, {rows} x {length} tokens, float32'
  ours = case.Trained(model, case.adam(model), case.whole_rows(tokens_BT))
  limit = train_step_products.limit(model, rows, length)
  for library, environment in peer_process.libraries().items():
    peers = train_step_hf.variants(rows, length, environment)
    best = peer_process.fastest(peers, 2 if is_quick else 5)
    peer = peers[best]()
    rates = peer_process.in_turns(ours, peer.rate, 5 if is_quick else 21)
    peer.close()
    # The peer as shipped is what most users have, and no goal.
    is_goal = 'unlocked' in library
    interleaved.report(
      'train_step',
      f'hf: {name}',
      rates,
      against=f'transformers ({best}; {library})',
      limit=limit,
      goal='ratio >= 1.05' if is_goal else 'none',
      met=lambda _, ratio, is_goal=is_goal: not is_goal or ratio >= 1.05,
    )
  parts = profile.split(ours.compiled, ours, 3 if is_quick else 8)
  for part in profile.joined(parts, profile.CPU_PARTS):
    print(part.line('train_step', name), flush=True)


def _dense(is_quick: bool) -> None:
  from benchmarks import train_step_case as case
  from composer_jax.kernels.grouped import matmul
  from composer_jax.models import flops

  config = case.tiny()
  rows, length = 8, 512
  batch = case.half_rows(rows, length, config.vocab_size)
  steps = 1 if is_quick else 3
  # The backend is picked while tracing, and nothing else differs.
  with matmul.using('ragged'):
    peer = case.Trained(config, case.muon(config), batch, steps)
  ours = case.Trained(config, case.muon(config), batch, steps)
  # Unlike MFU the limit counts only necessary work: a row has two documents,
  # and a token sees half of its own on average.
  per_token = flops.train_per_token(config, length // 2, causal=True)
  interleaved.report(
    'train_step',
    f'dense: tiny model, {rows} x {length} tokens, {config.moe.num_active} of '
    f'{config.moe.num_experts} experts',
    interleaved.rates(ours, peer, 2 if is_quick else 9),
    against='every expert computed for every token',
    limit=interleaved.peak() / per_token,
    goal='ratio >= 1.2',
    met=lambda rate, ratio: ratio >= 1.2,
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--quick', action='store_true', help='about a minute')
  parser.add_argument('--only', choices=('hf', 'dense'))
  parser.add_argument('--gpu', action='store_true')
  parser.add_argument('--tiny', action='store_true', help='with --gpu')
  parser.add_argument('--trace', default='runs/train_step_trace')
  args = parser.parse_args()
  if args.gpu:
    from benchmarks import train_step_gpu

    train_step_gpu.run(is_tiny=args.tiny, folder=args.trace)
    return
  interleaved.set_allocator()
  interleaved.pin_to_one_core()
  for name, run in (('hf', _hf), ('dense', _dense)):
    if args.only in (None, name):
      run(args.quick)


if __name__ == '__main__':
  main()

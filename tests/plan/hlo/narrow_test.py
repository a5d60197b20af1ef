"""Products of few bits that a compiler widened are refused by name."""

import dataclasses
import importlib.util
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from composer_jax.parallel import rounds
from composer_jax.plan import aot_process, programs
from composer_jax.plan.hlo import narrow, overlap
from composer_jax.train import placement
from tests.plan import compiled_test

# As libtpu 0.0.42.1 prints a product of codes for tpu7x, shortened.
CODES = """HloModule jit_dot, is_scheduled=true

%fused (a: f8e4m3fn[256,512], b: f8e4m3fn[512,256]) -> f32[256,256] {
  %a = f8e4m3fn[256,512]{1,0} parameter(0)
  %b = f8e4m3fn[512,256]{1,0} parameter(1)
  ROOT %dot.1 = f32[256,256]{1,0} convolution(%a, %b), dim_labels=bf_io->bf
}

ENTRY %main (c: f8e4m3fn[256,512], d: f8e4m3fn[512,256]) -> f32[256,256] {
  %c = f8e4m3fn[256,512]{1,0} parameter(0)
  %d = f8e4m3fn[512,256]{1,0} parameter(1)
  ROOT %fusion = f32[256,256]{1,0} fusion(%c, %d), kind=kOutput, calls=%fused
}
"""
# `lax.scaled_dot` there: codes times scales in bfloat16, which it multiplies.
SCALED = (
  CODES.replace('(a: f8e4m3fn[', '(a: bf16[')
  .replace('%a = f8e4m3fn', '%a = bf16')
  .replace(
    'ROOT %fusion',
    """%wide = bf16[256,512]{1,0} convert(%c)
  %scale = bf16[256,512]{1,0} broadcast(%wide), dimensions={0,1}
  %mul.5 = bf16[256,512]{1,0} multiply(%wide, %scale)
  ROOT %fusion""",
  )
  .replace('fusion(%c, %d)', 'fusion(%mul.5, %d)')
)
# The last stage of Mosaic for a kernel on tpu7x.
MOSAIC = '"llo.vmatmul.mubr"(%330) <{data_format = #llo.matmul_data_format<'
HOPPER = 'wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {%f1}, %d1;\n'
# What Triton of jax 0.10.2 makes of a product of codes for an H200.
TRITON = """cvt.rn.f16x2.e4m3x2 %r1, %rs1;
mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1}, {%r1}, {%r2}, {%f1};
"""


def test_products_of_codes_are_counted():
  kernels = 2 * (MOSAIC + 'e4m3b>\n'), 3 * HOPPER
  assert narrow.check(CODES, kernels) == {
    'f8e4m3fn_f8e4m3fn': 1,
    'e4m3b': 2,
    'e4m3': 3,
  }


@pytest.mark.parametrize(
  'program, kernel, message',
  [
    (SCALED, '', r'dot.1 \(f8e4m3fn to bf16\)'),
    (CODES, MOSAIC + 'e4m3b_to_bf16>', r'1 steps .* \(e4m3b_to_bf16\)'),
    (CODES, TRITON, r'1 steps .* \(e4m3_to_f16\).* devices that multiply'),
  ],
)
def test_what_compilers_widen_is_refused(program, kernel, message):
  with pytest.raises(narrow.Widened, match=message):
    narrow.check(program, [kernel])


def test_a_cpu_widens_and_a_plain_product_is_none_of_few_bits():
  def compiled(dtype):
    arrays = (jax.ShapeDtypeStruct((16, 16), dtype) for _ in 'ab')
    return jax.jit(jnp.dot).lower(*arrays).compile().as_text()

  assert narrow.check(compiled(jnp.float32)) == {'f32_f32': 1}
  with pytest.raises(narrow.Widened, match='f8e4m3fn to f'):
    narrow.check(compiled(jnp.float8_e4m3fn))


_COMPILE = """
import sys
from composer_jax.plan import topologies
topologies.prepare(sys.argv[1])
import jax, jax.numpy as jnp
from composer_jax.core import platforms
from composer_jax.kernels.grouped import coded
place = jax.sharding.SingleDeviceSharding(topologies.devices(sys.argv[1])[0])
array = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=place)
codes = jnp.float8_e4m3fn
platform = topologies.MACHINES[topologies.machine(sys.argv[1])].platform
with platforms.targeting(platform):
  lowered = jax.jit(coded.multiply, static_argnames='dtype').trace(
    (array((1000, 1024), codes), array((1000, 8), jnp.float32)),
    (array((4, 1024, 384), codes), array((4, 8, 3), jnp.float32)),
    array((4,), jnp.int32), dtype=jnp.bfloat16,
  ).lower(lowering_platforms=('tpu' if platform == 'tpu' else 'cuda',))
print(lowered.compile().as_text())
"""


def _compiled(topology, folder):
  """Returns a program of the kernel, and what is inside the kernel.

  That is Mosaic's last stages, or PTX, which is printed before the program.
  """
  asked = {'LIBTPU_INIT_ARGS': f'--xla_mosaic_dump_to={folder}'}
  done = subprocess.run(
    [sys.executable, '-c', _COMPILE, topology],
    env=os.environ | asked | {'MOSAIC_GPU_DUMP_PTX': '1'},
    capture_output=True,
    text=True,
    check=True,
  )
  printed, begin, program = done.stdout.partition('HloModule')
  stages = sorted(folder.glob('*post-finalize-llo.txt'))
  return begin + program, [printed, *(path.read_text() for path in stages)]


def _require(module):
  try:
    found = importlib.util.find_spec(module)
  except ModuleNotFoundError:
    found = None
  if found is None:
    pytest.skip(f'no {module}')


@pytest.mark.slow
def test_a_tpu_v7_multiplies_codes_and_others_widen_them(tmp_path):
  _require('libtpu')
  program, kernels = _compiled('tpu7x:1x1x1', tmp_path)
  counts = narrow.check(program, kernels)
  assert counts['e4m3b'] > 0 and len(counts) == 1
  others = tmp_path / 'v6e'
  others.mkdir()
  with pytest.raises(narrow.Widened, match='e4m3b_to_bf16'):
    narrow.check(*_compiled('v6e:1x1', others))


@pytest.mark.slow
def test_a_hopper_gpu_multiplies_codes(tmp_path):
  _require('jax_plugins.xla_cuda13')
  program, kernels = _compiled('h200:1', tmp_path)
  # Of 128 columns in one step of a loop.
  assert narrow.check(program, kernels) == {'e4m3': 4}


@pytest.mark.slow
def test_a_step_on_tpu_v7_gathers_and_multiplies_codes_and_has_no_ragged_dot():
  """With more devices than experts, whose matrices are gathered therefore."""
  _require('libtpu')
  subject = compiled_test.case_of(
    'tpu7x:2x2x2',
    '2,4,2',
    embed_dim=512,
    compute_dtype='bfloat16',
    precision=dict(experts='fp8', products='codes'),
  )
  moe = dataclasses.replace(subject.model.moe, ffw_dim=256, num_experts=4)
  subject = dataclasses.replace(
    subject, model=dataclasses.replace(subject.model, moe=moe)
  )
  task = aot_process.CompileTask(
    case=subject,
    options=programs.StepOptions(
      seq_len=256,
      optimizer='adam',
      parallel=placement.ParallelOptions(wire='codes'),
    ),
    topology_name='tpu7x:2x2x2',
    libtpu='',
  )
  text = aot_process.compile_step(task, 'schedule').text
  assert 'ragged-dot' not in text and 'ragged_dot' not in text
  assert 'coded_multiply' in text
  even = lambda scope: 0.0 if rounds.FURTHER in scope else 1.0
  moved = overlap.read(text, dynamic_trips=even).collectives
  gathered = {
    c.dtype
    for c in moved
    if c.kind == 'all-gather' and c.result_bytes >= 4 * 256 * 128
  }
  assert 'u8' in gathered
  sent = {
    c.scope.split('/')[-2]: c
    for c in moved
    if c.kind == 'ragged-all-to-all' and 'transpose' not in c.scope
  }
  assert sent['dispatch'].dtype == 'u8' and sent['combine'].dtype == 'bf16'
  # The compiler pads rows of bytes to 512: 516 become 1,024, as in bfloat16.
  assert sent['dispatch'].bytes <= sent['combine'].bytes

"""Compiler options of tests, most of which need no fast programs."""

import jax

# For `jax.jit` of `decoder.init`, whose many random numbers take four seconds
# to compile without these options and one with them. They change the last bits.
INIT = {'xla_backend_optimization_level': 0}
# Compiles in seconds instead of tens of seconds. Changes the last bits, so not
# for tests that compare bits.
QUICKLY: dict[str, bool | int] = {'xla_backend_optimization_level': 0}
# Compiles as for users, undoing tests/conftest.py: for tests that compare bits
# between programs of different meshes.
AS_USERS_DO: dict[str, bool | int] = {'xla_backend_optimization_level': 3}
# Compiles quickly and keeps the usual order of sums.
ORDERLY: dict[str, bool | int] = {'xla_backend_optimization_level': 0}
if jax.__version_info__ < (0, 11):
  AS_USERS_DO['xla_cpu_use_fusion_emitters'] = True
  ORDERLY['xla_cpu_use_fusion_emitters'] = True
  # Without the emitters compiling takes a fifth of that time. Later versions of
  # XLA have the emitters only.
  QUICKLY['xla_cpu_use_fusion_emitters'] = False

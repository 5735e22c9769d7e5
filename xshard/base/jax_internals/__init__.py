"""The parts of JAX that xshard uses although JAX does not promise to keep them.

And what differs between the versions of JAX that it runs on. JAX changes its private
modules and `jax.extend`, `jax.interpreters` and `jax.experimental` without notice, so
only this folder imports them. xshard runs on JAX 0.10, 0.11 and 0.12. Each item says
what it is for, and what makes it superfluous.
"""

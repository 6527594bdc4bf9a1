"""The same optimizer in JAX: an optax transformation like any other."""

import jax
import jax.numpy as jnp
import optax

from anon_optim.optax import anon

x = jax.random.normal(jax.random.key(0), (256, 8))
y = jnp.sin(x).sum(1)
shapes = {"w1": (8, 32), "w2": (32,)}
params = {name: jax.random.normal(jax.random.key(1), shape) / shape[0] ** 0.5 for name, shape in shapes.items()}
optimizer = optax.chain(optax.clip_by_global_norm(1.0), anon(1e-2, gamma=1.5, lr_scale="tensor", weight_decay=0.1))
state = optimizer.init(params)


def loss(params):
    return jnp.square(jnp.tanh(x @ params["w1"]) @ params["w2"] - y).mean()


@jax.jit
def step(params, state):
    value, grads = jax.value_and_grad(loss)(params)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


for _ in range(200):
    params, state, value = step(params, state)
print(f"loss {value:.4f}")

"""HGPO (Hierarchy-of-Groups Policy Optimization, arXiv 2602.22817) in one file: `python notebooks/hgpo_in_one_file.py`.

A tiny Qwen2.5 learns to find things in a household and to put them where they belong: it clones a scripted expert until it
solves 40 % of its tasks, is trained by HGPO for 80 iterations, and plays held-out tasks.

The library does the same in a setting that splits nothing, `python -m hgpo_jax.train mesh=data=1 rollout.decode_batch_size=256
learner.microbatch_size=1024`; prompts of fewer than 128 tokens are never packed. tests/docs/test_one_file.py finds not a bit of
difference in a small run compiled without LLVM's optimization; in the default run with it, rounding parts them in iteration 3.
Array names end in the dimension letters of hgpo_jax/__init__.py; x stands for several of them together.
"""

import functools
import time

import jax
import jax.numpy as jnp
import optax

from hgpo_jax.envs.household import Household, expert

SEED, ITERATIONS, HELD_OUT_TASKS = 0, 80, 512
GROUPS, GROUP_SIZE, MINIBATCH = 32, 8, 1024  # tasks of an iteration, episodes of each, decisions of an optimizer step
GAMMA, INVALID_PENALTY, LEVEL_OFFSET = 0.95, 0.5, 2  # weights of levels are k + 2 as in the authors' code; the paper has k + 1
CLIP, DUAL_CLIP, KL_WEIGHT, ENTROPY_WEIGHT = 0.2, 3.0, 0.01, 0.001
RATE, FINAL_RATE, CLIP_NORM = 2e-3, 0.1, optax.clip_by_global_norm(1.0)
PLAYED, NOISE, CLONING_STEPS, CLONING_MINIBATCH, CHECK_EVERY, STOP_AT = 4096, 0.3, 1000, 64, 50, 0.4
TRAIN, HELD_OUT, WARM_START, PLAY, PRACTICE, CLONING = 0, 1, 2, 5, 6, 7  # streams of random keys, which never meet

ENV, K = Household(), 2  # K: past turns in a prompt, and the deepest level of groups
T, O, A = ENV.max_turns, ENV.observation_length, ENV.action_length
P, R = ENV.goal_length + K * (O + A) + O + 1, A + 1  # tokens of a prompt and of a response
# Words are tokens. Padding, the end of a response and the mark that asks for one follow them; V is a multiple of 8.
END, ACT, V = len(ENV.words) + 1, len(ENV.words) + 2, -(-(len(ENV.words) + 3) // 8) * 8
LAYERS, D, F, H, G, E, ROPE_THETA, INITIAL_STD = 2, 64, 176, 2, 1, 32, 1000.0, 0.1

keys_of_numbers, fold_in_each = jax.vmap(jax.random.fold_in, (None, 0)), jax.vmap(jax.random.fold_in, (0, None))


def stream(purpose, seed):
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(20260222), purpose), seed)


def initialize(key):
    """A random Qwen2.5 (arXiv 2412.15115) with the names of the published weights; all layers but the last are stacked."""

    def linear(key, number, inputs, outputs):
        return {"kernel": jax.random.normal(jax.random.fold_in(key, number), (inputs, outputs)) * INITIAL_STD}

    def layer(key, first):
        q = linear(key, first, D, H * E) | {"bias": jnp.zeros(H * E)}
        k, v = (linear(key, first + number, D, G * E) | {"bias": jnp.zeros(G * E)} for number in (2, 4))
        attention = {"q_proj": q, "k_proj": k, "v_proj": v, "o_proj": linear(key, first + 6, H * E, D)}
        gate, up, down = (linear(key, first + 7, D, F), linear(key, first + 8, D, F), linear(key, first + 9, F, D))
        mlp = {"gate_proj": gate, "up_proj": up, "down_proj": down}
        return {"input_layernorm": norm, "self_attn": attention, "post_attention_layernorm": norm, "mlp": mlp}

    embedding, norm = {"embedding": linear(key, 0, V, D)["kernel"]}, {"weight": jnp.ones(D)}
    stacked = jax.vmap(layer, (0, None))(jax.random.split(jax.random.fold_in(key, 1), LAYERS - 1), 0)
    return {"embed_tokens": embedding, "layers": stacked, "last": layer(key, 2), "norm": norm}


def layers_of(params):
    return [*(jax.tree.map(lambda a, i=i: a[i], params["layers"]) for i in range(LAYERS - 1)), params["last"]]


product = jax.custom_vjp(lambda x, w: x @ w)
# The usual gradients; jax would form that of w as (g^T x)^T, which is slower on CPUs.
product.defvjp(lambda x, w: (x @ w, (x, w)), lambda xw, g: (g @ xw[1].T, jnp.einsum("bsi,bso->io", xw[0], g)))


def linear(w, x, transposed):
    return (jnp.einsum("bsi,oi->bso", x, w["kernel"]) if transposed else product(x, w["kernel"])) + w.get("bias", 0.0)


def rms_norm(w, x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * w["weight"]


def rotate(x_BSHE, slot_S):
    """Rotary embedding (arXiv 2104.09864); the two halves of E are the pairs."""
    angle_S1x = slot_S[:, None, None] * ROPE_THETA ** (-jnp.arange(E // 2) / (E // 2))
    cos, sin = jax.lax.optimization_barrier((jnp.cos(angle_S1x), jnp.sin(angle_S1x)))
    a, b = jnp.split(x_BSHE, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attend(q_BQHE, k_BSGE, v_BSGE, slot_Q):
    """Causal attention of queries at some slots; r = H / G query heads share a key-value head and are rows of one product."""
    (B, Q), r = q_BQHE.shape[:2], H // G
    q_BGxE = q_BQHE.reshape(B, Q, G, r, E).transpose(0, 2, 3, 1, 4).reshape(B, G, r * Q, E)
    scores_BGxS = q_BGxE @ k_BSGE.transpose(0, 2, 3, 1) * E**-0.5
    visible_xS = jnp.tile(jnp.arange(k_BSGE.shape[1]) <= slot_Q[:, None], (r, 1))
    out_BGxE = jax.nn.softmax(jnp.where(visible_xS, scores_BGxS, -jnp.inf)) @ v_BSGE.transpose(0, 2, 1, 3)
    return out_BGxE.reshape(B, G, r, Q, E).transpose(0, 3, 1, 2, 4).reshape(B, Q, H * E)


def layer(w, x_BSD, slot_S, cache, first):
    """One layer: (its output for the queries from number `first` on, keys and values); with a cache these are written to it."""
    project = functools.partial(linear, transposed=cache is not None)
    attention, heads = w["self_attn"], lambda a: a.reshape(*a.shape[:2], -1, E)
    y_BSD = rms_norm(w["input_layernorm"], x_BSD)
    k_BSGE = rotate(heads(project(attention["k_proj"], y_BSD)), slot_S)
    v_BSGE = heads(project(attention["v_proj"], y_BSD))
    if cache is not None:
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=slot_S[0], axis=1)
        k_BSGE, v_BSGE = put(cache[0], k_BSGE), put(cache[1], v_BSGE)
    at = jnp.arange(first, len(slot_S))
    x, y, slot_Q = (x_BSD[:, at], y_BSD[:, at], slot_S[at]) if first else (x_BSD, y_BSD, slot_S)
    q_BQHE = rotate(heads(project(attention["q_proj"], y)), slot_Q)
    x = x + project(attention["o_proj"], attend(q_BQHE, k_BSGE, v_BSGE, slot_Q))
    y = rms_norm(w["post_attention_layernorm"], x)
    gated = jax.nn.silu(project(w["mlp"]["gate_proj"], y)) * project(w["mlp"]["up_proj"], y)
    return x + project(w["mlp"]["down_proj"], gated), (k_BSGE, v_BSGE)


def forward(params, layers, token_BS, slot_S, caches=(None,) * LAYERS, first=0):
    """Logits of the queries from number `first` on, the only ones of the last layer; keys and values of each layer."""
    x, kept = params["embed_tokens"]["embedding"][token_BS], []
    for number, (w, cache) in enumerate(zip(layers, caches, strict=True)):
        x, keys_values = layer(w, x, slot_S, cache, first if number == LAYERS - 1 else 0)
        kept.append(keys_values)
    return rms_norm(params["norm"], x) @ params["embed_tokens"]["embedding"].T, kept  # the head is the embedding


def log_probs(params, batch):
    """f32[N, R], the log-probability of each response token and the entropy where it was sampled; 0 after the response."""
    token_NS = jnp.concatenate([batch["prompts"], batch["responses"][:, :-1]], axis=1)
    logits_NRV, _ = forward(params, layers_of(params), token_NS, jnp.arange(P + R - 1), first=P - 1)
    logp_NRV = jax.nn.log_softmax(logits_NRV)
    logp_NR = jnp.take_along_axis(logp_NRV, batch["responses"][..., None], axis=-1)[..., 0]
    entropy_NR, slot_NR = -(jnp.exp(logp_NRV) * logp_NRV).sum(-1), jnp.where(batch["mask"], jnp.arange(R), R)
    return tuple(jnp.take_along_axis(a, slot_NR, axis=1, mode="fill", fill_value=0) for a in (logp_NR, entropy_NR))


def policy_player(params, keys_B, prompt_BP, state, recent_BKA, greedy=False):
    """Samples a response token by token, with a cache of keys and values: (action, response, its length, log-probabilities)."""

    def next_token(carry, i):
        logits_B1V, ended_B, caches = carry
        logits_BV = logits_B1V[:, 0]
        sampled_B = jax.vmap(jax.random.categorical)(fold_in_each(keys_B, i), logits_BV)
        token_B = jnp.where(ended_B, 0, logits_BV.argmax(-1) if greedy else sampled_B)
        logp_B = jnp.take_along_axis(jax.nn.log_softmax(logits_BV), token_B[:, None], axis=1)[:, 0]
        logits_B1V, caches = forward(params, transposed, token_B[:, None], P + i[None], caches)
        return (logits_B1V, ended_B | (token_B == END), caches), (token_B, jnp.where(ended_B, 0.0, logp_B))

    transposed = jax.tree.map(jnp.transpose, layers_of(params))  # as products of few rows read weights faster
    logits_B1V, caches = forward(params, layers_of(params), prompt_BP, jnp.arange(P), first=P - 1)
    caches = jax.tree.map(lambda a: jnp.pad(a, ((0, 0), (0, R - 1), (0, 0), (0, 0))), caches)
    start = (logits_B1V, jnp.zeros(len(prompt_BP), bool), caches)
    response_BR, logp_BR = (a.T for a in jax.lax.scan(next_token, start, jnp.arange(R))[1])
    ended_B = (response_BR == END).any(1)
    length_B = jnp.where(ended_B, jnp.argmax(response_BR == END, axis=1) + 1, R)
    action_BA = jnp.where((response_BR == END) | ~ended_B[:, None], 0, response_BR)[:, :A]  # none where it was cut
    return action_BA, response_BR, length_B, logp_BR


@functools.partial(jax.vmap, in_axes=(None, 0, 0, 0, 0))
def expert_player(params, key, prompt_P, state, recent_KA):
    """Says what the expert would do, and at times does something else, to show what a clumsy policy gets into."""
    keys = jax.random.split(key, 3)
    label_A = expert.expert_action(ENV, state, recent_KA, keys[0])
    action_A = jnp.where(jax.random.uniform(keys[1]) < NOISE, expert.random_action(ENV, state, keys[2]), label_A)
    words = (label_A != 0).sum()
    return action_A, jnp.append(label_A, 0).at[words].set(END), words + 1, jnp.zeros(R)


@functools.partial(jax.jit, static_argnames="player")
def play(player, params, tasks_B, keys_B):
    """Episodes, a dict of arrays [B, T, ...] that are 0 after an episode's end."""
    state, observation_BO = jax.vmap(ENV.reset)(tasks_B)
    goal_Bx, B = jax.vmap(ENV.goal)(state), len(tasks_B)

    def turn(carry, t):
        state, observation_BO, past_BKx, done_B = carry
        prompt_BP = jnp.hstack([goal_Bx, past_BKx.reshape(B, -1), observation_BO, jnp.full((B, 1), ACT)])
        action_BA, response_BR, length_B, logp_BR = player(params, fold_in_each(keys_B, t), prompt_BP, state, past_BKx[..., O:])
        state, after_BO, reward_B, over_B, invalid_B = jax.vmap(ENV.step)(state, action_BA)
        record = {"prompts": prompt_BP, "responses": response_BR, "response_lengths": length_B, "logp": logp_BR}
        record |= {"observations": observation_BO, "rewards": reward_B, "invalid": invalid_B, "mask": ~done_B}
        record = jax.tree.map(lambda a: jnp.where(done_B.reshape(B, *[1] * (a.ndim - 1)), jnp.zeros_like(a), a), record)
        pair_B1x = jnp.hstack([observation_BO, action_BA])[:, None]
        return (state, after_BO, jnp.hstack([past_BKx, pair_B1x])[:, 1:], done_B | over_B), record

    start = (state, observation_BO, jnp.zeros((B, K, O + A), jnp.int32), jnp.zeros(B, bool))
    return jax.tree.map(lambda a: a.swapaxes(0, 1), jax.lax.scan(turn, start, jnp.arange(T))[1])


@jax.jit
def hgpo_advantages(episodes, group_B):
    """f32[B, T]: A = sum_k w_k A_k / sum_k w_k with w_k = k + 2, over the levels whose A_k is not 0.

    A_k is the discounted return, less a penalty where the step itself is invalid, minus its mean over the step's level-k group:
    the steps of its prompt group, of any episode and turn, with its context C_k = (s_{t-k}, ..., s_t); of t < k there is none.
    """
    (B, T), N = episodes["rewards"].shape, episodes["rewards"].size
    discounted_BT = jax.lax.scan(lambda y, r: (r + GAMMA * y,) * 2, jnp.zeros(B), episodes["rewards"].T, reverse=True)[1].T
    penalty_BT = INVALID_PENALTY * episodes["invalid"].astype(jnp.float32)
    returns, magnitudes = (discounted_BT - penalty_BT).ravel(), (discounted_BT + penalty_BT).ravel()
    row_numbers = functools.partial(jnp.unique, axis=0, return_inverse=True, size=N)  # [1] is equal where rows are equal
    state_BT = row_numbers(episodes["observations"].reshape(N, O))[1].reshape(B, T)
    contexts, levels = [jnp.repeat(group_B, T)], []
    for k in range(K + 1):
        earlier_BT = jnp.pad(state_BT, ((0, 0), (k, 0)), constant_values=-1)[:, :T]  # s_{t-k}, by which C_k refines C_{k-1}
        contexts.append(row_numbers(jnp.stack([contexts[-1], earlier_BT.ravel()], axis=1))[1].ravel())
    order = jnp.argsort(contexts[-1])  # in which the library adds
    for k, context in enumerate(contexts[1:]):
        size = jax.ops.segment_sum(jnp.ones(N, jnp.int32), context, N)[context]
        least = jax.ops.segment_min(returns, context, N)[context]  # so that the mean of equal returns is just that
        deviation = returns - (least + jax.ops.segment_sum((returns - least)[order], context[order], N)[context] / size)
        rounding = 64 * jnp.finfo(jnp.float32).eps * jax.ops.segment_max(magnitudes, context, N)[context]  # is no difference
        deviation_BT = jnp.where(jnp.abs(deviation) <= rounding, 0.0, deviation).reshape(B, T)
        levels.append(jnp.where(episodes["mask"] & (jnp.arange(T) >= k), deviation_BT, 0.0))
    level_BTL = jnp.stack(levels, axis=-1)
    weight_BTL = jnp.where(level_BTL != 0, jnp.arange(K + 1.0) + LEVEL_OFFSET, 0.0)
    return (weight_BTL / (weight_BTL.sum(-1, keepdims=True) + 1e-6) * level_BTL).sum(-1)


def hgpo_loss(params, reference, batch):
    """PPO's clipped surrogate (arXiv 1707.06347, eq. 7) with a dual clip (arXiv 1912.09729), KL and entropy; all as sums."""
    (logp, entropy), (reference_logp, _) = log_probs(params, batch), log_probs(reference, batch)
    advantage = jnp.where(batch["mask"], batch["advantages"][:, None], 0.0)
    ratio = jnp.exp(jnp.clip(logp - batch["logp"], -20, 20))
    surrogate = jnp.maximum(-advantage * ratio, -advantage * jnp.clip(ratio, 1 - CLIP, 1 + CLIP))
    surrogate = jnp.where(advantage < 0, jnp.minimum(surrogate, -DUAL_CLIP * advantage), surrogate)
    d = jnp.clip(reference_logp - logp, -20, 20)
    kl = jnp.minimum(jnp.expm1(d) - d, 10.0)  # k3, an estimate of KL(policy || reference) without negative values
    loss, kl, entropy = (jnp.where(batch["mask"], a, 0.0).sum(-1).sum() for a in (surrogate, kl, entropy))
    return loss + KL_WEIGHT * kl - ENTROPY_WEIGHT * entropy, {"loss": loss, "kl": kl, "entropy": entropy}


def cloning_loss(params, reference, batch):
    loss = -log_probs(params, batch)[0].sum(-1).sum()
    return loss, {"loss": loss, "kl": 0.0, "entropy": 0.0}


@functools.partial(jax.jit, static_argnames=("loss", "optimizer", "minibatch", "decisions"))
def epoch(loss, optimizer, minibatch, params, opt_state, reference, episodes, key, rate, decisions=None):
    """A step of the optimizer for each mini-batch of the decisions in random order, or of some; all are equally large."""
    batch = {name: a.reshape(-1, *a.shape[2:]) for name, a in episodes.items()}
    count = batch["mask"].sum() if decisions is None else decisions
    order_N = jnp.argsort(jax.random.uniform(key, batch["mask"].shape) + 2.0 * ~batch["mask"])  # turns that happened come first
    steps = -(-count // minibatch)
    size = -(-count // steps)

    def step(j, carry):
        params, opt_state, sums = carry
        at = j * size + jnp.arange(minibatch)
        some = jax.tree.map(lambda a: a[order_N[jnp.minimum(at, len(order_N) - 1)]], batch)
        length = jnp.where(at < jnp.minimum((j + 1) * size, count), some["response_lengths"], 0)
        some["mask"], tokens = jnp.arange(R) < length[:, None], length.sum()
        gradient, stats = jax.grad(loss, has_aux=True)(params, reference, some)
        updates, opt_state = optimizer.update(jax.tree.map(lambda g: g * (1.0 / tokens), gradient), opt_state, params)
        params = optax.apply_updates(params, jax.tree.map(lambda u: u * rate, updates))
        return params, opt_state, jax.tree.map(jnp.add, sums, stats | {"tokens": tokens})

    sums = {"loss": 0.0, "kl": 0.0, "entropy": 0.0, "tokens": 0}
    params, opt_state, sums = jax.lax.fori_loop(0, steps, step, (params, opt_state, sums))
    return params, opt_state, {name: a / sums["tokens"] for name, a in sums.items()}


def clone(params):
    """The warm start: random play almost never succeeds, and HGPO learns from what does."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, RATE, 100, CLONING_STEPS, RATE / 10)
    optimizer = optax.chain(CLIP_NORM, optax.adamw(schedule, b2=0.98))
    opt_state, learn = optimizer.init(params), functools.partial(epoch, cloning_loss, optimizer, CLONING_MINIBATCH)
    numbers, keys = jnp.arange(PLAYED + GROUPS * GROUP_SIZE), jax.random.split(stream(PLAY, SEED), PLAYED)
    tasks, practice = jnp.split(keys_of_numbers(stream(WARM_START, SEED), numbers), [PLAYED])
    episodes = play(expert_player, None, tasks, keys)
    for step in range(0, CLONING_STEPS, CHECK_EVERY):
        key = jax.random.fold_in(stream(CLONING, SEED), step)
        params, opt_state, _ = learn(params, opt_state, None, episodes, key, 1.0, CHECK_EVERY * CLONING_MINIBATCH)
        keys = jax.random.split(jax.random.fold_in(stream(PRACTICE, SEED), step), len(practice))
        success = play(policy_player, params, practice, keys)["rewards"].any(1).mean()
        print(f"{step + CHECK_EVERY} steps of cloning: success {success:.1%}", flush=True)
        if success >= STOP_AT:
            break
    return params


def main():
    params = reference = clone(jax.jit(initialize)(jax.random.key(SEED)))
    optimizer = optax.chain(CLIP_NORM, optax.adamw(optax.linear_schedule(RATE / 30, RATE, 29), weight_decay=0.01))
    opt_state, group_B = optimizer.init(params), jnp.arange(GROUPS * GROUP_SIZE) // GROUP_SIZE
    for iteration in range(ITERATIONS):
        began, key = time.perf_counter(), jax.random.fold_in(jax.random.key(SEED), iteration)
        tasks = keys_of_numbers(stream(TRAIN, SEED), iteration * GROUPS + group_B)
        episodes = play(policy_player, params, tasks, jax.random.split(jax.random.fold_in(key, 0), len(tasks)))
        episodes["advantages"] = hgpo_advantages(episodes, group_B)
        rate, key = 1 - (1 - FINAL_RATE) * iteration / (ITERATIONS - 1), jax.random.fold_in(key, 1)
        params, opt_state, stats = epoch(hgpo_loss, optimizer, MINIBATCH, params, opt_state, reference, episodes, key, rate)
        success, seconds = episodes["rewards"].any(1).mean(), time.perf_counter() - began
        print(f"iteration {iteration + 1}: success {success:.1%}, KL {stats['kl']:.4f}, {seconds:.1f} s", flush=True)
    tasks = keys_of_numbers(stream(HELD_OUT, 0), jnp.arange(HELD_OUT_TASKS))
    success = play(functools.partial(policy_player, greedy=True), params, tasks, tasks)["rewards"].any(1).mean()
    print(f"{HELD_OUT_TASKS} held-out tasks, greedy: success {success:.1%}")


if __name__ == "__main__":
    main()

"""Naive float64 references, written with loops over sequences and tokens from the papers' formulas."""

import math
from itertools import combinations

import numpy as np


def cut(x: float, bound: float = 20.0) -> float:
    return max(-bound, min(bound, x))


def grpo(rewards, groups, lengths, std=True):
    out = []
    for r, g in zip(rewards, groups, strict=True):
        members = [x for x, h in zip(rewards, groups, strict=True) if h == g]
        if len(set(members)) == 1:
            out.append(0.0)
            continue
        mean = sum(members) / len(members)
        deviation = math.sqrt(sum((x - mean) ** 2 for x in members) / (len(members) - 1))
        out.append((r - mean) / (deviation + 1e-6) if std else r - mean)
    return out


def dr_grpo(rewards, groups, lengths):
    return grpo(rewards, groups, lengths, std=False)


def rloo(rewards, groups, lengths):
    out = []
    for i, (r, g) in enumerate(zip(rewards, groups, strict=True)):
        others = [x for j, (x, h) in enumerate(zip(rewards, groups, strict=True)) if h == g and j != i]
        out.append(r - sum(others) / len(others) if others else 0.0)
    return out


def opo(rewards, groups, lengths):
    out = []
    for r, g in zip(rewards, groups, strict=True):
        members = [(x, n) for x, h, n in zip(rewards, groups, lengths, strict=True) if h == g]
        out.append(r - sum(x * n for x, n in members) / sum(n for _, n in members))
    return out


def whiten_tokens(values, lengths):
    tokens = [v for v, n in zip(values, lengths, strict=True) for _ in range(n)]
    mean = sum(tokens) / len(tokens)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in tokens) / len(tokens))
    return [(v - mean) / (deviation + 1e-6) for v in values]


def reinforce_pp(rewards, groups, lengths):
    return whiten_tokens(rewards, lengths)


def reinforce_pp_baseline(rewards, groups, lengths):
    return whiten_tokens(dr_grpo(rewards, groups, lengths), lengths)


def passk(rewards, groups, k):
    out = []
    for i, g in enumerate(groups):
        others = [rewards[j] for j, h in enumerate(groups) if h == g and j != i]
        gains = [max(rewards[i] - max(c), 0.0) for c in combinations(others, (k or len(others) + 1) - 1) if c]
        out.append(sum(gains) / len(gains) if gains else 0.0)
    return out


def tokens_of(seq_id, mask, s):
    return [t for t in range(len(seq_id)) if seq_id[t] == s and mask[t]]


def rho(numerator, behaviour, mask, seq_id, level):
    out = np.zeros(len(mask))
    for s in set(seq_id):
        ts = tokens_of(seq_id, mask, s)
        gaps = [numerator[t] - behaviour[t] for t in ts]
        for t in ts:
            gap = {
                "token": numerator[t] - behaviour[t],
                "sequence": sum(gaps),
                "geometric": sum(gaps) / len(gaps),
                "off": numerator[t] - behaviour[t],
            }[level]
            out[t] = math.exp(cut(gap))
    return out


def weights(numerator, behaviour, mask, seq_id, level, mode, low, high):
    if level == "off":
        return np.asarray(mask, dtype=float)
    ratio = rho(numerator, behaviour, mask, seq_id, level)
    out = np.zeros(len(mask))
    for t in range(len(mask)):
        if mask[t]:
            out[t] = min(ratio[t], high) if mode == "truncate" else (ratio[t] if low <= ratio[t] <= high else 0.0)
    return out


def clipped(r, a, low, high, dual):
    loss = max(-a * r, -a * max(1 - low, min(1 + high, r)))
    return min(loss, -a * dual) if a < 0 and dual else loss


def token_losses(name, logp, prox, behaviour, adv, mask, seq_id, low, high, dual):
    """Loss per token before the behaviour weight."""
    out = np.zeros(len(mask))
    anchor = prox if name in ("decoupled_ppo", "gspo") else behaviour
    for s in set(seq_id):
        ts = tokens_of(seq_id, mask, s)
        gaps = [logp[t] - anchor[t] for t in ts]
        for t in ts:
            r, a = math.exp(cut(logp[t] - anchor[t])), adv[t]
            if name in ("decoupled_ppo", "ppo_clip"):
                out[t] = clipped(r, a, low, high, dual)
            elif name == "gspo":
                out[t] = clipped(math.exp(cut(sum(gaps) / len(gaps))), a, low, high, dual)
            elif name == "cispo":
                out[t] = -max(1 - low, min(1 + high, r)) * a * logp[t]
            elif name == "topr":
                out[t] = -(min(1.0, math.exp(cut(sum(gaps)))) if a < 0 else 1.0) * a * logp[t]
            elif name == "reinforce":
                out[t] = -a * logp[t]
    return out


def aggregate(name, loss, mask, seq_id, num_tokens, num_seqs, constant):
    total = 0.0
    for s in set(seq_id):
        ts = tokens_of(seq_id, mask, s)
        part = sum(loss[t] for t in ts)
        if not ts:
            continue
        if name == "token_mean":
            total += part / num_tokens
        elif name == "seq_mean_token_mean":
            total += part / len(ts) / num_seqs
        else:
            total += part / constant / num_seqs
    return total


def kl(logp, ref, estimator):
    d = cut(logp - ref)
    return {"k1": d, "k2": d * d / 2, "k3": min(10.0, math.exp(-d) - 1 + d)}[estimator]


def gae(reward, value, mask, seq_id, gamma, lam):
    adv, ret = np.zeros(len(mask)), np.zeros(len(mask))
    for s in set(seq_id):
        ts = tokens_of(seq_id, mask, s)
        for i, t in enumerate(ts):  # the definition: a sum of discounted temporal differences
            for j in range(i, len(ts)):
                following = value[ts[j + 1]] if j + 1 < len(ts) else 0.0
                delta = reward[ts[j]] + gamma * following - value[ts[j]]
                adv[t] += (gamma * lam) ** (j - i) * delta
            ret[t] = adv[t] + value[t]
    return adv, ret


def vtrace(reward, value, log_rho, mask, seq_id, gamma, lam, rho_bar, c_bar, dead_band):
    adv, target = np.zeros(len(mask)), np.zeros(len(mask))
    for s in set(seq_id):
        ts = tokens_of(seq_id, mask, s)
        n = len(ts)
        ratio = [1.0 if abs(log_rho[t]) <= dead_band else math.exp(log_rho[t]) for t in ts]
        v = [value[t] for t in ts] + [0.0]
        delta = [reward[ts[i]] + gamma * v[i + 1] - v[i] for i in range(n)]
        excess = [0.0] * (n + 1)
        for i in range(n):
            for j in range(i, n):
                trace = 1.0
                for k in range(i, j):
                    trace *= gamma * lam * min(c_bar, ratio[k])
                excess[i] += trace * min(rho_bar, ratio[j]) * delta[j]
        for i, t in enumerate(ts):
            target[t] = v[i] + excess[i]
            adv[t] = delta[i] + gamma * lam * excess[i + 1]
    return adv, target


def value_loss(value, old, ret, mask, clip, num_tokens):
    total = 0.0
    for t in range(len(mask)):
        if mask[t]:
            near = max(old[t] - clip, min(old[t] + clip, value[t]))
            total += 0.5 * max((value[t] - ret[t]) ** 2, (near - ret[t]) ** 2)
    return total / num_tokens


def adaptive_entropy(entropies, target, delta, low, high):
    """Skywork-OR1's paper: alpha_k = c_k 1[e_k <= target], c_{k+1} = c_k +- delta, c_0 = 0."""
    c, out = 0.0, []
    for e in entropies:
        out.append(c * (1 if e <= target else 0))
        c = max(low, min(high, c + delta if e < target else c - delta))
    return out

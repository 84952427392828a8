"""Write what transformers computes for the tiny pairs (float32, CPU): golden.safetensors and golden.json.

python tests/golden/golden.py --root tests/golden [--variants e2b,e2b-trained]

The names and shapes are explained in README.md.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

VARIANTS = ("e2b", "e4b", "12b", "26b", "31b", "e2b-trained", "12b-trained", "26b-trained")
S, G = "sliding_attention", "full_attention"
WINDOW = 16
PROMPTS = {
    "short": "The cat sat on the mat.",
    "long": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday "
    "one two three four five six seven eight nine ten",
}
NUM_GREEDY = 208
NUM_UNCACHED = 32  # of them, checked once more by forwards without a cache
NUM_DRAFT_TOKENS = 3

KV = dict[str, tuple[Tensor, Tensor]]  # each [1, n_kv, S, head_dim]


def no_images(ids: Tensor) -> dict[str, Tensor]:
    return dict(input_ids=ids, mm_token_type_ids=torch.zeros_like(ids))


def forward(target: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor, KV]:
    """Logits [1, S, V], hidden after the final norm [1, S, D], K/V of the layers that the drafter reads."""
    out = target(**no_images(ids), use_cache=False, output_hidden_states=True, return_shared_kv_states=True)
    kv = dict(out.shared_kv_states)
    if set(kv) != {S, G}:
        raise ValueError(f"shared K/V of {sorted(kv)}, wanted both attention types")
    return out.logits, out.hidden_states[-1], kv


def margin(logits: Tensor) -> float:
    """Smallest distance of the best from the second best token."""
    top = logits.topk(2).values
    return (top[..., 0] - top[..., 1]).min().item()


def greedy(target: nn.Module, ids: Tensor) -> tuple[list[int], Tensor]:
    """The continuation, past any stop token, and its logits [NUM_GREEDY, V]; by single steps with a cache."""
    cache, rows, block = DynamicCache(config=target.config.get_text_config()), [], ids
    for _ in range(NUM_GREEDY):
        out = target(**no_images(block), past_key_values=cache, use_cache=True)
        rows.append(out.logits[0, -1])
        block = rows[-1].argmax().reshape(1, 1)
    return [int(row.argmax()) for row in rows], torch.stack(rows)


def draft(
    assistant: nn.Module, embed: Callable, bonus: Tensor, hidden: Tensor, kv: KV, position: int
) -> dict:
    """Greedy draft steps at one position; the K/V end before it."""
    rows: dict[str, list[Tensor]] = {key: [] for key in ("logits", "dense", "hidden", "tokens")}
    exact = {G: tuple(x[:, :, :position] for x in kv[G])}
    # transformers' own sliding mask shows two keys more than causality at this position allows
    exact[S] = tuple(x[:, :, max(0, position - WINDOW + 1) : position] for x in kv[S])
    normed: list[Tensor] = []
    hook = assistant.model.norm.register_forward_hook(lambda module, args, out: normed.append(out))
    token = bonus
    for _ in range(NUM_DRAFT_TOKENS):
        out = assistant(
            inputs_embeds=torch.cat([embed(token), hidden], dim=-1),
            position_ids=torch.tensor([[position]]),
            shared_kv_states=exact,
            attention_mask=None,
        )
        token, hidden = out.logits.argmax(-1), out.last_hidden_state
        step = dict(logits=out.logits, dense=assistant.lm_head(normed[-1]), hidden=hidden, tokens=token)
        for key, value in step.items():
            rows[key].append(value[0, 0])
    hook.remove()
    return {key: torch.stack(value) for key, value in rows.items()}


def speculate(draft_at: Callable[[int], dict], sequence: list[int], start: int) -> dict[str, Any]:
    """The rounds of an exact engine over a known greedy sequence; only those that end inside it."""
    rounds, margins, position = [], [], start
    while position + NUM_DRAFT_TOKENS + 1 < len(sequence):
        out = draft_at(position)
        drafts, accepted = out["tokens"].tolist(), 0
        while accepted < NUM_DRAFT_TOKENS and drafts[accepted] == sequence[position + 1 + accepted]:
            accepted += 1
        rounds.append([position, accepted, drafts])
        margins.append(margin(out["logits"]))
        position += accepted + 1
    return dict(accepted=[r[1] for r in rounds], min_draft_margin=min(margins), rounds=rounds)


def run_case(
    target: nn.Module, assistant: nn.Module, ids: Tensor
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    length = ids.shape[1]
    logits, hidden, _ = forward(target, ids)
    tokens, cached = greedy(target, ids)
    sequence = torch.cat([ids, torch.tensor([tokens])], dim=1)
    all_logits, all_hidden, all_kv = forward(target, sequence)
    path = all_logits[0, length - 1 : -1]
    for i in range(NUM_UNCACHED):
        last = target(**no_images(sequence[:, : length + i]), use_cache=False).logits[0, -1]
        check(int(last.argmax()) == tokens[i], f"token {i} with and without a cache")
    check(path.argmax(-1).tolist() == tokens, "greedy tokens and one forward over them")

    def draft_at(position: int) -> dict:
        bonus, row = sequence[:, position : position + 1], all_hidden[:, position - 1 : position]
        return draft(assistant, target.get_input_embeddings(), bonus, row, all_kv, position)

    first = draft_at(length)
    tensors = {f"draft.pos0_exact.{key}": value for key, value in first.items()}
    tensors |= {"ids": ids[0], "target.logits": logits[0], "target.hidden": hidden[0]}
    facts = dict(
        length=length,
        ids=ids[0].tolist(),
        greedy=tokens,
        min_margin=min(margin(path), margin(cached)),
        cache_difference=(path - cached).abs().max().item(),
        drafts=first["tokens"].tolist(),
        **speculate(draft_at, sequence[0].tolist(), length),
    )
    return tensors, facts


def check(same: bool, what: str) -> None:
    if not same:
        raise ValueError(f"{what} differ")


def run(root: Path) -> None:
    load = AutoModelForCausalLM.from_pretrained
    target = load(root / "target", dtype=torch.float32).eval()
    assistant = load(root / "assistant", dtype=torch.float32).eval()
    tok = AutoTokenizer.from_pretrained(root / "target")
    tensors: dict[str, Tensor] = {}
    facts: dict[str, Any] = dict(
        versions=dict(torch=torch.__version__.split("+")[0], transformers=transformers.__version__),
        sliding_window=WINDOW,
        num_draft_tokens=NUM_DRAFT_TOKENS,
        prompts=PROMPTS,
        cases={},
    )
    for case, text in PROMPTS.items():
        ids = torch.tensor([[2, *tok.encode(text, add_special_tokens=False)]])
        new, facts["cases"][case] = run_case(target, assistant, ids)
        for name, value in new.items():
            kind, _, rest = name.partition(".")
            tensors[f"{kind}.{case}.{rest}" if rest else f"{kind}.{case}"] = value.contiguous().clone()
        c = facts["cases"][case]
        accepted = "".join(map(str, c["accepted"]))
        least = 1e-3 if root.name.endswith("-trained") else 2e-3  # room for float32 noise
        check(c["min_margin"] >= max(least, 20 * c["cache_difference"]), "margins and their bound")
        check(c["min_draft_margin"] >= 3e-4, "margins of drafts and their bound")
        print(f"{root.name:11s} {case:5s} margin {c['min_margin']:.4f} accepted {accepted}", flush=True)
    save_file(tensors, root / "golden.safetensors")
    (root / "golden.json").write_text(compact(facts) + "\n")


def compact(value: Any, indent: str = "") -> str:
    """JSON with one line a key, lists on one line."""
    if not isinstance(value, dict):
        return json.dumps(value)
    lines = [f"{indent} {json.dumps(key)}: {compact(item, indent + ' ')}" for key, item in value.items()]
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, default=Path("tests/golden"))
    parser.add_argument("--variants", default=",".join(VARIANTS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.variants.split(","):
        run(args.root / name)


if __name__ == "__main__":
    main()

"""make_router_goldens.py [FOLDER]: FOLDER/routers.json, the choices of routers of Hugging Face transformers.

It has, by the name of a case, the settings of a router, and

    scores_of                  [tokens, experts]
    bias                       [experts], where the router has one
    chosen_experts, weights    [tokens, k]; the experts of each token are in ascending order

The weight of a router is the unit matrix, so its scores are its input. Scores are multiples of 1 / 1024. No two
experts or groups of a token are near a tie. The routers compute in float32.

Made with torch 2.15.0 and transformers 5.24.0; needs both.
"""
import json
import pathlib
import sys

import torch
from transformers import DeepseekV2Config, DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

TOKENS, EXPERTS = 5, 12
SMALL = {"hidden_size": EXPERTS, "intermediate_size": 4, "moe_intermediate_size": 4, "n_shared_experts": 1,
         "num_attention_heads": 4, "num_key_value_heads": 4}
V3 = {**SMALL, "n_routed_experts": EXPERTS, "num_local_experts": EXPERTS, "num_experts_per_tok": 4,
      "routed_scaling_factor": 2.5}


def mixtral() -> torch.nn.Module:
    return MixtralTopKRouter(MixtralConfig(hidden_size=EXPERTS, num_local_experts=EXPERTS, num_experts_per_tok=2))


def qwen3(normalised: bool) -> torch.nn.Module:
    return Qwen3MoeTopKRouter(Qwen3MoeConfig(hidden_size=EXPERTS, num_experts=EXPERTS, num_experts_per_tok=3,
                                             norm_topk_prob=normalised))


def deepseek_v2(method: str) -> torch.nn.Module:
    return DeepseekV2Moe(DeepseekV2Config(**SMALL, n_routed_experts=EXPERTS, num_local_experts=EXPERTS, n_group=4,
                                          num_experts_per_tok=3, routed_scaling_factor=16.0, topk_group=2,
                                          topk_method=method)).gate


def deepseek_v3(normalised: bool, groups: int, chosen_groups: int) -> torch.nn.Module:
    return DeepseekV3MoE(DeepseekV3Config(**V3, n_group=groups, norm_topk_prob=normalised,
                                          topk_group=chosen_groups)).gate


def settings(chosen: int, normalised: bool, scale: float = 1.0, groups: int = 1, chosen_groups: int = 1,
             scores: str = "softmax", group_scores: str = "largest") -> dict:
    return {"chosen": chosen, "chosen_groups": chosen_groups, "group_scores": group_scores, "groups": groups,
            "normalised": normalised, "scale": scale, "scores": scores}


V3_SETTINGS = {"group_scores": "two_largest", "scores": "sigmoid"}
CASES = {
    "mixtral": (mixtral(), settings(2, True)),
    "qwen3_moe": (qwen3(True), settings(3, True)),
    "qwen3_moe, not normalised": (qwen3(False), settings(3, False)),
    "deepseek_v2, greedy": (deepseek_v2("greedy"), settings(3, False, 16.0)),
    "deepseek_v2, groups": (deepseek_v2("group_limited_greedy"), settings(3, False, 16.0, 4, 2)),
    "deepseek_v3": (deepseek_v3(True, 1, 1), settings(4, True, 2.5, **V3_SETTINGS)),
    "deepseek_v3, groups": (deepseek_v3(True, 3, 2), settings(4, True, 2.5, 3, 2, **V3_SETTINGS)),
    "deepseek_v3, not normalised": (deepseek_v3(False, 4, 2), settings(4, False, 2.5, 4, 2, **V3_SETTINGS)),
}


def nearest_tie(values: torch.Tensor) -> float:
    return values.double().sort(-1).values.diff(dim=-1).min().item() if values.shape[-1] > 1 else 1.0


def draw(how: dict, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and a bias without near ties, of experts or of groups."""
    while True:
        scores = (torch.randn(TOKENS, EXPERTS, generator=generator) * 1024).round() / 1024
        bias = (torch.randn(EXPERTS, generator=generator) * 200).round() / 1024
        p = scores.sigmoid() + bias if how["scores"] == "sigmoid" else scores.softmax(-1)
        best = p.view(TOKENS, how["groups"], -1).topk(2 if how["group_scores"] == "two_largest" else 1).values.sum(-1)
        if min(nearest_tie(p), nearest_tie(best)) > 1e-5:
            return scores, bias


def make_case(router: torch.nn.Module, how: dict, generator: torch.Generator) -> dict:
    scores, bias = draw(how, generator)
    with torch.no_grad():
        router.weight.copy_(torch.eye(EXPERTS))
        if how["scores"] == "sigmoid":
            router.e_score_correction_bias.copy_(bias)
        logits, weights, chosen = router(scores)
    assert torch.equal(logits, scores) and chosen.shape == (TOKENS, how["chosen"])
    chosen, order = chosen.sort(-1)
    case = {**how, "chosen_experts": chosen.tolist(), "scores_of": scores.tolist(),
            "weights": [[float(f"{w:.9g}") for w in token] for token in weights.gather(-1, order).tolist()]}
    return {**case, "bias": bias.tolist()} if how["scores"] == "sigmoid" else case


def main() -> None:
    torch.set_num_threads(1)
    root = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parent
    generator = torch.Generator().manual_seed(7070)
    cases = {name: make_case(router, how, generator) for name, (router, how) in CASES.items()}
    (root / "routers.json").write_text(json.dumps(cases, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()

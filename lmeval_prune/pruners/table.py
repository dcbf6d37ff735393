"""Registry of pruners by method name; a class is imported at first use."""

from lmeval_prune.registry import Registry

PRUNERS = Registry(
    group="lmeval_prune.pruners",
    setting="method",
    own={
        "norm_entropy": "lmeval_prune.pruners.norm_entropy:NormEntropy",
        "global_threshold": "lmeval_prune.pruners.norm_entropy:GlobalThreshold",
        "magnitude": "lmeval_prune.pruners.baselines:Magnitude",
        "confidence": "lmeval_prune.pruners.norm_entropy:Confidence",
        "random": "lmeval_prune.pruners.baselines:RandomScores",
        "flap": "lmeval_prune.pruners.flap:Flap",
        "wanda_sp": "lmeval_prune.pruners.slimgpt:WandaSp",
        "slimgpt": "lmeval_prune.pruners.slimgpt:SlimGpt",
        "llm_pruner": "lmeval_prune.pruners.taylor:LlmPruner",
        "block_influence": "lmeval_prune.pruners.depth:BlockInfluence",
        "block_kl": "lmeval_prune.pruners.depth:BlockKl",
        "gisp": "lmeval_prune.pruners.taylor:Gisp",
    },
)

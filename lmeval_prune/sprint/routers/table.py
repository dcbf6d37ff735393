"""Registry of routers by method name; a class is imported at first use."""

from lmeval_prune.registry import Registry

CONTRASTIVE = "contrastive"  # the paper's, and the default

ROUTERS = Registry(
    group="lmeval_prune.routers",
    setting="router",
    own={
        CONTRASTIVE: "lmeval_prune.sprint.routers.contrastive:Contrastive",
        "knn": "lmeval_prune.sprint.routers.knn:Knn",
    },
)

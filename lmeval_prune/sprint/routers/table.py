"""Table of routers by method name; a class is imported at first use."""

from pkgutil import resolve_name
from typing import Any

from lmeval_prune.errors import check_known

CONTRASTIVE = "contrastive"  # the paper's, and the default

ROUTERS = {
    CONTRASTIVE: "lmeval_prune.sprint.routers.contrastive:Contrastive",
    "knn": "lmeval_prune.sprint.routers.knn:Knn",
    "logistic": "lmeval_prune.sprint.routers.logistic:Logistic",
    "sequential": "lmeval_prune.sprint.routers.sequential:Sequential",
    "sequential_knn": "lmeval_prune.sprint.routers.sequential:SequentialKnn",
}


def router_class(name: str) -> Any:
    """Import the class of a method; raise `InputError` for an unknown name."""
    check_known("router", name, ROUTERS)
    return resolve_name(ROUTERS[name])

"""The repository's `kernels/` folder, as part of the package (see `lmeval_prune._layout`)."""

from lmeval_prune._layout import package_path

__path__ = package_path(__file__)

"""Where `tasks/`, `kernels/` and `configs/` are: inside an installed package, or at the top of a checkout."""

from __future__ import annotations

from pathlib import Path


def package_path(init_file: str) -> list[str]:
    """`__path__` of one of the three packages.

    A wheel holds the files beside `__init__.py`. In a checkout (editable install) only `__init__.py`
    is there and the files stand in the folder of the same name at the top; it is added last.
    """
    here = Path(init_file).resolve().parent
    if (here / "README.md").is_file():  # each of the folders has one
        return [str(here)]
    top = here.parents[1] / here.name
    return [str(here), str(top)] if top.is_dir() else [str(here)]

"""Upload a folder to the Hub by huggingface_hub's own call, after it is complete on the disk."""

from __future__ import annotations

from collections.abc import Sequence
from shlex import quote

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.utils import HFValidationError, validate_repo_id

from lmeval_prune.artefacts import TEMPORARY_PREFIX
from lmeval_prune.errors import InputError, first_line

REPLACED = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.py")  # of an earlier upload


def check_push(repo_id: str | None) -> None:
    """Raise an `InputError` before the work begins if nothing can be uploaded: a wrong name, no login, or offline."""
    if repo_id is None:
        return
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise InputError(
            f"--push_to_hub {repo_id} is no name on the Hub ({first_line(error)}); write USER/NAME"
        ) from None
    if constants.HF_HUB_OFFLINE:
        raise InputError("--push_to_hub needs the Hub, and HF_HUB_OFFLINE is set; leave one of them out")
    if get_token() is None:
        raise InputError("--push_to_hub needs a login: run `hf auth login`, or set HF_TOKEN; or leave it out")


def push(folder: str, repo_id: str | None, files: Sequence[str] | None = None) -> None:
    """Upload a folder to a repository of models on the Hub, which is created if it does not exist.

    Weights and code of an earlier upload that the folder lacks are deleted: transformers would load them beside the new
    ones, or in their place.

    Args:
        folder: the folder.
        repo_id: name of the repository; None: nothing is uploaded.
        files: names of its files; default: all, because the folder holds nothing else.

    Raises:
        InputError: it could not be uploaded; the folder stays as it is.
    """
    if repo_id is None:
        return
    api, only = HfApi(), "".join(f" --include {quote(name)}" for name in files or ())
    try:
        repo_id = api.create_repo(repo_id, exist_ok=True).repo_id
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            commit_message="Upload by lmeval-prune",
            allow_patterns=None if files is None else list(files),
            ignore_patterns=[f"{TEMPORARY_PREFIX}*"],
            delete_patterns=[*REPLACED],
        )
    except Exception as error:  # error types of the Hub's HTTP client differ between versions
        raise InputError(
            f"{folder} is complete, but could not be uploaded to {repo_id} ({first_line(error)}); try again by "
            f"`hf upload {quote(repo_id)} {quote(folder)}{only}`"
        ) from error
    print(f"uploaded: {commit.commit_url}")

"""Upload a saved model to the hub."""

from pathlib import Path

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from collab_compress.errors import CheckpointError, one_line


def check_upload(name: str) -> None:
    """Refuse, before the work that leads to it, an upload that could not be done.

    Args:
        name: of the model on the hub, `org/name`, or `name` among one's own.

    Raises:
        CheckpointError: no such name can be, the hub is switched off, or nobody is logged in.
    """
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise CheckpointError(f"{name!r} cannot be a name on the hub: {one_line(error)}") from error
    if constants.HF_HUB_OFFLINE:
        raise CheckpointError(f"{name} cannot be put on the hub: HF_HUB_OFFLINE is set; unset it")
    if get_token() is None:
        raise CheckpointError(
            f"{name} cannot be put on the hub: nobody is logged in; run hf auth login, or set HF_TOKEN"
        )


def push_to_hub(directory: str | Path, name: str, *, private: bool | None = None, message: str | None = None) -> str:
    """Upload the folder of a saved model to the hub, with its card, in one commit.

    Args:
        directory: of the model, as `collab-compress` or `save_pretrained` wrote it.
        name: of the model on the hub, `org/name`, or `name` among one's own; made if it is not there.
        private: whether to make it for one's own eyes; what the account or organization does if not given.
        message: of the commit.

    Returns:
        Where it can be looked at.

    Raises:
        CheckpointError: there is no model in the directory, or the hub does not take it.
    """
    if not (Path(directory) / "config.json").is_file():
        raise CheckpointError(f"{directory} has no config.json, so it is no model directory")
    check_upload(name)
    api = HfApi()
    try:
        repository = api.create_repo(name, private=private, exist_ok=True).repo_id
        api.upload_folder(
            folder_path=directory,
            repo_id=repository,
            commit_message=message or "Upload a model made with collab-compress",
        )
    except Exception as error:  # the hub's own errors, those of its transport, and of the files
        raise CheckpointError(f"the hub does not take {name}: {one_line(error)}") from error
    return f"{api.endpoint}/{repository}"

"""A run's result to the hub: whether one is logged in, before anything is computed, and the upload at the end."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
from huggingface_hub.utils import validate_repo_id

from mmpreproj.training.config import ConfigError, TrainConfig

LOG_IN = "run `hf auth login`, or leave push_to_hub out"


def check_login(config: TrainConfig, *, accelerator: Accelerator) -> None:
    """Refuse a run that is to be uploaded where nobody is logged in; every process calls this.

    Where the hub cannot be reached, nothing can be told, and the run goes on: it may be uploaded later.

    Raises:
        ConfigError: naming the way out, or saying that the repository's id is none.
    """
    if config.push_to_hub is None:
        return
    faults = [_fault(config.push_to_hub) if accelerator.is_main_process else None]
    if accelerator.num_processes > 1:
        broadcast_object_list(faults)
    if faults[0] is not None:
        raise ConfigError(f"push_to_hub: {faults[0]}")


def upload(config: TrainConfig, folder: Path, *, say: Callable[[str], None]) -> str | None:
    """Upload a run's result, with the LoRA that was trained beside an adapter in `lora/`; one process calls this.

    A failure is told and ends nothing: what was trained is on this disk.

    Args:
        config: the run's settings.
        folder: `adapter/`, `lora/` or `model/` of the run.
        say: what tells a person.

    Returns:
        The address of the repository; None if nothing was uploaded, or not all.
    """
    if config.push_to_hub is None:
        return None
    parts: list[tuple[Path, str | None]] = [(folder, None)]
    if folder.name == "adapter" and config.lora is not None:
        parts.append((folder.parent / "lora", "lora"))
    try:
        hub = HfApi()
        repo = hub.create_repo(config.push_to_hub, exist_ok=True)
        for part, place in parts:
            hub.upload_folder(
                repo_id=repo.repo_id,
                folder_path=part,
                path_in_repo=place,
                commit_message=f"Upload {part.name}/ of a mmpreproj run",
            )
    except Exception as error:  # whatever an upload may raise, the training was not for nothing
        commands = "\n".join(f"  {_command(config.push_to_hub, part, place)}" for part, place in parts)
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        say(f"not uploaded to {config.push_to_hub}: {reason}\nthe results are in {folder}; to upload them later:")
        say(commands)
        return None
    say(f"uploaded: {repo}")
    return str(repo)


def _fault(repo_id: str) -> str | None:
    """Say why a run could not be uploaded to a repository; None if nothing speaks against it."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        return f"{repo_id!r} is no repository's id, such as me/my-adapter ({error})"
    try:
        HfApi().whoami()
    except LocalTokenNotFoundError:
        return f"{repo_id} is to be uploaded to, but nobody is logged in to the hub; {LOG_IN}"
    except HfHubHTTPError as error:
        if error.response.status_code in (401, 403):
            return f"{repo_id} is to be uploaded to, but the hub refuses the token of this machine; {LOG_IN}"
    except Exception:  # no network now, which each version of the library tells by another error
        pass
    return None


def _command(repo_id: str, folder: Path, place: str | None) -> str:
    return shlex.join(["hf", "upload", repo_id, str(folder), place or "."])

"""Models from the Hugging Face hub, in the cache of ``huggingface_hub`` (``HF_HOME``), which other tools share."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from paceline.errors import InputError, ModelFileError
from paceline.models.hub_files import HubModel, choose, models_among
from paceline.models.partial_file import Progress
from paceline.models.source import ModelSource, file_source

_REFERENCE = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(:(?P<wanted>.+))?")


def download(reference: str, progress: Progress | None = None) -> ModelSource:
    """The file ``owner/repo[:file]``, or its first part; where no hub can be reached, out of the cache.

    The token is HF_TOKEN's, or the one of ``hf auth login``.

    Raises:
        InputError: the reference is malformed, huggingface_hub is not installed, there is no such repository or file,
            or it may not be read without a token or without accepting its terms.
        ModelFileError: no hub can be reached, or the download failed.
    """
    found = _REFERENCE.fullmatch(reference)
    if found is None:
        raise InputError(
            f"hf:{reference} is no hf:owner/repo, hf:owner/repo:FILE or hf:owner/repo:Q4_K_M", param="model"
        )
    try:
        import huggingface_hub  # noqa: F401 (an extra, and half a second)
    except ImportError:
        raise InputError(
            f"hf:{reference} needs the package huggingface_hub: pip install 'paceline[hub]'", param="model"
        ) from None
    repository, wanted = found["repository"], found["wanted"]
    with _told(repository):
        try:
            files = _files_on_hub(repository)
        except _unreachable() as error:
            if _is_answer(error):
                raise
            cached = _cached_files(repository)
            if not cached:
                raise ModelFileError(
                    f"hf:{reference} is not in the cache, and the hub cannot be reached ({_endpoint()}): "
                    + _first_line(error)
                ) from None
            sizes: dict[str, int | None] = {name: path.stat().st_size for name, path in cached.items()}
            return file_source(cached[choose(repository, models_among(sizes), wanted).files[0]])
        return file_source(_fetch(repository, choose(repository, models_among(files), wanted), progress))


def _files_on_hub(repository: str) -> dict[str, int | None]:
    from huggingface_hub import HfApi

    siblings = HfApi().model_info(repository, files_metadata=True).siblings or ()
    return {sibling.rfilename: sibling.size for sibling in siblings}


def _cached_files(repository: str) -> dict[str, Path]:
    """The repository's files in the cache, at the newest revision that is there."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return {}
    revisions = [each for repo in repos if repo.repo_id == repository for each in repo.revisions]
    if not revisions:
        return {}
    newest = max(revisions, key=lambda revision: ("main" in revision.refs, revision.last_modified))
    return {file.file_path.relative_to(newest.snapshot_path).as_posix(): file.file_path for file in newest.files}


def _fetch(repository: str, model: HubModel, progress: Progress | None) -> Path:
    """The path of the first part; all parts are in its folder."""
    from huggingface_hub import hf_hub_download

    paths = []
    for number, file in enumerate(model.files):
        bar = None if progress is None else _bar_class(model, sum(model.sizes[:number]), progress)
        paths.append(hf_hub_download(repository, file, tqdm_class=bar))
    return Path(paths[0])


def _bar_class(model: HubModel, before: int, progress: Progress) -> Any:
    """What the library takes for a class of progress bars; those of all files are one of ours.

    ``before``: bytes of the files before this one.
    """
    done, what = before, f"downloading {model.files[0]}"

    class Bar:
        def __init__(self, *_: object, **_options: object) -> None: ...

        def update(self, n: float | None = 1) -> None:
            nonlocal done
            done += int(n or 0)
            progress(done, max(done, model.size), what)

        # A class with these two is given one bar per file, not a second one for what comes over the network.
        def update_transfer(self, _n: float) -> None: ...

        def set_transfer_postfix_str(self, *_: object, **_options: object) -> None: ...

        def set_postfix_str(self, *_: object, **_options: object) -> None: ...

        def close(self) -> None: ...

        def __enter__(self) -> "Bar":
            return self

        def __exit__(self, *_: object) -> None: ...

    return Bar


def _is_answer(error: Exception) -> bool:
    """Whether the hub says no, as opposed to saying nothing, or that it is out of order."""
    from huggingface_hub.errors import HfHubHTTPError

    return isinstance(error, HfHubHTTPError) and error.response.status_code < 500


def _unreachable() -> tuple[type[Exception], ...]:
    """What the library raises where no hub answers, and parents of what it raises where one does."""
    from huggingface_hub import errors

    # httpx's in version 1 of the library, httpx2's in version 2
    http_error = cast(type[Exception], vars(errors)["HTTPError"])
    return errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, http_error


@contextmanager
def _told(repository: str) -> Iterator[None]:
    """Say in our words what the hub refuses."""
    from huggingface_hub import errors

    page = f"{_endpoint()}/{repository}"
    token = "the token in HF_TOKEN" if os.environ.get("HF_TOKEN") else "a token in HF_TOKEN"
    try:
        yield
    except errors.HFValidationError as error:
        raise InputError(f"hf:{repository} cannot be a repository: {error}", param="model") from None
    except errors.GatedRepoError:
        raise InputError(
            f"hf:{repository} is gated: accept its terms on {page}, and have {token} be one of that account "
            f"({_endpoint()}/settings/tokens)",
            param="model",
        ) from None
    except errors.RepositoryNotFoundError:
        raise InputError(
            f"hf:{repository}: there is no {page}, or it is private and needs {token} that may read it", param="model"
        ) from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise InputError(
                f"hf:{repository}: the hub refuses access (HTTP {status}); open {page} in a browser, and check {token}",
                param="model",
            ) from None
        raise ModelFileError(f"hf:{repository}: the hub answers HTTP {status}: {_first_line(error)}") from None
    except errors.LocalEntryNotFoundError as error:
        raise ModelFileError(f"hf:{repository}: the download broke off: {error}; pull again to go on") from None
    except _unreachable() as error:
        raise ModelFileError(f"hf:{repository}: the download broke off: {error}; pull again to go on") from None
    except OSError as error:
        raise ModelFileError(f"hf:{repository} could not be stored: {error}; HF_HOME sets another folder") from error


def _first_line(error: Exception) -> str:
    """Without the body of the answer, which may be a page."""
    return str(error).partition("\n")[0] or type(error).__name__


def _endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT
